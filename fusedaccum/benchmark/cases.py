"""What is measured: lists of parameter shapes, and how parameters, states and gradients are held."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

OURS = "fusedaccum"  # what the names of our contenders begin with
CPU = torch.device("cpu")
Shapes = list[tuple[int, ...]]

MICRO_BATCHES = 8
MAX_NORM = 1.0
SCALE = 1.0 / MICRO_BATCHES

# No hyper-parameter changes how long an update takes. With these, parameters of N(0, 1) move by many roundings of bf16,
# also by the decay alone, so that the comparison with float64 (truth.py) sees what a contender left out.
LR, BETAS, WEIGHT_DECAY = 0.05, (0.9, 0.999), 0.5

# Gradients that fit in here are made anew for each micro-batch, as a backward would; larger ones are cold in every
# cache anyway, and two sets take turns.
DISTINCT_GRADIENT_BYTES = 256 << 20


def gpt2(layers: int = 12, width: int = 768, vocabulary: int = 50257, context: int = 1024) -> Shapes:
    """GPT-2's parameters, the head tied to the embedding: 148 tensors at full size."""
    shapes: Shapes = [(vocabulary, width), (context, width)]
    for _ in range(layers):
        shapes += [(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,)]
        shapes += [(width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [*shapes, (width,), (width,)]


def llama_8b(layers: int = 32, share: int = 1) -> Shapes:
    """8.03 billion parameters in 291 tensors, the head not tied to the embedding; 1/share of every size."""
    vocabulary, width, keys, inner = (size // share for size in (128256, 4096, 1024, 14336))
    shapes: Shapes = [(vocabulary, width), (vocabulary, width), (width,)]
    for _ in range(layers):
        shapes += [(width, width), (keys, width), (keys, width), (width, width)]
        shapes += [(inner, width), (inner, width), (width, inner), (width,), (width,)]
    return shapes


def pieces(tensors: Sequence[Tensor], most: int = 1 << 24) -> Iterator[Tensor]:
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


def memory_of(tensor: Tensor) -> ctypes.Array:
    """The tensor's memory as a buffer that keeps the tensor alive."""
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor
    return memory


def tensor_over(memory: ctypes.Array, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor that owns the buffer, and is no view of another."""
    flat = torch.frombuffer(memory, dtype=dtype)
    return flat if len(shape) == 1 else flat.resize_(shape)


def odd_sizes(largest: float = 2e6) -> Shapes:
    """96 odd sizes from 1 up, evenly spread on a logarithmic scale."""
    return [(int(largest ** (index / 95)) | 1,) for index in range(96)]


@dataclass(frozen=True)
class ShapeList:
    """A named list of shapes. build(layers): with fewer layers, for memory that does not hold all of them.

    `quick` is a small stand-in that only shows that the benchmark runs.
    """

    title: str
    build: Callable[[int], Shapes]
    quick: Callable[[], Shapes]
    layers: int = 1

    def shapes(self) -> Shapes:
        return self.build(self.layers)


SHAPE_LISTS = {
    "gpt2": ShapeList("GPT-2 124M", gpt2, lambda: gpt2(layers=1, width=64, vocabulary=500, context=32), 12),
    "1.3b": ShapeList(
        "1.3B",
        lambda layers: gpt2(layers, 2048, 50257, 2048),
        lambda: gpt2(layers=2, width=64, vocabulary=200, context=32),
        24,
    ),
    "8b": ShapeList("8B", llama_8b, lambda: llama_8b(layers=1, share=128), 32),
    "10000x64": ShapeList("10,000 x 64", lambda _: [(64,)] * 10_000, lambda: [(64,)] * 300),
    "odd": ShapeList("96 odd sizes, 1 to 2,000,000", lambda _: odd_sizes(), lambda: odd_sizes(largest=3e3)),
    "400x10486": ShapeList("400 x 10,486", lambda _: [(10_486,)] * 400, lambda: [(1_049,)] * 20),
}


class Layered(Protocol):
    """What `fitting` wants to know of a model."""

    @property
    def title(self) -> str: ...
    @property
    def layers(self) -> int: ...
    @property
    def build(self) -> Callable[[int], Shapes]: ...


def numel(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes))


def fitting(model: Layered, bytes_per_parameter: float, available: float) -> tuple[str, Shapes]:
    """The model's title and shapes, with fewer layers (the title says so) where `available` bytes are not enough.

    Raises MemoryError where one layer is too many.
    """
    for layers in range(model.layers, 0, -1):
        shapes = model.build(layers)
        if numel(shapes) * bytes_per_parameter <= available:
            cut = f", cut to {layers} of {model.layers} layers: there are {available / 1e9:.0f} GB for it"
            return model.title + (cut if layers < model.layers else ""), shapes
    needed = numel(shapes) * bytes_per_parameter / 1e9
    what = "one layer needs" if model.layers > 1 else "it needs"
    raise MemoryError(f"{what} {needed:.0f} GB of {available / 1e9:.0f}")


@dataclass(frozen=True)
class Kind:
    """How a model is held. `least_step_bytes` is what an update must move for each parameter."""

    title: str
    dtype: torch.dtype
    state_dtype: torch.dtype
    masters: bool
    least_step_bytes: int

    @property
    def gradient_bytes(self) -> int:
        return self.dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """Bytes per parameter of what every contender must own: the parameter, two moments and the master."""
        return self.dtype.itemsize + 2 * self.state_dtype.itemsize + (4 if self.masters else 0)

    def least_window_bytes(self, fold_every: int = 1, clip: bool = True, micro_batches: int = 8) -> int:
        """What a whole window must move, per parameter, with `fold_every` micro-batches read in one pass.

        A pass reads its gradients and writes the FP32 sum, and all but the first read the sum as well. The last one
        can be left to the update, which then reads the gradients too and need not write their sum. With clipping its
        norm takes a pass that only reads, so that this pays where the gradients are smaller than the sum; what pays is
        counted. Clipping, dividing and zeroing ride along and add nothing.
        """
        sizes = [min(fold_every, micro_batches - begin) for begin in range(0, micro_batches, fold_every)]
        grads = [size * self.gradient_bytes for size in sizes]
        passes = sum(grads) + 4 * (2 * len(sizes) - 1)
        reads_sum = 4 if len(sizes) > 1 else 0
        last = grads[-1] + reads_sum  # of a pass that takes the norm and writes nothing
        # Left to the update: its gradients are read there, the sum is read there anyway unless it does not exist yet.
        late = passes - (grads[-1] + reads_sum + 4) + (last if clip else 0) + grads[-1] - (4 - reads_sum)
        return min(passes, late) + self.least_step_bytes


KINDS = {
    "masters": Kind("bf16 parameters, FP32 masters and moments", torch.bfloat16, torch.float32, True, 16 + 14),
    "bf16": Kind("bf16 parameters and moments", torch.bfloat16, torch.bfloat16, False, 4 + 6 + 6),
    "fp32": Kind("FP32 parameters and moments", torch.float32, torch.float32, False, 16 + 12),
}


@dataclass(eq=False)
class Case:
    """One shape list held in one way: the values every contender starts from and is fed.

    sets: how many sets of gradients there are; None for as many as `gradients` says. clip: whether windows are clipped
    to MAX_NORM. kept: whether gradients that are handed over lie in memory that stays (see `fresh`).
    """

    shapes: Shapes
    kind: Kind
    title: str
    seed: int = 1
    device: torch.device = CPU
    sets: int | None = None
    micro_batches: int = MICRO_BATCHES
    clip: bool = True
    kept: bool = True
    _generator: torch.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._generator = torch.Generator(self.device).manual_seed(self.seed)

    @property
    def numel(self) -> int:
        return numel(self.shapes)

    @property
    def weight(self) -> float:
        """What each micro-batch's gradients are multiplied with."""
        return 1.0 / self.micro_batches

    def least_window_bytes(self, fold_every: int = 1) -> int:
        return self.kind.least_window_bytes(fold_every, self.clip, self.micro_batches)

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
        deviation = 2 * MAX_NORM * math.sqrt(self.micro_batches / self.numel)
        fits = self.micro_batches * self.numel * self.kind.gradient_bytes <= DISTINCT_GRADIENT_BYTES
        return [self._normal(deviation) for _ in range(self.sets or (self.micro_batches if fits else 2))]

    @cached_property
    def _memory(self) -> list[list[ctypes.Array]]:
        return [[memory_of(grad) for grad in grads] for grads in self.gradients]

    def fresh(self, index: int) -> list[Tensor]:
        """A set of gradients as a backward hands it over: tensors that nobody else refers to, to be dropped when used.

        On a CPU they lie over memory that stays, as with an allocator that keeps what it is given back: whether libc
        returns a large block to the system at once, and takes milliseconds for it, is not what is compared here. Not
        `kept`, and on a GPU, they are copies, and are counted as memory.
        """
        if not self.kept or self.device.type != "cpu":
            return [grad.clone() for grad in self.gradients[index]]
        pairs = zip(self._memory[index], self.shapes, strict=True)
        return [tensor_over(memory, self.kind.dtype, shape) for memory, shape in pairs]

    @cached_property
    def scaled(self) -> list[Tensor]:
        """Room for a set of gradients times `weight`, which is exact: of a loss that was divided by hand."""
        return [torch.empty_like(grad) for grad in self.gradients[0]]

    def scale(self, index: int) -> list[Tensor]:
        """Fill `scaled` with a set of gradients."""
        for scaled, grad in zip(self.scaled, self.gradients[index], strict=True):
            torch.mul(grad, self.weight, out=scaled)
        return self.scaled

    def order(self, window: int) -> list[int]:
        """The set each micro-batch of a window gets. Odd windows have another sum, so that stale sums are noticed."""
        sets = len(self.gradients)
        return [(k // 3 if window % 2 else k) % sets for k in range(self.micro_batches)]

    def make(self) -> None:
        """Make the tensors now and not when they are first looked at."""
        _ = self.start, self.gradients

    def forget(self) -> None:
        """Let go of the tensors: the next case may be as large."""
        for name in ("start", "gradients", "scaled", "_memory"):
            self.__dict__.pop(name, None)

    def _normal(self, deviation: float) -> list[Tensor]:
        drawn = (torch.randn(shape, generator=self._generator, device=self.device) for shape in self.shapes)
        return [values.mul_(deviation).to(self.kind.dtype) for values in drawn]
