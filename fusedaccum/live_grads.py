"""steps=None: whoever calls `step()` decides when; `p.grad` is a live FP32 view of what the backwards have added up."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fusedaccum import capture, folding, modes
from fusedaccum.flat_buffer import FlatBuffer, Part
from fusedaccum.hooks import ParameterHooks
from fusedaccum.notices import warn
from fusedaccum.ops import TOUCHED
from fusedaccum.options import NAME
from fusedaccum.passes import Passes
from fusedaccum.streams import Streams

if TYPE_CHECKING:
    from fusedaccum.window import Window


class LiveGrads:
    """Keeps `p.grad` what it is without us, a sum that every backward adds to, but for its dtype: FP32.

    Where `p.grad` is our view, it is taken away just before autograd would add to it, so that autograd hands its own
    gradient over as it is; that is folded, and the view put back. A `p.grad` that is None before it was taken away says
    that the sum was given up: what comes next is a first touch.
    """

    def __init__(self) -> None:
        self.views: dict[Tensor, Tensor] = {}
        self.passes = Passes()
        self._hooks = ParameterHooks()
        self._lock = threading.RLock()  # the engine has a thread for each device
        self._away: set[Tensor] = set()  # parameters whose view was taken away
        self._streams = Streams()
        self._parts: dict[Tensor, tuple[FlatBuffer, Part]] = {}
        self._unused = False  # whether there was a backward since the last step

    def hook(self, window: Window) -> None:
        """Hook the parameters that can get gradients, and no others. The window's buffers may be new."""
        self._hooks.fit(window, "live", before=True)
        was, self.views, parts = self.views, {}, self._parts
        self._parts = {}
        for buffer in window.buffers:
            for part in buffer.parts(0):
                for k in range(part.first, part.last):
                    p = buffer.params[k]
                    same = p in parts and parts[p][0] is buffer
                    self._parts[p] = parts[p] if same else (buffer, part)
                    self.views[p] = was[p] if same else buffer.view(k)
        for p, view in self.views.items():
            old = was.get(p)
            if old is None or old is view or not (p.grad is old or p in self._away):
                continue
            if old.shape == view.shape and old.dtype == view.dtype:
                view.copy_(old)
                if p not in self._away:
                    self._attach(p)

    def _attach(self, p: Tensor) -> None:
        p.grad = None
        if (view := self.views[p]).dtype != p.dtype and p.is_leaf and p.grad_dtype is not None:
            p.grad_dtype = None
        p.grad = view

    def before(self, p: Tensor, window: Window) -> None:
        """A hook: `p` is about to get a gradient, or `torch.autograd.grad` reads one and `p` gets none."""
        with self._lock:
            if p.grad is not None and p.grad is self.views.get(p):
                self._enter(window)
                p.grad = None
                self._away.add(p)

    def _enter(self, window: Window) -> None:
        if self.passes.enter(self._put_back, self._fail):
            if capture.is_capturing():
                raise RuntimeError(
                    f"{NAME}: a backward with steps=None cannot be captured in a CUDA graph; use steps=N, fold='step'"
                )
            with modes.no_grad():
                window.locate()
                folding.follow(window, thorough=False)

    def _put_back(self) -> None:
        """The end of a backward: views of parameters that got no gradient after all."""
        with self._lock:
            for p in self._away:
                if p.grad is None:
                    self._attach(p)
            self._away.clear()

    def _fail(self) -> None:
        self._put_back()
        self.passes.forget()

    def arrive(self, window: Window, p: Tensor) -> None:
        """A hook: autograd has set `p.grad`, or added to one that is not ours."""
        with self._lock:
            self._enter(window)
            if p.grad is None or p not in self.views:
                return
            if p.grad.requires_grad:  # create_graph=True: a sum that can be differentiated is autograd's to make
                if p in self._away:
                    self._away.discard(p)
                    total = self.views[p].clone() + p.grad
                    p.grad = None
                    self._attach(p)
                    p.grad = total
                return
            with modes.no_grad():
                self._fold(window, p)

    def _fold(self, window: Window, p: Tensor) -> None:
        window.check_usable()
        buffer, part = self._parts[p]
        k = window.place[p][1]
        grads: list[Tensor | None] = [None] * (part.last - part.first)
        grads[k - part.first] = folding.acceptable(window, buffer, p, p.grad)
        self._streams.note(p, p.grad)
        self._streams.join([p])
        buffer.marks.numpy()[k] = TOUCHED if p in self._away else 0
        window.midway = True
        buffer.fold(grads, 1.0, False, part)
        self._attach(p)
        self._away.discard(p)
        self._unused = True
        window.midway = False

    def check_step(self, mean_of: object, sum_of: object) -> None:
        """Refuse a `step()` that this mode has no meaning for. Raises ValueError or RuntimeError."""
        if mean_of is not None or sum_of is not None:
            raise ValueError(
                f"{NAME}: mean_of and sum_of have no meaning with steps=None, where the caller's losses say how "
                "micro-batches are weighted; leave them out, or use steps=N"
            )
        if capture.is_capturing():
            raise RuntimeError(f"{NAME}: step() with steps=None cannot be captured in a CUDA graph; use steps=N")

    def collect(self, window: Window) -> None:
        """Have the buffers say what `p.grad` says: touched where there is one. One that is not ours is copied."""
        self._put_back()
        for buffer in window.buffers:
            marks = buffer.marks.numpy()
            others: list[Tensor | None] = [None] * len(buffer.params)
            for k, p in enumerate(buffer.params):
                grad = p.grad
                marks[k] = TOUCHED if grad is self.views[p] else 0
                if grad is not None and not marks[k]:
                    others[k] = folding.acceptable(window, buffer, p, p.grad)
            buffer.touched = bool(marks.any())
            if any(grad is not None for grad in others):
                buffer.fold(others, 1.0, False)
                for p, grad in zip(buffer.params, others, strict=True):
                    if grad is not None and not p.grad.requires_grad:
                        self._attach(p)
        self._unused = False

    def sum_of(self, p: Tensor) -> Tensor | None:
        """What `p.grad` holds, in FP32; None where it holds nothing."""
        self._put_back()
        if p.grad is None or p.grad is self.views.get(p):
            return p.grad
        return p.grad.detach().to(torch.complex64 if p.is_complex() else torch.float32)

    def drop(self) -> None:
        """Give up every sum, as `zero_grad()` does."""
        for p, view in self.views.items():
            if p.grad is view or p in self._away:
                p.grad = None
        self._away.clear()
        self._unused = False
        self.passes.forget()

    def close(self) -> None:
        """Have no part in backwards any more, and leave parameters as an optimizer without us takes them."""
        held = sum(p.grad is view for p, view in self.views.items()) if self._unused else 0
        if held:
            warn(
                f"{NAME} was closed with gradients of {held} parameters that no step() has used; they are dropped: "
                "call step() before close()"
            )
        self._hooks.remove()
        self.drop()
        for p in self.views:
            if p.is_leaf and p.grad is None and p.grad_dtype is None:
                p.grad_dtype = p.dtype
        self.views = {}
