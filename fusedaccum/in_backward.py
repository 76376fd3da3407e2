"""fold="backward": each gradient is folded and freed soon after it appears, in buckets."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from torch import Tensor

from fusedaccum import capture, folding, modes
from fusedaccum.flat_buffer import FlatBuffer, Part
from fusedaccum.hooks import ParameterHooks
from fusedaccum.micro import Micro, begin
from fusedaccum.options import NAME, WEIGHTED
from fusedaccum.passes import Passes, is_compiled
from fusedaccum.streams import Streams

if TYPE_CHECKING:
    from fusedaccum.window import Window

MIB = 2**20


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
        self._bucket: dict[Tensor, Tensor] = {}
        self._held = 0  # bytes in the bucket
        self._left: Tensor | None = None  # whose gradient is still its own, because somebody may look at it
        self.backwards = 0  # that have ended in this micro-batch
        self._folded = False  # something of the passes that are under way
        self._first = False  # whether they are the first ones of a micro-batch
        self._largest = 0  # bytes of a parameter
        self._sizes: dict[Tensor, int] = {}  # of the gradient that came after a parameter's
        self._before: Tensor | None = None  # whose gradient came last
        self._streams = Streams()
        self._parts: dict[Tensor, tuple[FlatBuffer, Part]] = {}

    def hook(self, window: Window) -> None:
        """Hook the parameters that can get gradients, and no others. The window's buffers may be new."""
        self._hooks.fit(window, "in_backward")
        self._largest = max((p.nbytes for p in window.place), default=0)
        self._parts = {
            p: (buffer, part)
            for buffer in window.buffers
            for part in buffer.parts(self.limit)
            for p in buffer.params[part.first : part.last]
        }

    def unhook(self) -> None:
        """Have no part in backwards any more."""
        self._hooks.remove()
        self.forget()
        self._parts, self._sizes = {}, {}

    def forget(self) -> None:
        """The window is over. Gradients that are not folded yet are dropped with it."""
        with self._lock:
            self._bucket, self._held, self._left, self._before = {}, 0, None, None
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
        with self._lock, modes.no_grad():
            if p.grad is None or window.closed:  # by a hook before this one
                return
            if is_compiled():  # nobody says when it is over: these gradients wait for step()
                return
            if not self._begin(window, p):
                return
            self.passes.enter(lambda: self._end(window), lambda: self._fail(window))
            if window.begun.is_empty:
                p.grad, window.dropped = None, True
                return
            if self._left is not p:
                self._take(window)
            size = _bytes(p.grad)
            if self._before is not None:
                self._sizes[self._before] = size
            self._before = p
            if self._held + size > self.limit:
                self._fold(window)
            self._left = p
            if self._hooks.is_last(p):
                self._take(window)
                if self._held + self._sizes.get(p, self._largest) > self.limit:
                    self._fold(window)

    def _begin(self, window: Window, p: Tensor) -> bool:
        """The first gradient of a micro-batch says what becomes of all of them. Raises before anything is changed.

        Returns whether the window has a place for that of `p`.
        """
        if self.passes.failed:
            self.check_ended()
        if window.begun:
            if not self.passes.unfinished:  # another backward of it, before which parameters may have changed
                window.locate()
                folding.follow(window, thorough=False)
            return p in window.place
        window.check_usable()
        if capture.is_capturing():
            raise RuntimeError(
                f"{NAME}: a backward with fold='backward' cannot be captured in a CUDA graph; use fold='step'"
            )
        if window.announced is None and window.pending and window.mode == WEIGHTED:
            length = window.length_now()  # step() will give the count, which only divides
            micro = Micro(length, 1.0, None, True, last=window.pending + 1 >= length)
            window.locate()
        else:
            micro = begin(window, *(window.announced or (None, None)))
        folding.follow(window, thorough=False)
        if p not in window.place:
            return False
        window.begun, window.length, window.saved = micro, micro.length, False
        self.backwards = 0
        self._first = True
        return True

    def _take(self, window: Window) -> None:
        """Put the gradient that was left with its parameter into the bucket."""
        p, self._left = self._left, None
        if p is None or p.grad is None:
            return
        if p in self._bucket:
            self._fold(window)
        buffer, _ = self._parts[p]
        self._bucket[p] = grad = folding.acceptable(window, buffer, p)
        self._held += _bytes(grad)
        self._streams.note(p, grad)
        p.grad = None

    def _fold(self, window: Window) -> None:
        """Fold what is in the bucket, with one call for each part of a buffer that it belongs to."""
        if not self._bucket:
            return
        micro = window.begun
        together: dict[Part, tuple[FlatBuffer, list[Tensor | None]]] = {}
        for p, grad in self._bucket.items():
            buffer, part = self._parts[p]
            if part not in together:
                together[part] = buffer, [None] * (part.last - part.first)
            together[part][1][window.place[p][1] - part.first] = grad
        self._streams.join(self._bucket)
        window.midway = True
        for part, (buffer, grads) in together.items():
            try:
                buffer.fold(grads, micro.scale, micro.last, part)
            except folding.REFUSALS:
                window.midway = self._folded
                raise
            self._folded = True
        self._bucket, self._held = {}, 0
        window.midway = False

    def _end(self, window: Window) -> None:
        """A backward came to its end: nothing of it waits for the next one."""
        with self._lock, modes.no_grad():
            try:
                self._take(window)
                self._fold(window)
            except BaseException:
                self.passes.failed = True
                self._fail(window)
                raise
            self._folded, self._first, self._before = False, False, None
            self.backwards += 1
            self._hooks.come_last()

    def _fail(self, window: Window) -> None:
        """A backward ended with an exception. Where nothing of it was folded, it leaves its gradients as without us."""
        with self._lock:
            if self._folded:
                return
            for p, grad in self._bucket.items():
                if p.grad is None:
                    p.grad = grad
                else:
                    p.grad = p.grad + grad if grad.is_sparse else grad + p.grad
            if self._first:
                window.begun = None
            self.forget()


def _bytes(grad: Tensor) -> int:
    return grad._values().nbytes if grad.is_sparse else grad.nbytes
