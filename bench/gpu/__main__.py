"""Command line: python -m bench.gpu [--only fold] [--models gpt2] [--seconds 150] [--device cpu]."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # read when torch is imported, by the profiler that counts launches

import torch

from bench.cases import KINDS
from bench.gpu import goals
from bench.gpu.cases import MODELS
from bench.gpu.clock import CudaClock, DryClock
from bench.gpu.sections import SECTIONS, Run


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description="Fold, step and window on a GPU.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run, no measurement")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections to run")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--backend", default="auto", help="as in FusedAccumOptimizer")
    parser.add_argument("--seconds", type=float, default=150.0, help="no case begins after that")
    parser.add_argument("--box", type=float, default=0.25, help="seconds for each contender of a race")
    parser.add_argument("--json", type=Path, default=Path("out/gpu/bench.json"), help="where the samples go")
    parser.add_argument("--summary", type=Path, help="where the summary's lines go as well")
    return parser.parse_args(argv)


def save(path: Path, run: Run) -> None:
    """Everything so far: what follows may be cut short."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "device": torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "clock": run.clock.title,
        "absent": run.absent,
        "no_time_for": run.cut,
        "rows": [asdict(row) for row in run.rows],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def main(argv: list[str]) -> int:
    given = arguments(argv)
    if given.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device; --device cpu shows that the benchmark runs, without measuring", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device()) if given.device == "cuda" else torch.device("cpu")
    clock = DryClock() if given.device == "cpu" else CudaClock(device)
    print(clock.title, flush=True)
    for name, kind in KINDS.items():
        print(f"{name}: {kind.title}", flush=True)
    deadline = time.monotonic() + given.seconds

    def report(run: Run) -> bool:
        save(given.json, run)
        lines, passed = goals.summary(run.rows, run.absent, run.cut, clock.dry)
        if given.summary:
            given.summary.write_text("\n".join(lines) + "\n")
        return passed

    run = Run(device, clock, given.models, given.backend, given.box, deadline, report)
    for section in given.only:
        begin = time.monotonic()
        SECTIONS[section](run)
        print(f"{section}: {time.monotonic() - begin:.0f} s", flush=True)
    passed = report(run)
    print("\n".join(goals.summary(run.rows, run.absent, run.cut, clock.dry)[0]))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
