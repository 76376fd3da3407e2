"""CUDA graphs: which calls may be captured, and what the device counts when they are replayed without the host.

Two forms. The whole window: `steps` micro-batches are captured with their boundary, and a replay is a window. Folds
alone: fewer are captured, each replay folds them once more, and an eager (or captured) `flush()` updates. In both a
captured fold adds, first touch or not, so every boundary leaves the buffer zeroed, in the pass of its update.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from fusedaccum.flat_buffer import FlatBuffer
from fusedaccum.ops import TOUCHED
from fusedaccum.options import NAME, parameters

if TYPE_CHECKING:
    from fusedaccum.window import Window


def is_capturing() -> bool:
    """Whether what is launched now goes into a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def rates_on_device(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether every learning rate is a tensor on `device`: one that a graph can read anew at each replay."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    return device.type != "cpu" and all(isinstance(lr, Tensor) and lr.device == device for lr in rates)


class Graphs:
    """What a window's captured steps leave for the device to count.

    folds: float64[1], replayed folds since the last boundary. updates: float64[1], replayed updates, skips left out.
    """

    def __init__(self) -> None:
        self.captured = 0  # folds in graphs that no graph's boundary follows: while there are any, the device counts
        self.in_capture = 0  # those of them that the capture going on has added
        self.length = 0  # of the window they belong to
        self.marks: Tensor | None = None  # what those folds touch
        self.folds: Tensor | None = None
        self.updates: Tensor | None = None
        self.divisor: Tensor | None = None
        self.counts_updates = False
        # What graphs read and write: it must outlive them, and nobody says when they are gone.
        self.held: dict[int, object] = {}

    def prepare(self, buffers: list[FlatBuffer], optimizer: Optimizer) -> None:
        """At an eager boundary: make what a capture needs to find, where one is possible."""
        for buffer in buffers:
            alone = len(buffers) == 1 and rates_on_device(optimizer, buffer.device)
            buffer.keeps_zero = alone or id(buffer) in self.held
            if alone and (self.folds is None or self.folds.device != buffer.device):
                make = {"dtype": torch.float64, "device": buffer.device}
                self.folds, self.updates, self.divisor = (torch.zeros(1, **make) for _ in range(3))

    def check_capture(self, window: Window, weighted: bool, scale: float | Tensor) -> None:
        """Refuse a fold that no graph can hold. Raises RuntimeError with the window as it was."""
        reason = self._obstacle(window, weighted)
        if reason is None and window.buffers[0].scale_value != scale:
            reason = "no window of these `steps` has run yet; run a whole one before the capture"
        if reason is not None:
            raise RuntimeError(f"{NAME}: this step() cannot be captured in a CUDA graph because {reason}")

    @contextmanager
    def adding(self, window: Window) -> Iterator[None]:
        """Has the fold in this block add every gradient, its segment's first one too. Undone where the fold raises."""
        (buffer,) = window.buffers
        marks, touched = buffer.marks.clone(), buffer.touched
        for k, p in enumerate(buffer.params):
            if p.grad is not None:
                buffer.marks[k] = TOUCHED
        buffer.touched = True
        try:
            yield
        except BaseException:
            buffer.marks.copy_(marks)
            buffer.touched = touched
            raise

    def end_fold(self, window: Window) -> None:
        """After a fold was captured: the device counts it."""
        (buffer,) = window.buffers
        self.folds.add_(1)
        self.captured += 1
        self.in_capture += 1
        self.length = window.length
        self.marks = buffer.marks & TOUCHED
        for held in (buffer, buffer.scale_in_graph(), *window.update.tables(buffer)):
            self.held[id(held)] = held

    def leave(self, window: Window) -> None:
        """At the first call outside of the capture: what was captured has not run, and is no eager micro-batch."""
        if self.in_capture and not is_capturing():
            window.pending -= self.in_capture
            self.in_capture = 0

    def _obstacle(self, window: Window, weighted: bool) -> str | None:
        """Why no step of this window can be captured, in words that complete "because"; None if it can."""
        if window.update.name != "fused":
            return "only the fused update can be; use AdamW, Adam or SGD and update='auto'"
        if not window.coming.is_fixed:
            return "steps is a function, which only the host can call; set steps to a number"
        if window.ranks is not None:
            return "process_group is given, and at its end hosts tell each other of the window; leave it out"
        if any(buffer.spread is not None for buffer in window.buffers):
            return "a parameter is a DTensor, and at a window's end its ranks tell each other of it; step outside of it"
        if weighted:
            return "item counts are given, which the host reads; leave mean_of and sum_of out"
        if window.options.amp_scaling:
            return "amp_scaling=True takes another scale for every micro-batch; use bfloat16, which needs none"
        if window.nonfinite.looks:
            return f"nonfinite={window.nonfinite.policy!r} looks at every micro-batch; use 'propagate' or 'skip_window'"
        if eager := window.pending - self.in_capture:
            return f"the open window holds {eager} eager micro-batches; flush() or reset() before the capture"
        if len({p.device for p in parameters(window.optimizer)}) > 1:
            return "its parameters are on several devices; use one optimizer for each"
        if not window.buffers or not window.is_located():
            return "buffer and state do not exist yet; run one whole window before the capture"
        (buffer,) = window.buffers
        if not rates_on_device(window.optimizer, buffer.device):
            return "a learning rate would be frozen in the graph; pass lr=torch.tensor(..., device=...) in every group"
        if not all(group.get("capturable", True) for group in window.optimizer.param_groups):
            return "a parameter group is capturable=False; pass capturable=True to the optimizer, as torch asks for it"
        if not getattr(buffer.backend, "CAPTURABLE", False):
            return f"{buffer.backend.__name__} copies tables at every call; use backend='compiled'"
        if not buffer.keeps_zero or self.folds is None:
            return "its buffer holds an earlier window's values; run one whole window before the capture"
        if any(p.grad is not None and p.grad.layout != torch.strided for p in buffer.params):
            return "a gradient is sparse, and how many entries it has may change; use sparse=False in the embedding"
        return window.update.obstacle_to_capture(buffer, [k for k, p in enumerate(buffer.params) if p.grad is not None])

    def check_flush(self, window: Window) -> None:
        """Refuse to capture the end of a window whose micro-batches are not in a graph, or to end one they miss."""
        if not is_capturing():
            self.check_eager(window)
        elif not self.captured:
            raise RuntimeError(
                f"{NAME}: flush() cannot be captured in a CUDA graph because the window's step()s were not; capture "
                "them before, or call it outside of the graph"
            )

    def check_eager(self, window: Window) -> None:
        """Refuse to go on where captured folds reach a buffer that is no longer the window's."""
        if not self.captured or (window.is_located() and id(window.buffers[0]) in self.held):
            return
        raise RuntimeError(
            f"{NAME}: parameters were added, removed or unfrozen since step() was captured in a CUDA graph, whose "
            "replays do not reach them; opt.load_state_dict(opt.state_dict()) keeps what was replayed and forgets the "
            "graph; then run a window, and capture again"
        )

    def divide(self, eager: int, length: int | None) -> Tensor:
        """The window's divisor, on the device: folds over `length`, or 1 for a sum; 0, a skip, where there are none.

        eager: the micro-batches beside the replayed ones.
        """
        folds = self.divisor.copy_(self.folds).add_(eager)
        return folds.clamp_(max=1) if length is None else folds.div_(length)

    def begin_window(self, buffers: list[FlatBuffer]) -> bool:
        """The window was closed or dropped; returns whether folds captured before still belong to the next one."""
        if not self.captured:
            return False
        self.folds.zero_()
        if is_capturing():  # the boundary is in the graph, behind the folds
            self.captured, self.in_capture, self.marks = 0, 0, None
            return False
        (buffer,) = buffers
        buffer.marks.copy_(self.marks)
        buffer.touched = True
        return True

    def count_update(self, scalars: Tensor) -> None:
        """On the device, now or at every replay: one update, unless it is skipped."""
        self.updates.add_(1).sub_(scalars[1])
        self.counts_updates = True

    def counted_updates(self) -> int:
        return int(self.updates) if self.counts_updates else 0

    def replayed_folds(self) -> int:
        return int(self.folds) if self.captured else 0

    def forget(self) -> None:
        """Graphs captured so far are of no use any more."""
        self.captured, self.in_capture, self.marks, self.counts_updates = 0, 0, None, False
        for counter in (self.folds, self.updates):
            if counter is not None:
                counter.zero_()
