"""An open window as plain containers and tensors: what `state_dict()` adds to the wrapped optimizer's own.

`torch.distributed.checkpoint` loads a dict into the tensors that are there already and leaves out entries that the
loading side does not have: a new wrapper would lose its sums and masters without a word. It takes a tuple as one value,
whatever is in it, so that everything of varying shape or presence stands in tuples here.
"""

from __future__ import annotations

import hashlib
import reprlib
from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fusedaccum import checkpoint_shards, folding, loaded_state
from fusedaccum.checkpoint_fields import ABSENT, FIELDS, is_any_of
from fusedaccum.flat_buffer import in_memory_order
from fusedaccum.local import is_distributed, local
from fusedaccum.micro import Micro
from fusedaccum.notices import warn
from fusedaccum.options import NAME, PLAIN, WEIGHTED, is_lazy, parameters
from fusedaccum.rounding import Rounding
from fusedaccum.update import FusedUpdate
from fusedaccum.window import Window

KEY = "fusedaccum"
VERSION = 1
DROP = f"drop the key {KEY!r} to load the wrapped optimizer's state without the open window"
WAY_OUT = f"load an undamaged file, or {DROP}"


def by_index(window: Window) -> dict[int, Tensor]:
    """Parameters by the index that `torch.optim.Optimizer.state_dict` gives them: in order, each counted once."""
    return dict(enumerate(dict.fromkeys(parameters(window.optimizer))))


def _shapes(positions: dict[int, Tensor]) -> tuple[tuple[int, ...] | None, ...]:
    """Of the parameters; None where a lazy module has not given one yet."""
    return tuple(None if is_lazy(p) else tuple(p.shape) for p in positions.values())


def save(window: Window) -> dict[str, Any]:
    """The window under `KEY`. Tensors are live, as in torch: sums are views of the flat buffer, in parameters' shapes.

    sums, masters: one entry a parameter, None where there is none: float32, or complex64 sums of complex64 parameters.
    sharded: what `checkpoint_shards.save` returns, sharded_sums: the parameters whose sums in there count.
    items: a tuple of one. rounding: what `Rounding.save` returns; () where it is to nearest. shapes: of the parameters.
    rank: (rank, ranks) where the window is what that rank alone has summed up, else ().
    unstarted: indices of parameters whose momentum buffer no update has started. state_layout: a digest of which
    parameters have which state; state_witness: {that digest: True}, empty where there is no state, which
    `torch.distributed.checkpoint` drops whenever it drops the state.
    """
    folding.follow(window, thorough=True)
    positions = by_index(window)
    _conform_moments(window)
    pending, kept, rounding = window.micro_batches, window.nonfinite.kept, _rounding(window)
    is_open = window.is_open
    plain = {i: None if is_distributed(p) else p for i, p in positions.items()}
    sums = [_saved_sum(window, p) if is_open and p is not None else None for p in plain.values()]
    masters = [None if p is None else _saved_master(window, p) for p in plain.values()]
    unstarted = _unstarted(window, positions)
    state = {i: window.optimizer.state.get(p, ()) for i, p in positions.items()}
    # A function is not asked how long a window would be that nobody may begin.
    length = window.length_now() if is_open or window.coming.is_fixed else 1
    return {
        "version": VERSION,
        "steps": length,
        "pending": pending,
        "length": max(length, pending),  # a loaded window may be longer than this wrapper's steps
        "reduction": window.options.reduction,
        "begun": () if window.begun is None else window.begun.as_saved(),
        "mode": window.mode if pending else None,
        "items": (window.items if pending else 0.0,),
        "kept": float(kept) if pending and kept is not None else None,
        "updates": window.updates,
        "skipped_windows": window.counts.skipped_windows,
        "skipped_micro_batches": window.skipped_micro_batches,
        "dropped": bool(pending) and window.left_any_out(),
        "rounding": rounding.save() if rounding is not None else (),
        "sums": tuple(sums),
        "masters": tuple(masters),
        "sharded": checkpoint_shards.save(window, positions),
        "sharded_sums": tuple(i for i, p in positions.items() if is_open and checkpoint_shards.holds_sum(window, p)),
        "shapes": _shapes(positions),
        "unstarted": unstarted,
        "rank": _rank(window) if window.is_of_one_rank else (),
        **witnessed(state, unstarted),
    }


def _rank(window: Window) -> tuple[int, ...]:
    return () if window.ranks is None else (window.ranks.rank, window.ranks.size)


def _rounding(window: Window) -> Rounding | None:
    return window.update.rounding if isinstance(window.update, FusedUpdate) else None


def _saved_sum(window: Window, p: Tensor) -> Tensor | None:
    buffer, k = window.place.get(p, (None, 0))
    if buffer is None or not buffer.holds_sum(k):
        return None
    view = window.boundary.undivided(window, buffer.view(k))
    if window.reduced is not None:
        view = view * window.reduced.share(window)
    # The end of the window zeroes such a buffer, also the one that loading begins with; and torch.save takes no complex
    # tensor beside float ones over one storage.
    return view.clone() if buffer.keeps_zero or view.is_complex() else view


def _saved_master(window: Window, p: Tensor) -> Tensor | None:
    if not isinstance(window.update, FusedUpdate) or window.zero1 is not None:
        return None
    buffer, k = window.place.get(p, (None, 0))
    return window.update.parked_master(p) if buffer is None else window.update.master(buffer, k)


def _conform_moments(window: Window) -> None:
    """Bring moments that torch made to `state_dtype`, as the next update would: loads in place keep their bits."""
    update = window.update
    if not isinstance(update, FusedUpdate) or update.state_dtype is None:
        return
    for entries in update.optimizer.state.values():
        for slot in update.rule.slots if isinstance(entries, dict) else ():
            if isinstance(value := entries.get(slot), Tensor) and value.dtype != update.state_dtype:
                entries[slot] = value.to(update.state_dtype)


def _unstarted(window: Window, positions: dict[int, Tensor]) -> tuple[int, ...]:
    if not isinstance(window.update, FusedUpdate):
        return ()
    found = {id(p) for buffer in window.owned(window.buffers) for p in window.update.side(buffer).state.unstarted()}
    return tuple(i for i, p in positions.items() if id(p) in found)


def witnessed(state: Mapping[int, Iterable[Any]], unstarted: Container[int] = ()) -> dict[str, Any]:
    """The two fields that say which parameters have which entries in the state."""
    layout = []
    for i, entries in sorted(state.items()):
        keys = {str(key) for key in entries} - ({"momentum_buffer"} if i in unstarted else set())
        if keys:
            layout.append((i, sorted(keys)))
    digest = hashlib.sha256(repr(layout).encode()).hexdigest()[:16] if layout else ""
    return {"state_layout": digest, "state_witness": {digest: True} if layout else {}}


def bring_steps_home(state_dict: dict[str, Any]) -> None:
    """Put the state as torch has it, for who reads it without us.

    Step counts: on the CPU, unless a group is capturable or fused; ours are on the device. Waits for the device, once
    for each count that has to be moved. Momentum buffers that no update has started: absent, as before torch's first
    step, which takes a buffer that is there for a started one.
    """
    for i in state_dict.get(KEY, {}).get("unstarted", ()):
        entries = state_dict["state"].get(i, {})
        state_dict["state"][i] = {key: value for key, value in entries.items() if key != "momentum_buffer"}
    for group in state_dict["param_groups"]:
        if group.get("capturable") or group.get("fused"):
            continue
        for i in group["params"]:
            entries = state_dict["state"].get(i, {})
            step = entries.get("step")
            if isinstance(step, Tensor) and step.device.type != "cpu":
                state_dict["state"][i] = {**entries, "step": step.cpu()}


def check(window: Window, saved: Any) -> None:
    """Refuse a saved window that does not fit, before anything is loaded. Raises ValueError."""
    if not isinstance(saved, dict) or not is_any_of(saved.get("version"), (VERSION,)):
        seen = saved.get("version") if isinstance(saved, dict) else type(saved).__name__
        raise ValueError(
            f"{NAME}: state_dict[{KEY!r}] has version {seen!r} and this release reads {VERSION}; {WAY_OUT}"
        )
    for name, (rule, holds) in FIELDS.items():
        if name not in saved and name not in ABSENT:
            raise ValueError(f"{NAME}: state_dict[{KEY!r}] lacks {name!r}, which must be {rule}; {WAY_OUT}")
        if not holds(value := saved.get(name, ABSENT.get(name))):
            seen = f"{reprlib.repr(value)}, a {type(value).__name__},"
            raise ValueError(f"{NAME}: state_dict[{KEY!r}][{name!r}] is {seen} and must be {rule}; {WAY_OUT}")
    _check_counts(window, saved)
    if window.live is not None and (saved["pending"] or saved.get("begun")):
        raise ValueError(
            f"{NAME}: the saved window holds {saved['pending']} of {saved['length']} micro-batches and with steps=None "
            f"a window is what p.grad holds, which is not saved; load it with steps={saved['length']}, or {DROP}"
        )
    _check_rank(window, saved)
    positions = by_index(window)
    _check_shapes(saved, positions)
    _check_tensors(saved, positions)
    checkpoint_shards.check(checkpoint_shards.complete(saved), positions)
    window.choose_update(
        [p for i, p in positions.items() if i in checkpoint_shards.sums(saved)]
    )  # raises where none can be
    if saved["state_witness"] != ({saved["state_layout"]: True} if saved["state_layout"] else {}):
        raise ValueError(
            f"{NAME}: the saved optimizer has state for its parameters (moments, step counts) that did not come with "
            "this dict, because torch.distributed.checkpoint loads into state that is there already; create it with "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer), then load again"
        )
    _warn_of_other_steps(window, saved)
    if checkpoint_shards.sums(saved) or any(t is not None for t in saved["masters"]):
        window.locate()  # here, because parameters that cannot be summed make it raise
        folding.follow(window, thorough=True)


def _check_counts(window: Window, saved: dict[str, Any]) -> None:
    """Refuse counts that no window can have, or none of this wrapper."""
    length, pending, mode, (items,) = saved["length"], saved["pending"], saved["mode"], saved["items"]
    counts_items = isinstance(items, Tensor) or items != 0
    holds_sums = bool(checkpoint_shards.sums(saved))
    begun = saved.get("begun", ABSENT["begun"])
    kinds = {mode, (WEIGHTED if begun[-1] else PLAIN) if begun else None} - {None}
    if (
        pending > length
        or (pending > 0) != (mode is not None)
        or (counts_items and mode != WEIGHTED)
        or (holds_sums and not pending and not begun)
        or len(kinds) > 1
        or (saved["kept"] or 0.0) > pending
    ):
        raise ValueError(
            f"{NAME}: the saved window counts {pending} of {length} micro-batches, mode {mode!r}, items {items!r} and "
            f"{'some sums' if holds_sums else 'no sum'}, with {begun!r} begun, which no window can; {WAY_OUT}"
        )
    if WEIGHTED in kinds and window.options.reduction == "sum":
        raise ValueError(
            f"{NAME}: the saved window counts items and this wrapper has reduction='sum', which has no use for "
            "them; load it with reduction='mean'"
        )


def _check_rank(window: Window, saved: dict[str, Any]) -> None:
    """Refuse what another rank has summed up, which `torch.distributed.checkpoint` too would give to all of them."""
    was, here = saved.get("rank", ABSENT["rank"]), _rank(window)
    if was and here and was != here:
        raise ValueError(
            f"{NAME}: the saved window holds what rank {was[0]} of {was[1]} alone had summed up, and this is rank "
            f"{here[0]} of {here[1]}, for whose sums it would stand; load each rank's own dict, or save after "
            f"consolidate() on every rank, or {DROP}"
        )


def _check_shapes(saved: dict[str, Any], positions: dict[int, Tensor]) -> None:
    """Refuse a window over other parameters, or over the same ones in another order where their shapes tell."""
    same = f"load it into an optimizer over the same parameters in the same order, or drop the key {KEY!r}"
    here = _shapes(positions)
    if len(saved["shapes"]) != len(here):
        raise ValueError(
            f"{NAME}: the saved window has {len(saved['shapes'])} parameters and this optimizer {len(here)}; {same}"
        )
    for i, (was, now) in enumerate(zip(saved["shapes"], here, strict=True)):
        if was != now and None not in (was, now):
            raise ValueError(
                f"{NAME}: the saved window holds shape {was} for parameter {i} and this optimizer has {now}; {same}"
            )


def _check_tensors(saved: dict[str, Any], positions: dict[int, Tensor]) -> None:
    if any(i not in positions for i in saved["unstarted"]):
        raise ValueError(
            f"{NAME}: state_dict[{KEY!r}]['unstarted'] is {reprlib.repr(saved['unstarted'])} and this optimizer has "
            f"{len(positions)} parameters; {WAY_OUT}"
        )
    for name in ("sums", "masters"):
        if len(saved[name]) != len(positions):
            raise ValueError(
                f"{NAME}: state_dict[{KEY!r}][{name!r}] has {len(saved[name])} entries and must have one for each of "
                f"{len(positions)} parameters; {WAY_OUT}"
            )
        for i, p in positions.items():
            value = saved[name][i]
            dtype = torch.complex64 if name == "sums" and p.is_complex() else torch.float32
            shape = None if is_lazy(p) else tuple(p.shape)
            if value is not None and (tuple(value.shape) != shape or value.dtype != dtype):
                raise ValueError(
                    f"{NAME}: the saved window holds a {value.dtype} tensor of shape {tuple(value.shape)} in {name} "
                    f"for parameter {i}, which must be {dtype} of shape {shape} (None: see its forward); "
                    f"{WAY_OUT}"
                )


def _warn_of_other_steps(window: Window, saved: dict[str, Any]) -> None:
    """Before anything is loaded: where warnings are errors, nothing is loaded then."""
    if not saved["pending"] and not saved.get("begun", ABSENT["begun"]):
        return
    steps = window.coming.of_update(lambda: saved["updates"])
    if saved["steps"] != steps:
        warn(
            f"{NAME}: the loaded window was begun with steps={saved['steps']} and this wrapper has "
            f"steps={steps}; its {saved['pending']} micro-batches are kept and the window closes at "
            f"{max(steps, saved['pending'] + 1)}"
        )


def load(window: Window, saved: dict[str, Any] | None, state_dict: dict[str, Any]) -> None:
    """Make a saved window the open one, after the wrapped optimizer has loaded its part. Copies, as torch does.

    saved: what `save` returned, checked; None closes an open window, as a bare optimizer's dict does.
    state_dict: the loaded dict, whose FP32 moments torch has cast to the parameter's dtype.
    """
    window.graphs.forget()
    window.reset()
    if window.ranks is not None:
        window.ranks.given_up = 0  # parameters are brought together again where a state is loaded
    positions = by_index(window)
    state = loaded_state.by_position(window.optimizer, state_dict, positions)
    loaded_state.make_own(window.optimizer, state, positions)
    if isinstance(window.update, FusedUpdate):
        window.update.forget_masters()
        if window.update.rounding is not None:
            window.update.rounding.load((saved or ABSENT).get("rounding", ()))
        if window.update.state_dtype is not None:
            loaded_state.restore_moments(window.update, state, positions)
    if saved is None:
        return
    for i in saved["unstarted"]:
        window.optimizer.state[positions[i]].pop("momentum_buffer", None)
    _take_tensors(window, saved, positions)
    _take_counts(window, saved)


def _take_tensors(window: Window, saved: dict[str, Any], positions: dict[int, Tensor]) -> None:
    sums, masters = (
        checkpoint_shards.sums(saved),
        {i: value for i, value in enumerate(saved["masters"]) if value is not None},
    )
    masters.update(checkpoint_shards.complete(saved)["sharded"]["masters"])
    if sums or masters:
        window.locate()
    for i, value in sums.items():
        buffer, k = window.place_for(positions[i])
        buffer.put(k, local(value.detach()))
    if isinstance(window.update, FusedUpdate) and window.update.master_weights:
        for i, master in masters.items():
            buffer, k = window.place_for(positions[i])
            values = local(master.detach()).to(device=buffer.device, copy=True)
            window.update.put_master(buffer, k, in_memory_order(values, buffer.strides[k]))


def _take_counts(window: Window, saved: dict[str, Any]) -> None:
    window.set_counts(saved["updates"], saved["skipped_windows"], saved["skipped_micro_batches"])
    (items,) = saved["items"]
    window.items = items.clone() if isinstance(items, Tensor) else items
    window.mode = saved["mode"]
    begun = saved.get("begun", ABSENT["begun"])
    if saved["pending"] or begun:
        window.length = window.coming.of_update(lambda: saved["updates"])
    window.pending = saved["pending"]
    window.nonfinite.resume(saved["kept"], window.pending)
    window.dropped = saved.get("dropped", ABSENT["dropped"])
    window.saved = True
    plain = window.mode == PLAIN
    if begun:
        window.begun = Micro.again(window, *begun)
        plain = not window.begun.weighted
    if plain:
        scale_was = saved["steps"] if saved["reduction"] == "mean" else 1
        scale_is = window.length if window.options.reduction == "mean" else 1
        if scale_was != scale_is:
            window.rescale(scale_was / scale_is)


def pack(window: Window) -> dict[str, Any]:
    """A wrapper as `pickle` and `deepcopy` take it: the wrapped optimizer, the options, the window, its last news."""
    return {
        "optimizer": window.optimizer,
        "steps": window.coming.value,
        "options": window.options,
        "window": save(window),
        "announced": window.announced,
        "grad_norm": window.grad_norm,
        "updated": window.counts.updated,
        "loads": window.counts.loads,
        "base": window.counts.base,
        "closed": window.closed,
        "pieces": () if window.zero1 is None else window.zero1.pieces(window),
    }


def unpack(state: dict[str, Any]) -> Window:
    """The window that `pack` described. Its tensors were copied with it, so that no moment has to be restored."""
    steps = None if state["steps"] is None else state["window"]["steps"]
    window = Window(state["optimizer"], steps, state["options"])
    load(window, state["window"], {})
    if window.zero1 is not None:
        window.zero1.take_pieces(window, *state["pieces"])
    window.resume(state["steps"], state["announced"], state["grad_norm"], state["updated"])
    # A GatedScheduler that is copied along knows by them which updates it has not followed.
    window.counts.loads, window.counts.base = state["loads"], state["base"]
    if state["closed"]:
        window.release()
    return window
