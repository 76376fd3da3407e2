"""A small GPT in plain torch: pre-norm blocks, learned positions, the head tied to the token embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEAD_SIZE = 64


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.feed_forward_norm(x))))

    def attention(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        heads = self.query_key_value(x).view(rows, length, 3, width // HEAD_SIZE, HEAD_SIZE)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).reshape(rows, length, width))


class GPT(nn.Module):
    """Next-token logits, float32[rows, length, tokens], for int64[rows, length] with length at most `context`."""

    def __init__(self, tokens: int, width: int, layers: int, context: int) -> None:
        super().__init__()
        if width % HEAD_SIZE:
            raise ValueError(f"width={width} is not a multiple of the head size, {HEAD_SIZE}")
        self.context = context
        self.token_embedding = nn.Embedding(tokens, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.final_norm = nn.LayerNorm(width)
        self.initialise(layers)

    def initialise(self, layers: int) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                # Layers that add to the residual stream start smaller: its variance would grow with depth (GPT-2).
                residual = name.endswith(("attention_out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if residual else 0.02)

    def forward(self, numbers: Tensor) -> Tensor:
        positions = torch.arange(numbers.shape[1], device=numbers.device)
        x = self.token_embedding(numbers) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.final_norm(x), self.token_embedding.weight).float()

    def loss(self, rows: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token; rows: int64[rows, length + 1], each predicted from those before it."""
        return F.cross_entropy(self(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    @torch.no_grad()
    def generate(self, numbers: Tensor, count: int, seed: int, temperature: float = 0.7) -> Tensor:
        """int64[length + count]: `numbers` continued by `count` tokens drawn from the model."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(count):
            logits = self(numbers[-self.context :].unsqueeze(0))[0, -1]
            drawn = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            numbers = torch.cat([numbers, drawn])
        return numbers
