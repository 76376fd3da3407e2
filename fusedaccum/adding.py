"""What adds gradients to a flat buffer: at once, or after they were held back for a while."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fusedaccum.ops import TOUCHED, VOID
from fusedaccum.tables import Part, to_device

if TYPE_CHECKING:
    from fusedaccum.flat_buffer import FlatBuffer


class Held:
    """What of one flat buffer's gradients waits for its fold, in the order in which it came.

    grads: lists with an entry for each segment, None where nothing waits. scales: by which each list is multiplied.
    """

    def __init__(self) -> None:
        self.grads: list[list[Tensor | None]] = []
        self.scales: list[float | Tensor] = []

    def __len__(self) -> int:
        return len(self.grads)

    def add(self, grads: list[Tensor | None], scale: float | Tensor) -> None:
        """Hold back what there is of a micro-batch."""
        self.grads.append(grads)
        self.scales.append(scale)

    def add_one(self, k: int, grad: Tensor, scale: float | Tensor, count: int) -> None:
        """Hold back the gradient of segment k, one of `count`, behind those that it has here."""
        place = len(self.grads)
        while place and self.grads[place - 1][k] is None:
            place -= 1
        for j in range(place, len(self.grads)):
            if self.scales[j] is scale:
                self.grads[j][k] = grad
                return
        grads: list[Tensor | None] = [None] * count
        grads[k] = grad
        self.add(grads, scale)

    def before(self, grads: list[Tensor | None], part: Part) -> tuple[list[list[Tensor | None]], list[float | Tensor]]:
        """What waits for segments that `grads`, those of `part`, have an entry for."""
        lists, scales = [], []
        for held, scale in zip(self.grads, self.scales, strict=True):
            here = held[part.first : part.last]
            here = [h if g is not None else None for h, g in zip(here, grads, strict=True)]
            if any(h is not None for h in here):
                lists.append(here)
                scales.append(scale)
        return lists, scales

    def drop(self, grads: list[Tensor | None], part: Part) -> None:
        """What `before` returned was folded."""
        for k, grad in enumerate(grads, part.first):
            if grad is not None:
                for held in self.grads:
                    held[k] = None
        left = [any(g is not None for g in held) for held in self.grads]
        self.grads = [held for held, some in zip(self.grads, left, strict=True) if some]
        self.scales = [scale for scale, some in zip(self.scales, left, strict=True) if some]

    def clear(self) -> None:
        """Nothing waits any more."""
        self.grads, self.scales = [], []


class Adding:
    """The part of `FlatBuffer` that gradients go into.

    What is held back is folded before anybody sees `flat`, `marks`, `partials` or `live`: they are properties.
    """

    def _here(self: FlatBuffer, value: Tensor) -> Tensor:
        """`value` on this device, without a wait for a copy from the CPU."""
        value = value.detach()
        return to_device(value, self.device) if value.device.type == "cpu" else value.to(self.device)

    def _scalar(self: FlatBuffer, value: float | Tensor) -> Tensor:
        """`value`, a number or a tensor of one element anywhere, as float32[1] on this device."""
        if isinstance(value, Tensor):
            return self._here(value).to(torch.float32).reshape(1)
        return torch.full((1,), value, dtype=torch.float32, device=self.device)

    def fold(
        self: FlatBuffer,
        grads: list[Tensor | None],
        scale: float | Tensor,
        norm: bool,
        part: Part | None = None,
        rest: bool = True,
    ) -> None:
        """Fold one micro-batch, or what came of it in one part, and with it what was held back of the same segments.

        grads: an entry for each segment of the part. scale: a number, or a tensor of one element on any device. rest:
        with the whole buffer, also what was held back of other segments.
        """
        grads = self.readable(grads, part.first if part else 0)
        if not self.held:
            self._fold([grads], [scale], norm, part or self.whole)
        elif part is None and rest:
            self._fold([*self.held.grads, grads], [*self.held.scales, scale], norm, self.whole)
            self.held.clear()
        else:
            lists, scales = self.held.before(grads, part or self.whole)
            self._fold([*lists, grads], [*scales, scale], norm, part or self.whole)
            self.held.drop(grads, part or self.whole)
        self.touched = self.touched or any(g is not None for g in grads)

    def _fold(
        self: FlatBuffer, lists: list[list[Tensor | None]], scales: list[float | Tensor], norm: bool, part: Part
    ) -> None:
        self.backend.fold(
            self._flat,
            part.partials,
            part.marks,
            None if self._live is None else self._live[part.first : part.last],
            part.segments,
            part.tiles,
            lists[0] if len(lists) == 1 else [g for grads in lists for g in grads],
            self._factors(scales),
            norm,
        )

    def check_grads(self: FlatBuffer, grads: list[Tensor | None]) -> list[Tensor | None]:
        """`readable(grads)`. Raises as `fold` does; nothing is written."""
        grads = self.readable(grads)
        self.backend.check_grads(self._flat, self._marks, self.segments, self.tiles, grads)
        return grads

    def hold_back(self: FlatBuffer, grads: list[Tensor | None], scale: float | Tensor) -> None:
        """Keep a micro-batch that `check_grads` has seen until the next fold, or until somebody looks at the sums."""
        if all(g is None for g in grads):
            return
        marks = self._marks.tolist()
        new = [k for k, (g, mark) in enumerate(zip(grads, marks, strict=True)) if g is not None and not mark & TOUCHED]
        self.held.add(grads, scale)
        if new:
            self._marks[new] = TOUCHED | VOID
        self.touched = True

    def hold_one(self: FlatBuffer, k: int, grad: Tensor, scale: float | Tensor) -> None:
        """`hold_back` of segment k's gradient alone."""
        self.held.add_one(k, grad, scale, len(self.params))
        if not self._marks[k] & TOUCHED:
            self._marks[k] = TOUCHED | VOID
        self.touched = True

    def settle(self: FlatBuffer, norm: bool = False) -> None:
        """Fold what is held back. norm: leave the partial sums of the norm behind."""
        if self.held:
            self.settling = True
            self._fold(self.held.grads, self.held.scales, norm, self.whole)
            self.held.clear()
            self.settling = False

    @property
    def flat(self: FlatBuffer) -> Tensor:
        """The sums: float32. Nothing is held back from who asks for them, or for what describes them."""
        self.settle()
        return self._flat

    @property
    def marks(self: FlatBuffer) -> Tensor:
        """See `fusedaccum.ops`."""
        self.settle()
        return self._marks

    def sums(self: FlatBuffer) -> Tensor:
        """`flat` as it is, without what is held back."""
        return self._flat

    def own_marks(self: FlatBuffer) -> Tensor:
        """`marks` as they are, with what is held back."""
        return self._marks

    @property
    def partials(self: FlatBuffer) -> Tensor:
        """See `fusedaccum.ops`."""
        self.settle()
        return self._partials

    @property
    def live(self: FlatBuffer) -> Tensor | None:
        """See `fusedaccum.ops`."""
        if self._live is not None:
            self.settle()
        return self._live

    @live.setter
    def live(self: FlatBuffer, value: Tensor | None) -> None:
        self._live = value

    @property
    def has_live(self: FlatBuffer) -> bool:
        """Whether only the device knows which segments were folded into."""
        return self._live is not None

    def late(self: FlatBuffer) -> tuple[list[Tensor | None], Tensor]:
        """What the update has to add to the sums by itself, and by what it multiplies that: the operators' `late`."""
        if not self.held:
            return [], self.no_scale
        return [g for grads in self.held.grads for g in grads], self._factors(self.held.scales)

    def _factors(self: FlatBuffer, scales: list[float | Tensor]) -> Tensor:
        """`scales`, numbers or tensors of one element anywhere, as float32[K] on this device."""
        if len(scales) == 1:
            return self._factor(scales[0])
        if any(isinstance(scale, Tensor) for scale in scales):
            return torch.cat([self._scalar(scale) for scale in scales])
        if (known := self._several.get(tuple(scales))) is None:
            if len(self._several) >= 8:
                self._several.clear()
            known = to_device(torch.tensor(scales, dtype=torch.float32, device="cpu"), self.device)
            self._several[tuple(scales)] = known
        return known

    def _factor(self: FlatBuffer, scale: float | Tensor) -> Tensor:
        if isinstance(scale, Tensor):
            return self._scalar(scale)
        if scale != self.scale_value:
            self._set_scale(scale)
        return self._scale

    def _set_scale(self: FlatBuffer, value: float) -> None:
        if self._scale_in_graph:  # a CUDA graph reads the old value at every replay
            self._scale = self._scalar(value)
            self._scale_in_graph = False
        else:
            self._scale.fill_(value)
        self.scale_value = value

    def scale_in_graph(self: FlatBuffer) -> Tensor:
        """The scale as a CUDA graph reads it: from now on it is not written."""
        self._scale_in_graph = True
        return self._scale
