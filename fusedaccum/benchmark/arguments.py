"""What `python -m fusedaccum bench` can be asked."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from fusedaccum.benchmark.cases import KINDS, SHAPE_LISTS
from fusedaccum.benchmark.compare import load

SECTIONS = ("fold", "step", "window", "scaling")
BUSY = 3  # exit code
DESCRIPTION = """\
Time folds, steps and whole windows against what people use instead, in turns and after comparing everybody with
float64; and what a window costs against parameters, tensors, micro-batches and threads. Prints tables, and writes all
samples as JSON and a picture beside it. Or compare two such files. A machine that others use is refused.

shape lists:
""" + "\n".join(f"  {name:<10} {listed.title}" for name, listed in SHAPE_LISTS.items())
DESCRIPTION += "\n\nkinds:\n" + "\n".join(f"  {name:<10} {kind.title}" for name, kind in KINDS.items())
EXAMPLES = f"""\
examples:
  python -m fusedaccum bench --quick                                          shows that it runs; measures nothing
  python -m fusedaccum bench --only window --shapes gpt2 --kinds masters      one table
  python -m fusedaccum bench --only fold --shapes gpt2 400x10486 --rounds 15
  python -m fusedaccum bench --only scaling --memory-gb 30
  python -m fusedaccum bench --compare before.json after.json --fail-over 3   what changed, beyond the noise

exit codes: 0 done, 1 failed (the reason is the last line) or slower (--compare), 2 wrong usage, {BUSY} busy machine"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    several = {"nargs": "+", "metavar": "NAME"}
    parser.add_argument("--only", choices=SECTIONS, default=list(SECTIONS), help=f"of {', '.join(SECTIONS)}", **several)
    parser.add_argument("--shapes", choices=SHAPE_LISTS, default=list(SHAPE_LISTS), help="shape lists", **several)
    text = "how a model is held (default: all, for windows of some shape lists only masters)"
    parser.add_argument("--kinds", choices=KINDS, help=text, **several)
    text = "rounds of a race; five times as many for small lists (default 9)"
    parser.add_argument("--rounds", type=at_least(2), default=9, metavar="N", help=text)
    parser.add_argument("--threads", type=at_least(1), default=2, metavar="N", help="threads on the CPU (default 2)")
    parser.add_argument("--device", type=device, default="cpu", help="cpu or cuda (default cpu)")
    text = (
        "what contenders may hold together (default: 0.6 of what is free); what does not fit is cut or left out by name"
    )
    parser.add_argument("--memory-gb", type=positive, metavar="GB", help=text)
    parser.add_argument("--no-clip", action="store_true", help="windows without clipping")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile, slow to start")
    parser.add_argument("--allow-noise", action="store_true", help="time even though the machine is busy")
    parser.add_argument("--quick", action="store_true", help="small stand-ins, 2 rounds: shows that it runs, no more")
    text = "where the samples go, and beside them FILE with .png for .json (default out/bench/bench.json)"
    parser.add_argument("--json", type=Path, default=Path("out/bench/bench.json"), metavar="FILE", help=text)
    text = "time nothing: print what differs in AFTER, noise taken into account"
    parser.add_argument("--compare", type=results, nargs=2, metavar=("BEFORE", "AFTER"), help=text)
    text = "with --compare: a slowdown of ours by more than this and the noise is exit code 1 (default 5)"
    parser.add_argument("--fail-over", type=positive, default=5.0, metavar="PERCENT", help=text)


def at_least(smallest: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < smallest:
            raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least {smallest}")
        return int(text)

    return parse


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0")
    return value


def device(text: str) -> torch.device:
    if text not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"{text!r} must be cpu or cuda")
    if text == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("there is no CUDA device; --device cpu measures the CPU")
    return torch.device("cuda", torch.cuda.current_device()) if text == "cuda" else torch.device("cpu")


def results(text: str) -> dict[str, object]:
    """What a file of the benchmark holds."""
    try:
        return load(Path(text))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
