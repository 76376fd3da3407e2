"""Whether the machine is quiet enough to time anything, and which machine it is."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import torch

import fusedaccum
from fusedaccum import backends
from fusedaccum.benchmark.harness import InPlaceAdd, run_once


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


# What contenders come from, by the name under which it is installed.
PACKAGES = ("triton", "numpy", "deepspeed", "apex", "transformer_engine", "megatron-core")


def machine(threads: int, module: str, device: torch.device | None = None) -> dict[str, object]:
    """What a reader needs to judge or repeat a measurement. module: what was run."""
    device = device or torch.device("cpu")
    backend = backends.select(device)
    return {
        "cpu": _cpu_model(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "cores": os.cpu_count(),
        "threads": threads,
        "caches": caches(),
        "memory_gb": round(total_memory() * 1e-9, 1),
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "backend": backend.__name__.rsplit(".", 1)[-1],
        "isa": backend.build_info()["isa"] if hasattr(backend, "build_info") else None,
        "os": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "fusedaccum": fusedaccum.__version__,
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "commit": commit(),
        "load_average": load_average(),
        "command": " ".join([f"python -m {module}", *sys.argv[1 + (sys.argv[1:2] == ["bench"]) :]]),
    }


def load_average() -> list[float] | None:
    return [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None


def commit(root: Path = Path(__file__).parents[2]) -> str:
    """What git calls the source that runs, with "-dirty" where it was changed. An installed copy has none."""
    if not (root / ".git").exists():
        return "not a checkout"
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True)
    return git.stdout.strip() or "unknown"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def caches(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> dict[str, int]:
    """Bytes of each cache of data that the first core sees: {"L1": ..., "L2": ..., "L3": ...}. Linux only, else {}.

    A virtual machine shows what it was told; neighbours may use the same L3.
    """
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    found = {}
    for index in sorted(folder.glob("index*")):
        try:
            level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        except OSError:
            continue
        if kind != "Instruction":
            found[f"L{level}"] = int(size[:-1]) * units[size[-1]] if size[-1] in units else int(size)
    return found


def _memory(field: str) -> int:
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.exists() else []
    sizes = [int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")]
    return sizes[0] if sizes else 0


def total_memory() -> int:
    """Bytes; 0 where the system does not say."""
    return _memory("MemTotal")


def usable_memory_gb(device: torch.device) -> float:
    """What contenders may hold together unless told otherwise: some of what is free now."""
    if device.type == "cuda":
        return 0.9e-9 * torch.cuda.mem_get_info(device)[0]
    return 0.6e-9 * _memory("MemAvailable") or 8.0
