"""What the machine of tests/stateful.py draws, and how it compares."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from hypothesis.stateful import rule
from stateful_model import Count

SIZES = (1, 67, 3)
MOST = 4  # parameters, those of groups that are added later included
MIXED = (torch.float32, torch.float32, torch.bfloat16, torch.float16)
# How parameters of low precision are treated, and the dtypes that parameters have then.
LOW = {
    None: (torch.float32,),
    "masters": MIXED,
    "state": MIXED,
    "plain": MIXED,
    "stochastic": (torch.float32, torch.bfloat16, torch.bfloat16),
}
PRECISION = [("wrapped", None), ("wrapped", "plain"), ("wrapped", "plain"), ("fused", None), ("fused", "plain")]
PRECISION += [("fused", "masters")] * 2 + [("fused", "state")] + [("fused", "stochastic")] * 2


@dataclass(frozen=True)
class Lengths:
    """`steps` as a function of the coming update."""

    cycle: tuple

    def __call__(self, update):
        return self.cycle[update % len(self.cycle)]


@dataclass(frozen=True)
class Call:
    """A micro-batch. bad: (parameter, value) that is not finite. count: an item count, used where the window already
    counts items, or `counted` in one that is new. said: where the count is given. inside: the backward, of a closure.
    sparse: parameters whose gradient is. scaled: whether a GradScaler, where there is one, scales the loss, and calls
    step(). scale: what it is set to afterwards, None where it decides.
    """

    grads: list
    bad: tuple | None
    count: Count
    counted: bool
    said: str
    inside: bool
    sparse: tuple
    scaled: str
    scale: float | None


# One draw each, of a list that says how often what comes: drawing is most of the machine's time.
GRADIENTS = [None] * 8 + list(range(-8, 9))
SPARSE = [()] * 5 + [(0,), (1,), (2,), (1, 3), (0, 1, 2, 3)]
NOT_FINITE = [None] * 24 + [(k, bad) for k in range(MOST) for bad in (math.inf, -math.inf, math.nan)]
COUNTS = [Count(word, n, on) for word in ("mean_of", "sum_of") for n in (0, 1, 2, 3, 0.5) for on in (False, True)]

# Of fold="backward", in MiB: every gradient alone, some together, all.
BYTE = 2.0**-20
BUCKETS = [None] * 3 + [BYTE, 272 * BYTE, 25]
IN_BACKWARD = ("propagate", "skip_window")  # the policies it takes

POLICIES = ["propagate", "skip_window", "skip_micro", "skip_micro", "raise"]
EDITS = [None] + [(k, factor) for k in range(2) for factor in (0.5, 0.0, -2.0)]

steps_drawn = st.integers(1, 4) | st.builds(Lengths, st.tuples(st.integers(1, 3), st.integers(1, 3)))
grads_drawn = st.lists(st.sampled_from(GRADIENTS), min_size=MOST, max_size=MOST)
sparse_drawn = st.sampled_from(SPARSE)
bad_drawn = st.sampled_from(NOT_FINITE)
calls_drawn = st.builds(
    Call,
    grads=grads_drawn,
    bad=bad_drawn,
    count=st.sampled_from(COUNTS),
    counted=st.sampled_from([False, False, True]),
    said=st.sampled_from(["step", "step", "before", "closure"]),
    inside=st.booleans(),
    sparse=sparse_drawn,
    scaled=st.sampled_from(["no", "yes", "yes", "unscaled first"]),
    scale=st.sampled_from([None] * 5 + [0.5, 4.0, 64.0]),
)
few_calls = st.lists(calls_drawn, max_size=3)
which = st.integers(0, MOST - 1)


def event(**drawn):
    """A rule after which some micro-batches follow: what it has done to the window shows in them."""

    def decorate(function):
        def with_calls(self, then, **given):
            function(self, **given)
            self.agree()
            self.make_calls(then)

        with_calls.__name__ = function.__name__
        return rule(then=few_calls, **drawn)(with_calls)

    return decorate


def pattern(n: int) -> torch.Tensor:
    """Elements that differ, all powers of two: sums of integers times these are exact."""
    k = torch.arange(n)
    return (1 - 2.0 * (k % 2)) * 2.0 ** ((k * 5) % 3 - 1)


def read(tensor) -> torch.Tensor:
    """In float64, dense: a sparse tensor as the sum of its entries, each index as often as it stands there."""
    tensor = tensor.detach()
    if tensor.is_sparse:
        entries = tensor._values().double()
        return torch.sparse_coo_tensor(tensor._indices(), entries, tensor.shape, check_invariants=False).to_dense()
    return tensor.double().clone()


def sparse_loss(p, values) -> torch.Tensor:
    """A loss whose gradient is sparse, with `values` and, for half of the indices once more, a 512th of them: together
    they need more bits than bfloat16 has.
    """
    half = (p.numel() + 1) // 2
    index = torch.cat([torch.arange(p.numel()), torch.arange(half)])
    entries = torch.cat([values, values[:half] / 512])
    return (p.gather(0, index, sparse_grad=True) * entries.to(p.dtype)).sum()


def as_arguments(count) -> dict:
    return {count.word: torch.tensor(count.items) if count.on_device else count.items} if count.word else {}


def close(seen, want, error, what):
    """Elements that are not finite must be the same, the others within their error."""
    seen = read(seen)
    same = (seen == want) | (seen.isnan() & want.isnan())
    wrong = ~(same | ((seen - want).abs() <= error))
    if bool(wrong.any()):
        error = torch.as_tensor(error, dtype=torch.float64).expand_as(want)
        raise AssertionError(
            f"{what}: {int(wrong.sum())} elements differ, the first is {seen[wrong][0]:.9g}, not {want[wrong][0]:.9g} "
            f"within {error[wrong][0]:.3g}"
        )
