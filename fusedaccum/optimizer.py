"""`FusedAccumOptimizer`: what torch, schedulers and frameworks ask of an optimizer, answered for an accumulated one."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from fusedaccum import amp, capture, checkpoint, folding, headers, hooks, micro, modes, sharded_dict
from fusedaccum.asked import Asked
from fusedaccum.length import Steps, check_steps
from fusedaccum.notices import warn_open_window
from fusedaccum.options import (
    NAME,
    check_optimizer,
    check_options,
    check_params,
    check_with_steps,
    one_count,
    parameters,
)
from fusedaccum.over_ranks import OverRanks
from fusedaccum.window import Window

# Which wrapper holds an optimizer: two windows over the same parameters would each see half of the gradients.
_wrapped: weakref.WeakKeyDictionary[Optimizer, weakref.ref[Window]] = weakref.WeakKeyDictionary()

# The default of `step`: torch.distributed.checkpoint says `step(closure=None)` to have state made, loops seldom do.
NO_CLOSURE: Any = type("NoClosure", (), {"__repr__": lambda self: "None"})()


def _inner(name: str) -> property:
    """An attribute that is the wrapped optimizer's own live object."""

    def get(self: FusedAccumOptimizer) -> Any:
        return getattr(self._window.optimizer, name)

    def set(self: FusedAccumOptimizer, value: Any) -> None:
        setattr(self._window.optimizer, name, value)

    return property(get, set, doc=f"The wrapped optimizer's `{name}`, live.")


class FusedAccumOptimizer(Asked, OverRanks, Optimizer):
    """Adds micro-batch gradients up in FP32 and updates once per window of `steps` micro-batches.

        opt = FusedAccumOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-4), steps=8)
        for batch in loader:
            model(batch).loss.backward()   # the loss is not divided by 8
            opt.step()                     # folds the gradients; every 8th call updates the parameters
            opt.zero_grad()

    optimizer: any torch.optim.Optimizer over float32, bfloat16, float16 or complex64 parameters, plain tensors or
        DTensors (of `fully_shard` or tensor parallelism, which reduce their gradients). LBFGS is refused.
    steps: micro-batches per window, an int of at least 1, or a function of the coming update's index (from 0) that
        returns one. It is called as a window begins; a window that was skipped counts no update. Set later, it holds
        from the next window. None where the caller decides, as frameworks do that accumulate by themselves: every
        backward adds to `p.grad`, an FP32 view of the sums, every `step()` updates with it, and it stays until it is
        zeroed or dropped, as without us.
    reduction: "mean" updates with the mean of the window's gradients, "sum" with their sum.
    max_norm: clip the window's gradient to this global L2 norm (`torch.nn.utils.clip_grad_norm_`), on the device.
    nonfinite: what infinities and NaNs in gradients lead to. "propagate": they reach the parameters, as elsewhere.
        "skip_window": the window they are in updates nothing. "skip_micro": their micro-batch is left out, and the
        window's mean is that of the others. "raise": FloatingPointError from that very step(), which waits for the
        device, with the window as it was.
    update: "fused" runs our kernel, for exactly AdamW, Adam and SGD over float32, bfloat16 and float16 parameters that
        share no storage; "wrapped" runs `optimizer.step()` on the mean gradient rounded once to each parameter's dtype;
        "auto" takes the first where it is possible.
    state_dtype: dtype of the moments in the fused update: float32, bfloat16 or float16; None as torch has it.
    master_weights: FP32 copies of bfloat16 and float16 parameters, which the fused update updates and rounds from. A
        parameter that was changed in between is taken up again; a change through `p.data`, which torch does not count,
        is not seen.
    rounding: "stochastic" has the fused update round bfloat16 parameters up or down at random and right in the mean, so
        that small updates are not lost and no masters are needed. Not with float16 parameters or `master_weights`.
    rounding_seed: of that, 0 to 2**63 - 1. The same seed gives the same bits on every backend and rank (shards of a
        DTensor have numbers of their own); torch's own generators play no part. `load_state_dict` goes on with the
        saved seed and number of updates; with this seed and from 0 where the dict has none.
    amp_scaling: take scale and overflow flag from a `torch.amp.GradScaler` and unscale in the fold, which nothing waits
        for and which float16 parameters need. A micro-batch that overflowed is left out of the window's mean, as under
        nonfinite="skip_micro", and counts as one of its `steps`; without this option it never reaches `step()`.
    backend: "auto", "compiled", "triton" or "reference".
    fold: "step": gradients are read in `step()`; "backward": each is folded and freed as it appears, so that no set of
        gradients is ever held beside the sums, and `p.grad` is None after a backward. A gradient that was folded cannot
        be taken back by `zero_grad()`; item counts are given by `micro_batch()`, ahead of the backward.
    bucket_mb: with that, fold at this many MiB of gradients, or one that is larger.
    process_group: the ranks (processes) over which every window is reduced, once, at its end: the update is then by the
        mean of all their micro-batches (of all their items). Every rank makes the same calls. `no_sync()` or `ddp_hook`
        keep DistributedDataParallel from reducing too.
    wire_dtype: float32 or bfloat16, in which sums are sent; bfloat16 rounds them twice, whatever the number of ranks.
    shard: "zero1" has each rank of `process_group` add up, and keep moments and masters for, its share of the elements
        alone: 1 / ranks of their memory. `state_dict()` is then of this rank's pieces, and loads into the same rank of
        as many; after `consolidate()`, a collective, it is whole. Needs the fused update.
    fold_every: only its default is supported.

    Memory: 4 bytes per parameter that can get a gradient, from the first fold on; masters and moments as asked for.
    `param_groups`, `state` and `defaults` are the wrapped optimizer's own objects. Hooks registered here fire once per
    update. `zero_grad()` never touches the open window. Raises TypeError or ValueError, before anything is changed, for
    arguments that are not allowed.
    """

    _step_supports_amp_scaling = amp.SUPPORT
    param_groups = _inner("param_groups")
    state = _inner("state")
    defaults = _inner("defaults")

    def __init__(
        self,
        optimizer: Optimizer,
        steps: Steps,
        *,
        reduction: str = "mean",
        max_norm: float | None = None,
        nonfinite: str = "propagate",
        update: str = "auto",
        state_dtype: torch.dtype | None = None,
        master_weights: bool = False,
        rounding: str = "nearest",
        rounding_seed: int = 0,
        amp_scaling: bool = False,
        fold: str = "step",
        bucket_mb: float = 25,
        process_group: dist.ProcessGroup | None = None,
        wire_dtype: torch.dtype = torch.float32,
        shard: str | None = None,
        backend: str = "auto",
        **options: Any,
    ) -> None:
        if isinstance(optimizer, FusedAccumOptimizer):
            raise TypeError(f"{NAME}: the optimizer is already a {NAME}; wrap the bare optimizer once")
        check_optimizer(optimizer)
        chosen = check_options(
            reduction=reduction,
            max_norm=max_norm,
            nonfinite=nonfinite,
            update=update,
            state_dtype=state_dtype,
            master_weights=master_weights,
            rounding=rounding,
            rounding_seed=rounding_seed,
            amp_scaling=amp_scaling,
            fold=fold,
            bucket_mb=bucket_mb,
            process_group=process_group,
            wire_dtype=wire_dtype,
            shard=shard,
            backend=backend,
            **options,
        )
        length = check_steps(steps)
        check_with_steps(chosen, length)
        holder = _wrapped.get(optimizer, lambda: None)()
        if holder is not None and not holder.closed:
            raise ValueError(
                f"{NAME}: this {type(optimizer).__name__} is wrapped already; use that wrapper, or close() it before "
                "wrapping the optimizer again"
            )
        window = Window(optimizer, length, chosen)
        window.warn_about_precision()
        self._attach(window)

    def _attach(self, window: Window) -> None:
        """Everything but the constructor's checks; `Optimizer.__init__` would make param_groups of its own."""
        for cls in (FusedAccumOptimizer, Asked, OverRanks):
            modes.keep_out_of_graphs(cls)
        self._window = window
        for name in hooks.NAMES:
            setattr(self, name, OrderedDict())
        self._zero_grad_profile_name = f"Optimizer.zero_grad#{type(self).__name__}.zero_grad"
        self._warned_capturable_if_run_uncaptured = True
        _wrapped[window.optimizer] = weakref.ref(window)

    # One micro-batch

    def step(
        self,
        closure: Callable[[], Any] | None = NO_CLOSURE,
        *,
        mean_of: float | Tensor | None = None,
        sum_of: float | Tensor | None = None,
    ) -> Any:
        """End a micro-batch: fold the gradients into the window, and update if it is the window's last.

        closure: re-evaluates the model under `torch.enable_grad()` before gradients are read; its value is returned.
        mean_of, sum_of: the loss of this micro-batch was a mean (a sum) over that many items; the window's gradient is
            then the mean over all its items. A number of at least 0, or a tensor of one element, which is not waited
            for. 0 folds nothing. All micro-batches of a window are given a count, or none.

        Every `p.grad` is None afterwards (steps=None: as it was). A call without any gradient counts as a micro-batch.

        Raises, with parameters, moments and window as they were: ValueError or TypeError for counts that are not
        allowed and for gradients of another dtype, shape or device than can be folded; RuntimeError
        after `close()`.
        """
        window = self._window
        with amp.verdict(self, window.options.amp_scaling) as verdict:
            window.check_usable()
            given = one_count(mean_of, sum_of)
            loss = None
            if closure is not NO_CLOSURE and closure is not None:
                with torch.enable_grad():
                    loss = closure()
            counts = micro.counts_of(window, *given)  # after the closure, which may have called micro_batch()
            with modes.no_grad():
                if closure is None and not capture.is_capturing() and folding.is_state_probe(window.optimizer):
                    if window.zero1 is None:  # else each rank has pieces, which torch's helpers cannot hold
                        window.optimizer.step()
                    return loss
                window.nesting.look(window)
                window.micro_batch(*counts, *verdict)
                if window.full:
                    self._close_window()
        return loss

    # `Optimizer._patch_step_function` would fire the step hooks at every call; `_close_window` fires them per update.
    step.hooked = True  # type: ignore[attr-defined]

    def micro_batch(self, *, mean_of: Any = None, sum_of: Any = None, last: bool = False) -> None:
        """Say ahead of the backward what `step(mean_of=..., sum_of=...)` says after it, for loops with a bare `step()`.

        last: it is the window's last one, so that with `process_group` and fold="backward" its backward sends sums to
            the other ranks as they are complete; every rank says so, or none, and calls `step()` or `flush()` next.

        Raises ValueError or TypeError as `step` does, RuntimeError after `close()`.
        """
        self._window.check_usable()
        self._window.check_owns_boundary("micro_batch()", "steps=N weighs micro-batches, here the caller's losses do")
        micro.announce(self._window, *one_count(mean_of, sum_of), last)

    # The boundary

    def flush(self) -> bool:
        """Close a short window now: update with the mean (reduction="sum": the sum) of the micro-batches it holds.

        Returns whether the parameters were updated; False, and nothing done, where the window is empty. With
        `process_group` every rank has to call it, one whose window is empty too, and the mean is over all their
        micro-batches. Raises RuntimeError after `close()` and inside a step pre-hook.
        """
        self._window.check_usable()
        self._window.check_owns_boundary("flush()", "step() updates with what there is")
        self._window.graphs.check_flush(self._window)
        if self._window.nothing_to_flush():
            return False
        with modes.no_grad():
            if self._window.begun:  # a backward without a step() behind it
                self._window.micro_batch(None, None)
            self._close_window(headers.FLUSH)
        # Folds that were replayed in a CUDA graph are counted on the device, and nothing waits for it here.
        return True if self._window.graphs.captured else self.updated

    def _close_window(self, doing: int = headers.FULL) -> None:
        window = self._window
        try:
            window.boundary.close(window, lambda: hooks.before_update(self), lambda: hooks.after_update(self), doing)
        finally:
            if window.live is not None:
                window.pending = 0

    def reset(self) -> None:
        """Drop what the open window holds. `p.grad` is left alone; with steps=None it is what the window holds."""
        if self._window.reduced is not None or self._window.overlap is not None:
            self._window.ranks.given_up += 1  # other ranks may have updated with it
        with modes.no_grad():
            self._window.reset()
            if self._window.live is not None:
                self._window.live.drop(self._window)

    def close(self) -> None:
        """Stop accumulating: an open window is dropped with a warning; the optimizer can then be wrapped again.

        `step`, `flush`, `micro_batch` and `load_state_dict` raise RuntimeError from then on.
        """
        window = self._window
        if not window.closed:
            with modes.no_grad():
                held = None if window.zero1 is None else window.zero1.whole_to_leave(window)
            if window.is_open:
                warn_open_window(window, "was closed")
            with modes.no_grad():
                window.reset()
                window.release()
                if held is not None:
                    window.zero1.give_back(window, held)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear every `p.grad`. The open window keeps what it holds; `reset()` drops it.

        With fold="backward" it holds all of a backward that has ended. One that no `step()` has counted is warned of:
        without us this call would have dropped it.
        """
        inner, live = self._window.optimizer, self._window.live
        self._window.warn_of_folded()
        if live is not None:
            live.put_back()  # a failed backward may not be over in the thread of a device, and would do it later
        # After step() there is nothing to clear, and torch's own loop costs three times this look.
        if any([p.grad is not None for p in parameters(inner)]):
            inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer, inside a window too.

        Raises TypeError for parameters that cannot be summed in float32, ValueError for such as the update that was
        asked for cannot take; the optimizer is as it was then.
        """
        if isinstance(param_group, dict) and "params" in param_group:  # else torch says what is wrong
            params = param_group["params"]
            if not isinstance(params, Tensor | list | tuple | set | str):
                params = param_group["params"] = list(params)
            listed = [params] if isinstance(params, Tensor) else [p[1] if isinstance(p, tuple) else p for p in params]
            tensors = [p for p in listed if isinstance(p, Tensor)]
            check_params(tensors)
            self._window.choose_update([p for p in tensors if p.requires_grad or p.grad is not None])
        self._window.optimizer.add_param_group(param_group)
        self._window.hook_parameters()

    def __repr__(self) -> str:
        window = self._window
        using = (
            ", ".join(sorted({b.backend.__name__.rsplit(".", 1)[-1] for b in window.buffers})) or "chosen at first step"
        )
        head = f"{type(self).__name__} (steps={window.coming.value}, update={window.update.name}, backend={using})"
        return f"{head}\n{window.optimizer!r}"

    # Saving and loading

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state dict, and the open window under the key "fusedaccum".

        Plain containers and tensors, which `torch.load(weights_only=True)` reads. Tensors are live, as in torch.
        Without that key it loads into a bare optimizer.
        """
        self._window.check_may_be_saved()
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        with modes.no_grad():
            state = {**self._window.optimizer.state_dict(), checkpoint.KEY: checkpoint.save(self._window)}
            checkpoint.bring_steps_home(state)
            if self._window.zero1 is not None:
                sharded_dict.close(self._window, state)
        self._window.saved = True
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            if (result := post_hook(self, state)) is not None:
                state = result
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, here or on a bare optimizer (which closes an open window). Copies tensors.

        Raises ValueError where it does not fit, with the optimizer and the window as they were.
        """
        self._window.check_open()
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            if (result := hook(self, state_dict)) is not None:
                state_dict = result
        with modes.no_grad():
            opened = sharded_dict.Opened(self._window, state_dict)
            if opened.saved is not None:
                checkpoint.check(self._window, opened.saved)
            opened.cut()
            if any(buffer.handed_out for buffer in self._window.buffers):
                # Closing the window zeroes what was handed out, and these may be views of it.
                opened.saved = deepcopy(opened.saved)
            self._window.optimizer.load_state_dict(opened.state_dict)
            checkpoint.load(self._window, opened.saved, opened.state_dict)
            opened.take()
            if self._window.ranks is not None:
                self._window.ranks.loads += 1
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        self._window.check_readable()
        with modes.no_grad():
            return checkpoint.pack(self._window)

    def __copy__(self) -> FusedAccumOptimizer:
        """A shallow copy shares the wrapped optimizer and the window, as its attributes are shared."""
        new = type(self).__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "optimizer" not in state:  # a bare optimizer's state, as Optimizer.load_state_dict hands it on
            self._window.optimizer.__setstate__(state)
            return
        with modes.no_grad():
            self._attach(checkpoint.unpack(state))
