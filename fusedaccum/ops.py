"""The operators: what every backend must do, and with which tensors.

A backend is a module with one function for each method of `Backend`, with the same name and the same argument order:
`fusedaccum.backends.reference` (plain torch, the specification), `compiled` (C++) and `triton`. The same signatures,
with their mutations declared, stand in `csrc/schema.h`.

Arguments that several operators share (n segments, T tiles, F elements of flat buffer, G parameter groups). All are
contiguous and on `flat`'s device, but for `segments` and `marks`, which are facts that the host knows:

    flat       float32[F]     the flat buffer: every master gradient, segment after segment. Segment starts are
                              multiples of ALIGN elements. The padding between segments is never read nor written.
    segments   int64[n, 2]    on the CPU: (offset in `flat`, numel) of each segment. numel may be 0.
    tiles      int64[T, 4]    (segment, start in the segment, start in `flat`, count) of each tile, in order; count is
                              TILE but for a segment's last tile. A segment of 0 elements has no tile.
    marks      uint8[n]       on the CPU, per segment: TOUCHED (it holds the sum of this window) | FRESH (the partials
                              of its tiles are those of its present values).
    live       uint8[n]       1 where a fold of this window had a gradient for the segment and a scale that was not 0,
                              which only the device knows; or None, where every touched segment counts. Segments of 0
                              elements are never live. A segment that is TOUCHED and not live holds zeros, and is left
                              alone by `close_window`, `emit` and the update rules.
    partials   float64[T]     per tile: the sum of the squares of its elements, in float64. The square of a finite
                              float32 cannot overflow there, so a sum that is not finite says that an element is not.
    scalars    float32[3]     what the step reads: (multiplier, skip, norm), see `close_window`.
    steps      float32[n]     updates that each segment has seen, this one included (after `close_window`).
    groups     int64[n]       row of `hyper` that holds for the segment.
    hyper      float64[G, C]  hyper-parameters per group, columns ADAM_COLUMNS or SGD_COLUMNS. Flags are 0.0 or 1.0.
    random     int64[n + 2]   what random numbers are made of: the seed (at least 0), the number of the update, and the
                              stream of each segment; or None, to round to nearest. See below.

Lists of tensors have n entries. Where an entry does not apply (a segment that is not touched, a parameter without a
master, a group without momentum) it is a tensor of 0 elements; a list none of whose entries apply may be empty.
Listed tensors are read and written in memory order: they are contiguous, dtype float32, bfloat16 or float16 (masters:
float32) and have as many elements as the segment. Nothing is written before all arguments have been checked.

An element is read once, computed on in float32 and written once, rounded to nearest even. Wherever a product is added,
it is a fused multiply-add. Segments that are not TOUCHED are neither read nor written by anything but `fold`.

With `random`, bfloat16 parameters without a master are rounded stochastically: to either neighbour, with probabilities
that make the mean exactly right. 16 random bits are added to the float32's bits below bfloat16's, which are then cut
off. Magnitudes of the largest finite bfloat16 and beyond (infinities and NaNs among them) are rounded to nearest. The
random bits are those of Philox4x32-10 (Salmon et al. 2011): the key is the seed, low word first, and the counter of
element i is (i // 8 as two words, low first; the segment's stream; the number of the update), the last two modulo
2^32. Of the block's words the elements take the lower, then the upper half, in order of i % 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

TILE = 4096
ALIGN = 64
TOTAL = 66

TOUCHED = 1
FRESH = 2

ADAM_COLUMNS = ("lr", "beta1", "beta2", "eps", "weight_decay", "decoupled", "amsgrad", "maximize")
SGD_COLUMNS = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")


class Backend(Protocol):
    """What the modules in `fusedaccum.backends` implement."""

    def fold(
        self,
        flat: Tensor,
        partials: Tensor,
        marks: Tensor,
        live: Tensor | None,
        segments: Tensor,
        tiles: Tensor,
        grads: Sequence[Tensor | None],
        scale: Tensor,
        norm: bool,
    ) -> None:
        """Add one micro-batch: flat = fma(scale, grad, flat), and flat = scale * grad on a segment's first touch.

        grads: n entries; None where the micro-batch left no gradient, and that segment is left alone. A mix of float32,
            bfloat16 and float16. Any address that fits the dtype; contiguous.
        scale: float32[1], on `flat`'s device. Where it is 0 the contribution is exactly 0, whatever the gradients
            hold (a first touch stores +0.0).
        norm: leave `partials` of the folded tiles behind and set FRESH; without it FRESH is cleared.

        Mutates flat, partials, marks (TOUCHED is set for every segment with a gradient, those of 0 elements too), live
        (1 for every segment with a gradient, where scale is not 0).

        Raises RuntimeError naming the index, the rule and the value seen: a gradient of another numel, dtype or device,
        or not contiguous. Nothing is written then.
        """
        ...

    def found_inf(
        self,
        flat: Tensor,
        marks: Tensor,
        segments: Tensor,
        tiles: Tensor,
        grads: Sequence[Tensor | None],
        found_inf: Tensor,
    ) -> None:
        """found_inf[0] = 1.0 where an element of any gradient is infinite or not a number, else 0.0.

        grads: as in `fold`; they are read, and the buffer is not. found_inf: float32[1]. Mutates found_inf. Raises as
        `fold` does.
        """
        ...

    def square_total(
        self, flat: Tensor, partials: Tensor, marks: Tensor, segments: Tensor, tiles: Tensor, total: Tensor
    ) -> None:
        """total[0] = the sum of squares of all touched segments, in float64, added in an order that never changes.

        Tiles of segments that are TOUCHED but not FRESH are read again first and become FRESH.

        total: float64[TOTAL]; what comes after total[0] is the operator's workspace: zeros when a tensor is first
            given, and left alone by everybody else. Mutates partials, marks, total.
        """
        ...

    def close_window(
        self,
        scalars: Tensor,
        steps: Tensor,
        marks: Tensor,
        live: Tensor | None,
        total: Tensor,
        divisor: Tensor,
        max_norm: float,
        skip_nonfinite: bool,
    ) -> None:
        """Turn the window's sum of squares into what the step reads, and count the update.

            skip       = 1 if divisor == 0, or skip_nonfinite and total is not finite, else 0
            norm       = sqrt(total) / divisor                              (0 if divisor == 0)
            multiplier = 1 / divisor * min(1, max_norm / (norm + 1e-6))     (0 if skip)
            steps[k]  += 1 for every touched segment (that is live), unless skip

        The clip factor is that of `torch.nn.utils.clip_grad_norm_`; a norm that is not a number makes the multiplier
        not a number, as there. Computed in float64, rounded once.

        total: float64[1], the sum over all devices. divisor: float64[1]. max_norm: infinity means no clipping: the
            factor is 1, whatever the norm. Mutates scalars, steps.
        """
        ...

    def rescale(self, flat: Tensor, marks: Tensor, segments: Tensor, tiles: Tensor, factor: Tensor) -> None:
        """flat *= factor[0] on every touched segment. factor: float32[1]. Mutates flat, marks (FRESH is cleared)."""
        ...

    def emit(
        self,
        flat: Tensor,
        marks: Tensor,
        live: Tensor | None,
        segments: Tensor,
        tiles: Tensor,
        scalars: Tensor,
        grads: Sequence[Tensor],
    ) -> None:
        """grads[k] = flat * multiplier, rounded once to grads[k]'s dtype, for every touched segment. Mutates grads.

        Where skip is set the grads are left as they are.
        """
        ...

    def adam(
        self,
        flat: Tensor,
        marks: Tensor,
        live: Tensor | None,
        segments: Tensor,
        tiles: Tensor,
        scalars: Tensor,
        steps: Tensor,
        groups: Tensor,
        hyper: Tensor,
        params: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        max_exp_avg_sqs: Sequence[Tensor],
        masters: Sequence[Tensor],
        random: Tensor | None,
        zero: bool,
    ) -> None:
        """Adam and AdamW (torch.optim.Adam; `decoupled` = 1 for AdamW) on every touched segment.

        With g = flat * multiplier, negated where `maximize`; p = the master where there is one, else the parameter:

            p      = p - lr * weight_decay * p          where decoupled,    g = g + weight_decay * p    elsewhere
            m      = m + (1 - beta1) * (g - m)
            v      = beta2 * v + (1 - beta2) * g * g
            v_hat  = max(v_max, v) where amsgrad (v_max is stored), else v
            p      = p - lr / (1 - beta1^step) * m / (sqrt(v_hat) / sqrt(1 - beta2^step) + eps)

        Formula: Kingma and Ba 2015, Loshchilov and Hutter 2019, Reddi et al. 2018, as torch.optim computes them. Step
        sizes, bias corrections and 1 - beta are computed in float64 and rounded once.

        A weight decay of 0 is left out (p may be infinite), and so is v_max where the segment has none.
        The master takes the new p, the parameter its rounding. A moment may have another dtype than the parameter; an
        update of p uses the moments before they are rounded to their dtype.
        zero: store +0.0 to flat in the same pass (on every touched segment, skipped windows too).
        Where skip is set, nothing but that zeroing is written.

        Mutates flat (only with zero), params, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, masters.
        """
        ...

    def sgd(
        self,
        flat: Tensor,
        marks: Tensor,
        live: Tensor | None,
        segments: Tensor,
        tiles: Tensor,
        scalars: Tensor,
        steps: Tensor,
        groups: Tensor,
        hyper: Tensor,
        params: Sequence[Tensor],
        momentum_buffers: Sequence[Tensor],
        masters: Sequence[Tensor],
        random: Tensor | None,
        zero: bool,
    ) -> None:
        """Stochastic gradient descent as in torch.optim.SGD, on every touched segment.

        With g = flat * multiplier, negated where `maximize`, and p as in `adam`:

            g = g + weight_decay * p
            b = g at the segment's first update (step == 1), else momentum * b + (1 - dampening) * g
            g = g + momentum * b where nesterov, else b
            p = p - lr * g

        The two lines with b are left out where momentum is 0 or the segment has no momentum buffer. A weight
        decay of 0 is left out. zero, skip, masters, random as in `adam`.

        Mutates flat (only with zero), params, momentum_buffers, masters.
        """
        ...
