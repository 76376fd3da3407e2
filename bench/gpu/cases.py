"""Whole models where they fit: lists of shapes at full size, and with fewer layers on a smaller GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.cases import KINDS, SHAPE_LISTS, Case, Kind, gpt2, odd_sizes

Shapes = list[tuple[int, ...]]


def llama_8b(layers: int = 32) -> Shapes:
    """8.03 billion parameters in 291 tensors, the head not tied to the embedding."""
    shapes: Shapes = [(128256, 4096), (128256, 4096), (4096,)]
    for _ in range(layers):
        shapes += [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)]
        shapes += [(14336, 4096), (14336, 4096), (4096, 14336), (4096,), (4096,)]
    return shapes


@dataclass(frozen=True)
class Model:
    """steps: the kinds whose update is measured. windows: the kinds whose whole window is."""

    title: str
    build: Callable[[int], Shapes]
    layers: int
    steps: tuple[str, ...] = ("masters", "bf16", "fp32")
    windows: tuple[str, ...] = ()


# The smaller first: what they show (launches, host time) is at stake in the goals, and costs least time.
MODELS = {
    "gpt2": Model("GPT-2 124M", gpt2, 12, windows=("masters", "bf16", "fp32")),
    "10000x64": Model("10,000 x 64", lambda layers: [(64,)] * 10_000, 1, windows=("masters",)),
    "1.3b": Model("1.3B", lambda layers: gpt2(layers, 2048, 50257, 2048), 24, windows=("masters",)),
    "8b": Model("8B", llama_8b, 32, steps=("bf16",)),  # FP32 moments of 8 billion parameters are 64 GB by themselves
    "odd": Model("96 odd sizes, 1 to 2,000,000", lambda layers: odd_sizes(), 1),
}

# The reference's three tensors, what the float64 comparison holds of one piece, the L2 flush, and the allocator's own.
RESERVE = 10e9


def fold_bytes(kind: Kind) -> int:
    """Per parameter: a gradient, the same scaled, the sums that all share, what `_foreach_add_` converts into."""
    return 2 * kind.gradient_bytes + 4 + (4 if kind.gradient_bytes < 4 else 0)


def step_bytes(kind: Kind) -> int:
    """Per parameter: start and gradient, the state that contenders share, our sums, the rival's gradient."""
    return 2 * kind.gradient_bytes + kind.state_bytes + 4 + (4 + 4 if kind.masters else kind.gradient_bytes)


def numel(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes))


def window_bytes(kind: Kind) -> int:
    """Per parameter: start, three sets of gradients, and ours with one rival; more of them run in more heats."""
    return kind.gradient_bytes * 4 + 2 * (kind.state_bytes + 8)


def fitting(model: Model, bytes_per_parameter: float, available: float) -> tuple[str, Shapes]:
    """The model's title and shapes, with fewer layers (the title says so) where `available` bytes are not enough.

    Raises MemoryError where one layer is too many.
    """
    for layers in range(model.layers, 0, -1):
        shapes = model.build(layers)
        if numel(shapes) * bytes_per_parameter <= available:
            cut = f", cut to {layers} of {model.layers} layers: this GPU has {available / 1e9:.0f} GB for it"
            return model.title + (cut if layers < model.layers else ""), shapes
    raise MemoryError(f"one layer needs {numel(shapes) * bytes_per_parameter / 1e9:.0f} GB of {available / 1e9:.0f}")


def make_case(name: str, kind: str, device: torch.device, bytes_per_parameter: float, sets: int | None) -> Case:
    """The case of a model held in one way. On a CPU its small stand-in."""
    if device.type == "cpu":
        return Case(SHAPE_LISTS[name].quick(), KINDS[kind], SHAPE_LISTS[name].title + ", stand-in", sets=sets)
    torch.cuda.empty_cache()
    available = torch.cuda.mem_get_info(device)[0] - RESERVE
    title, shapes = fitting(MODELS[name], bytes_per_parameter, available)
    return Case(shapes, KINDS[kind], title, device=device, sets=sets)
