"""What the fields of a saved window may be."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusedaccum.options import PLAIN, WEIGHTED

MODES = (None, PLAIN, WEIGHTED)
REDUCTIONS = ("mean", "sum")


def _is_count(value: Any, least: int = 0) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and value >= least


def _is_kept(value: Any) -> bool:
    return value is None or (isinstance(value, float) and 0 <= value < math.inf)


def _are_items(value: Any) -> bool:
    if not isinstance(value, tuple) or len(value) != 1:
        return False
    (items,) = value
    return _is_item(items) and not (isinstance(items, Tensor) and items.dtype != torch.float64)


def _is_item(items: Any) -> bool:
    if isinstance(items, Tensor):
        return items.numel() == 1 and not items.is_complex() and items.layout == torch.strided and not items.is_meta
    return isinstance(items, float) and 0 <= items < math.inf


def _is_begun(value: Any) -> bool:
    if not isinstance(value, tuple) or len(value) not in (0, 3):
        return False
    if not value:
        return True
    scale, items, weighted = value
    return _is_item(scale) and isinstance(weighted, bool) and (items is None or (weighted and _is_item(items)))


def is_any_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    return any(type(value) is type(choice) and value == choice for choice in allowed)


def _is_rounding(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) in (0, 2) and all(_is_count(v) and v < 2**63 for v in value)


def _are_tensors(value: Any) -> bool:
    return isinstance(value, tuple) and all(
        t is None or (isinstance(t, Tensor) and t.layout == torch.strided and not t.is_meta) for t in value
    )


def _are_shards(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(held := value.get(kind), dict) and all(isinstance(t, Tensor) for t in held.values())
        for kind in ("sums", "masters")
    )


# What every field must be: (in words, test).
FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "steps": ("an int of at least 1, the micro-batches per window", lambda v: _is_count(v, 1)),
    "length": ("an int of at least 1, the micro-batches of this window", lambda v: _is_count(v, 1)),
    **{
        name: ("an int of at least 0", _is_count)
        for name in ("pending", "updates", "skipped_windows", "skipped_micro_batches")
    },
    "reduction": (f"one of {REDUCTIONS}", lambda v: is_any_of(v, REDUCTIONS)),
    "mode": (f"one of {MODES}", lambda v: is_any_of(v, MODES)),
    "items": ("a tuple of one float of at least 0, or of one float64 tensor of one element", _are_items),
    "kept": ("None, or a float of at least 0: how many of the micro-batches were folded", _is_kept),
    "dropped": ("a bool: whether gradients of this window were left out", lambda v: isinstance(v, bool)),
    "rounding": ("a tuple: empty, or of two ints from 0 to 2**63 - 1: seed and number of the update", _is_rounding),
    "begun": ("a tuple: empty, or (scale, items or None, bool) of a micro-batch that was folded in part", _is_begun),
    "sums": ("a tuple of dense tensors and None", _are_tensors),
    "masters": ("a tuple of dense tensors and None", _are_tensors),
    "sharded": ("a dict of sums and masters, each one a dict of DTensors", _are_shards),
    "sharded_sums": ("a tuple of parameter indices", lambda v: isinstance(v, tuple) and all(map(_is_count, v))),
    "shapes": (
        "a tuple of tuples of ints and None",
        lambda v: (
            isinstance(v, tuple) and all(s is None or (isinstance(s, tuple) and all(map(_is_count, s))) for s in v)
        ),
    ),
    "unstarted": ("a tuple of parameter indices", lambda v: isinstance(v, tuple) and all(map(_is_count, v))),
    "rank": (
        "a tuple: empty, or a rank and how many there are",
        lambda v: isinstance(v, tuple) and len(v) in (0, 2) and all(map(_is_count, v)),
    ),
    "state_layout": ("a str", lambda v: isinstance(v, str)),
    "state_witness": ("a dict", lambda v: isinstance(v, dict)),
}

# Fields that earlier releases did not write, and what their absence says.
ABSENT: dict[str, Any] = {
    "rounding": (),
    "dropped": False,
    "begun": (),
    "sharded": {"sums": {}, "masters": {}},
    "sharded_sums": (),
    "rank": (),
}
