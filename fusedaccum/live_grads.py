"""steps=None: whoever calls `step()` decides when; `p.grad` is a live FP32 view of what the backwards have added up."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fusedaccum import capture, folding, modes
from fusedaccum.flat_buffer import FlatBuffer, Part
from fusedaccum.hooks import ParameterHooks
from fusedaccum.local import like, local
from fusedaccum.notices import warn
from fusedaccum.ops import TOUCHED
from fusedaccum.options import NAME, parameters
from fusedaccum.passes import Passes, is_compiled
from fusedaccum.streams import Streams

if TYPE_CHECKING:
    from fusedaccum.window import Window


@dataclass(eq=False)
class Place:
    """Where the sum of one parameter lies: segment k of a buffer, in one of its parts. `p.grad` is set to `view`."""

    buffer: FlatBuffer
    part: Part
    k: int

    def __post_init__(self) -> None:
        self.look()
        self.address = local(self.view).data_ptr()
        self.marks = self.buffer.marks.numpy()  # an element of it is set in a tenth of the time

    def look(self) -> None:
        """Make the view. Its version counter is its own: what is folded for others is no change of it."""
        self.view = like(self.buffer.params[self.k], self.buffer.view(self.k).data)

    def give_away(self) -> None:
        """Something else is about to be put here: whoever has kept the view keeps its values, as without us.

        It is ours alone where this object and the call hold it. Views of it are not seen.
        """
        if sys.getrefcount(self.view) > 2 or self.view._use_count() > 1:
            memory = local(self.view)  # not before: it would be a reference more
            memory.data = memory.data.clone()
            self.look()

    def is_view(self, grad: Tensor | None) -> bool:
        """Whether `grad` is the view, and shows the sum: `p.grad.data = ...` has it show something else."""
        return grad is self.view and local(grad).data_ptr() == self.address


class LiveGrads:
    """Keeps `p.grad` what it is without us, a sum that every backward adds to, but for its dtype: FP32.

    Where `p.grad` is our view, it is taken away just before autograd would add to it, so that autograd hands its own
    gradient over as it is; that is folded, and the view put back. A `p.grad` that is None before it was taken away says
    that the sum was given up: what comes next is a first touch. One that somebody has set stays theirs, autograd adds
    to it and `step()` reads it; that of a 16-bit parameter is taken into an FP32 sum.
    """

    def __init__(self) -> None:
        self.passes = Passes()
        self._hooks = ParameterHooks()
        self._lock = threading.RLock()  # the engine has a thread for each device
        self._places: dict[Tensor, Place] = {}
        self._away: set[Tensor] = set()  # parameters whose view was taken away
        self._theirs: set[Tensor] = set()  # parameters whose gradient is somebody's tensor, which autograd adds to now
        self._streams = Streams()
        self._grad_dtypes: dict[Tensor, torch.dtype | None] = {}  # as they were where ours is another; None: p.dtype
        self._unused = False  # whether there was a backward since the last step

    def hook(self, window: Window) -> None:
        """Hook the parameters that can get gradients, and no others. The window's buffers may be new."""
        self._fit_hooks(window)
        was, self._places = self._places, {}
        for buffer in window.buffers:
            for part in buffer.parts(0):
                for k in range(part.first, part.last):
                    old = was.get(p := buffer.params[k])
                    same = old is not None and old.buffer is buffer
                    self._places[p] = old if same else Place(buffer, part, k)
        for p, old in was.items():
            if (new := self._places.get(p)) is not old and (old.is_view(p.grad) or p in self._away):
                self._carry(p, old.view, new)

    def _carry(self, p: Tensor, sum_: Tensor, new: Place | None) -> None:
        """Take what `p.grad` holds along into a new buffer, or leave it to a parameter that we hold no more."""
        if new is not None and (new.view.shape, new.view.dtype) == (sum_.shape, sum_.dtype):
            new.view.copy_(sum_)
            if p not in self._away:
                self._attach(p)
        elif p.shape == sum_.shape:  # else it stays as it is, and step() refuses it
            self._away.discard(p)
            p.grad = None
            p.grad = sum_.clone()

    def _fit_hooks(self, window: Window) -> None:
        self._hooks.fit(window, "live", around=True)

    def _attach(self, p: Tensor) -> None:
        place = self._places[p]
        p.grad = None
        if not place.is_view(place.view):
            place.look()
        if place.view.dtype != p.dtype and p.is_leaf and p.grad_dtype is not None:
            self._grad_dtypes[p] = None if p.grad_dtype == p.dtype else p.grad_dtype
            p.grad_dtype = None
        p.grad = place.view

    def _is_ours(self, p: Tensor) -> bool:
        return (place := self._places.get(p)) is not None and place.is_view(p.grad)

    def before(self, key: int, window: Window) -> None:
        """A hook: a parameter is about to get a gradient, or `torch.autograd.grad` reads one and it gets none."""
        with self._lock:
            p = self._hooks.param(key)
            window.ddp.check_live(window)
            if p is None or p.grad is None or is_compiled():
                return  # compiled autograd has read p.grad by now, and adds to it by itself
            if not self.passes.is_known:
                self._enter(window)
            if (place := self._places.get(p)) is None:  # it has left the optimizer
                return
            if not self._is_ours(p):
                if p.dtype == place.view.dtype or p.grad.requires_grad:
                    if p.grad is not place.view:
                        self._theirs.add(p)
                    return
                with modes.no_grad_in_hook():
                    self._fold(window, p)  # else autograd would add to it in 16 bits, or a sparse gradient's entries
            self._away.add(p)  # first: an interrupt between the two must not lose the sum
            p.grad = None

    def _enter(self, window: Window) -> None:
        if is_compiled() or self.passes.enter(self._end, self._fail):
            if capture.is_capturing():
                raise RuntimeError(
                    f"{NAME}: a backward with steps=None cannot be captured in a CUDA graph; use steps=N, fold='step'"
                )
            with modes.no_grad():
                window.locate()
                folding.follow(window, thorough=False)

    def put_back(self) -> None:
        """The end of a backward: views of parameters that got no gradient after all."""
        if not self._away:
            return
        with self._lock:
            for p in self._away:
                if p.grad is None:
                    self._attach(p)
            self._away.clear()

    def _end(self) -> None:
        self.put_back()
        self._theirs.clear()
        self._streams.end()
        self._hooks.come_around()

    def _fail(self) -> None:
        """A backward ended with an exception. A gradient that was not added yet is not, and the sum is there again."""
        with self._lock:
            for p in self._away:
                self._attach(p)
            self._away.clear()
        self._theirs.clear()
        self.passes.forget()

    def arrive(self, window: Window, p: Tensor) -> None:
        """A hook: autograd has set `p.grad`, or added to one that is not ours."""
        with self._lock:
            if not self.passes.is_known:
                self._enter(window)
            if p.grad is None or p not in self._places:
                return
            if self._is_ours(p):  # compiled autograd has added to it
                self._away.discard(p)
                self._unused = True
            elif p in self._theirs and p.grad.dtype == self._places[p].view.dtype:
                self._theirs.discard(p)
                self._unused = True
            elif p.grad.requires_grad:  # create_graph=True: a sum that can be differentiated is autograd's to make
                self._add_differentiably(p)
            else:
                with modes.no_grad_in_hook():
                    self._fold(window, p)

    def _add_differentiably(self, p: Tensor) -> None:
        if p in self._away:
            self._away.discard(p)
            total = self._places[p].view.clone() + p.grad
            self._attach(p)
            p.grad = total

    def _fold(self, window: Window, p: Tensor) -> None:
        window.check_usable()
        place = self._places[p]
        try:
            grads = self._alone(window, p, place)
            if p.is_cuda:
                self._streams.note(p, local(p.grad))
                self._streams.join([p])
            if p not in self._away:
                place.give_away()
            place.marks[place.k] = TOUCHED if p in self._away else 0
            window.midway = True
            place.buffer.fold(grads, 1.0, False, place.part)
        except folding.REFUSALS:  # nothing was written
            window.midway = False
            if p in self._away:  # as where autograd refuses to add
                self._away.discard(p)
                self._attach(p)
            raise
        self._attach(p)
        torch.autograd.graph.increment_version(place.view)
        self._away.discard(p)
        self._unused = True
        window.midway = False

    def _alone(self, window: Window, p: Tensor, place: Place) -> list[Tensor | None]:
        """The gradient of `p` as its part's fold takes it. Raises TypeError or ValueError where it can not."""
        if p.dtype != place.view.dtype:
            _check_compiler()
            if p.grad.dtype == torch.float64:  # without a grad_dtype autograd leaves it as a custom function returns it
                p.grad = p.grad.float()
        grads: list[Tensor | None] = [None] * (place.part.last - place.part.first)
        grads[place.k - place.part.first] = folding.acceptable(
            window, place.buffer, p, folding.of_this_rank(window, p, p.grad)
        )
        return grads

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
        """Have the buffers say what `p.grad` says: touched where there is one. Somebody else's is read, and stays."""
        self.put_back()
        self._fit_hooks(window)
        # Views of ours that show something else since `p.grad.data = ...`.
        turned = {p for p, place in self._places.items() if p.grad is place.view and not place.is_view(p.grad)}
        others = [self._others(window, buffer) for buffer in window.buffers]
        for buffer, grads in zip(window.buffers, others, strict=True):
            held = [p.grad is not None and g is None for p, g in zip(buffer.params, grads, strict=True)]
            buffer.marks.copy_(torch.tensor(held, dtype=torch.uint8, device="cpu") * TOUCHED)
            buffer.touched = any(held)
            if all(grad is None for grad in grads):
                continue
            buffer.fold(grads[:], 1.0, False)
            for p, grad in zip(buffer.params, grads, strict=True):
                if grad is not None and (p in turned or p.grad.dtype != self._places[p].view.dtype):
                    self._attach(p)
        self._unused = False

    def _others(self, window: Window, buffer: FlatBuffer) -> list[Tensor | None]:
        """The gradients that are not our views. One that lies where sums do is copied: it may be another's."""
        grads: list[Tensor | None] = [None] * len(buffer.params)
        others = [(k, p) for k, p in enumerate(buffer.params) if p.grad is not None and not self._is_ours(p)]
        for _, p in others:
            self._places[p].give_away()
        for k, p in others:
            grad = folding.acceptable(window, buffer, p, folding.of_this_rank(window, p, p.grad))
            in_buffer = any(torch._C._is_alias_of(grad, b.flat) for b in window.buffers)
            grads[k] = grad.clone() if in_buffer else grad
        return grads

    def sum_of(self, p: Tensor) -> Tensor | None:
        """What `p.grad` holds, in FP32; None where it holds nothing."""
        self.put_back()
        if p.grad is None or self._is_ours(p):
            return p.grad
        return p.grad.detach().to(torch.complex64 if p.is_complex() else torch.float32)

    def drop(self, window: Window) -> None:
        """Give up every sum, as `zero_grad()` does."""
        for p in parameters(window.optimizer):
            p.grad = None
        self._away.clear()
        self._unused = False
        self.passes.forget()

    def close(self) -> None:
        """Have no part in backwards any more, and leave parameters as an optimizer without us takes them."""
        self.put_back()
        held = [p for p in self._places if self._is_ours(p)]
        if held and self._unused:
            warn(
                f"{NAME} was closed with gradients of {len(held)} parameters that no step() has used; they are "
                "dropped: call step() before close()"
            )
        self._hooks.remove()
        self.passes.forget()
        for p in held:
            p.grad = None
        for p, dtype in self._grad_dtypes.items():
            if p.is_leaf and p.grad is None and p.grad_dtype is None:
                p.grad_dtype = dtype or p.dtype
        self._places, self._grad_dtypes = {}, {}


def _check_compiler() -> None:
    """Refuse compiled autograd where sums are of another dtype than the parameter: it reads `p.grad` ahead of hooks."""
    compiler = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiler is not None and (compiler.compiled_autograd_enabled or compiler.in_compiled_autograd_region):
        raise TypeError(
            f"{NAME}: compiled autograd reads p.grad ahead of all hooks and takes none of another dtype than its "
            "parameter's, and with steps=None that of a 16-bit parameter is FP32; run this backward without it, or "
            "use steps=N"
        )
