"""Command line: python -m bench [--only window] [--shapes gpt2] [--kinds masters] [--rounds 9] [--quick]."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

# Unless told otherwise before torch is imported, the profiler that counts memory writes two lines at every start.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

import torch

from bench import harness, report
from bench.cases import KINDS, SHAPE_LISTS
from bench.sections import SECTIONS, Options, Result


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Fold, step and window against their rivals.")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections to run")
    parser.add_argument("--shapes", nargs="+", choices=SHAPE_LISTS, default=list(SHAPE_LISTS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="how a model is held")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of a race; five times as many for small lists")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory-gb", type=float, default=12.0, help="what contenders may hold together")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile, slow to start")
    parser.add_argument("--allow-noise", action="store_true", help="time even though the machine is busy")
    parser.add_argument("--quick", action="store_true", help="small stand-ins, 2 rounds: shows that it runs, no more")
    parser.add_argument("--json", type=Path, default=Path("out/bench/bench.json"), help="where the samples go")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    given = arguments(argv)
    torch.set_num_threads(given.threads)
    noise, refused = harness.refusal(given.quick, given.allow_noise)
    if refused:
        return 3
    rounds = 2 if given.quick else given.rounds
    options = Options(
        given.shapes,
        given.kinds or list(KINDS),
        given.kinds is None,
        rounds,
        given.memory_gb,
        not given.no_compile,
        given.quick,
    )
    machine, result = harness.machine(given.threads), Result()
    with harness.OtherLoad() as load:
        for section in given.only:
            SECTIONS[section](options, result)
    machine["share_used_by_others"] = load.share
    noise += harness.noise_of(load, given.quick)
    report.write_json(given.json, machine, noise, result.absent, result.rows)
    print(report.summary(result.rows), end="\n\n")
    print(report.EXPLANATION)
    for key, value in machine.items():
        print(f"{key}: {value}")
    for line in noise:
        print(f"NOT QUIET, do not publish: {line}")
    print(f"samples: {given.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
