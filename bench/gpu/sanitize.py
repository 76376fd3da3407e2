"""Every operator once, on a few odd sizes: python -m bench.gpu.sanitize [--device cuda] [--backend auto] [--plant].

Small enough to run under compute-sanitizer, which makes each access many times slower. What the operators leave behind
is compared with the reference backend on the CPU, so that a run that did nothing is no clean run. --plant sends one
fold out of its buffer: a checker that says nothing to that has not looked.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor

from fusedaccum.backends import select
from fusedaccum.flat_buffer import FlatBuffer
from fusedaccum.ops import ADAM_COLUMNS, SGD_COLUMNS

SIZES = (1, 7, 63, 64, 4095, 4096, 4097, 9001, 0)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CPU = torch.device("cpu")


def draw(shift: int, device: torch.device, dtypes: tuple[torch.dtype, ...] = DTYPES) -> list[Tensor]:
    """One tensor a segment, dtypes in turn. Every second one begins one element behind an aligned address."""
    random = torch.Generator().manual_seed(shift)
    drawn = []
    for k, size in enumerate(SIZES):
        dtype, offset = dtypes[(k + shift) % len(dtypes)], k % 2
        base = torch.rand(size + offset, generator=random).add(0.5).to(dtype)
        drawn.append(base.to(device)[offset:])
    return drawn


def squares(buffer: FlatBuffer, shift: int) -> list[Tensor]:
    return [tensor.square() for tensor in draw(shift, buffer.device)]


def table(columns: tuple[str, ...], values: dict[str, float], device: torch.device) -> Tensor:
    return torch.tensor([[values.get(column, 0.0) for column in columns]], dtype=torch.float64).to(device)


def fill(buffer: FlatBuffer) -> Tensor:
    """A window: a first touch, a fold that leaves a segment out, one with the norm. Returns whether it was finite."""
    buffer.keep_live()
    buffer.fold(list(draw(0, buffer.device)), 0.25, norm=False)
    grads: list[Tensor | None] = list(draw(1, buffer.device))
    grads[3] = None
    buffer.fold(grads, 0.25, norm=False)
    buffer.fold(list(draw(2, buffer.device)), 0.25, norm=True)
    buffer.rescale(0.5)
    found = buffer.found_inf(grads)
    buffer.close_window(buffer.square_total(), 0.75, 1.0, skip_nonfinite=True)
    return found


def run(device: torch.device, backend: str) -> list[Tensor]:
    """Call all operators. Returns all they wrote, on the CPU."""
    left: list[Tensor] = []
    groups = torch.zeros(len(SIZES), dtype=torch.int64).to(device)
    random = torch.arange(2 + len(SIZES)).to(device)
    for rule in ("emit", "adam", "sgd"):
        buffer = FlatBuffer(draw(0, device), device, select(device, backend))
        found = fill(buffer)
        tables = (buffer.flat, buffer.marks, buffer.live, buffer.segments, buffer.tiles, buffer.scalars)
        if rule == "emit":
            lists = [draw(4, device)]
            buffer.backend.emit(*tables, *lists)
        elif rule == "adam":
            values = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1}
            hyper = table(ADAM_COLUMNS, {**values, "decoupled": 1.0, "amsgrad": 1.0}, device)
            lists = [draw(0, device), draw(1, device), squares(buffer, 2), squares(buffer, 3)]
            lists.append(draw(0, device, (torch.float32,)))
            buffer.backend.adam(*tables, buffer.steps, groups, hyper, *lists, None, True)
        else:
            values = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": 1.0}
            hyper = table(SGD_COLUMNS, values, device)
            masters = [t if k % 2 else t[:0] for k, t in enumerate(draw(0, device, (torch.float32,)))]
            lists = [draw(0, device), draw(1, device), masters]
            buffer.backend.sgd(*tables, buffer.steps, groups, hyper, *lists, random, False)
        sums = [buffer.view(k) for k in range(len(SIZES))]
        left += [
            *sums,
            found,
            buffer.live.float(),
            buffer.total[:1],
            buffer.scalars,
            buffer.steps,
            *(t for tensors in lists for t in tensors),
        ]
    return [tensor.to(CPU) for tensor in left]


def plant(device: torch.device, backend: str) -> None:
    """Fold into memory 4 MB behind the flat buffer, which has to be seen by whoever checks."""
    buffer = FlatBuffer(draw(0, device), device, select(device, backend))
    buffer.tiles[-1, 2] += 1 << 20
    print("planted", flush=True)
    buffer.fold(list(draw(0, device)), 0.25, norm=False)
    torch.cuda.synchronize()


def wrong(found: list[Tensor], right: list[Tensor]) -> list[int]:
    """Where the two differ by more than some roundings of the tensor's dtype."""
    return [
        k
        for k, (a, b) in enumerate(zip(found, right, strict=True))
        if not torch.allclose(a.double(), b.double(), rtol=4 * torch.finfo(a.dtype).eps, atol=1e-6)
    ]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.sanitize", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--plant", action="store_true", help="one fold out of bounds, for a memory checker to find")
    given = parser.parse_args(argv)
    device = torch.device(given.device)
    if given.plant and device.type != "cuda":
        parser.error("--plant is for a CUDA device: on a CPU the fault would hit this process's own memory")
    if given.plant:
        plant(device, given.backend)
        return 0
    found = run(device, given.backend)
    if bad := wrong(found, run(CPU, "reference")):
        print(f"{len(bad)} of {len(found)} results are not the reference's; the first is number {bad[0]}")
        return 1
    print(f"all operators ran on {device}, {len(found)} results are the reference's")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
