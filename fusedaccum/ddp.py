"""DistributedDataParallel: which of its models hold a wrapper's parameters, whether it has reduced their gradients, and
a communication hook with which it reduces none.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from fusedaccum import ddp_rules
from fusedaccum.options import NAME, parameters

if TYPE_CHECKING:
    from fusedaccum.window import Window


@dataclass(eq=False)
class Watch:
    """What is known of the forwards of one model. users: the `Models` that ask."""

    forwards: int = 0  # that autograd has recorded
    synced: bool = True  # whether DDP reduces after the last of them
    users: weakref.WeakSet[Models] = field(default_factory=weakref.WeakSet)
    handle: RemovableHandle | None = None


_watches: weakref.WeakKeyDictionary[DistributedDataParallel, Watch] = weakref.WeakKeyDictionary()


def _after_forward(model: DistributedDataParallel, args: Any, output: Any) -> None:
    """A forward hook. At the top of the module, so that a model can be pickled with it."""
    watch = _watches.get(model)
    if watch is None:  # a copy of a model that was watched
        return
    if not watch.users:
        watch.handle.remove()
        del _watches[model]
    elif torch.is_grad_enabled():
        watch.forwards += 1
        watch.synced = _syncs(model)


def _syncs(model: DistributedDataParallel) -> bool:
    """Whether DDP will reduce, or has reduced, what comes of the last forward: nothing where there was none.

    `require_forward_param_sync` is what that forward has found, whoever has entered or left no_sync() since. It says no
    after a forward without gradients too, which is why forwards are watched.
    """
    if model._use_python_reducer:
        return model.require_backward_grad_sync
    return model._lazy_init_ran and model.require_forward_param_sync


@dataclass(eq=False)
class Held:
    """A model, and those of a wrapper's parameters that it reduces."""

    known: weakref.ref[DistributedDataParallel]
    params: list[Tensor]
    watch: Watch
    seen: int = 0  # forwards, at the last look
    checked: bool = False  # by `ddp_rules`, for what never changes
    copied: list[Tensor] = field(default_factory=list)  # whose `p.grad` is what DDP copies there, after a backward
    copied_after: int = 0  # forwards

    @property
    def model(self) -> DistributedDataParallel:
        return self.known()

    @property
    def hooked(self) -> bool:
        """Whether `ddp_hook` is its communication hook. DDP takes one, and lists those too that it refuses after it."""
        hooks = self.model._comm_hooks
        return bool(hooks) and hooks[0][0] is ddp_hook

    def has_gradients(self, first: Tensor | None) -> bool:
        """Whether there are any of its parameters, one of which `first` is that gets one now."""
        return any(p is first or p.grad is not None for p in self.params)


class Models:
    """The models that hold parameters of one wrapper.

    Nothing but the garbage collector knows of all models. They are looked for when the wrapper is built, and again
    after its parameters were; from then on a hook tells of their forwards.
    """

    def __init__(self) -> None:
        self._found: list[Held] | None = None
        self._warned = self._live_checked = self._looked_twice = False

    def look_again(self, window: Window) -> None:
        """The parameters may be others, and a model may be newer than the last look."""
        params = {id(p) for p in parameters(window.optimizer) if p.requires_grad}
        if not params <= {id(p) for held in self.of(window) for p in held.params}:
            self.forget()

    def forget(self) -> None:
        """Look for models again at the next question, which takes a tenth of a second in a large program."""
        self._found, self._live_checked = None, False

    def close(self) -> None:
        """Have no part in forwards any more."""
        for held in self._found or ():
            held.watch.users.discard(self)
            if not held.watch.users and held.watch.handle is not None:
                held.watch.handle.remove()
                if held.model is not None:
                    _watches.pop(held.model, None)
        self._found = []

    def of(self, window: Window) -> Sequence[Held]:
        """All of them."""
        if self._found is None:
            if not (dist.is_available() and dist.is_initialized()):
                return ()
            mine = {id(p): p for p in parameters(window.optimizer)}
            self._found = []
            kinds = _with_subclasses(DistributedDataParallel)
            for model in [m for m in gc.get_objects() if type(m) in kinds]:
                self._add(model, mine)
        return [held for held in self._found if held.model is not None]

    def _add(self, model: DistributedDataParallel, mine: dict[int, Tensor]) -> bool:
        """Whether the model holds parameters of ours."""
        params = [mine[id(p)] for p in ddp_rules.reduced_by(model) if id(p) in mine]
        if params:
            watch = _watch(model)
            watch.users.add(self)
            self._found.append(Held(weakref.ref(model), params, watch, watch.forwards))
        return bool(params)

    def hold(self, window: Window, model: DistributedDataParallel) -> bool:
        """Whether a model holds parameters of ours, also where it is newer than the last look."""
        if any(held.model is model for held in self.of(window)):
            return True
        return self._add(model, {id(p): p for p in parameters(window.optimizer)})

    def shared(self, window: Window) -> list[Held]:
        """Those on more than one rank."""
        return [held for held in self.of(window) if held.model.process_group.size() > 1]

    def check(self, window: Window, weighted: bool, first: Tensor | None = None) -> None:
        """Refuse gradients that nobody reduces, or that are folded before DDP reduces them. Raises RuntimeError.

        weighted: whether the micro-batch counts items. first: with fold="backward", whose gradient has come.
        """
        ran, others = self._taking_part(window, first)
        if others and not self._looked_twice:  # they may have been wrapped again
            self.forget()
            self._looked_twice = True
            ran, others = self._taking_part(window, first)
        for held in ran + others:
            reduces = held.watch.synced and not held.hooked
            if window.ranks is None:
                ddp_rules.check_alone(window, held, reduces)
                continue
            ddp_rules.check_with_group(window, held, reduces, weighted)
            if reduces and not self._warned:
                self._warned = True
                ddp_rules.warn_twice()

    def _taking_part(self, window: Window, first: Tensor | None) -> tuple[list[Held], list[Held]]:
        """The models that the gradients of this micro-batch come from: those that were called since the last look, and
        others.

        A model of the same parameters as another that was called is no other: it is left from before they were wrapped
        again.
        """
        shared = self.shared(window)
        ran = [held for held in shared if held.watch.forwards > held.seen]
        for held in ran:
            held.seen = held.watch.forwards
        called = ran or [held for held in shared if held.model._lazy_init_ran]
        taken = {id(p) for held in called for p in held.params}
        left = [held for held in shared if held not in called and any(id(p) in taken for p in held.params)]
        others = [held for held in shared if held not in ran and held not in left and held.has_gradients(first)]
        return [held for held in ran if first is not None or held.has_gradients(None)], others

    def check_counts(self, window: Window) -> None:
        """Refuse item counts that DDP's own mean over ranks does not know of. Raises ValueError."""
        if window.ranks is None and (shared := self.shared(window)):
            ddp_rules.refuse_counts(shared[0])

    def check_live(self, window: Window) -> None:
        """Refuse steps=None where DDP takes no FP32 gradients. Raises TypeError."""
        if not self._live_checked:
            for held in self.of(window):
                ddp_rules.check_live(held)
            self._live_checked = True

    def take(self, window: Window, bucket: dist.GradBucket) -> None:
        """`ddp_hook` was called: DDP is about to copy `bucket` into `p.grad`, zeros where there was no gradient."""
        held = self._holder(window, params := bucket.parameters())
        if held.copied_after != held.watch.forwards:
            held.copied, held.copied_after = [], held.watch.forwards
        left = None if window.in_backward is None else window.in_backward.left
        held.copied += [p for p in params if p.grad is None or p is left]
        # DDP queues what copies behind the last bucket's hook, whichever that is, and before callbacks are run.
        queue = torch.autograd.Variable._execution_engine.queue_callback
        queue(lambda: queue(lambda: _drop_copies(window, held)))

    def end_backward(self, window: Window) -> None:
        """With fold="backward": DDP on one rank has no hook of ours, and is about to copy its buckets all the same."""
        for held in self.of(window):
            if held.model.process_group.size() == 1 and not held.hooked:
                held.copied = [p for p in held.params if p.grad is None]
                torch.autograd.Variable._execution_engine.queue_callback(lambda held=held: _drop_copies(window, held))

    def _holder(self, window: Window, params: list[Tensor]) -> Held:
        for _ in range(2):
            for held in self.of(window):
                mine = set(map(id, held.params))
                if mine.issuperset(map(id, params)):
                    return held
            self.forget()  # the model is newer than the last look
        raise ddp_rules.not_ours(window, params)


def _with_subclasses(cls: type) -> set[type]:
    """For many objects: to ask each whether it is an instance takes five times as long."""
    return {cls}.union(*map(_with_subclasses, cls.__subclasses__()))


def _watch(model: DistributedDataParallel) -> Watch:
    if (watch := _watches.get(model)) is None:
        watch = _watches[model] = Watch(synced=_syncs(model))
        watch.handle = model.register_forward_hook(_after_forward)
    return watch


def _drop_copies(window: Window, held: Held) -> None:
    """What DDP has copied into `p.grad` is no gradient: it was folded, or there was none on this rank."""
    left = None if window.in_backward is None else window.in_backward.left
    for p in held.copied:
        if p is not left:
            p.grad = None


def ddp_hook(state, bucket):  # without annotations, which DDP would compare with its own
    """A communication hook that sends nothing: the wrapper reduces the window, once.

        opt = FusedAccumOptimizer(optimizer, steps=8, process_group=group)
        model = DistributedDataParallel(model)
        model.register_comm_hook(opt, fusedaccum.ddp_hook)

    state: the wrapper, which has a process_group and holds every parameter of the model. bucket: a
    torch.distributed.GradBucket, whose tensor is returned as it is, in a torch.futures.Future. With fold="step",
    `step()` reads the gradients of this rank from `p.grad`; with fold="backward" they are folded before DDP learns of
    them, and what it copies into `p.grad` is dropped.

    Raises, inside the backward, TypeError for a state that is no wrapper, RuntimeError for one without a process_group
    or after its `close()`, and for a model that holds parameters of others.
    """
    window = ddp_rules.window_of(state)
    ddp_rules.check_hook(window, bucket)
    window.ddp.take(window, bucket)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def no_sync(window: Window, model: Any) -> AbstractContextManager[None]:
    """See `FusedAccumOptimizer.no_sync`."""
    model = getattr(model, "_orig_mod", model)  # what torch.compile has returned
    ddp_rules.check_no_sync(window, model)
    if not window.ddp.hold(window, model):
        raise ValueError(
            f"{NAME}: no_sync() was given a model that holds none of this optimizer's parameters; give the "
            "DistributedDataParallel model that the optimizer's parameters are in"
        )
    return model.no_sync()
