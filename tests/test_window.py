"""Windows of any shape against a plain float64 model: counts, weights, touch, norm, flush, reset, steps."""

from __future__ import annotations

import gc
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.optim import SGD, AdamW
from wrapper_helpers import bits, params_of, set_grads, tidy, wrap  # noqa: F401

EPS = torch.finfo(torch.float32).eps
SIZES = (1, 65, 3)


def quick(examples):
    return settings(max_examples=examples, suppress_health_check=[HealthCheck.function_scoped_fixture])


@dataclass(frozen=True)
class Micro:
    grads: tuple  # per parameter: a number for all of its elements, or None
    word: str | None = None  # None | "mean_of" | "sum_of"
    items: int = 0
    as_tensor: bool = False
    said: str = "step"  # where the weight is said: "step" | "micro_batch"


@dataclass(frozen=True)
class Window:
    steps: int
    micros: tuple
    end: str  # "boundary" | "flush" | "reset"
    set_early: bool  # `steps` was set inside the window before


gradients = st.tuples(*[st.none() | st.integers(-64, 64)] * len(SIZES))
plain = st.builds(Micro, gradients)
weighted = st.builds(
    Micro,
    gradients,
    st.sampled_from(["mean_of", "sum_of"]),
    st.integers(0, 5),
    st.booleans(),
    st.sampled_from(["step", "micro_batch"]),
)


@st.composite
def windows(draw):
    steps, end = draw(st.integers(1, 5)), draw(st.sampled_from(["boundary", "boundary", "flush", "reset"]))
    count = steps if end == "boundary" else draw(st.integers(0, steps - 1))
    kind = draw(st.sampled_from([plain, weighted]))
    micros = draw(st.lists(kind, min_size=count, max_size=count))
    return Window(steps, tuple(micros), end, draw(st.booleans()))


class Model:
    """What the words say, in float64, without any of the code: each parameter is one number."""

    def __init__(self):
        self.values, self.slack = [0.0] * len(SIZES), [0.0] * len(SIZES)
        self.updates, self.updated, self.norm = 0, False, None
        self.open()

    def open(self):
        self.sums, self.sizes, self.calls, self.items, self.weighted = [None] * len(SIZES), [0.0] * len(SIZES), 0, 0, 0

    def fold(self, micro):
        self.calls += 1
        self.updated = False
        self.weighted += micro.word is not None
        self.items += micro.items
        scale = micro.items if micro.word == "mean_of" else 1
        if micro.word and micro.items == 0:
            return  # as a number and as a tensor: nothing is touched
        for k, g in enumerate(micro.grads):
            if g is not None:
                self.sums[k] = (self.sums[k] or 0) + scale * g
                self.sizes[k] += abs(scale * g)

    def close(self):
        divisor = self.items if self.weighted else self.calls
        touched = [k for k, s in enumerate(self.sums) if s is not None]
        self.updated = bool(touched) and divisor > 0
        if self.updated:
            self.updates += 1
            self.norm = math.sqrt(sum(SIZES[k] * (self.sums[k] / divisor) ** 2 for k in touched))
            for k in touched:
                self.values[k] -= self.sums[k] / divisor
                rounded = (self.calls + 3) * self.sizes[k] / divisor + abs(self.values[k])
                self.slack[k] += EPS * rounded
            self.norm_slack = (
                EPS * (self.calls + 4) * sum(math.sqrt(SIZES[k]) * self.sizes[k] / divisor for k in touched)
            )
        self.open()


def play(w, params, micro):
    pairs = zip(micro.grads, SIZES, strict=True)
    set_grads(params, [None if g is None else torch.full((n,), float(g)) for g, n in pairs])
    items = torch.tensor(micro.items) if micro.as_tensor else micro.items
    weight = {micro.word: items} if micro.word else {}
    if weight and micro.said == "micro_batch":
        w.micro_batch(**weight)
        weight = {}
    w.step(**weight)


def agree(w, params, model, steps):
    assert (w.pending, w.updates, w.updated) == (model.calls, model.updates, model.updated)
    assert w.will_update == (w.pending == steps - 1)
    assert w.skipped_micro_batches == 0
    for p, value, slack in zip(params, model.values, model.slack, strict=True):
        assert p.grad is None
        assert (p.detach().double() - value).abs().max() <= slack, (p, value)
    share = 1 if model.weighted else 1 / steps
    for p, total, size in zip(params, model.sums, model.sizes, strict=True):
        held = w.master_grad(p).double()
        assert (held - (total or 0) * share).abs().max() <= EPS * (model.calls + 2) * size * share
    if model.norm is not None and model.calls == 0 and w.updated:
        assert abs(float(w.grad_norm) - model.norm) <= model.norm_slack


def run_windows(sequence, **options):
    params = [torch.nn.Parameter(torch.zeros(n)) for n in SIZES]
    w, model = wrap(SGD(params, lr=1.0), 1, **options), Model()
    following = [*sequence[1:], None]
    w.steps = sequence[0].steps
    for window, after in zip(sequence, following, strict=True):
        steps = window.steps
        for k, micro in enumerate(window.micros):
            play(w, params, micro)
            model.fold(micro)
            if len(window.micros) == k + 1 and window.end == "boundary":
                model.close()
                steps = w.steps
            elif after and after.set_early:
                w.steps = after.steps
            agree(w, params, model, steps)
        if window.end == "flush":
            was_open = model.calls > 0
            closed = w.flush()
            model.close()
            assert closed is model.updated if model.updated or not was_open else True
        elif window.end == "reset":
            w.reset()
            model.open()
            model.updated = False
        if after:
            w.steps = after.steps
        agree(w, params, model, after.steps if after else w.steps)


@quick(80)
@given(st.lists(windows(), min_size=1, max_size=5))
def test_windows_of_the_fused_update(sequence):
    run_windows(sequence, update="fused")


@quick(40)
@given(st.lists(windows(), min_size=1, max_size=4))
def test_windows_of_the_wrapped_update(sequence):
    run_windows(sequence, update="wrapped")


@quick(40)
@given(st.lists(windows(), min_size=1, max_size=3))
def test_windows_of_the_reference_backend(sequence):
    run_windows(sequence, backend="reference")


@quick(60)
@given(st.permutations([0, 1, 2, 3]), st.lists(gradients, min_size=4, max_size=4))
def test_the_order_of_micro_batches_does_not_matter(order, micros):
    """Integers over a power of two add without rounding: the same bits in any order."""
    results = []
    for chosen in (range(4), order):
        params = [torch.nn.Parameter(torch.full((n,), 0.1)) for n in SIZES]
        w = wrap(SGD(params, lr=1.0), 4)
        for k in chosen:
            play(w, params, Micro(micros[k]))
        results.append([bits(p) for p in params])
    assert results[0] == results[1]


@quick(60)
@given(st.lists(st.lists(gradients, min_size=2, max_size=2), min_size=1, max_size=6), st.sampled_from([None, 2.0]))
def test_touch_and_step_counts_of_adamw(sequence, max_norm):
    """A parameter without a gradient in a window keeps value, moments and step count: as stock torch in float64."""
    ours = [torch.nn.Parameter(torch.ones(n)) for n in SIZES]
    truth = [torch.nn.Parameter(torch.ones(n, dtype=torch.float64)) for n in SIZES]
    options = {"lr": 0.1, "weight_decay": 0.2, "eps": 0.5, "betas": (0.5, 0.75)}
    w, bare = wrap(AdamW(ours, **options), 2, max_norm=max_norm), AdamW(truth, **options)
    for micros in sequence:
        before = [bits(p) for p in ours]
        for grads in micros:
            play(w, ours, Micro(grads))
        for k, p in enumerate(truth):
            given_ = [m[k] for m in micros if m[k] is not None]
            p.grad = torch.full_like(p, sum(given_) / 2) if given_ else None
            if p.grad is None:
                assert bits(ours[k]) == before[k]
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(truth, max_norm)
        bare.step()
    for p, q in zip(ours, truth, strict=True):
        torch.testing.assert_close(p.detach().double(), q.detach(), rtol=0, atol=len(sequence) * 32 * EPS)
        assert (q in bare.state) == bool(w.state.get(p))
        if q in bare.state:
            assert w.state[p]["step"].item() == bare.state[q]["step"].item()


POISON = (float("nan"), float("inf"), 1e30)


@pytest.mark.parametrize("update", ["fused", "wrapped"])
@pytest.mark.parametrize("poison", POISON)
def test_what_reset_dropped_never_comes_back(poison, update):
    """Stale values of an earlier window reach neither the sum, nor the norm, nor an update."""
    params = [torch.nn.Parameter(torch.zeros(n)) for n in SIZES]
    w = wrap(SGD(params, lr=1.0, momentum=0.5, weight_decay=0.1), 2, max_norm=1e6, update=update)
    play(w, params, Micro((poison,) * 3))
    w.reset()
    for grads in ((2, None, None), (4, None, None)):
        play(w, params, Micro(grads))
    assert float(w.grad_norm) == pytest.approx(3.0)
    assert params[0].item() == pytest.approx(-3.0)
    assert not params[1].any()
    assert not params[2].any()
    assert not w.master_grad(params[1]).any()
    for grads in ((None, 1, None), (None, 1, 2)):
        play(w, params, Micro(grads))
    assert float(w.grad_norm) == pytest.approx(math.sqrt(65 + 3))
    assert params[1].tolist() == pytest.approx([-1.0] * 65)
    assert params[0].item() == pytest.approx(-3.0)


@pytest.mark.parametrize("update", ["fused", "wrapped"])
def test_what_an_earlier_window_summed_is_not_in_the_norm(update):
    params = [torch.nn.Parameter(torch.zeros(n)) for n in SIZES]
    w = wrap(SGD(params, lr=1.0), 2, max_norm=1.0, update=update)
    for grads in ((1e6, 1e6, 1e6), (1e6, 1e6, 1e6)):
        play(w, params, Micro(grads))
    before = [bits(p) for p in params[1:]]
    first = params[0].item()
    play(w, params, Micro((0.5, None, None)))
    w.flush()
    assert float(w.grad_norm) == pytest.approx(0.5)
    assert params[0].item() == pytest.approx(first - 0.5, rel=1e-5)
    assert [bits(p) for p in params[1:]] == before


def test_a_weight_said_before_is_used_once():
    """micro_batch() speaks of one micro-batch; the next is unweighted again, and mixing the two is refused."""
    params = [torch.nn.Parameter(torch.zeros(n)) for n in SIZES]
    w = wrap(SGD(params, lr=1.0), 2)
    play(w, params, Micro((1, 1, 1), "mean_of", 3, said="micro_batch"))
    with pytest.raises(ValueError, match="weight"):
        play(w, params, Micro((1, 1, 1)))
    assert w.pending == 1
    assert params_of(w)[0].item() == 0.0


def test_reset_forgets_a_weight_that_was_said():
    params = [torch.nn.Parameter(torch.zeros(n)) for n in SIZES]
    w = wrap(SGD(params, lr=1.0), 2)
    w.micro_batch(mean_of=7)
    w.reset()
    for g in (1, 3):
        play(w, params, Micro((g, g, g)))
    assert [p[0].item() for p in params] == [-2.0] * 3


def test_weights_may_be_fractions():
    params = [torch.nn.Parameter(torch.zeros(n)) for n in SIZES]
    w = wrap(SGD(params, lr=1.0), 2)
    play(w, params, Micro((1, 1, 1), "mean_of", 0.25))
    play(w, params, Micro((5, 5, 5), "mean_of", 0.75))
    assert [p[0].item() for p in params] == [-4.0] * 3


def test_totals_beyond_the_integers_of_float32():
    """2^24 + 1 items: the divisor is exact, on the host and on the device."""
    for of in (int, torch.tensor):
        p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float32))
        w = wrap(SGD([p], lr=1.0), 3)
        for total, items in ((2**24, 2**24), (2, 1), (0, 1)):
            set_grads([p], [torch.tensor([float(total)])])
            w.step(sum_of=of(items))
        assert p.item() == -1.0


def live_tensors():
    gc.collect()
    return sum(type(o) is torch.Tensor for o in gc.get_objects())


@pytest.mark.parametrize("weight", [None, 2, torch.tensor(2)], ids=["plain", "number", "tensor"])
@pytest.mark.parametrize("update", ["fused", "wrapped"])
def test_nothing_piles_up_while_nobody_reads(update, weight):
    params = [torch.nn.Parameter(torch.zeros(n)) for n in SIZES]
    w = wrap(AdamW(params, lr=0.1), 2, max_norm=1.0, update=update)

    def windows_pass(count):
        for _ in range(2 * count):
            set_grads(params, [torch.ones(n) for n in SIZES])
            w.step(mean_of=weight)

    windows_pass(5)
    before = live_tensors()
    windows_pass(50)
    assert live_tensors() <= before + 10
    assert w.updates == 55
