"""Peak memory, counted exactly: torch's profiler reports every allocation of torch's CPU allocator.

That includes temporaries inside an operator, which neither a look at the tensors nor the resident size shows. It leaves
out what does not go through torch's allocator (Python objects, C++ tables of a few bytes per tile).
"""

from __future__ import annotations

import gc
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_allocated(work: Callable[[], object]) -> int:
    """Bytes: the most that `work` held at once of what it allocated itself."""
    return peak_and_held(work)[0]


def peak_and_held(work: Callable[[], object]) -> tuple[int, int]:
    """Bytes: the most that `work` held at once of what it allocated itself, and what it left behind."""
    # What an earlier contender left to the garbage collector would count as given back by this one.
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = (event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]")
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak, held
