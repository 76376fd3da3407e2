"""State dicts of shard="zero1": one rank's pieces, which load into the same rank of as many, and whole ones.

Pieces stand under our own key, in an entry that names the rank, so that `torch.distributed.checkpoint` saves those of
every rank. "state" is empty then, and a last parameter group holds a notice in place of parameters: a bare optimizer
raises for it, where it would take pieces for a state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from fusedaccum import checkpoint, folding, loaded_state
from fusedaccum.checkpoint import KEY
from fusedaccum.gathering import Kept
from fusedaccum.memory_order import dense_stride, in_memory_order
from fusedaccum.options import NAME
from fusedaccum.shares import Cut

if TYPE_CHECKING:
    from fusedaccum.window import Window

SHARD = "zero1"  # under KEY: {"rank r of n": (cuts, state, masters)}, each a tuple with an entry a parameter


def _label(window: Window) -> str:
    return f"rank {window.ranks.rank} of {window.ranks.size}"


def _way_out(what: str) -> str:
    return (
        f"{what} holds one rank's pieces of the optimizer state (shard='zero1'), not the whole: call consolidate() on "
        "every rank before state_dict()"
    )


def close(window: Window, state_dict: dict[str, Any]) -> None:
    """Make a dict, in which the optimizer's pieces stand like a state, one of pieces, or the whole that is held."""
    zero1, positions = window.zero1, checkpoint.by_index(window)
    saved = state_dict[KEY]
    saved["unstarted"] = ()  # they are left out of "state" already
    if zero1.held is not None:
        state = {i: dict(zero1.held.state[p]) for i, p in positions.items() if p in zero1.held.state}
        state_dict["state"] = state
        saved["masters"] = tuple(zero1.held.masters.get(p) for p in positions.values())
        saved.update(checkpoint.witnessed(state))
        return
    saved[SHARD] = {_label(window): (*zero1.pieces(window), tuple(state_dict["state"].get(i) for i in positions))}
    state_dict["state"] = {}
    saved.update(checkpoint.witnessed({}))
    state_dict["param_groups"] = [*state_dict["param_groups"], {"params": [_way_out("this dict")]}]


class Opened:
    """A dict that is about to be loaded into a wrapper, sharded or not.

    state_dict: as the wrapped optimizer takes it, with this rank's pieces where it is sharded. saved: what stands under
    our key, in the terms of an unsharded wrapper. Raises ValueError where it does not fit.
    """

    def __init__(self, window: Window, state_dict: dict[str, Any]) -> None:
        self.window = window
        self.state_dict = state_dict.copy()
        self.saved = self.state_dict.pop(KEY, None)
        self._cuts: dict[Tensor, Any] = {}
        self._masters: dict[Tensor, Tensor] = {}
        self._cut = isinstance(self.saved, dict) and bool(self.saved.get(SHARD))
        if self._cut:
            self._open()

    def _open(self) -> None:
        shards, window = self.saved[SHARD], self.window
        there = ", ".join(map(str, shards)) if isinstance(shards, dict) else type(shards).__name__
        if window.zero1 is None or not isinstance(shards, dict) or _label(window) not in shards:
            here = f"is {_label(window)}" if window.zero1 is not None else "has no shard='zero1'"
            raise ValueError(
                f"{NAME}: {_way_out('the dict')}; such a one loads into the rank that saved it ({there}), and this "
                f"wrapper {here}"
            )
        positions, parts = checkpoint.by_index(window), shards[_label(window)]
        if not isinstance(parts, tuple) or len(parts) != 3 or any(len(part) != len(positions) for part in parts):
            raise ValueError(
                f"{NAME}: the pieces of {_label(window)} do not belong to this optimizer's {len(positions)} "
                "parameters; load them into an optimizer over the same parameters in the same order"
            )
        cuts, masters, state = (
            {p: v for p, v in zip(positions.values(), part, strict=True) if v is not None} for part in parts
        )
        self._cuts, self._masters = {p: Cut(*cut) for p, cut in cuts.items()}, masters
        for p, cut in self._cuts.items():
            _check_piece(p, cut, cut.of(window.ranks.rank), {**state.get(p, {}), "master": masters.get(p)})
        self.state_dict["state"] = {i: dict(state[p]) for i, p in positions.items() if p in state}
        self.state_dict["param_groups"] = self.state_dict["param_groups"][:-1]
        self.saved = {
            **self.saved,
            **checkpoint.witnessed(self.state_dict["state"]),
            "masters": (None,) * len(positions),
        }

    def cut(self) -> None:
        """Cut a whole state to this rank's pieces: what is not its own is never copied."""
        window = self.window
        if window.zero1 is None or self._cut:
            return
        window.locate()
        folding.follow(window, thorough=True)
        self._cuts = window.zero1.wanted(window.buffers)
        masters = self.saved["masters"] if self.saved is not None else ()
        state = dict(self.state_dict["state"])
        keys = loaded_state.keys_of(window.optimizer, self.state_dict)
        for i, p in checkpoint.by_index(window).items():
            master = masters[i] if i < len(masters) else None
            flat = None if master is None else in_memory_order(master, dense_stride(p))
            if p not in self._cuts:
                if flat is not None:
                    self._masters[p] = flat
                continue
            kept = Kept.of_whole(window.update.rule, p, state.pop(key := keys.get(p, i), {}), flat)
            if (piece := self._cuts[p].of(window.ranks.rank)) is None:
                continue
            mine = kept.cut(*piece)
            if mine.entries:
                state[key] = mine.entries
            if mine.master is not None:
                self._masters[p] = mine.master
        self.state_dict["state"] = state
        if self.saved is not None:
            self.saved = {**self.saved, "masters": (None,) * len(masters)}

    def take(self) -> None:
        """After the wrapped optimizer has loaded its part, and the window its own."""
        if self.window.zero1 is not None:
            self.window.zero1.take(self.window, self._cuts, self._masters)


def _check_piece(p: Tensor, cut: Cut, piece: tuple[int, int] | None, entries: dict[str, Any]) -> None:
    numel = 0 if piece is None else piece[1] - piece[0]
    for name, value in entries.items():
        if isinstance(value, Tensor) and name != "step" and value.shape != (numel,):
            raise ValueError(
                f"{NAME}: the saved piece of {name!r} has shape {tuple(value.shape)} and must be 1-D of {numel} "
                f"elements, this rank's of a parameter of shape {tuple(p.shape)}; load an undamaged file"
            )
    if cut.shape != tuple(p.shape):
        raise ValueError(
            f"{NAME}: the saved pieces are of a parameter of shape {cut.shape} and this one has {tuple(p.shape)}; load "
            "them into an optimizer over the same parameters in the same order"
        )
