"""Runs what `python -m fusedaccum bench` was asked for."""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path

import torch

from fusedaccum.benchmark import compare, plot, quiet, report
from fusedaccum.benchmark.arguments import BUSY
from fusedaccum.benchmark.progress import Progress
from fusedaccum.benchmark.run import Options, Run, Task
from fusedaccum.benchmark.scaling import scaling_tasks
from fusedaccum.benchmark.sections import fold_tasks, step_tasks, window_tasks

TASKS = {"fold": fold_tasks, "step": step_tasks, "window": window_tasks, "scaling": scaling_tasks}


def start(given: argparse.Namespace) -> int:
    """The exit code. Raises RuntimeError where a contender of ours is wrong, ValueError for a file of another form."""
    if given.compare:
        return compare.main(*given.compare, given.fail_over / 100)
    threads = torch.get_num_threads()
    torch.set_num_threads(given.threads)
    # Each race and each count of memory collects garbage first, which takes 0.15 s over what importing torch has made.
    gc.collect()
    gc.freeze()
    try:
        noise, refused = quiet.refusal(given.quick, given.allow_noise)
        return BUSY if refused else measure(given, noise)
    finally:
        gc.unfreeze()
        torch.set_num_threads(threads)


def options_of(given: argparse.Namespace) -> Options:
    return Options(
        shapes=given.shapes,
        kinds=given.kinds,
        rounds=2 if given.quick else given.rounds,
        threads=given.threads,
        memory_gb=given.memory_gb or quiet.usable_memory_gb(given.device),
        compiled=not given.no_compile,
        clip=not given.no_clip,
        quick=given.quick,
        device=given.device,
    )


def measure(given: argparse.Namespace, noise: list[str]) -> int:
    options = options_of(given)
    todo: list[Task] = [task for section in dict.fromkeys(given.only) for task in TASKS[section](options)]
    run = Run(options, Progress(len(todo), sys.stderr))
    if "scaling" in given.only and options.device.type != "cpu":
        run.leave_out("scaling", "scaling", "it is measured on a CPU alone")
    machine = quiet.machine(given.threads, "fusedaccum bench", options.device)
    machine["load_before"] = machine.pop("load_average")
    run.say(f"{run.clock.title}; load average before: {machine['load_before']}")
    with quiet.OtherLoad() as load:
        for title, task in todo:
            run.progress.begin(title)
            task(run)
            # Everything so far: what follows may be interrupted.
            report.write_json(given.json, machine, noise, run.absent, run.rows, run.scaling)
    machine["load_after"] = quiet.load_average()
    machine["share_used_by_others"] = load.share
    noise = noise + quiet.noise_of(load, given.quick)
    report.write_json(given.json, machine, noise, run.absent, run.rows, run.scaling)
    close(run, given.json, machine, noise)
    return 0


def close(run: Run, path: Path, machine: dict[str, object], noise: list[str]) -> None:
    """What stands below the tables."""
    if run.rows:
        run.say(f"{report.summary(run.rows)}\n\n{report.EXPLANATION}")
    for key, value in machine.items():
        print(f"{key}: {value}")
    for line in noise:
        print(f"NOT QUIET, do not publish: {line}")
    print(f"samples: {path}")
    picture = path.with_suffix(".png")
    try:
        plot.draw(run.rows, run.scaling, machine, noise, picture)
    except ImportError as error:
        print(f"picture: none, {error} (pip install matplotlib)")
    else:
        print(f"picture: {picture}")
