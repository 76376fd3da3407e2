"""What is measured: lists of parameter shapes, and how parameters, states and gradients are held."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

CPU = torch.device("cpu")

MICRO_BATCHES = 8
MAX_NORM = 1.0
SCALE = 1.0 / MICRO_BATCHES

# No hyper-parameter changes how long an update takes. With these, parameters of N(0, 1) move by many roundings of bf16,
# also by the decay alone, so that the comparison with float64 (truth.py) sees what a contender left out.
LR, BETAS, WEIGHT_DECAY = 0.05, (0.9, 0.999), 0.5

# Gradients that fit in here are made anew for each micro-batch, as a backward would; larger ones are cold in every
# cache anyway, and two sets take turns.
DISTINCT_GRADIENT_BYTES = 256 << 20


def gpt2(layers: int = 12, width: int = 768, vocabulary: int = 50257, context: int = 1024) -> list[tuple[int, ...]]:
    """GPT-2's parameters, the head tied to the embedding: 148 tensors at full size."""
    shapes: list[tuple[int, ...]] = [(vocabulary, width), (context, width)]
    for _ in range(layers):
        shapes += [(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,)]
        shapes += [(width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [*shapes, (width,), (width,)]


def llama_8b(share: int) -> list[tuple[int, ...]]:
    """One of 32 layers and 1/32 of both embeddings, with 1/share of the rows of every matrix."""
    rows = [128256 // 32, 128256 // 32, 4096, 1024, 1024, 4096, 14336, 14336]
    shapes: list[tuple[int, ...]] = [(row // share, 4096) for row in rows]
    return [*shapes, (4096 // share, 14336), (4096,), (4096,), (4096,)]


def pieces(tensors: Sequence[Tensor], most: int = 1 << 26) -> Iterator[Tensor]:
    """All elements in order, as 1-D tensors of about `most`: many small tensors in one, a large one in several.

    Comparing 10,000 tensors one by one takes longer than timing them, and one of 500 million not as much memory as
    there is. Lists of the same shapes come in the same pieces.
    """
    group: list[Tensor] = []
    held = 0
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        if group and held + flat.numel() > most:
            yield torch.cat(group)
            group, held = [], 0
        if flat.numel() > most:
            yield from flat.split(most)
        else:
            group.append(flat)
            held += flat.numel()
    if group:
        yield torch.cat(group)


def odd_sizes(largest: float = 2e6) -> list[tuple[int, ...]]:
    """96 odd sizes from 1 up, evenly spread on a logarithmic scale."""
    return [(int(largest ** (index / 95)) | 1,) for index in range(96)]


@dataclass(frozen=True)
class ShapeList:
    """A named list of shapes; `quick` is a small stand-in that only shows that the benchmark runs."""

    title: str
    shapes: Callable[[], list[tuple[int, ...]]]
    quick: Callable[[], list[tuple[int, ...]]]


SHAPE_LISTS = {
    "gpt2": ShapeList("GPT-2 124M", gpt2, lambda: gpt2(layers=1, width=64, vocabulary=500, context=32)),
    "1.3b": ShapeList(
        "1.3B, sampled: 2 of 24 layers, 1/4 of the embedding",
        lambda: gpt2(layers=2, width=2048, vocabulary=50257 // 4, context=2048),
        lambda: gpt2(layers=2, width=96, vocabulary=200, context=32),
    ),
    "8b": ShapeList(
        "8B, sampled: 1 of 32 layers, 1/32 of the embeddings, half the rows",
        lambda: llama_8b(share=2),
        lambda: llama_8b(share=512),
    ),
    "10000x64": ShapeList("10,000 x 64", lambda: [(64,)] * 10_000, lambda: [(64,)] * 300),
    "odd": ShapeList("96 odd sizes, 1 to 2,000,000", odd_sizes, lambda: odd_sizes(largest=3e3)),
    "400x10486": ShapeList("400 x 10,486", lambda: [(10_486,)] * 400, lambda: [(1_049,)] * 20),
}


@dataclass(frozen=True)
class Kind:
    """How a model is held. `least_step_bytes` and `least_window_bytes` are what an update and a whole window must move.

    A window is one pass per micro-batch: (G + 4) for the first, (G + 8) for each later one, with G bytes of gradient,
    and the step. Clipping, dividing and zeroing can be had in those passes and add nothing.
    """

    title: str
    dtype: torch.dtype
    state_dtype: torch.dtype
    masters: bool
    least_step_bytes: int

    @property
    def gradient_bytes(self) -> int:
        return self.dtype.itemsize

    @property
    def least_window_bytes(self) -> int:
        first, later = self.gradient_bytes + 4, self.gradient_bytes + 8
        return first + (MICRO_BATCHES - 1) * later + self.least_step_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes per parameter of what every contender must own: the parameter, two moments and the master."""
        return self.dtype.itemsize + 2 * self.state_dtype.itemsize + (4 if self.masters else 0)


KINDS = {
    "masters": Kind("bf16 parameters, FP32 masters and moments", torch.bfloat16, torch.float32, True, 16 + 14),
    "bf16": Kind("bf16 parameters and moments", torch.bfloat16, torch.bfloat16, False, 4 + 6 + 6),
    "fp32": Kind("FP32 parameters and moments", torch.float32, torch.float32, False, 16 + 12),
}


@dataclass(eq=False)
class Case:
    """One shape list held in one way: the values every contender starts from and is fed.

    sets: how many sets of gradients there are; None for as many as `gradients` says.
    """

    shapes: list[tuple[int, ...]]
    kind: Kind
    title: str
    seed: int = 1
    device: torch.device = CPU
    sets: int | None = None
    _generator: torch.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._generator = torch.Generator(self.device).manual_seed(self.seed)

    @property
    def numel(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def eps(self) -> float:
        """As large as a clipped gradient's elements: Adam alone would hide a forgotten clipping, this shows it."""
        return MAX_NORM / math.sqrt(self.numel)

    @cached_property
    def start(self) -> list[Tensor]:
        return self._normal(1.0)

    @cached_property
    def gradients(self) -> list[list[Tensor]]:
        """Sets of gradients, one per micro-batch where memory allows.

        Their mean has a norm of about 2 * MAX_NORM. Far more, and clipping would shrink a sum that was not zeroed until
        it could not be seen in the next one.
        """
        deviation = 2 * MAX_NORM * math.sqrt(MICRO_BATCHES / self.numel)
        fits = MICRO_BATCHES * self.numel * self.kind.gradient_bytes <= DISTINCT_GRADIENT_BYTES
        return [self._normal(deviation) for _ in range(self.sets or (MICRO_BATCHES if fits else 2))]

    @cached_property
    def scaled(self) -> list[Tensor]:
        """Room for a set of gradients times SCALE, which is exact: of a loss that was divided by hand."""
        return [torch.empty_like(grad) for grad in self.gradients[0]]

    def scale(self, index: int) -> list[Tensor]:
        """Fill `scaled` with a set of gradients."""
        for scaled, grad in zip(self.scaled, self.gradients[index], strict=True):
            torch.mul(grad, SCALE, out=scaled)
        return self.scaled

    def order(self, window: int) -> list[int]:
        """The set each micro-batch of a window gets. Odd windows have another sum, so that stale sums are noticed."""
        sets = len(self.gradients)
        return [(k // 3 if window % 2 else k) % sets for k in range(MICRO_BATCHES)]

    def make(self) -> None:
        """Make the tensors now and not when they are first looked at."""
        _ = self.start, self.gradients

    def forget(self) -> None:
        """Let go of the tensors: the next case may be as large."""
        for name in ("start", "gradients", "scaled"):
            self.__dict__.pop(name, None)

    def _normal(self, deviation: float) -> list[Tensor]:
        drawn = (torch.randn(shape, generator=self._generator, device=self.device) for shape in self.shapes)
        return [values.mul_(deviation).to(self.kind.dtype) for values in drawn]
