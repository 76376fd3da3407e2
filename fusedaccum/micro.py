"""One micro-batch: what is known of it before its gradients are folded, and how many items it counts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fusedaccum import capture, folding
from fusedaccum.local import is_shared
from fusedaccum.options import NAME, PLAIN, WEIGHTED, parameters

if TYPE_CHECKING:
    from fusedaccum.window import Window


@dataclass(frozen=True)
class Micro:
    """A micro-batch.

    length: of its window. scale: what its gradients are multiplied by, a number or a tensor of one element. items: that
    it counts, likewise, or None. weighted: whether its window counts items. norm: whether its fold leaves the norm
    behind, as the window's last one does unless ranks reduce it after that.
    """

    length: int
    scale: float | Tensor
    items: float | Tensor | None
    weighted: bool
    norm: bool

    @property
    def is_empty(self) -> bool:
        """Whether its gradients are not folded, because it counts no items. A tensor is not looked at."""
        return isinstance(self.items, float) and self.items == 0.0

    def as_saved(self) -> tuple[float | Tensor, float | Tensor | None, bool]:
        """What a saved window says of it, when gradients of it have been folded."""
        return self.scale, self.items, self.weighted

    @classmethod
    def again(cls, window: Window, scale: float | Tensor, items: float | Tensor | None, weighted: bool) -> Micro:
        """What `as_saved` returned, in a window that has been loaded. Copies tensors."""
        if not weighted:
            scale = 1.0 if window.options.reduction == "sum" else 1.0 / window.length
        scale, items = (n.clone() if isinstance(n, Tensor) else n for n in (scale, items))
        return cls(window.length, scale, items, weighted, norm=_takes_norm(window, window.length))

    def settled(self, window: Window, mean_of: float | Tensor | None, sum_of: float | Tensor | None) -> Micro:
        """The same with the count that `step()` gives after gradients were folded. Raises before anything changes."""
        if window.announced is not None:
            return self
        if mean_of is not None or (sum_of is not None and self.items is not None):
            raise ValueError(
                f"{NAME}: step() was given an item count after gradients of this micro-batch were folded without it, "
                "as they appeared in the backward; call micro_batch(mean_of=...) before the backward instead, "
                "and reset() drops this window"
            )
        weighted = sum_of is not None or self.items is not None
        check_mode(window, weighted)
        if sum_of is None:
            return self
        if isinstance(sum_of, Tensor):
            window.keep_live()
        if not self.weighted and self.scale != 1.0:
            window.rescale(1.0 / self.scale)
        return replace(self, scale=1.0, items=sum_of, weighted=True)


def begin(
    window: Window,
    mean_of: float | Tensor | None,
    sum_of: float | Tensor | None,
    grad_scale: Tensor | None = None,
    late: bool = False,
    first: Tensor | None = None,
) -> Micro:
    """The micro-batch that is about to be folded. Raises before anything is changed.

    grad_scale: what its gradients have been multiplied by, a tensor of one element. late: `step()` will give its count,
    which only divides. first: the parameter whose gradient has come, where they are folded in the backward.
    """
    weighted = late or mean_of is not None or sum_of is not None
    window.check_takes_more()
    window.graphs.leave(window)
    check_mode(window, weighted)
    length = window.length_now()
    scale: float | Tensor = 1.0
    if mean_of is not None:
        scale = mean_of
    elif isinstance(sum_of, Tensor):
        scale = sum_of != 0
    elif not weighted and window.options.reduction == "mean":
        scale = 1.0 / length
    if grad_scale is not None:
        scale = folding.times(grad_scale.double().reciprocal(), scale)
    if capture.is_capturing():
        window.graphs.check_capture(window, weighted, scale)
    else:
        window.graphs.check_eager(window)
    window.locate()
    window.ddp.check(window, weighted, first)
    items = mean_of if mean_of is not None else sum_of
    if isinstance(items, Tensor):
        window.keep_live()  # whether it is 0, only the device knows
    return Micro(length, scale, items, weighted, norm=_takes_norm(window, length))


def _takes_norm(window: Window, length: int) -> bool:
    return window.pending + 1 >= length and window.ranks is None


def check_shared(window: Window) -> None:
    """Refuse item counts where each gradient is a mean over ranks when we get it. Raises ValueError."""
    if any(map(is_shared, parameters(window.optimizer))):
        raise ValueError(
            f"{NAME}: mean_of and sum_of weigh micro-batches by their items, and gradients of DTensor parameters are "
            "means over ranks already, in which ranks with unequal counts weigh the same; leave the counts out, and "
            "multiply each loss (a mean over n items) by n * ranks * steps / (items of the window on all ranks)"
        )


def check_mode(window: Window, weighted: bool) -> None:
    """Refuse a micro-batch with item counts, or without, where the window cannot take it."""
    mode = WEIGHTED if weighted else PLAIN
    if weighted:
        check_shared(window)
        window.ddp.check_counts(window)
    if weighted and window.options.reduction == "sum":
        raise ValueError(
            f"{NAME}: mean_of and sum_of are per-item means and reduction='sum' adds micro-batches up; "
            "leave the item counts out, or use reduction='mean'"
        )
    if (window.pending or window.graphs.captured) and window.mode != mode:
        raise ValueError(
            f"{NAME}: this window holds {window.micro_batches} {window.mode} micro-batches and a {mode} one was "
            "given; give mean_of or sum_of with every micro-batch of a window or with none, or reset() the window"
        )


def announce(window: Window, mean_of: float | Tensor | None, sum_of: float | Tensor | None, last: bool = False) -> None:
    """Keep the item count of the coming micro-batch. last: and that it is the window's last."""
    if last and (window.ranks is None or window.in_backward is None):
        raise ValueError(
            f"{NAME}: micro_batch(last={last!r}) begins the reduction over ranks inside the backward, which needs "
            "process_group and fold='backward'; leave it out, or give both to the wrapper"
        )
    if last and window.zero1 is not None:
        raise ValueError(
            f"{NAME}: micro_batch(last=True) sends sums in the order of parameters, and with shard='zero1' they are "
            "added up by shares, after the last of them; leave last=True out: the window is then reduced in step()"
        )
    window.check_takes_more()
    if window.begun:
        raise ValueError(
            f"{NAME}: micro_batch() came after gradients of this micro-batch were folded, as they appeared in the "
            "backward; call it before the backward"
        )
    weighted = mean_of is not None or sum_of is not None
    check_mode(window, weighted)
    # A copy: the caller may count the next batch in the same tensor before step() is called.
    given = tuple(n.clone() if isinstance(n, Tensor) else n for n in (mean_of, sum_of))
    window.announced = given if weighted else None
    window.last = bool(last)


def counts_of(window: Window, mean_of: float | Tensor | None, sum_of: float | Tensor | None) -> tuple[Any, Any]:
    """The item count of a micro-batch: what was announced, or what step() was given."""
    if window.announced is None:
        return mean_of, sum_of
    if mean_of is not None or sum_of is not None:
        raise ValueError(
            f"{NAME}: this micro-batch was given a count by micro_batch() and another by step(); give it in one place"
        )
    return window.announced
