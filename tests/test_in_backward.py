"""fold="backward" gives what fold="step" gives, by bits, where a parameter has one gradient in a micro-batch."""

from __future__ import annotations

import pytest
import torch
from backward_runs import (
    BUCKETS,
    BYTE,
    SHAPES,
    assert_alike,
    give,
    gradients,
    held,
    plain,
    sgd_pair,
    start_values,
    train,
)
from torch.optim import SGD, AdamW
from wrapper_helpers import (
    DTYPES,
    LOW_PRECISION,
    MAKERS,
    Toy,
    both_updates,
    every_maker,
    recorded,
    refused,
    tidy,  # noqa: F401
    use_two_buffers,
    wrap,
)

from fusedaccum import FusedAccumOptimizer

pytestmark = LOW_PRECISION
every_bucket = pytest.mark.parametrize("bucket", BUCKETS.values(), ids=BUCKETS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# One parameter has its last gradient in the window's first micro-batch, one in the third, one none in the second.
ABSENT = {(1, 0), (2, 0), (3, 0), (3, 3), *((k, 1) for k in range(4, 8))}


@every_maker
@both_updates
@every_dtype
@every_bucket
def test_two_windows(bucket, dtype, update, make):
    assert_alike(make, dtype, plain(8), bucket, update=update)


@both_updates
@every_dtype
@every_bucket
def test_clipped_with_gradients_that_are_missing(bucket, dtype, update):
    """The norm is that of the window, whatever came in its last micro-batch."""
    seen = assert_alike(MAKERS["adamw"], dtype, plain(8), bucket, update=update, max_norm=0.5, absent=ABSENT)
    assert float(seen[-1]["norm"]) > 0.5


COUNTS = {
    "mean_of": lambda k: {"mean_of": k + 1},
    "sum_of": lambda k: {"sum_of": 2.5 * k + 1},
    "both, and none": lambda k: ({"mean_of": 3}, {"sum_of": 5}, {"mean_of": 0}, {"sum_of": 0.0})[k % 4],
    "on the device": lambda k: {"mean_of" if k % 2 else "sum_of": torch.tensor([3.0, 7.0, 0.0, 1.0][k % 4])},
    "all zero": lambda k: {"mean_of": 0} if k < 4 else {"sum_of": 2},
    "all zero on the device": lambda k: {"mean_of": torch.tensor(0.0 if k < 4 else 2.0)},
}


@both_updates
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bucket", [BYTE, 25])
@pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS)
def test_item_counts_ahead_of_the_backward(count, bucket, dtype, update):
    calls = [(k, count(k)) for k in range(8)]
    assert_alike(MAKERS["sgd"], dtype, calls, bucket, update=update, max_norm=1.0)


@pytest.mark.parametrize("options", [{"reduction": "sum"}, {"steps": 3}, {"steps": lambda k: 1 + k % 2}], ids=str)
@pytest.mark.parametrize("bucket", [BYTE, 25])
def test_other_windows(bucket, options):
    calls = [*plain(5), "flush", *plain(2), "reset", *plain(3), "flush"]
    assert_alike(MAKERS["sgd"], torch.bfloat16, calls, bucket, max_norm=2.0, **options)


PRECISION = {
    "masters": {"master_weights": True},
    "masters and moments": {"master_weights": True, "state_dtype": torch.float32},
    "stochastic": {"rounding": "stochastic", "rounding_seed": 5},
}


@pytest.mark.parametrize("options", PRECISION.values(), ids=PRECISION)
@every_bucket
def test_parameters_of_low_precision(bucket, options):
    assert_alike(MAKERS["adamw"], torch.bfloat16, plain(12), bucket, **options)


@both_updates
@pytest.mark.parametrize("bad", [0, 3], ids=["first", "last"])
@pytest.mark.parametrize("bucket", [BYTE, 25])
def test_a_window_that_is_skipped(bucket, bad, update):
    options = {"update": update, "nonfinite": "skip_window", "bad": {bad}}
    seen = assert_alike(MAKERS["sgd"], torch.float32, plain(8), bucket, **options)
    assert [entry["skipped"] for entry in seen] == [0] * 3 + [1] * 5
    assert [entry["updated"] for entry in seen] == [False] * 7 + [True]


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_other_backends(backend):
    assert_alike(MAKERS["adamw"], torch.bfloat16, plain(4), 100 * BYTE, backend=backend, absent=ABSENT, max_norm=0.5)


@every_bucket
def test_two_devices(monkeypatch, bucket):
    use_two_buffers(monkeypatch)
    assert_alike(MAKERS["adamw"], torch.float32, plain(8), bucket, absent=ABSENT, max_norm=0.5)


def test_nothing_at_all():
    """Micro-batches without a backward count, as in fold="step"."""
    seen = assert_alike(MAKERS["sgd"], torch.float32, plain(5), 25, absent={(k, j) for k in (0, 1) for j in range(8)})
    assert [entry["window"][0] for entry in seen] == [1, 2, 3, 0, 1]


# A backward that counts, and the calls around it


@both_updates
@pytest.mark.parametrize("count", [None, {"mean_of": 3}, {"sum_of": 5}], ids=str)
def test_flush_behind_a_backward_counts_it(count, update):
    """As its step() would have done."""
    results = []
    for with_step in (True, False):
        params = start_values(torch.float32)
        w = wrap(MAKERS["sgd"](params), 4, fold="backward", update=update)
        for k in range(2):
            w.micro_batch(**(count or {}))
            give(params, gradients(k, params))
            if k == 0 or with_step:
                w.step()
        assert w.flush()
        assert (w.pending, w.updates) == (0, 1)
        results.append([p.detach().clone() for p in params])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("steps", [4, 3])
@pytest.mark.parametrize("count", [int, torch.tensor])
def test_a_sum_whose_count_step_gives(count, steps):
    """It only divides: the first one of a window takes 1/N back, exactly where N is a power of two."""
    toys = [Toy(steps, fold=fold) for fold in ("step", "backward")]
    for toy in toys:
        for k in range(2 * steps):
            toy.micro(k + 1, sum_of=count(k + 2))
    assert toys[1].value == pytest.approx(toys[0].value, rel=0 if steps == 4 else 1e-6)
    assert toys[0].value == pytest.approx(-10 / 14 - 26 / 30 if steps == 4 else -6 / 9 - 15 / 18)


def test_a_mean_whose_count_comes_too_late():
    toy = Toy(4, fold="backward")
    toy.micro(1, sum_of=1)
    toy.backward(4)
    with refused(toy.w, "micro_batch", "reset"):
        toy.w.step(mean_of=2)
    with refused(toy.w, "before the backward"):
        toy.w.micro_batch(mean_of=2)
    toy.w.step(sum_of=1)
    assert toy.w.flush()
    assert toy.value == -2.5
    toy.w.micro_batch(mean_of=2)
    toy.backward(3)
    with refused(toy.w, "another by step"):
        toy.w.step(sum_of=2)
    toy.w.step()
    toy.w.flush()
    assert toy.value == -5.5


def test_plain_and_weighted_do_not_mix():
    toy = Toy(4, fold="backward")
    toy.micro(1)
    with refused(toy.w, "plain"):
        toy.w.micro_batch(mean_of=2)
    toy.backward(1)
    with refused(toy.w, "plain"):
        toy.w.step(sum_of=2)
    toy.w.step()
    toy.w.reset()
    toy.micro(1, sum_of=1)
    toy.backward(5)
    with refused(toy.w, "weighted"):
        toy.w.step()
    toy.w.step(sum_of=2)
    toy.w.flush()
    assert toy.value == -2.0


def test_what_zero_grad_cannot_take_back_and_reset_can():
    toy = Toy(2, fold="backward")
    toy.backward(8)
    toy.w.zero_grad()
    assert held(toy.w, [toy.p]) == [4.0]
    toy.w.reset()
    assert held(toy.w, [toy.p]) == [0.0]
    toy.run([1, 3])
    assert toy.value == -2.0


def test_a_closure_runs_the_backward():
    toy = Toy(2, fold="backward")

    def closure():
        assert toy.w.zero_grad() is None
        toy.backward(3)
        return 3.5

    assert [toy.w.step(closure) for _ in range(4)] == [3.5] * 4
    assert toy.value == -6.0


def test_gradients_set_by_hand_and_a_backward():
    """step() folds what no hook has seen, with the rest of its micro-batch."""
    params, w = sgd_pair()
    for _ in range(2):
        (params[0] * 3).sum().backward()
        params[1].grad = torch.full((2,), 5.0)
        w.step()
    assert [p[0].item() for p in params] == [2.0 - 3.0, 3.0 - 5.0]


def test_parameters_stay_before_the_boundary():
    toy = Toy(4, fold="backward")
    for k in range(3):
        toy.backward(k + 1)
        assert toy.p.grad is None
        toy.w.step()
        assert toy.value == 0.0
    assert toy.w.will_update
    toy.micro(4)
    assert (toy.value, toy.w.grad_norm) == (-2.5, 2.5)


def test_lengths_set_inside_a_micro_batch():
    """A window that a backward has begun keeps its length."""
    toy = Toy(2, fold="backward")
    toy.backward(1)
    toy.w.steps = 1
    assert not toy.w.will_update
    toy.w.step()
    assert (toy.w.pending, toy.value) == (1, 0.0)
    toy.micro(3)
    assert toy.value == -2.0
    toy.micro(3)
    assert toy.value == -5.0


# What is refused


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("bad", [False, True])
def test_a_grad_scaler_is_refused(bad, early):
    """It finds no gradient to look at: never torch's own assertion."""
    toy, scaler = Toy(2, fold="backward"), torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale((toy.p * (torch.inf if bad else 1.0)).sum()).backward()
    if early:
        scaler.unscale_(toy.w)  # finds nothing to do, and asks the optimizer nothing
    with pytest.raises(RuntimeError, match="fold='step'"):
        scaler.step(toy.w)
    assert toy.value == 0.0


REFUSED = {
    "skip_micro": ({"nonfinite": "skip_micro"}, "skip_window"),
    "raise": ({"nonfinite": "raise"}, "skip_window"),
    "amp_scaling": ({"amp_scaling": True}, "fold='step'"),
    "steps=None": ({"steps": None}, "fold"),
    "no bucket": ({"bucket_mb": 0}, "above 0"),
    "negative": ({"bucket_mb": -1.0}, "above 0"),
    "infinite": ({"bucket_mb": float("inf")}, "finite"),
    "text": ({"bucket_mb": "25"}, "number of MiB"),
    "true": ({"bucket_mb": True}, "number of MiB"),
    "bucket without fold": ({"fold": "step", "bucket_mb": 1}, "fold='backward'"),
    "unknown": ({"fold": "forward"}, "'step', 'backward'"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_options_that_are_refused(case):
    options, words = case
    p = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises((TypeError, ValueError), match=words):
        FusedAccumOptimizer(SGD([p], lr=1.0), **({"steps": 2, "fold": "backward"} | options))
    assert not p._post_accumulate_grad_hooks


# A real model


def test_a_model_trains_alike():
    """Convolution, embedding, norm layers, a tied weight."""
    results = []
    for fold in ("step", "backward"):
        torch.manual_seed(0)
        embed, conv = torch.nn.Embedding(10, 8), torch.nn.Conv1d(8, 8, 3, padding=1)
        norm, head = torch.nn.LayerNorm(8), torch.nn.Linear(8, 10, bias=False)
        head.weight = embed.weight
        model = torch.nn.ModuleList([embed, conv, norm, head])
        w = wrap(AdamW(model.parameters(), lr=0.01), 2, fold=fold, max_norm=1.0)
        for k in range(6):
            tokens = torch.randint(0, 10, (3, 7), generator=torch.Generator().manual_seed(k))
            x = norm(conv(embed(tokens).transpose(1, 2)).transpose(1, 2))
            torch.nn.functional.cross_entropy(head(x).flatten(0, 1), tokens.flatten()).backward()
            w.step()
            w.zero_grad()
        results.append([p.detach().clone() for p in model.parameters()] + [torch.tensor(w.grad_norm)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_runs_differ_where_gradients_do():
    """`train` sees what it is meant to see."""
    a, b = (train("backward", MAKERS["sgd"], torch.float32, plain(4), absent=absent) for absent in ((), {(3, 7)}))
    assert a[2] == b[2]
    assert [key for key in a[3] if a[3][key] != b[3][key]] == ["params", "state", "norm"]
    assert len(SHAPES) == 8


def test_zero_grad_says_once_that_it_drops_nothing_that_was_folded():
    p = torch.nn.Parameter(torch.zeros(1))
    w = wrap(SGD([p], lr=1.0), 1, fold="backward")
    with recorded() as caught:
        for g in (100, 1):  # as a GAN's generator leaves gradients in the discriminator
            w.zero_grad()
            (p * g).sum().backward()
        w.zero_grad()
        w.step()
        w.zero_grad()
    assert [("reset()" in str(w.message), "folded" in str(w.message)) for w in caught] == [(True, True)]
    assert p.item() == -101
