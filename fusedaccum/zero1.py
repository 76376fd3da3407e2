"""shard="zero1": each rank adds up a share of every flat buffer, and holds moments and masters of that share alone.

A window ends with a reduce-scatter of the sums, an update of the shares and an all-gather of the parameters, which is
staged in the memory of the sums: nothing as large as a buffer is made beside it. What the optimizer keeps for a
parameter is a run of its elements in memory order, and no entry on ranks that hold none of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fusedaccum import gathering
from fusedaccum.collectives import Ranks
from fusedaccum.flat_buffer import FlatBuffer
from fusedaccum.gathering import Held, Kept
from fusedaccum.memory_order import in_memory_order
from fusedaccum.options import NAME, parameters
from fusedaccum.shares import Cut, Share, cuts_of

if TYPE_CHECKING:
    from fusedaccum.window import Window


class Zero1:
    """The shares of one wrapper's rank.

    cuts: how what ranks keep for a parameter is cut; one that is not there is kept whole by every rank. It changes in
    `settle` alone, where all ranks meet, and when a state is loaded. held: the whole state, after `consolidate`.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.cuts = WeakTensorKeyDictionary()
        self.held: Held | None = None
        self._shares: dict[FlatBuffer, Share] = {}
        self._settled: list[FlatBuffer] = []
        self._digest: bytes | None = None

    # Which rank holds what

    def shares(self, buffers: list[FlatBuffer]) -> list[Share]:
        """This rank's shares of those of `buffers` that have been updated, or are about to be."""
        found = [self._shares[buffer] for buffer in buffers if buffer in self._shares]
        for share in found:
            share.begin()
        return found

    def wanted(self, buffers: list[FlatBuffer]) -> dict[Tensor, Cut]:
        """How parameters are cut by `buffers`."""
        return {p: cut for b in buffers for p, cut in zip(b.params, cuts_of(b, self.ranks.size), strict=True)}

    def settle(self, window: Window) -> None:
        """Have state and masters cut as the buffers are now: a collective where they were cut otherwise.

        Raises ValueError for a state that belongs to other parameters, or to another wrapper's shares.
        """
        buffers = window.buffers
        if len(buffers) == len(self._settled) and all(map(is_, buffers, self._settled)):
            return
        self._digest = None
        wanted = self.wanted(buffers)
        moving = [p for p, cut in wanted.items() if p in self.cuts and self.cuts[p] != cut]
        for p in moving:
            if self.cuts[p].shape != wanted[p].shape:
                raise ValueError(
                    f"{NAME}: the state of a parameter of shape {wanted[p].shape} was made when its shape was "
                    f"{self.cuts[p].shape}; they must be equal: load a state that belongs to these parameters"
                )
        whole = {p: self._whole(window, p) for p in wanted if p not in self.cuts}
        gone = [share for buffer, share in self._shares.items() if not any(buffer is b for b in buffers)]
        window.update.replace(gone, [])  # parks their masters
        self._shares = {b: self._shares.get(b) or Share(b, self.ranks.rank, self.ranks.size) for b in buffers}
        for p, kept in gathering.gather(window, moving):
            self._keep(window, p, wanted[p], kept.each(lambda flat, p=p: self._reordered(flat, p, wanted[p])))
        for p, kept in whole.items():
            self._keep(window, p, wanted[p], kept)
        for share in self._shares.values():
            for k, p in enumerate(share.params):
                if (parked := window.update.parked.pop(p, None)) is not None:
                    window.update.put_master(share, k, parked[0])
        self._settled = list(buffers)

    def digest(self, window: Window) -> bytes:
        """Of how the state is cut: ranks that are to move pieces to each other agree on it first."""
        if self._digest is None:
            cuts = [self.cuts[p] for p in dict.fromkeys(parameters(window.optimizer)) if p in self.cuts]
            self._digest = hashlib.sha256(repr(cuts).encode()).digest()
        return self._digest

    def _whole(self, window: Window, p: Tensor) -> Kept:
        """What this rank, as every other, keeps of a parameter that is not cut yet."""
        parked = window.update.parked.get(p)
        return Kept.of_whole(
            window.update.rule, p, window.optimizer.state.get(p, {}), None if not parked else parked[0]
        )

    def _reordered(self, flat: Tensor, p: Tensor, cut: Cut) -> Tensor:
        """`flat`, in the memory order that `p` had, in the order of `cut`."""
        was = self.cuts[p]
        return flat if was.stride == cut.stride else in_memory_order(flat.as_strided(was.shape, was.stride), cut.stride)

    def _keep(self, window: Window, p: Tensor, cut: Cut, kept: Kept) -> None:
        """Keep this rank's piece of what there is of `p`, in memory of its own."""
        window.optimizer.state.pop(p, None)
        window.update.parked.pop(p, None)
        if (piece := cut.of(self.ranks.rank)) is not None:
            mine = kept.cut(*piece)
            if mine.entries:
                window.optimizer.state[p] = mine.entries
            if mine.master is not None:
                window.update.parked[p] = (mine.master, (1,), None)
        self.cuts[p] = cut

    def master(self, window: Window, p: Tensor) -> Tensor | None:
        """This rank's piece of the master of `p`, in memory order; None where there is none."""
        if (parked := window.update.parked.get(p)) is not None:
            return parked[0]
        buffer, k = window.place.get(p, (None, 0))
        share = self._shares.get(buffer) if buffer is not None else None
        if share is None or not share.here.start <= k < share.here.stop:
            return None
        return window.update.master(share, k - share.here.start)

    def pieces(self, window: Window) -> tuple[tuple[Any, ...], tuple[Tensor | None, ...]]:
        """(how each parameter is cut, as plain tuples; this rank's piece of each master), by position."""
        params = dict.fromkeys(parameters(window.optimizer))
        self.shares(window.buffers)  # where parameters lie now
        cuts = tuple(tuple(self.cuts[p]) if p in self.cuts else None for p in params)
        return cuts, tuple(self.master(window, p) for p in params)

    def take_pieces(self, window: Window, cuts: Sequence[Any], masters: Sequence[Tensor | None]) -> None:
        """`take` what `pieces` returned."""
        params = [*dict.fromkeys(parameters(window.optimizer))]
        self.take(
            window,
            {p: Cut(*cut) for p, cut in zip(params, cuts, strict=True) if cut is not None},
            {p: master for p, master in zip(params, masters, strict=True) if master is not None},
        )

    def take(self, window: Window, cuts: dict[Tensor, Cut], masters: dict[Tensor, Tensor]) -> None:
        """Begin again with what was loaded: the optimizer holds the pieces that `cuts` give to this rank."""
        for share in self._shares.values():
            window.update.sides.pop(share, None)
        self.held, self._shares, self._settled, self._digest = None, {}, [], None
        self.cuts = WeakTensorKeyDictionary(cuts)
        if window.update.master_weights:
            for p, master in masters.items():
                window.update.parked[p] = (master.detach().to(p.device, torch.float32, copy=True), (1,), None)

    # The end of a window

    def total(self, shares: Sequence[FlatBuffer]) -> Tensor:
        """The sum of squares of all ranks' shares: float64[1] on the first one's device, the same bits on each rank."""
        device = shares[0].device
        total = sum((share.square_total().to(device) for share in shares[1:]), shares[0].square_total().clone())
        self.ranks.total("the sum of the shares' squares", total)
        return total

    def add_up(self, buffer: FlatBuffer) -> None:
        """Make this rank's share of `buffer` the sum over ranks."""
        self.ranks.share_out("the reduce-scatter of a window", buffer.flat)

    def send_parameters(self, window: Window, buffers: list[FlatBuffer]) -> None:
        """After the update: every rank gets the parameters of all shares, those that the window has touched."""
        for buffer in buffers:
            share = self._shares[buffer]
            dtype = buffer.data(0).dtype
            stage = buffer.flat.view(dtype)[: buffer.flat.numel()]
            self._stage(share, stage)
            self.ranks.collect("the all-gather of parameters", stage)
            self._unstage(buffer, stage)
            if dtype != torch.float32 and (padding := buffer.padding()):
                torch._foreach_zero_(padding)  # bits of parameters are no zeros of float32
            if (masters := window.update.side(share).masters) is not None:
                masters.written(share.touched_segments())

    def _stage(self, share: Share, stage: Tensor) -> None:
        mine = stage.view(self.ranks.size, -1)[self.ranks.rank]
        segments = [k for k in share.touched_segments() if share.numels[k]]
        if segments:
            targets = [mine[offset : offset + numel] for offset, numel in share.segments[segments].tolist()]
            torch._foreach_copy_(targets, [share.data(k) for k in segments])

    @staticmethod
    def _unstage(buffer: FlatBuffer, stage: Tensor) -> None:
        targets, sources = [], []
        for k in buffer.touched_segments():
            if not buffer.numels[k]:
                continue
            offset, numel = buffer.segments[k].tolist()
            param, values = buffer.data(k), stage[offset : offset + numel]
            ordered = in_memory_order(param, buffer.strides[k])
            if ordered.data_ptr() == param.data_ptr():
                targets.append(ordered)
                sources.append(values)
            else:
                param.copy_(values.as_strided(buffer.shapes[k], buffer.strides[k]))
        if targets:
            torch._foreach_copy_(targets, sources)

    # The whole state

    def consolidate(self, window: Window, to: int | None) -> None:
        """Hold the whole state on the CPU: of every rank, or of rank `to` alone."""
        self.held = None
        self.held = gathering.hold(window, to)

    def whole_to_leave(self, window: Window) -> Held | None:
        """What `close` puts into the optimizer. Refuses to leave pieces in one that knows nothing of them."""
        if self.held is None and self.ranks.size == 1:
            self.consolidate(window, None)
        slots = window.update.rule.slots
        pieces = [p for p in self.cuts if any(slot in window.optimizer.state.get(p, ()) for slot in slots)]
        if self.held is None and pieces:
            raise RuntimeError(
                f"{NAME}: close() would leave pieces of the state of {len(pieces)} parameters in the optimizer, those "
                f"of rank {self.ranks.rank} of {self.ranks.size}; call consolidate() on every rank before it, which "
                "puts the whole state there, or optimizer.state.clear() to give it up"
            )
        return self.held

    def give_back(self, window: Window, held: Held) -> None:
        """Put the whole state into the optimizer, as torch has it."""
        for group in window.optimizer.param_groups:
            on_device = group.get("capturable") or group.get("fused")
            for p in group["params"]:
                window.optimizer.state.pop(p, None)
                if p in held.state:
                    window.optimizer.state[p] = {
                        key: value.to(p.device) if isinstance(value, Tensor) and (key != "step" or on_device) else value
                        for key, value in held.state[p].items()
                    }
