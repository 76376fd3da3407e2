"""Real processes on this machine that talk over gloo. They are started once and serve every test of several ranks.

    results = on_ranks(2, trains, "fp32")     # [trains("fp32") on rank 0, on rank 1], the default group being there

`trains` is a function at the top of a test file: it runs with one thread, and what it returns is pickled. Where it
raises, the test fails with its traceback, unless `errors=True` asks for (type name, message) in the results.
"""

from __future__ import annotations

import atexit
import datetime
import functools
import importlib
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

GROUP_TIMEOUT = 60.0  # seconds, of every collective
MOST = 4


class Failure(NamedTuple):
    """What a function raised on its rank."""

    type: str
    message: str
    trace: str


class Lost(NamedTuple):
    """A process that has ended, or had to be."""

    why: str


def on_ranks(
    world: int, function: Callable[..., Any], *args: Any, errors: bool = False, timeout: float = GROUP_TIMEOUT
) -> list[Any]:
    """`function(*args)` on each of `world` ranks; the results in order of ranks.

    errors: a Failure (or Lost) stands in the results, else it fails the test. timeout: of the group's collectives.
    """
    results = _pool().run(world, function, args, timeout)
    bad = [(rank, r) for rank, r in enumerate(results) if isinstance(r, Failure | Lost)]
    if bad and not errors:
        raise AssertionError("\n".join(f"rank {rank}: {getattr(r, 'trace', r)}" for rank, r in bad))
    return results


class _Pool:
    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes = []
        for _ in range(MOST):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def run(self, world: int, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        with tempfile.TemporaryDirectory() as folder:
            name = (function.__module__, function.__qualname__)
            for rank, pipe in enumerate(self.pipes[:world]):
                pipe.send_bytes(pickle.dumps((name, args, rank, world, f"file://{folder}/meet", timeout)))
            return self._collect(self.pipes[:world], timeout * 2 + 60)

    def _collect(self, pipes: list[Connection], patience: float) -> list[Any]:
        results: dict[Connection, Any] = {}
        while len(results) < len(pipes):
            ready = wait([pipe for pipe in pipes if pipe not in results], timeout=patience)
            for pipe in ready:
                try:
                    results[pipe] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    results[pipe] = Lost("the process has ended")
            if not ready:
                results.update({pipe: Lost(f"no answer in {patience} s") for pipe in pipes if pipe not in results})
        if any(isinstance(r, Lost) for r in results.values()):
            self.end()
            _pool.cache_clear()
        return [results[pipe] for pipe in pipes]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@functools.cache
def _pool() -> _Pool:
    pool = _Pool()
    atexit.register(pool.end)
    return pool


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    while True:
        try:
            order = pipe.recv_bytes()
        except EOFError:  # the tests have ended
            return
        pipe.send_bytes(_answer(*pickle.loads(order)))


def _answer(name: tuple[str, str], args: tuple[Any, ...], rank: int, world: int, meet: str, timeout: float) -> bytes:
    try:
        function = getattr(importlib.import_module(name[0]), name[1])
        torch.manual_seed(0)
        dist.init_process_group(
            "gloo", init_method=meet, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=timeout)
        )
        try:
            return pickle.dumps(function(*args))
        finally:
            dist.destroy_process_group()
    except BaseException as error:
        return pickle.dumps(Failure(type(error).__name__, str(error), traceback.format_exc()))
