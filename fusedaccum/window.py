"""The window: counting micro-batches, weighting them, and the boundary at which the update fires."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fusedaccum import capture, folding
from fusedaccum.boundary import Boundary
from fusedaccum.checks import Checks
from fusedaccum.collectives import Ranks
from fusedaccum.counts import Counts
from fusedaccum.ddp import Models
from fusedaccum.flat_buffer import FlatBuffer
from fusedaccum.in_backward import InBackward
from fusedaccum.length import Length, Steps
from fusedaccum.live_grads import LiveGrads
from fusedaccum.local import like
from fusedaccum.micro import Micro, begin
from fusedaccum.nesting import Nesting
from fusedaccum.nonfinite import NonFinite
from fusedaccum.notices import warn_low_moments, warn_low_precision, warn_of_folded, warn_open_window
from fusedaccum.ops import TOUCHED
from fusedaccum.options import NAME, PLAIN, WEIGHTED, Options, as_float64, check_params, parameters
from fusedaccum.overlap import Overlap
from fusedaccum.reduction import Totals
from fusedaccum.update import FusedUpdate, Update, choose
from fusedaccum.zero1 import Zero1


class Window(Checks):
    """Everything about one wrapper that changes: proxies of the wrapper share this one object.

    optimizer: the wrapped optimizer. steps: micro-batches per window, checked.
    """

    def __init__(self, optimizer: Optimizer, steps: Steps, options: Options) -> None:
        self.optimizer = optimizer
        self.options = options
        self.coming = Length(steps)  # of the next window
        self.length = 0  # of the open window
        self.pending = 0
        self.mode: str | None = None
        self.items: float | Tensor = 0.0
        self.announced: tuple[Any, Any] | None = None  # (mean_of, sum_of) that micro_batch() gave
        self.begun: Micro | None = None  # the micro-batch of which gradients have been folded already
        self.nonfinite = NonFinite(options.nonfinite, options.amp_scaling, alone=options.process_group is None)
        self._skipped_micro_batches = 0
        self.buffers: list[FlatBuffer] = []
        self.place: dict[Tensor, tuple[FlatBuffer, int]] = {}
        self.graphs = capture.Graphs()
        # The ranks that windows are reduced over, and, once the open one was, its counts over all of them.
        self.ranks = None if options.process_group is None else Ranks(options.process_group, options.wire_dtype)
        self.reduced: Totals | None = None
        self.zero1 = None if options.shard is None else Zero1(self.ranks)
        self.last = False  # that micro_batch(last=True) was called in this window
        self.overlap: Overlap | None = None  # the reduction that has begun because of it
        self.consolidated = False
        self.ddp = Models()
        self.closed = False
        self.saved = False  # whether the open window, as it is, was written out
        self.dropped = False  # gradients of the open window, by a count of 0
        self.midway = False  # something was written that is not counted yet: an interrupt may come just then
        self.counts = Counts()
        self.params: list[Tensor] = []
        self._unplaced: list[Tensor] = []
        self._dtypes: dict[Tensor, torch.dtype] = {}
        self.norm: Tensor | float | None = None  # of what the last window updated with
        self.boundary = Boundary()
        self._warned = self._warned_of_folded = False
        self.nesting = Nesting()
        self.update = self.choose_update()
        self.in_backward = InBackward(options.bucket_mb) if options.fold == "backward" else None
        self.live = LiveGrads() if steps is None else None
        self.hook_parameters()
        self.ddp.of(self)  # whose forwards are known from now on

    # What was chosen

    def choose_update(self, more: Sequence[Tensor] = ()) -> Update:
        """See `update.choose`. What holds a sum is updated, frozen or not."""
        there = set(map(id, parameters(self.optimizer)))
        touched = [buffer.params[k] for buffer in self.buffers for k in buffer.touched_segments()]
        more = [*more, *(p for p in touched if id(p) in there)]
        return choose(self.optimizer, self.options, more, live=self.coming.value is None)

    def warn_of_folded(self) -> None:
        """Say once that gradients have been folded which somebody wants to drop."""
        folded = self.begun and self.in_backward is not None and not self.in_backward.passes.unfinished
        if folded and not self._warned_of_folded:
            self._warned_of_folded = True
            warn_of_folded()

    def warn_about_precision(self) -> None:
        """Say once that parameters of low precision lose small updates, and what helps."""
        if self._warned:
            return
        low = [p for p in parameters(self.optimizer) if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16)]
        if self.options.master_weights or self.options.rounding == "stochastic":
            if isinstance(self.update, FusedUpdate) and (stuck := self.update.stuck_moments()):
                self._warned = True
                warn_low_moments(stuck)
        elif low:
            self._warned = True
            warn_low_precision(low, fused=self.update.name == "fused")

    # Where gradients go

    def locate(self) -> None:
        """Make `buffers` fit the optimizer's parameters as they are now; sums of an open window move along."""
        if not self.is_located():
            self.rebuild()

    def is_located(self) -> bool:
        """Whether `buffers` fit the optimizer's parameters as they are now."""
        params = parameters(self.optimizer)
        same = len(params) == len(self.params) and all(map(is_, params, self.params))
        return same and not any(p.requires_grad or p.grad is not None for p in self._unplaced)

    def rebuild(self, also: Tensor | None = None) -> None:
        """Build the flat buffers anew where the parameters ask for it. also: a frozen parameter to make room for."""
        params = parameters(self.optimizer)
        check_params(params)
        if (chosen := self.choose_update([] if also is None else [also])).name != self.update.name:
            self.update.replace(self.buffers, [])  # gives up what only it can tell apart
            self.update = chosen
        for p in params:
            if (was := self._dtypes.get(p, p.dtype)) != p.dtype:
                self.update.retype(p, was)
        old = self.buffers
        shares = {} if self.zero1 is None else {"shares": self.ranks.size}
        self.buffers = self.check_may_move(folding.build(params, old, self.options.backend, also, **shares))
        if self.nonfinite.counts or any(buffer.live is not None for buffer in old):
            self.keep_live()
        if self.buffers != old:
            if self.live is None:  # else `hook` does, and what a parameter's `p.grad` holds is never lost
                folding.carry(old, self.buffers)
            if self.zero1 is None:  # else shares move at the next boundary, where all ranks are
                self.update.replace(old, self.buffers)
        self.place = {p: (buffer, k) for buffer in self.buffers for k, p in enumerate(buffer.params)}
        self.params = params
        self._dtypes = {p: p.dtype for p in params}
        self._unplaced = [p for p in params if p not in self.place]
        for buffer in self.buffers:
            buffer.addresses = buffer.addresses_now()
        self.ddp.look_again(self)
        self.hook_parameters()
        self.warn_about_precision()

    def hook_parameters(self) -> None:
        """Have the parameters that can get gradients tell of them as they appear, where that was asked for."""
        for listener in (self.in_backward, self.live):
            if listener is not None:
                listener.hook(self)

    # One micro-batch

    def micro_batch(
        self,
        mean_of: float | Tensor | None,
        sum_of: float | Tensor | None,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """Fold the gradients that are there and count the micro-batch. Raises before anything is changed.

        grad_scale: what they have been multiplied by. found_inf: where it is not 0 they are left out. Tensors of one
        element, of a GradScaler.
        """
        if self.live is not None:
            self.live.check_step(mean_of, sum_of)
            self.mode, self.length, self.pending = PLAIN, 1, 1  # of what `p.grad` holds
            return
        capturing = capture.is_capturing()
        if self.begun:
            micro = self.begun.settled(self, mean_of, sum_of)
            self.locate()
        else:
            micro = begin(self, mean_of, sum_of, grad_scale)
        kept = None
        if micro.is_empty:
            self.midway = True
            self.dropped = self.dropped or any(p.grad is not None for p in self.params)
            folding.discard(self.params)
        elif not self.begun or any(p.grad is not None for p in self.params):
            with self.graphs.adding(self) if capturing else nullcontext():
                kept = folding.fold(self, micro.scale, norm=micro.norm, found_inf=found_inf, items=micro.items)
        self._count(micro, kept)
        if capturing:
            self.graphs.end_fold(self)

    def _count(self, micro: Micro, kept: Tensor | None) -> None:
        """A micro-batch has been folded. kept: 1 or 0, whether it was, where only the device knows."""
        items = micro.items
        if kept is not None or self.nonfinite.counts or self.nonfinite.kept is not None:
            self.nonfinite.count(1.0 if kept is None else kept)
            items = items if items is None or kept is None else folding.times(kept, items)
        if items is not None:
            self.items = self.items + as_float64(items, self.items)
        self.mode = WEIGHTED if micro.weighted else PLAIN
        self.length = micro.length
        self.pending += 1
        self.counts.nothing_updated()
        self.announced = self.begun = None
        self.saved = self.midway = False
        self.drop_consolidated()

    def length_now(self) -> int:
        """Micro-batches of the open window, or of the one that the next micro-batch begins.

        Where `steps` is a function this may wait for the device, which knows how many updates there were.
        """
        if self.begun:
            return self.begun.length
        if self.pending or self.graphs.captured:
            return self.length
        return self.coming.of_update(lambda: self.updates)

    @property
    def is_open(self) -> bool:
        """Whether the window holds anything that would be lost with it."""
        return bool(self.micro_batches or self.begun)

    @property
    def may_close(self) -> bool:
        """Whether there is something to close: nobody has called `reset` since that began."""
        return bool(self.pending or self.reduced or self.graphs.captured)

    @property
    def full(self) -> bool:
        return self.pending >= self.length

    @property
    def micro_batches(self) -> int:
        """What the open window holds. Reading it waits for the device where folds were captured in a CUDA graph."""
        self.graphs.leave(self)
        return self.pending - self.graphs.in_capture + self.graphs.replayed_folds()

    # The boundary

    def divisor(self) -> float | Tensor:
        """What the sum has to be divided by to be the window's mean (or its sum, with reduction="sum")."""
        if self.reduced is not None:
            return self.reduced.divisor(self.options.reduction)
        if self.mode == WEIGHTED:
            return self.items
        if self.graphs.captured:
            eager = self.pending - self.graphs.in_capture
            return self.graphs.divide(eager, self.length if self.options.reduction == "mean" else None)
        if self.nonfinite.kept is not None:
            return self.nonfinite.kept / self.length if self.options.reduction == "mean" else self.nonfinite.kept > 0
        return self.pending / self.length if self.options.reduction == "mean" else 1.0

    def master_grad(self, param: Tensor) -> Tensor:
        """See `FusedAccumOptimizer.master_grad`."""
        if not isinstance(param, Tensor):
            raise TypeError(f"{NAME}: master_grad needs a parameter of the optimizer, not a {type(param).__name__}")
        if not self.boundary.in_pre_hook:
            folding.follow(self, thorough=True)
        buffer, k = self.place.get(param, (None, 0))
        if self.live is not None and (held := self.live.sum_of(param)) is not None:
            return held
        if buffer is None or self.live is not None or not buffer.is_touched(k):
            if buffer is None and not any(param is p for p in parameters(self.optimizer)):
                raise ValueError(
                    f"{NAME}: master_grad was given a tensor of shape {tuple(param.shape)} that is not a parameter "
                    "of the optimizer; pass one of param_groups' parameters"
                )
            dtype = torch.complex64 if param.is_complex() else torch.float32
            return torch.zeros_like(param, dtype=dtype, requires_grad=False)
        self.boundary.show(self)
        return like(param, buffer.hand_out(k))

    def rescale(self, factor: float | Tensor) -> None:
        """Multiply every sum of this window by `factor`."""
        for buffer in self.buffers:
            if buffer.touched:
                buffer.rescale(factor)

    def reset(self) -> None:
        """Drop what the window holds and begin the next."""
        for buffer in self.buffers:
            buffer.clear()
        self.pending, self.mode, self.items = 0, None, 0.0
        self.nonfinite.begin_window()
        self.coming.ask_again()
        if self.graphs.begin_window(self.buffers):
            self.length, self.mode = self.graphs.length, PLAIN
        if self.overlap is not None:  # what is on its way would still arrive
            self.overlap.send_rest()
            self.overlap.finish()
        self.announced = self.begun = self.reduced = self.overlap = None
        self.drop_consolidated()
        if self.in_backward is not None:
            self.in_backward.forget()
        self.last = self.dropped = self.midway = False
        self.counts.nothing_updated()

    def drop_consolidated(self) -> None:
        """What `consolidate()` has made is out of date."""
        self.consolidated = False
        if self.zero1 is not None:
            self.zero1.held = None

    def owned(self, buffers: list[FlatBuffer]) -> Sequence[FlatBuffer]:
        """What this rank updates of `buffers`: its shares of them, or all."""
        return buffers if self.zero1 is None else self.zero1.shares(buffers)

    @property
    def counted_items(self) -> float | Tensor:
        """The items that the window counts: those of all ranks once it was reduced."""
        return self.items if self.reduced is None else self.reduced.items

    @property
    def only_device_knows(self) -> bool:
        """Whether only the device knows if anything is left of the gradients of this window."""
        return self.nonfinite.counts or isinstance(self.counted_items, Tensor)

    def left_any_out(self) -> bool:
        """Whether gradients of this window were left out, as far as it matters where none are left. May wait."""
        held = [(b.marks & TOUCHED).bool() & ~b.live.cpu().bool() for b in self.buffers if b.live is not None]
        return self.dropped or any(bool(left_out.any()) for left_out in held)

    def keep_live(self) -> None:
        """Have the device note which segments were folded into."""
        for buffer in self.buffers:
            buffer.keep_live()

    def begin_overlap(self) -> None:
        """Have parts of the window leave for the other ranks as they are complete."""
        self.overlap = Overlap(self, self.in_backward.limit)

    def nothing_to_flush(self) -> bool:
        """Whether the window is empty, which makes this call one that updated nothing. Other ranks' may not be."""
        self.graphs.leave(self)
        others = self.ranks is not None and self.ranks.size > 1
        if others or self.pending or self.begun or self.graphs.captured:
            return False
        self.counts.nothing_updated()
        return True

    def release(self) -> None:
        """Give up the buffers; the wrapper is of no further use."""
        self.closed = True
        self.ddp.close()
        if self.in_backward is not None:
            self.in_backward.unhook()
        if self.live is not None:
            self.live.close()
        self.update.replace(self.buffers, [])
        self.buffers, self.place, self.params, self._unplaced = [], {}, [], []

    def place_for(self, param: Tensor) -> tuple[FlatBuffer, int]:
        """Buffer and segment of `param`, which is given one if it has none because it is frozen."""
        if param not in self.place:
            self.rebuild(also=param)
        return self.place[param]

    # What happened; reading it is what waits for the device

    @property
    def updates(self) -> int:
        return self.counts.updates + self.graphs.counted_updates()

    @property
    def skipped_micro_batches(self) -> int:
        self._skipped_micro_batches += self.nonfinite.read_skipped()
        return self._skipped_micro_batches

    @property
    def grad_norm(self) -> float | None:
        return None if self.norm is None else float(self.norm)

    @property
    def will_update(self) -> bool:
        self.graphs.leave(self)
        return self.pending + 1 >= self.length_now()

    def set_counts(self, updates: int, skipped_windows: int, skipped_micro_batches: int) -> None:
        """Set what was counted, when a state is loaded."""
        self.counts.set(updates, skipped_windows)
        self.nonfinite.read_skipped()
        self._skipped_micro_batches = skipped_micro_batches

    def resume(self, steps: Steps, announced: Any, grad_norm: float | None, updated: bool) -> None:
        """What a copy of a wrapper has beyond a saved window."""
        self.coming, self.announced = Length(steps), announced
        self.counts.set(self.counts.updates, self.counts.skipped_windows, updated)
        self.norm = grad_norm

    def __del__(self) -> None:
        open_ = getattr(self, "pending", 0) or getattr(self, "begun", None)
        if open_ and not self.saved and not self.closed and not self.graphs.captured:
            warn_open_window(self, "was dropped")
