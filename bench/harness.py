"""Times contenders round-robin in one process, and watches what else the machine is doing.

Why not pytest-benchmark for the numbers that are published: it finishes one contender before it starts the next, and
on a shared or a warm machine the minutes between them change the result by more than the contenders differ. Here each
round runs every contender once, in an order that rotates, and a rival is compared with ours of the same rounds.
"""

from __future__ import annotations

import gc
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import torch

from fusedaccum import backends

# What is made ready without being timed (the backward's work, a reset) and what is timed after it.
Part = tuple[Callable[[], object], Callable[[], object]]


class Contender(Protocol):
    name: str

    def parts(self) -> Iterable[Part]:
        """The parts of one run, in order. A run's time is the sum of its timed halves."""
        ...


def run_once(contender: Contender) -> float:
    """Seconds of one run."""
    total = 0
    for prepare, timed in contender.parts():
        prepare()
        begin = time.perf_counter_ns()
        timed()
        total += time.perf_counter_ns() - begin
    return total * 1e-9


def race(contenders: list[Contender], rounds: int) -> dict[str, list[float]]:
    """Seconds of every run by name. One round before the counted ones warms up."""
    samples: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    gc.collect()
    gc.disable()
    try:
        for contender in contenders:
            run_once(contender)
        for turn in range(rounds):
            first = turn % len(contenders)
            for contender in contenders[first:] + contenders[:first]:
                samples[contender.name].append(run_once(contender))
    finally:
        gc.enable()
    return samples


class InPlaceAdd:
    """The bandwidth that everything is compared with: a.add_(b) in FP32, 12 bytes an element, as large as the case.

    In place, because out of place pays a read of the destination first and makes anything look good.
    """

    name = "a.add_(b), FP32 in place"
    BYTES = 12

    def __init__(self, numel: int) -> None:
        self.a, self.b = torch.ones(numel), torch.ones(numel)

    def parts(self) -> Iterable[Part]:
        yield (lambda: None, lambda: self.a.add_(self.b))


class OtherLoad:
    """The share of the machine's cores that this process does not use and somebody else does, while the block runs.

    Linux only, from /proc/stat (steal, the hypervisor's taking, counted); elsewhere `share` stays None.
    """

    share: float | None = None

    def __enter__(self) -> OtherLoad:
        self._begin = self._snapshot()
        return self

    def __exit__(self, *_: object) -> None:
        if self._begin is not None and (end := self._snapshot()) is not None:
            busy, total, own = (after - before for before, after in zip(self._begin, end, strict=True))
            self.share = max(0.0, busy - own) / total if total > 0 else 0.0

    @staticmethod
    def _snapshot() -> tuple[float, float, float] | None:
        stat = Path("/proc/stat")
        if not stat.exists():
            return None
        ticks = [int(field) for field in stat.read_text().split("\n", 1)[0].split()[1:9]]
        per_second = os.sysconf("SC_CLK_TCK")
        times = os.times()
        idle = ticks[3] + ticks[4]
        own = times.user + times.system + times.children_user + times.children_system
        return (sum(ticks) - idle) / per_second, sum(ticks) / per_second, own


QUIET_LOAD = 0.05
# A virtual machine with nothing else on it repeats an add of 16 MB within 1.15 to 1.25, as its neighbours please.
QUIET_SPREAD = 1.25


def noise(numel: int = 1 << 22, seconds: float = 2.0) -> list[str]:
    """What speaks against timing now: load from others, or a calibration run that does not repeat."""
    adder = InPlaceAdd(numel)
    run_once(adder)
    samples = []
    with OtherLoad() as load:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            samples.append(run_once(adder))
    found = []
    if load.share is not None and load.share > QUIET_LOAD:
        found.append(f"others use {load.share:.0%} of this machine (up to {QUIET_LOAD:.0%} counts as quiet)")
    spread = statistics.median(samples) / min(samples)
    if spread > QUIET_SPREAD:
        found.append(f"the same add takes {spread:.2f} times its minimum in the median (up to {QUIET_SPREAD} is quiet)")
    return found


def refusal(quick: bool, allow_noise: bool) -> tuple[list[str], bool]:
    """What speaks against timing now, which is printed, and whether nothing is to be timed for it."""
    found = ["--quick: nothing here is a measurement"] if quick else noise()
    for line in found:
        print(f"NOT QUIET: {line}", file=sys.stderr)
    refused = bool(found) and not (allow_noise or quick)
    if refused:
        print("Nothing was timed. Stop the other work, or pass --allow-noise.", file=sys.stderr)
    return found, refused


def noise_of(load: OtherLoad, quick: bool) -> list[str]:
    """What `load`, watched while something was timed, says against the times."""
    busy = not quick and load.share is not None and load.share > QUIET_LOAD
    return [f"others used {load.share:.0%} of the machine while this ran"] if busy else []


def machine(threads: int, module: str = "bench") -> dict[str, object]:
    """What a reader needs to judge or repeat a measurement. module: what was run."""
    backend = backends.select(torch.device("cpu"))
    root = Path(__file__).parent.parent
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True)
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": threads,
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "backend": backend.__name__.rsplit(".", 1)[-1],
        "isa": backend.build_info()["isa"] if hasattr(backend, "build_info") else None,
        "os": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": git.stdout.strip() or "unknown",
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "command": " ".join([f"python -m {module}", *sys.argv[1:]]),
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
