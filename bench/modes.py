"""What each mode of the wrapper costs in memory and time: python -m bench.modes [--shapes gpt2] [--quick] [--json F].

The model is nothing but parameters: its backward hands out a gradient for each, last one first, and keeps no
activations. What is counted is what torch's allocator gave, the profiler says so for every allocation; time is that of
whole windows, the making of gradients included (2 or 4 bytes read and written per parameter and micro-batch).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "6")

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import AdamW

from bench import harness
from bench.cases import BETAS, LR, MICRO_BATCHES, SHAPE_LISTS
from bench.memory import peak_and_held
from fusedaccum import FusedAccumOptimizer

MODES: dict[str, dict[str, object] | None] = {
    "stock PyTorch": None,
    'fold="step"': {"steps": MICRO_BATCHES},
    'fold="backward"': {"steps": MICRO_BATCHES, "fold": "backward"},
    "steps=None": {"steps": None},
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Gradient(torch.autograd.Function):
    """0, with a gradient that is a new copy of `values`."""

    @staticmethod
    def forward(ctx, chain: Tensor, param: Tensor, values: Tensor) -> Tensor:
        ctx.values = values
        return chain.clone()

    @staticmethod
    def backward(ctx, upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        return upstream, ctx.values.clone(), None


class Model:
    """Parameters of these shapes, all 1, and a backward for them. Gradients are 1/64, which every dtype here holds."""

    def __init__(self, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
        self.params = [Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]
        self.numel = sum(p.numel() for p in self.params)
        self.largest = max(p.nbytes for p in self.params)
        # Memory of its own for each: one that all are copied from would stay in the cache as long as nothing is folded.
        self.values = [torch.full_like(p, 1 / 64, requires_grad=False) for p in self.params]
        self.start = torch.zeros((), requires_grad=True)

    def backward(self) -> None:
        chain = self.start
        for param, values in zip(self.params, self.values, strict=True):
            chain = Gradient.apply(chain, param, values)
        chain.backward()
        self.start.grad = None


class Run:
    """Windows of one mode on one model."""

    def __init__(self, name: str, model: Model) -> None:
        self.name = name
        self.model = model
        self.options = MODES[name]
        inner = AdamW(model.params, lr=LR, betas=BETAS, fused=self.options is None)
        self.optimizer = inner if self.options is None else FusedAccumOptimizer(inner, **self.options)
        self.every_call = self.options is not None and self.options["steps"] is not None

    def window(self) -> None:
        for index in range(MICRO_BATCHES):
            self.model.backward()
            if self.every_call or index == MICRO_BATCHES - 1:
                self.optimizer.step()
                self.optimizer.zero_grad()

    def parts(self) -> Iterable[harness.Part]:
        yield (lambda: None, self.window)


def memory(name: str, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> tuple[float, float, float]:
    """Bytes per parameter beside the parameters: at the peak of three windows, at rest behind them, in one bucket or
    the largest gradient.
    """
    model = Model(shapes, dtype)
    kept: list[Run] = []

    def work() -> None:
        kept.append(Run(name, model))
        for _ in range(3):
            kept[0].window()

    peak, held = peak_and_held(work)
    return peak / model.numel, held / model.numel, model.largest / model.numel


def times(shapes: list[tuple[int, ...]], dtype: torch.dtype, rounds: int) -> dict[str, list[float]]:
    """Seconds of every window, by mode, interleaved. The models share nothing."""
    return harness.race([Run(name, Model(shapes, dtype)) for name in MODES], rounds)


def table(lines: list[dict[str, object]]) -> str:
    head = "| model | mode | at the peak | at rest | window, minimum | median |\n|---|---|---:|---:|---:|---:|"
    rows = [
        f"| {line['model']} | {line['mode']} | {line['peak']:.2f} B | {line['held']:.2f} B | "
        f"{line['minimum'] * 1e3:.0f} ms | {line['median'] * 1e3:.0f} ms |"
        for line in lines
    ]
    return "\n".join([head, *rows])


def measure(shapes: list[tuple[int, ...]], rounds: int, say: Callable[[str], object]) -> list[dict[str, object]]:
    lines = []
    for model, dtype in DTYPES.items():
        seconds = times(shapes, dtype, rounds)
        for mode in MODES:
            peak, held, largest = memory(mode, shapes, dtype)
            samples = seconds[mode]
            figures = {"minimum": min(samples), "median": statistics.median(samples), "samples": samples}
            lines.append({"model": model, "mode": mode, "peak": peak, "held": held, "largest": largest, **figures})
            say(f"{model}, {mode}: measured")
    return lines


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.modes", description="Memory and time of each mode.")
    parser.add_argument("--shapes", choices=SHAPE_LISTS, default="gpt2")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--allow-noise", action="store_true", help="time even though the machine is busy")
    parser.add_argument("--quick", action="store_true", help="a small stand-in, 2 rounds: shows that it runs, no more")
    parser.add_argument("--json", type=Path, help="where the samples go")
    given = parser.parse_args(argv)
    torch.set_num_threads(given.threads)
    noise, refused = harness.refusal(given.quick, given.allow_noise)
    if refused:
        return 3
    listed = SHAPE_LISTS[given.shapes]
    shapes = listed.quick() if given.quick else listed.shapes()
    machine = harness.machine(given.threads, "bench.modes")
    with harness.OtherLoad() as load:
        lines = measure(shapes, 2 if given.quick else given.rounds, lambda text: print(text, file=sys.stderr))
    machine["share_used_by_others"] = load.share
    noise += harness.noise_of(load, given.quick)
    title = listed.title + (" (quick stand-in)" if given.quick else "")
    print(f"{title}, AdamW, {MICRO_BATCHES} micro-batches; bytes per parameter beside the parameters\n")
    print(table(lines))
    for key, value in machine.items():
        print(f"{key}: {value}")
    for line in noise:
        print(f"NOT QUIET, do not publish: {line}")
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps({"machine": machine, "noise": noise, "modes": lines}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
