"""fold="backward": each gradient is folded and freed soon after it appears, in buckets."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from fusedaccum import capture, folding, modes
from fusedaccum.flat_buffer import FlatBuffer, Part
from fusedaccum.hooks import ParameterHooks
from fusedaccum.local import like, local
from fusedaccum.micro import begin
from fusedaccum.options import NAME, WEIGHTED
from fusedaccum.passes import Passes, is_compiled
from fusedaccum.streams import Streams

if TYPE_CHECKING:
    from fusedaccum.window import Window

MIB = 2**20


@dataclass(eq=False)
class Slot:
    """What a hook has to know of its parameter: where it belongs, and what came of it."""

    buffer: FlatBuffer
    part: Part
    index: int  # in the part
    hook: int  # the number of our hook among those of the parameter
    next_size: int | None = None  # bytes of the gradient that came after its own in the last backward
    grad: Tensor | None = None  # in the bucket


class InBackward:
    """Takes the gradients of one wrapper's parameters out of the backward.

    What it holds is one bucket, or one gradient that is larger. The next gradient is there before a hook tells of it,
    so the bucket is emptied ahead of one that would not fit: its size is known from the last backward, and taken to be
    the largest before that.
    """

    def __init__(self, bucket_mb: float) -> None:
        self.limit = int(bucket_mb * MIB)
        self.passes = Passes()
        self._hooks = ParameterHooks()
        self._lock = threading.RLock()  # the engine has a thread for each device
        self._slots: dict[int, Slot] = {}  # by identity: a tensor's hash takes as long as all of the rest
        self._bucket: list[tuple[Tensor, Slot]] = []
        self._held = 0  # bytes in the bucket
        self.left: Tensor | None = None  # whose gradient is still its own, because somebody may look at it
        self.backwards = 0  # that have ended in this micro-batch
        self._folded = False  # something of the passes that are under way
        self._first = False  # whether they are the first ones of a micro-batch
        self._largest = 0  # bytes, of a gradient whose size is not known yet
        self._before: Slot | None = None  # of the gradient that came last
        self._streams = Streams()

    def hook(self, window: Window) -> None:
        """Hook the parameters that can get gradients, and no others. The window's buffers may be new."""
        self._hooks.fit(window, "in_backward")
        old, self._slots = self._slots, {}
        for buffer in window.buffers:
            for part in buffer.parts(self.limit):
                for index, p in enumerate(buffer.params[part.first : part.last]):
                    was = old.get(id(p))
                    known = (was.next_size, was.grad) if was else (None, None)
                    self._slots[id(p)] = Slot(buffer, part, index, self._hooks.number(p), *known)
        self._bucket = [(p, self._slots[id(p)]) for p, _ in self._bucket if id(p) in self._slots]
        self._largest = max((p.nbytes for buffer in window.buffers for p in buffer.memory()), default=0)

    def unhook(self) -> None:
        """Have no part in backwards any more."""
        self._hooks.remove()
        self.forget()
        self._slots = {}

    def forget(self) -> None:
        """The window is over. Gradients that are not folded yet are dropped with it."""
        with self._lock:
            for _, slot in self._bucket:
                slot.grad = None
            self._bucket, self._held, self.left, self._before = [], 0, None, None
            self._folded = self._first = False
            self.passes.forget()
            self._streams.forget()

    def check_ended(self) -> None:
        """Refuse to go on with gradients of half a backward."""
        if self.passes.unfinished:
            raise RuntimeError(
                f"{NAME}: a backward is still running, or was left by an exception after some of its gradients were "
                "folded, which cannot be taken out again; reset() drops the window"
            )

    def arrive(self, window: Window, p: Tensor) -> None:
        """A hook: the gradient of `p` has been accumulated."""
        with self._lock:
            if (grad := p.grad) is None or window.closed:  # by a hook before this one
                return
            if not self.passes.is_known:
                if is_compiled():  # nobody says when it is over: these gradients wait for step()
                    return
                with modes.no_grad():
                    if not self._begin(window, p):
                        return
                self.passes.enter(lambda: self._end(window), lambda: self._fail(window))
            if (slot := self._slots.get(id(p))) is None:
                return
            if window.begun.is_empty:
                p.grad, window.dropped = None, True
                return
            if self.left is not None and self.left is not p:
                self._take(window, self.left)
            size = _bytes(grad)
            if self._before is not None:
                self._before.next_size = size
            self._before = slot
            if self._held + size > self.limit:
                self._fold(window)
            if not self._hooks.is_last(p, slot.hook):
                self.left = p
                self._streams.leave(p)
                return
            self._take(window, p)
            if self._held + (self._largest if slot.next_size is None else slot.next_size) > self.limit:
                self._fold(window)

    def _begin(self, window: Window, p: Tensor) -> bool:
        """The first gradient of a micro-batch says what becomes of all of them. Raises before anything is changed.

        Returns whether the window has a place for that of `p`.
        """
        if self.passes.failed:
            self.check_ended()
        if window.begun:
            window.saved = False
            if not self.passes.unfinished:  # another backward of it, before which parameters may have changed
                window.locate()
                folding.follow(window, thorough=False)
            window.ddp.check(window, window.begun.weighted, p)
            return p in window.place
        window.check_usable()
        if capture.is_capturing():
            raise RuntimeError(
                f"{NAME}: a backward with fold='backward' cannot be captured in a CUDA graph; use fold='step'"
            )
        late = window.announced is None and window.pending > 0 and window.mode == WEIGHTED
        micro = begin(window, *(window.announced or (None, None)), late=late, first=p)
        folding.follow(window, thorough=False)
        if p not in window.place:
            return False
        if window.last:
            window.begin_overlap()
        window.begun, window.length, window.saved = micro, micro.length, False
        window.consolidated = False  # what is folded from now on is of this rank alone
        self.backwards = 0
        self._first = True
        return True

    def _take(self, window: Window, p: Tensor) -> None:
        """Put the gradient of `p` into the bucket."""
        self.left = None
        if (grad := p.grad) is None or (slot := self._slots.get(id(p))) is None:  # by a hook behind ours
            return
        if slot.grad is not None:
            self._fold(window)
        slot.grad = grad = folding.of_this_rank(window, p, grad)
        self._bucket.append((p, slot))
        self._held += _bytes(grad)
        self._streams.note(p, grad)
        p.grad = None

    def _fold(self, window: Window) -> None:
        """Fold what is in the bucket, with one call for each part of a buffer that it belongs to."""
        if not self._bucket:
            return
        self._streams.join([p for p, _ in self._bucket])
        with modes.no_grad():
            try:
                self._fold_parts(window)
            except folding.REFUSALS:
                for p, slot in self._bucket:
                    if slot.grad is not None:
                        slot.grad = folding.acceptable(window, slot.buffer, p, slot.grad)
                self._fold_parts(window)
        self._bucket, self._held = [], 0

    def _fold_parts(self, window: Window) -> None:
        together: dict[Part, list[Slot]] = {}
        for p, slot in self._bucket:
            if slot.grad is None:  # folded before another part was refused
                continue
            if type(slot.grad) not in folding.PLAIN:
                folding.acceptable(window, slot.buffer, p, slot.grad)
            together.setdefault(slot.part, []).append(slot)
        micro = window.begun
        window.midway = True
        for part, slots in together.items():
            if window.overlap is not None:
                window.overlap.check(part)
            grads: list[Tensor | None] = [None] * (part.last - part.first)
            for slot in slots:
                grads[slot.index] = slot.grad
            try:
                slots[0].buffer.fold(grads, micro.scale, micro.norm, part)
            except folding.REFUSALS:
                window.midway = False  # nothing of it was written
                raise
            self._folded = True
            for slot in slots:
                slot.grad = None
            if window.overlap is not None:
                window.overlap.folded(part, len(slots))
        window.midway = False

    def _end(self, window: Window) -> None:
        """A backward came to its end: nothing of it waits for the next one."""
        with self._lock, modes.no_grad():
            try:
                if self.left is not None:
                    self._take(window, self.left)
                self._fold(window)
                self._streams.end()
            except BaseException:
                self.passes.failed = True
                self._fail(window)
                raise
            self._folded, self._first, self._before = False, False, None
            self.backwards += 1
            self._hooks.come_last()
            window.ddp.end_backward(window)

    def _fail(self, window: Window) -> None:
        """A backward ended with an exception. Where nothing of it was folded, it leaves its gradients as without us."""
        with self._lock:
            if self._folded:
                return
            for p, slot in self._bucket:
                grad = like(p, slot.grad)
                if p.grad is None:
                    p.grad = grad
                else:
                    p.grad = p.grad + grad if grad.is_sparse else grad + p.grad
            if self._first:
                window.begun = None
            self.forget()


def _bytes(grad: Tensor) -> int:
    grad = local(grad)
    return grad._values().nbytes if grad.is_sparse else grad.nbytes
