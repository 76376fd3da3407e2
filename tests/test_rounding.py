"""rounding="stochastic" in the wrapper: small updates survive, and one seed gives one result, whatever else changes."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from torch.optim import SGD, AdamW
from wrapper_helpers import (
    LOW_PRECISION,
    Toy,
    bits,
    every_maker,
    make_windows,
    params_of,
    refused,
    set_grads,
    tidy,  # noqa: F401
    train_wrapped,
    use_two_buffers,
    wrap,
)

pytestmark = LOW_PRECISION

BF16 = torch.bfloat16
SHAPES = [(33,), (5, 7), (), (0,), (4097,), (4, 3, 2, 2)]
STOCHASTIC = {"rounding": "stochastic"}


def build(make=lambda params: SGD(params, lr=0.01, momentum=0.9), shapes=SHAPES, steps=2, **options):
    random = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter((torch.rand(s, generator=random) + 0.5).to(BF16)) for s in shapes]
    return wrap(make(params), steps, **STOCHASTIC | options)


def windows_of(count, shapes=SHAPES, seed=0):
    return make_windows(shapes, count, 2, BF16, seed)


def trained(windows=3, **options):
    """The parameters' bits after some windows."""
    w = build(**options)
    train_wrapped(w, windows_of(windows))
    return [bits(p) for p in params_of(w)]


# Updates far below half of the last bit


def many(make, n=20_000, updates=100, start=0.5, **options):
    """n elements of a parameter that get a gradient of 1 in each update."""
    p = torch.nn.Parameter(torch.full((n,), start, dtype=BF16))
    w = wrap(make([p]), 1, **options)
    for _ in range(updates):
        p.grad = torch.ones_like(p)
        w.step()
    return p.detach().double()


@pytest.mark.parametrize("make", [lambda p: SGD(p, lr=1e-5), lambda p: AdamW(p, lr=1e-5, weight_decay=0.0)])
def test_updates_that_nearest_loses_add_up(make):
    """100 steps of 1e-5, each 1/195 of the spacing of bfloat16 below 0.5."""
    with pytest.warns(UserWarning, match=r"master_weights=True.*rounding='stochastic'"):
        stuck = many(make)
    assert (stuck == 0.5).all()
    p = many(make, **STOCHASTIC)
    # One rounding has at most the variance spacing^2 / 4, and those of 100 updates add up.
    deviation = math.sqrt(100 / 4) * 2.0**-8 / math.sqrt(len(p))
    assert abs(p.mean().item() - (0.5 - 1e-3)) < 5 * deviation
    assert len(p.unique()) > 1


def test_the_roundings_of_different_updates_are_independent():
    """64 steps of q spacings: each moves an element with probability q, a binomial count of variance 64 q (1 - q)."""
    q, spacing = 1 / 8, 2.0**-8
    p = many(lambda params: SGD(params, lr=q * spacing), updates=64, start=0.75, **STOCHASTIC)
    moves = (0.75 - p) / spacing
    assert abs(moves.mean().item() / (64 * q) - 1) < 0.02
    assert abs(moves.var().item() / (64 * q * (1 - q)) - 1) < 0.05  # 5 deviations of 1 % each


def test_a_loss_that_nearest_cannot_reach():
    """Gradient descent on (p - 0.3)^2: with nearest it stops where a step is below half a spacing."""

    def reached(**options):
        p = torch.nn.Parameter(torch.full((2000,), 0.5, dtype=BF16))
        w = wrap(SGD([p], lr=2e-3), 1, **options)
        for _ in range(1500):
            ((p.float() - 0.3) ** 2).sum().backward()
            w.step()
        return abs(p.float().mean().item() - 0.3)

    with pytest.warns(UserWarning, match="rounding"):
        assert reached() > 0.1
    assert reached(**STOCHASTIC) < 0.005


# One seed, one result


@every_maker
def test_every_backend_and_number_of_threads_gives_the_same_bits(make):
    want = trained(make=make, backend="compiled")
    assert want == trained(make=make, backend="reference")
    assert want == trained(make=make, backend="triton")
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert trained(make=make, backend="compiled") == want
    finally:
        torch.set_num_threads(threads)


def test_the_seed_decides_and_torchs_generator_has_no_part():
    torch.manual_seed(1)
    want = trained()
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert trained() == want == trained(rounding_seed=0)
    assert torch.equal(torch.get_rng_state(), before)
    others = [trained(rounding_seed=seed) for seed in (1, 2**62, 2**63 - 1)]
    assert all(one != two for k, one in enumerate([want, *others]) for two in others[k:])


def test_parameters_and_updates_have_numbers_of_their_own():
    """Two equal parameters, and one that is set back after its update, are rounded to other values."""
    w = build(lambda params: SGD(params, lr=2.0**-9), [(600,)] * 2, steps=1)
    p, q = params_of(w)
    seen = []
    for _ in range(3):
        for each in (p, q):
            each.data.fill_(0.5)
            each.grad = torch.full_like(each, -1)
        w.step()
        seen += [bits(p), bits(q)]
    assert len(set(seen)) == 6


def test_float32_parameters_are_updated_as_ever():
    toys = [Toy(2, lr=0.1, start=0.3, **options).run([1.1, 0.7] * 3) for options in ({}, STOCHASTIC)]
    assert toys[0].value == toys[1].value


# The numbers belong to the parameter, whatever surrounds it


def last_bits(w, windows, **changes):
    """The bits of the last parameter after training, with changes at the given windows."""
    for k, window in enumerate(windows):
        changes.get(f"at_{k}", lambda: None)()
        for grads in window:
            set_grads(params_of(w)[-1:], grads[-1:])
            w.step()
    return bits(params_of(w)[-1])


def test_a_second_device_changes_nothing(monkeypatch):
    want = trained(shapes=SHAPES)
    use_two_buffers(monkeypatch)
    assert trained(shapes=SHAPES) == want


def test_a_buffer_without_a_gradient_keeps_count(monkeypatch):
    """On two devices: the second one's parameter gets its gradients in the second window alone."""
    shapes = [(40,), (50,)]
    (one, two) = windows_of(2, shapes)
    found = []
    for split in (False, True):
        if split:
            use_two_buffers(monkeypatch)
        w = build(shapes=shapes)
        train_wrapped(w, [[[grads[0], None] for grads in one], two])
        found.append([bits(p) for p in params_of(w)])
    assert found[0] == found[1]


def test_frozen_parameters_change_nothing():
    shapes = [(40,), (5, 3), (600,)]
    windows = windows_of(4, shapes)
    want = last_bits(build(shapes=shapes), windows)
    frozen = build(shapes=shapes)
    first, second, _ = params_of(frozen)
    first.requires_grad_(False)
    changes = {"at_1": lambda: second.requires_grad_(False), "at_2": lambda: first.requires_grad_(True)}
    assert last_bits(frozen, windows, **changes) == want
    assert want != last_bits(build(shapes=shapes, rounding_seed=1), windows)


def test_groups_that_are_added_change_nothing():
    shapes = [(40,), (600,)]
    windows = windows_of(3, shapes)
    want, w = last_bits(build(shapes=shapes), windows), build(shapes=shapes)
    last = params_of(w)[-1]
    for k, window in enumerate(windows):
        if k == 1:
            w.add_param_group({"params": [torch.nn.Parameter(torch.ones(7, dtype=BF16))]})
        for grads in window:
            last.grad = grads[-1].clone()
            w.step()
    assert bits(last) == want


def test_a_parameter_whose_position_changes_has_its_new_numbers():
    """As an optimizer has them that was built in that order: what is saved says nothing of the past order."""
    shapes = [(600,), (40,)]
    first, second = windows_of(2, shapes)
    w = build(shapes=shapes)
    train_wrapped(w, [first])
    frozen = torch.nn.Parameter(torch.ones(3, dtype=BF16), requires_grad=False)
    w.param_groups[0]["params"].insert(0, frozen)
    new = build(lambda params: SGD([frozen, *params], lr=0.01, momentum=0.9), shapes)
    resume(w, new)
    for each in (w, new):
        train_wrapped(each, [[[None, *grads] for grads in second]])
    assert [bits(p) for p in params_of(w)] == [bits(p) for p in params_of(new)]


def test_unaligned_and_channels_last_parameters():
    """Elements are counted in memory order, wherever that begins."""
    kept = []
    for offset in (0, 1):
        whole = torch.full((offset + 96,), 0.5, dtype=BF16)
        p = torch.nn.Parameter(whole[offset:].view(2, 4, 4, 3).permute(0, 3, 1, 2))
        w = wrap(SGD([p], lr=2.0**-9), 1, **STOCHASTIC)
        p.grad = torch.full_like(p, -1)
        w.step()
        kept.append(bits(p.permute(0, 2, 3, 1)))
    assert kept[0] == kept[1]


# Saving and loading (tests/test_checkpoint.py and test_distributed_checkpoint.py go every way)


def resume(w, into):
    buffer = io.BytesIO()
    torch.save(w.state_dict(), buffer)
    buffer.seek(0)
    for p, q in zip(params_of(w), params_of(into), strict=True):
        q.data.copy_(p)
    into.load_state_dict(torch.load(buffer, weights_only=True))
    return into


def test_a_loaded_run_goes_on_with_the_saved_seed():
    windows = windows_of(4)
    w = build(rounding_seed=12345678901234567)
    train_wrapped(w, windows[:2])
    assert w.state_dict()["fusedaccum"]["rounding"] == (12345678901234567, 2)
    new = resume(w, build(rounding_seed=9))
    assert new.state_dict()["fusedaccum"]["rounding"] == (12345678901234567, 2)
    copies = [w, new, copy.deepcopy(new)]
    for each in copies:
        train_wrapped(each, windows[2:])
    assert len({tuple(bits(p) for p in params_of(each)) for each in copies}) == 1


@pytest.mark.parametrize("what", ["nearest", "an earlier release's", "bare"])
def test_a_dict_without_random_numbers_begins_anew(what):
    """With the seed that this wrapper was given."""
    w, fresh = build(rounding_seed=3), build(rounding_seed=3)
    train_wrapped(w, windows_of(2))
    saved = fresh.state_dict()
    if what == "nearest":
        saved["fusedaccum"]["rounding"] = ()
    elif what == "bare":
        del saved["fusedaccum"]
    else:
        del saved["fusedaccum"]["rounding"]
    assert w.state_dict()["fusedaccum"]["rounding"] == (3, 2)
    w.load_state_dict(saved)
    assert w.state_dict()["fusedaccum"]["rounding"] == (3, 0)


@LOW_PRECISION
def test_a_wrapper_that_rounds_to_nearest_leaves_random_numbers_out():
    w, nearest = build(), build(rounding="nearest")
    train_wrapped(w, windows_of(2))
    resume(w, nearest)
    assert nearest.updates == 2
    assert nearest.state_dict()["fusedaccum"]["rounding"] == ()


def test_skipped_windows_resume_to_the_same_bits():
    windows = windows_of(4)
    windows[1][0][0].view(-1)[0] = math.inf
    w = build(nonfinite="skip_window")
    train_wrapped(w, windows[:2])
    new = resume(w, build(nonfinite="skip_window"))
    for each in (w, new):
        train_wrapped(each, windows[2:])
    assert [bits(p) for p in params_of(w)] == [bits(p) for p in params_of(new)]
    assert (w.skipped_windows, w.updates) == (1, 3)


# What is refused


def half(*shape, dtype=torch.float16):
    return torch.nn.Parameter(torch.ones(shape, dtype=dtype))


WORDS = (r"torch\.float16", "rounding='stochastic'", "bfloat16", "master_weights=True")


def test_float16_parameters_are_refused_when_they_come():
    optimizer = SGD([half(3, dtype=BF16), half(2, 2)], lr=0.1)
    with refused(optimizer, r"parameter 1 of shape \(2, 2\)", *WORDS):
        wrap(optimizer, 2, **STOCHASTIC)
    w = build()
    train_wrapped(w, windows_of(1))
    with refused(w, rf"parameter {len(SHAPES)} of shape \(2, 2\)", *WORDS):
        w.add_param_group({"params": [half(2, 2)]})


def test_float16_parameters_are_refused_when_they_change():
    w = build()
    (window,) = windows_of(1)
    train_wrapped(w, [window])
    p = params_of(w)[0]
    p.data = p.data.half()
    set_grads(params_of(w), window[0])
    with refused(w, r"parameter 0 of shape \(33,\)", *WORDS):
        w.step()


def test_float16_in_the_memory_of_bfloat16_is_refused_before_the_update():
    """Nothing but the dtype tells, which only the boundary looks at."""
    w = build()
    (window,) = windows_of(1)
    train_wrapped(w, [window])
    p = params_of(w)[0]
    p.data = p.data.view(torch.float16)
    set_grads(params_of(w), window[0])
    w.step()
    before = [bits(q) for q in params_of(w)]
    set_grads(params_of(w), window[1])
    with pytest.raises(ValueError, match=r"parameter 0 of shape \(33,\) is torch.float16"):
        w.step()
    assert [bits(q) for q in params_of(w)] == before


def test_frozen_float16_parameters_are_left_alone_until_they_train():
    w = build()
    frozen = half(3).requires_grad_(False)
    w.add_param_group({"params": [frozen]})
    (window,) = windows_of(1)
    for grads in window:
        set_grads(params_of(w)[:-1], grads)
        w.step()
    frozen.requires_grad_(True)
    with refused(w, *WORDS):
        w.step()


def test_masters_leave_nothing_to_do():
    optimizer = SGD([half(3, dtype=BF16)], lr=0.1)
    with refused(optimizer, "rounding='stochastic'", "master_weights=True", "one of them"):
        wrap(optimizer, 2, master_weights=True, **STOCHASTIC)
