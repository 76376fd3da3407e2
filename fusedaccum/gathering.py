"""The optimizer state of shard="zero1" as a whole: gathered from the ranks that hold pieces of it, and cut again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fusedaccum.collectives import as_bits, from_bits
from fusedaccum.flat_buffer import FLOAT_DTYPES
from fusedaccum.memory_order import dense_stride, in_memory_order
from fusedaccum.options import NAME, parameters
from fusedaccum.rules import Rule
from fusedaccum.shares import Cut

if TYPE_CHECKING:
    from fusedaccum.window import Window


@dataclass
class Kept:
    """What is kept for one parameter: its entries in `optimizer.state`, moments 1-D in memory order, and its master."""

    slots: tuple[str, ...]
    entries: dict[str, Any]
    master: Tensor | None

    def each(self, change: Callable[[Tensor], Tensor]) -> Kept:
        """The same with every moment and the master changed."""
        entries = {
            key: change(value) if key in self.slots and isinstance(value, Tensor) else value
            for key, value in self.entries.items()
        }
        return Kept(self.slots, entries, None if self.master is None else change(self.master))

    @classmethod
    def of_whole(cls, rule: Rule, p: Tensor, entries: dict[str, Any], master: Tensor | None) -> Kept:
        """From entries of the parameter's shape. master: 1-D. Raises ValueError for one of another shape."""
        stride = dense_stride(p)
        found = dict(entries)
        for slot in rule.slots:
            if not isinstance(value := entries.get(slot), Tensor):
                continue
            if value.shape != p.shape:
                raise ValueError(
                    f"{NAME}: state[p][{slot!r}] has shape {tuple(value.shape)} and its parameter {tuple(p.shape)}; "
                    "they must be equal where no rank has a share of it yet: load a state that belongs to these "
                    "parameters; after shard='zero1', consolidate() before state_dict() or close() makes one"
                )
            found[slot] = in_memory_order(value, stride)
        return cls(rule.slots, found, master)

    def cut(self, start: int, stop: int) -> Kept:
        """The same of a run of elements, in memory of its own."""
        return self.each(lambda value: value[start:stop].clone())


@dataclass
class Held:
    """The whole state on the CPU, in torch's own layout: entries and masters by parameter, in parameters' shapes."""

    state: dict[Tensor, dict[str, Any]]
    masters: dict[Tensor, Tensor]


def gather(window: Window, params: Sequence[Tensor], to: int | None = None) -> Iterator[tuple[Tensor, Kept]]:
    """What ranks keep of each of `params`, which are cut: whole on every rank, or on rank `to`; elsewhere nothing.

    A collective, one parameter and slot after the other. Raises RuntimeError on every rank, before it, where those that
    hold pieces of a parameter do not hold the same kinds.
    """
    if not params:
        return
    ranks, slots = window.ranks, window.update.rule.slots
    names = (*slots, "master")
    shares = window.zero1.shares(window.buffers)
    unstarted = {id(p) for share in shares for p in window.update.side(share).state.unstarted()}
    mine = [_pieces(window, p, id(p) in unstarted) for p in params]
    facts: list[int] = []
    for pieces, step in mine:
        codes = [FLOAT_DTYPES.index(t.dtype) + 1 if (t := pieces.get(name)) is not None else 0 for name in names]
        facts += [*codes, step is not None, 0 if step is None else as_bits(step)]
    everybody = ranks.all_of("the exchange of what is in the optimizer state", facts)
    width = len(names) + 2
    for i, p in enumerate(params):
        _check_same(window, p, [told[i * width : (i + 1) * width] for told in everybody])
    for i, (p, (pieces, _)) in enumerate(zip(params, mine, strict=True)):
        cut = window.zero1.cuts[p]
        told = everybody[cut.pieces[0][0]][i * width : (i + 1) * width]
        entries: dict[str, Any] = {}
        if told[-2]:
            entries["step"] = torch.tensor(from_bits(told[-1]), dtype=torch.float32, device="cpu")
        for name, code in zip(names, told, strict=False):
            if code:
                entries[name] = _assemble(window, p, cut, pieces.get(name), FLOAT_DTYPES[code - 1], to)
        master = entries.pop("master", None)
        yield p, Kept(slots, entries, master) if to in (None, ranks.rank) else Kept(slots, {}, None)


def _pieces(window: Window, p: Tensor, unstarted: bool) -> tuple[dict[str, Tensor], float | None]:
    """This rank's pieces of what is kept for `p`, and its step count. A buffer that no update has started is none."""
    entries = {} if unstarted else window.optimizer.state.get(p, {})
    pieces = {slot: entries[slot] for slot in window.update.rule.slots if isinstance(entries.get(slot), Tensor)}
    if (master := window.zero1.master(window, p)) is not None:
        pieces["master"] = master
    return pieces, float(entries["step"]) if "step" in entries else None


def _check_same(window: Window, p: Tensor, told: list[list[int]]) -> None:
    seen = {tuple(told[rank]) for rank, _, _ in window.zero1.cuts[p].pieces}
    if len(seen) > 1:
        raise RuntimeError(
            f"{NAME}: ranks hold pieces of the state of a parameter of shape {tuple(p.shape)} that do not belong "
            f"together ({', '.join(map(repr, window.update.rule.slots))}, master, step: {sorted(seen)}); load states "
            "that were saved at the same time on every rank"
        )


def _assemble(window: Window, p: Tensor, cut: Cut, mine: Tensor | None, dtype: torch.dtype, to: int | None) -> Tensor:
    """1-D, in memory order; of no use on ranks other than `to`."""
    ranks = window.ranks
    wanted = to in (None, ranks.rank)
    whole = torch.empty(cut.numel if wanted else 0, dtype=dtype, device=p.device)
    for rank, start, stop in cut.pieces:
        if rank == ranks.rank:
            piece = mine.to(p.device)
        else:
            piece = whole[start:stop] if wanted else whole.new_empty(stop - start)
        ranks.spread("the gathering of the optimizer state", piece, rank)
        if wanted and rank == ranks.rank:
            whole[start:stop].copy_(piece)
    return whole


def hold(window: Window, to: int | None) -> Held | None:
    """The whole state on the CPU, on every rank or on rank `to`; elsewhere None. A collective."""
    zero1, held = window.zero1, Held({}, {})
    order = dict.fromkeys(parameters(window.optimizer))
    for p, kept in gather(window, [p for p in order if p in zero1.cuts], to):
        _put(held, p, kept, zero1.cuts[p])
    for p in order:
        if p not in zero1.cuts and (entries := window.optimizer.state.get(p)):
            kept = Kept.of_whole(window.update.rule, p, entries, zero1.master(window, p))
            _put(held, p, kept, Cut(tuple(p.shape), dense_stride(p), ()))
    return held if to in (None, window.ranks.rank) else None


def _put(held: Held, p: Tensor, kept: Kept, cut: Cut) -> None:
    shaped = kept.each(lambda flat: flat.detach().to("cpu", copy=True).as_strided(cut.shape, cut.stride))
    if shaped.entries:
        held.state[p] = shaped.entries
    if shaped.master is not None:
        held.masters[p] = shaped.master
