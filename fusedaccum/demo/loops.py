"""The loops that are compared: ours, and what people write without it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

from fusedaccum import FusedAccumOptimizer, GatedScheduler

from .measure import Clock, GradientMeter, bytes_of
from .model import GPT
from .settings import Settings


class Loop:
    """A model and its optimizer; `window` trains on one window.

    `clock` has the seconds per phase of the last window. An observed window takes longer and leaves `distance`, that of
    the gradients it summed (GradientMeter), and `held`: "backward" | "update" -> kind of tensor -> bytes then.
    """

    optimizer: torch.optim.Optimizer
    masters: Sequence[Tensor]
    one_batch = False

    def __init__(self, model: GPT, settings: Settings) -> None:
        self.model = model
        self.settings = settings
        self.parameters = list(model.parameters())
        self.clock = Clock()
        self.meter = GradientMeter(self.parameters)
        self.observed = False
        self.distance = math.nan
        self.held: dict[str, dict[str, int]] = {"backward": {}, "update": {}}

    def window(self, rows: Tensor) -> Tensor:
        """Train on int64[steps, rows, context + 1], micro-batch after micro-batch. Returns the mean loss."""
        raise NotImplementedError

    def lasting(self) -> dict[str, int]:
        """Bytes of what lives from window to window, per kind of tensor."""
        state = self.optimizer.state.values()
        return {
            "parameters": bytes_of(self.parameters),
            "moments": bytes_of(entry[key] for entry in state for key in ("exp_avg", "exp_avg_sq")),
            "masters": bytes_of(self.masters),
        }

    def expect(self, observed: bool) -> None:
        """Whether the next window is observed."""
        self.observed = observed
        self.clock = Clock()
        if observed:
            self.meter.open()

    def note_sums(self, sums: Iterable[Tensor], scale: float) -> None:
        if self.observed:
            self.distance = self.meter.distance(sums, scale)
            self.meter.close()

    def note_bytes(self, kind: str, tensors: Iterable[Tensor], *moments: str) -> None:
        if self.observed:
            count = bytes_of(tensors)
            for moment in moments:
                self.held[moment][kind] = count

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]


class FusedLoop(Loop):
    """FusedAccumOptimizer around AdamW."""

    def __init__(self, model: GPT, settings: Settings) -> None:
        super().__init__(model, settings)
        adamw = settings.adamw(self.parameters)
        self.optimizer = FusedAccumOptimizer(
            adamw,
            steps=settings.steps,
            max_norm=settings.max_norm,
            master_weights=True,
            state_dtype=torch.float32,
            backend=settings.backend,
        )
        self.schedule = GatedScheduler(LambdaLR(adamw, settings.rate_factor), self.optimizer)
        self.optimizer.register_step_pre_hook(self.before_update)

    def window(self, rows: Tensor) -> Tensor:
        losses = []
        for micro_batch in rows:
            self.clock.start("forward, backward")
            loss = self.model.loss(micro_batch)
            loss.backward()
            self.note_bytes("gradients", self.gradients(), "backward")
            self.clock.start("fold")
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            losses.append(loss.detach())
        self.clock.stop()
        return torch.stack(losses).mean()

    @property
    def masters(self) -> list[Tensor]:
        return [m for m in self.optimizer.state_dict()["fusedaccum"]["masters"] if m is not None]

    def before_update(self, *_: object) -> None:
        self.note_bytes("gradients", self.gradients(), "update")
        self.note_bytes("FP32 gradients", map(self.optimizer.master_grad, self.parameters), "backward", "update")
        self.note_sums(map(self.optimizer.master_grad, self.parameters), scale=1 / self.settings.steps)
        self.clock.start("step")


class NativeLoop(Loop):
    """Plain torch: autograd sums in the dtype of the parameters.

    one_batch: the whole window goes through the model at once.
    masters: AdamW updates FP32 copies, from gradients copied to FP32; else it updates the parameters themselves.
    """

    def __init__(self, model: GPT, settings: Settings, one_batch: bool, masters: bool) -> None:
        super().__init__(model, settings)
        self.one_batch = one_batch
        self.masters = [parameter.detach().float() for parameter in self.parameters] if masters else []
        self.optimizer = settings.adamw(self.masters or self.parameters)
        self.schedule = LambdaLR(self.optimizer, settings.rate_factor)

    def window(self, rows: Tensor) -> Tensor:
        losses = []
        micro_batches = rows.flatten(0, 1).unsqueeze(0) if self.one_batch else rows
        for micro_batch in micro_batches:
            self.clock.start("forward, backward")
            loss = self.model.loss(micro_batch)
            (loss / len(micro_batches)).backward()
            losses.append(loss.detach())
        self.note_bytes("gradients", self.gradients(), "backward", "update")
        self.note_sums(self.gradients(), scale=1.0)
        self.clock.start("step")
        self.update()
        self.schedule.step()
        self.clock.stop()
        return torch.stack(losses).mean()

    def update(self) -> None:
        if self.masters:
            for master, parameter in zip(self.masters, self.parameters, strict=True):
                master.grad = parameter.grad.float()
            self.note_bytes("FP32 gradients", [master.grad for master in self.masters], "update")
        clip_grad_norm_(self.masters or self.parameters, self.settings.max_norm)
        self.optimizer.step()
        if self.masters:
            torch._foreach_copy_([parameter.detach() for parameter in self.parameters], self.masters)
        self.optimizer.zero_grad()
        self.model.zero_grad()
