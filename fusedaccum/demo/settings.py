"""What every run of the demo shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.optim import AdamW


@dataclass(frozen=True)
class Settings:
    """What every run shares. A window is `steps` micro-batches of `rows` sequences of `context` tokens."""

    updates: int = 300
    steps: int = 8
    rows: int = 1
    context: int = 128
    width: int = 128
    layers: int = 2
    learning_rate: float = 1.5e-3
    max_norm: float = 1.0
    seed: int = 0
    backend: str = "auto"

    def rate_factor(self, update: int) -> float:
        """Linear warm-up over the first tenth of the updates, then a cosine down to a tenth of the learning rate."""
        warm = max(1, self.updates // 10)
        if update < warm:
            return (update + 1) / warm
        return 0.1 + 0.45 * (1 + math.cos(math.pi * (update - warm) / max(1, self.updates - warm)))

    def adamw(self, tensors: Sequence[Tensor]) -> AdamW:
        return AdamW(tensors, lr=self.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
