"""What a saved window holds of DTensor parameters.

`torch.distributed.checkpoint` has one rank write a tuple, with that rank's shards alone: what is sharded has to stand
in dicts as DTensors, which all ranks write, and which are read back over other ones. It reads into tensors that are
there already and raises for such as are missing in the file, so whoever saves and whoever loads must have the same:
sums and masters of every parameter, whatever the window holds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedaccum.checkpoint_fields import ABSENT
from fusedaccum.local import is_distributed, like
from fusedaccum.options import NAME
from fusedaccum.update import FusedUpdate
from fusedaccum.window import Window

KINDS = ("sums", "masters")


def save(window: Window, positions: dict[int, Tensor]) -> dict[str, dict[int, Tensor]]:
    """{"sums": {index: DTensor}, "masters": {index: DTensor}} of the parameters that can get gradients.

    Sums are copies: torch.save takes no DTensor over a part of a storage. Those that the window does not hold read as
    zeros. With steps=None there are none. Masters are live, as the other tensors of a state dict.
    """
    found: dict[str, dict[int, Tensor]] = {kind: {} for kind in KINDS}
    shared = {i: p for i, p in positions.items() if is_distributed(p) and p.requires_grad}
    if not shared or any(p.is_meta for p in shared.values()):
        return found
    window.locate()
    for i, p in shared.items():
        buffer, k = window.place[p]
        if window.live is None:
            view = buffer.view(k)
            held = window.boundary.undivided(window, view).clone() if buffer.is_touched(k) else torch.zeros_like(view)
            found["sums"][i] = like(p, held)
        if isinstance(window.update, FusedUpdate) and (master := window.update.made_master(buffer, k)) is not None:
            found["masters"][i] = master
    return found


def holds_sum(window: Window, p: Tensor) -> bool:
    """Whether the open window holds a sum of `p`, a DTensor."""
    buffer, k = window.place.get(p, (None, 0))
    return buffer is not None and buffer.spread is not None and buffer.is_touched(k)


def complete(saved: dict[str, Any]) -> dict[str, Any]:
    """`saved` with what releases did not write that knew nothing of it."""
    return {**ABSENT, **saved}


def sums(saved: dict[str, Any]) -> dict[int, Tensor]:
    """The sums that the window holds, by parameter."""
    saved = complete(saved)
    sharded = {i: saved["sharded"]["sums"].get(i) for i in saved["sharded_sums"]}
    return {i: value for i, value in [*enumerate(saved["sums"]), *sharded.items()] if value is not None}


def check(saved: dict[str, Any], positions: dict[int, Tensor]) -> None:
    """Refuse what does not fit. Raises ValueError."""
    held = saved["sharded"]
    lost = [i for i in saved["sharded_sums"] if i not in held["sums"]]
    if lost:
        raise ValueError(
            f"{NAME}: the saved window holds sums of DTensor parameters {lost}, and they did not come with this dict, "
            "because here these parameters are no DTensors, or are frozen; shard and freeze the model as it was saved, "
            "be it over one rank, then load again"
        )
    for kind in KINDS:
        for i, p in positions.items():
            if is_distributed(p) and saved[kind][i] is not None:
                raise ValueError(
                    f"{NAME}: the saved window holds a plain tensor in {kind} for parameter {i}, which is a DTensor "
                    "here; load it into the model as it was, before sharding"
                )
        for i, value in held[kind].items():
            p = positions.get(i)
            if p is None or not is_distributed(p):
                raise ValueError(
                    f"{NAME}: the saved window holds a DTensor in {kind} for parameter {i}, which is none here; shard "
                    "the model as it was saved, be it over one rank, then load again"
                )
            _check_value(kind, i, value, p)


def _check_value(kind: str, i: int, value: Any, p: Tensor) -> None:
    dtype = torch.complex64 if kind == "sums" and p.is_complex() else torch.float32
    if not is_distributed(value) or value.dtype != dtype or value.shape != p.shape:
        seen = f"a {value.dtype} {type(value).__name__} of shape {tuple(value.shape)}"
        raise ValueError(
            f"{NAME}: the saved window holds {seen} in {kind} for parameter {i}, which must be a {dtype} DTensor of "
            f"shape {tuple(p.shape)}; load an undamaged file"
        )
    if value.device_mesh != p.device_mesh or value.placements != p.placements:
        raise ValueError(
            f"{NAME}: the saved window holds {kind} for parameter {i} over {value.device_mesh} as {value.placements}, "
            f"and the parameter is over {p.device_mesh} as {p.placements}; torch.distributed.checkpoint loads into "
            "another mesh: dcp.save() and dcp.load() the wrapper itself"
        )
