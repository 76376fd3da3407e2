"""An open window as plain containers and tensors: what `state_dict()` adds to the wrapped optimizer's own."""

from __future__ import annotations

import numbers
import warnings
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fusedaccum.flat_buffer import in_memory_order
from fusedaccum.options import NAME, parameters
from fusedaccum.update import FusedUpdate
from fusedaccum.window import PLAIN, WEIGHTED, Window

KEY = "fusedaccum"
VERSION = 1
MODES = (None, PLAIN, WEIGHTED)
REDUCTIONS = ("mean", "sum")


def _positions(window: Window) -> dict[int, Tensor]:
    """Parameters by the index that `torch.optim.Optimizer.state_dict` gives them: in order, each counted once."""
    return dict(enumerate(dict.fromkeys(parameters(window.optimizer))))


def save(window: Window) -> dict[str, Any]:
    """The window under `KEY`. Tensors are live, as in torch: sums are views of the flat buffer, in parameters' shapes.

    sums: {parameter index: float32 or complex64 sum}, touched parameters only. masters: {parameter index: float32}.
    """
    sums, masters = {}, {}
    pending = window.micro_batches
    for i, p in _positions(window).items():
        buffer, k = window.place.get(p, (None, 0))
        if buffer is None:
            continue
        if pending and buffer.holds_sum(k):
            view = window.undivided(buffer.view(k))
            # The end of the window zeroes such a buffer, also the one that loading begins with.
            sums[i] = view.clone() if buffer.keeps_zero else view
        if isinstance(window.update, FusedUpdate) and (master := window.update.master(buffer, k)) is not None:
            masters[i] = master.as_strided(buffer.shapes[k], buffer.strides[k])
    return {
        "version": VERSION,
        "steps": window.length if pending else window.steps,
        "pending": pending,
        "reduction": window.options.reduction,
        "mode": window.mode if pending else None,
        "items": window.items,
        "kept": None if window.nonfinite.kept is None else float(window.nonfinite.kept),
        "updates": window.updates,
        "skipped_windows": window.counts.skipped_windows,
        "skipped_micro_batches": window.skipped_micro_batches,
        "sums": sums,
        "masters": masters,
    }


def bring_steps_home(state_dict: dict[str, Any]) -> None:
    """Put step counts where torch has them: on the CPU, unless a group is capturable or fused. Ours are on the device.

    Waits for the device, once for each count that has to be moved.
    """
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
    if not isinstance(saved, dict) or saved.get("version") != VERSION:
        seen = saved.get("version") if isinstance(saved, dict) else type(saved).__name__
        raise ValueError(
            f"{NAME}: state_dict[{KEY!r}] has version {seen!r} and this release reads {VERSION}; drop the key to "
            "load the wrapped optimizer's state without the open window"
        )
    positions = _positions(window)
    try:
        _check_counts(saved)
        if saved["mode"] == WEIGHTED and window.options.reduction == "sum":
            raise ValueError(
                f"{NAME}: the saved window counts items and this wrapper has reduction='sum', which has no use for "
                "them; load it with reduction='mean'"
            )
        for i, value in chain(saved["sums"].items(), saved["masters"].items()):
            if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_meta:
                raise ValueError(
                    f"{NAME}: the saved window holds no dense tensor for parameter {i} but a {type(value).__name__}; "
                    "the file is damaged"
                )
            if i not in positions or value.shape != positions[i].shape:
                has = f"shape {tuple(positions[i].shape)}" if i in positions else "no such parameter"
                raise ValueError(
                    f"{NAME}: the saved window holds shape {tuple(value.shape)} for parameter {i} and this optimizer "
                    f"has {has}; load it into an optimizer over the same parameters in the same order"
                )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{NAME}: state_dict[{KEY!r}] lacks or garbles {error}; the file is damaged") from error


def _check_counts(saved: dict[str, Any]) -> None:
    """Refuse counts that no window can have."""
    numbers_ok = all(
        isinstance(saved[name], numbers.Integral) and saved[name] >= 0
        for name in ("steps", "pending", "updates", "skipped_windows", "skipped_micro_batches")
    )
    if not numbers_ok or saved["steps"] < 1 or saved["mode"] not in MODES or saved["reduction"] not in REDUCTIONS:
        raise ValueError(f"{NAME}: state_dict[{KEY!r}] holds counts that cannot be; the file is damaged")
    items, pending = saved["items"], saved["pending"]
    if isinstance(items, Tensor):
        good = items.numel() == 1 and items.is_floating_point()
    else:
        good = isinstance(items, float) and 0 <= items < float("inf")
    if (
        not good
        or isinstance(pending, bool)
        or pending > saved["steps"]
        or (pending > 0) != (saved["mode"] is not None)
    ):
        raise ValueError(
            f"{NAME}: the saved window counts {pending!r} of {saved['steps']!r} micro-batches, mode {saved['mode']!r}, "
            f"items {items!r}, which no window can; the file is damaged"
        )


def load(window: Window, saved: dict[str, Any] | None, state: dict[Any, Any]) -> None:
    """Make a saved window the open one, after the wrapped optimizer has loaded its part. Copies, as torch does.

    saved: what `save` returned, checked; None closes an open window, as a bare optimizer's dict does.
    state: the "state" of the loaded dict, whose FP32 moments torch has cast to the parameter's dtype.
    """
    window.graphs.forget()
    window.reset()
    positions = _positions(window)
    _own_state(window, state, positions)
    if isinstance(window.update, FusedUpdate):
        window.update.forget_masters()
        if window.update.state_dtype is not None:
            _restore_moments(window.update, state, positions)
    if saved is None:
        return
    if saved["sums"] or saved["masters"]:
        window.locate()
    for i, value in saved["sums"].items():
        buffer, k = window.place_for(positions[i])
        buffer.put(k, value)
    if isinstance(window.update, FusedUpdate) and window.update.master_weights:
        for i, master in saved["masters"].items():
            buffer, k = window.place_for(positions[i])
            values = master.detach().to(device=buffer.device, dtype=torch.float32, copy=True)
            window.update.put_master(buffer, k, in_memory_order(values, buffer.strides[k]))
    _take_counts(window, saved)


def _take_counts(window: Window, saved: dict[str, Any]) -> None:
    window.set_counts(saved["updates"], saved["skipped_windows"], saved["skipped_micro_batches"])
    items = saved["items"]
    window.items = items.clone() if isinstance(items, Tensor) else float(items)
    window.mode = saved["mode"]
    window.pending = saved["pending"]
    window.nonfinite.resume(saved.get("kept"), window.pending)
    window.saved = True
    if not window.pending:
        return
    if saved["steps"] != window.steps:
        warnings.warn(
            f"{NAME}: the loaded window was begun with steps={saved['steps']} and this wrapper has "
            f"steps={window.steps}; its {window.pending} micro-batches are kept and the window closes at "
            f"{max(window.steps, window.pending + 1)}",
            UserWarning,
            stacklevel=5,
        )
    if window.mode == PLAIN:
        scale_was = saved["steps"] if saved["reduction"] == "mean" else 1
        scale_is = window.steps if window.options.reduction == "mean" else 1
        if scale_was != scale_is:
            window.rescale(scale_was / scale_is)


def _own_state(window: Window, state: dict[Any, Any], positions: dict[int, Tensor]) -> None:
    """Copy what torch's loader has taken over from the dict as it was: two optimizers must not share their moments."""
    for i, entries in state.items():
        if i not in positions or not isinstance(entries, dict):
            continue
        mine = window.optimizer.state[positions[i]]
        for key, value in entries.items():
            if isinstance(value, Tensor) and mine.get(key) is value:
                mine[key] = value.detach().clone()


def _restore_moments(update: FusedUpdate, state: dict[Any, Any], positions: dict[int, Tensor]) -> None:
    """Put moments back whose bits torch's loader has rounded to the parameter's dtype."""
    dtype = update.state_dtype
    for i, entries in state.items():
        p = positions.get(i)
        if p is None or p.dtype == dtype:
            continue
        for slot in update.rule.slots:
            if isinstance(value := entries.get(slot), Tensor):
                update.optimizer.state[p][slot] = value.detach().to(device=p.device, dtype=dtype, copy=True)


def pack(window: Window) -> dict[str, Any]:
    """A wrapper as `pickle` and `deepcopy` take it: the wrapped optimizer, the options, the window, its last news."""
    return {
        "optimizer": window.optimizer,
        "steps": window.steps,
        "options": window.options,
        "window": save(window),
        "announced": window.announced,
        "grad_norm": window.grad_norm,
        "updated": window.counts.updated,
        "closed": window.closed,
    }


def unpack(state: dict[str, Any]) -> Window:
    """The window that `pack` described. Its tensors were copied with it, so that no moment has to be restored."""
    window = Window(state["optimizer"], state["window"]["steps"], state["options"])
    load(window, state["window"], {})
    window.resume(state["steps"], state["announced"], state["grad_norm"], state["updated"])
    if state["closed"]:
        window.release()
    return window
