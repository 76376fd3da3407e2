"""The state that torch's loader has taken over: made our own, with the bits that it had in the dict."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from fusedaccum.options import parameters
from fusedaccum.update import FusedUpdate


def by_position(optimizer: Optimizer, state_dict: dict[str, Any], positions: dict[int, Tensor]) -> dict[int, Any]:
    """The state in `state_dict` by the index of its parameter.

    torch's loader goes by the order in the groups, whatever the keys are: its distributed helpers give names.
    """
    keys, state = keys_of(optimizer, state_dict), state_dict.get("state", {})
    return {i: state[keys[p]] for i, p in positions.items() if p in keys and keys[p] in state}


def keys_of(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[Tensor, Any]:
    """The key in `state_dict` of each parameter."""
    keys = [key for group in state_dict.get("param_groups", ()) for key in group["params"]]
    return dict(zip(parameters(optimizer), keys, strict=False))


def make_own(optimizer: Optimizer, state: dict[Any, Any], positions: dict[int, Tensor]) -> None:
    """Copy what torch's loader has taken over from the dict as it was: two optimizers must not share their moments."""
    for i, entries in state.items():
        if i not in positions or not isinstance(entries, dict):
            continue
        mine = optimizer.state[positions[i]]
        for key, value in entries.items():
            if isinstance(value, Tensor) and mine.get(key) is value:
                mine[key] = value.detach().clone()


def restore_moments(update: FusedUpdate, state: dict[Any, Any], positions: dict[int, Tensor]) -> None:
    """Put moments back whose bits torch's loader has rounded to the parameter's dtype."""
    dtype = update.state_dtype
    for i, entries in state.items():
        p = positions.get(i)
        if p is None or p.dtype == dtype or not isinstance(entries, dict):
            continue
        for slot in update.rule.slots:
            if isinstance(value := entries.get(slot), Tensor):
                update.optimizer.state[p][slot] = value.detach().to(device=p.device, dtype=dtype, copy=True)
