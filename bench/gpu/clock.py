"""What times a contender: CUDA events and the host's clock on a GPU, the host's clock alone on a CPU (a dry run).

Every timed part begins with a cold L2 cache: twice its size was written to other memory just before.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.harness import Contender, Part


@dataclass
class Sample:
    """One run of a contender, in seconds.

    device: between two events, of a device that was kept busy until the host had launched everything: what kernels
    take, whoever launches them. wall: from an idle device to the end of the work. hosts: what each part's call kept the
    host, from an idle device; in a window a part is a micro-batch.
    """

    device: float
    wall: float
    hosts: list[float]


class Clock(Protocol):
    dry: bool
    title: str

    def sample(self, contender: Contender) -> Sample: ...

    def launches(self, part: Part) -> int | None:
        """Run a part and count the kernels that its timed half launches; None where they cannot be counted."""
        ...

    def peak(self, work: Callable[[], object]) -> int:
        """Bytes: the most that `work` held at once of what it allocated itself."""
        ...


def host_seconds(contender: Contender, cold: Callable[[], None], wait: Callable[[], None]) -> tuple[float, list[float]]:
    """Wall time of one run, and of it the host's part by part. wait: until the device is idle."""
    wall, hosts = 0.0, []
    for prepare, timed in contender.parts():
        prepare()
        cold()
        wait()
        begin = time.perf_counter()
        timed()
        hosts.append(time.perf_counter() - begin)
        wait()
        wall += time.perf_counter() - begin
    return wall, hosts


def kernels_in(events: Iterable) -> int:
    """Kernel launches among a profiler's events: what ran on the device and is no copy, memset or wait."""
    on_device = (event for event in events if event.device_type == DeviceType.CUDA)
    return sum(not event.name.startswith(("Mem", "Stream ", "Context ", "Event ")) for event in on_device)


class CudaClock:
    dry = False
    title = "GPU time from CUDA events behind a busy device, wall time from an idle one, both with a cold L2"
    # torch.cuda._sleep counts cycles of the device's clock, which is below this everywhere: it sleeps at least as long.
    HERTZ = 2.2e9
    MOST_AHEAD = 0.02

    def __init__(self, device: torch.device) -> None:
        size = torch.cuda.get_device_properties(device).L2_cache_size
        self._other = torch.zeros(max(2 * size, 1 << 20), dtype=torch.uint8, device=device)

    def _cold(self) -> None:
        self._other.add_(1)

    def sample(self, contender: Contender) -> Sample:
        wall, hosts = host_seconds(contender, self._cold, torch.cuda.synchronize)
        pairs = []
        for (prepare, timed), host in zip(contender.parts(), hosts, strict=True):
            prepare()
            self._cold()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(int(min(1.5 * host + 50e-6, self.MOST_AHEAD) * self.HERTZ))
            begin.record()
            timed()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize()
        return Sample(sum(begin.elapsed_time(end) for begin, end in pairs) * 1e-3, wall, hosts)

    def launches(self, part: Part) -> int | None:
        prepare, timed = part
        prepare()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            timed()
            torch.cuda.synchronize()
        # Every contender launches something: none at all says that the profiler could not look.
        return kernels_in(profiler.events()) or None

    def peak(self, work: Callable[[], object]) -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


class DryClock:
    """The same calls on a CPU, to show that all of it runs. What it returns means nothing and is never printed."""

    dry = True
    title = "CPU DRY RUN: small stand-ins, no GPU, nothing here is a measurement"

    def sample(self, contender: Contender) -> Sample:
        wall, hosts = host_seconds(contender, lambda: None, lambda: None)
        return Sample(wall, wall, hosts)

    def launches(self, part: Part) -> int | None:
        prepare, timed = part
        prepare()
        timed()
        return None

    def peak(self, work: Callable[[], object]) -> int:
        work()
        return 0
