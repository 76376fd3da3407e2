"""state_dict and load_state_dict: the open window comes back bit by bit, and torch's own layout stays torch's."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.optim import SGD, Adam, AdamW
from wrapper_helpers import (
    LOW_PRECISION,
    Toy,
    bits,
    extra_key,
    make_windows,
    params_of,
    recorded,
    set_grads,
    snapshot,
    state_bits,
    tidy,  # noqa: F401
    wrap,
)

pytestmark = LOW_PRECISION

SHAPES = [(33,), (5, 7), (4097,)]
FP32_STATE = {"state_dtype": torch.float32, "master_weights": True}


def build(make=AdamW, dtype=torch.float32, steps=4, seed=0, **options):
    random = torch.Generator().manual_seed(seed)
    params = [torch.nn.Parameter((torch.rand(s, generator=random) + 0.5).to(dtype)) for s in SHAPES]
    chosen = {"lr": 0.01} | ({"momentum": 0.9} if make is SGD else {})
    return wrap(make([{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.1}], **chosen), steps, **options)


def micros_of(count, dtype=torch.float32):
    (window,) = make_windows(SHAPES, 1, count, dtype)
    return window


def feed(w, micros):
    for grads in micros:
        set_grads(params_of(w), grads)
        w.step()
        w.zero_grad()


def move(w, new, path, optimizer_first=False):
    """Parameters and optimizer through a file, into new objects, in either order."""
    torch.save({"model": [p.detach() for p in params_of(w)], "optimizer": w.state_dict()}, path)
    loaded = torch.load(path, weights_only=True)
    if optimizer_first:
        new.load_state_dict(loaded["optimizer"])
    with torch.no_grad():
        for p, value in zip(params_of(new), loaded["model"], strict=True):
            p.copy_(value)
    if not optimizer_first:
        new.load_state_dict(loaded["optimizer"])
    return new


CONFIGURATIONS = {
    "fp32": (torch.float32, {}),
    "fp32-wrapped": (torch.float32, {"update": "wrapped"}),
    "fp32-clip": (torch.float32, {"max_norm": 0.5}),
    "bf16": (torch.bfloat16, {}),
    "fp16": (torch.float16, {}),
    "bf16-fp32-state": (torch.bfloat16, {"state_dtype": torch.float32}),
    "bf16-master": (torch.bfloat16, {"master_weights": True}),
    "bf16-master-fp32-state": (torch.bfloat16, FP32_STATE),
    "fp16-master-fp32-state": (torch.float16, FP32_STATE),
    "bf16-stochastic": (torch.bfloat16, {"rounding": "stochastic", "rounding_seed": 2**63 - 1}),
    "fp32-bf16-state": (torch.float32, {"state_dtype": torch.bfloat16}),
}


@pytest.mark.parametrize("done", [6, 8], ids=["open window", "between windows"])
@pytest.mark.parametrize("make", [AdamW, Adam, SGD])
@pytest.mark.parametrize("optimizer_first", [False, True], ids=["model first", "optimizer first"])
@pytest.mark.parametrize(("dtype", "options"), CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_89_save_and_load_inside_a_window(dtype, options, optimizer_first, make, done, tmp_path):
    micros = micros_of(16, dtype)
    straight = build(make, dtype, **options)
    feed(straight, micros[:done])
    resumed = move(straight, build(make, dtype, seed=1, **options), tmp_path / "saved.pt", optimizer_first)
    assert (resumed.pending, resumed.updates) == (straight.pending, straight.updates) == (done % 4, done // 4)
    for k, (p, q) in enumerate(zip(params_of(straight), params_of(resumed), strict=True)):
        assert bits(straight.master_grad(p)) == bits(resumed.master_grad(q)), k
        assert resumed.master_grad(q).dtype == torch.float32
    feed(straight, micros[done:])
    feed(resumed, micros[done:])
    assert snapshot(resumed) == snapshot(straight)
    assert resumed.updates == 4


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 11), max_size=4), st.booleans(), st.integers(1, 5))
def test_any_number_of_stops_gives_the_same_bits(stops, weighted, steps):
    micros = make_windows([(5,), (70,)], 1, 12, torch.float32)[0]

    def fresh():
        return wrap(AdamW([torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(70))], lr=0.1), steps)

    straight, stopped = fresh(), fresh()
    for k, grads in enumerate(micros):
        if k % 3 == 1:
            grads = [grads[0], None]
        for w in (straight, stopped):
            set_grads(params_of(w), grads)
            w.step(**({"mean_of": k % 4} if weighted else {}))
        if k in stops:
            new = fresh()
            new.load_state_dict(copy.deepcopy(stopped.state_dict()))
            for p, q in zip(params_of(new), params_of(stopped), strict=True):
                p.data.copy_(q.data)
            stopped = new
    assert snapshot(stopped, norm=False) == snapshot(straight, norm=False)


def test_93_the_buffer_of_a_bf16_model_comes_back_in_float32(tmp_path):
    w = build(dtype=torch.bfloat16)
    feed(w, micros_of(2, torch.bfloat16))
    new = move(w, build(dtype=torch.bfloat16, seed=1), tmp_path / "saved.pt")
    for p, q in zip(params_of(w), params_of(new), strict=True):
        assert new.master_grad(q).dtype == torch.float32
        assert bits(new.master_grad(q)) == bits(w.master_grad(p))
        assert new.master_grad(q).any()


def leaves(value):
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from leaves(key)
            yield from leaves(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from leaves(entry)
    else:
        yield value


@pytest.mark.parametrize("options", [{}, FP32_STATE], ids=["plain", "masters"])
def test_the_dict_is_torchs_plus_one_key(options):
    w = build(dtype=torch.bfloat16, **options)
    bare = build(dtype=torch.bfloat16, **options).optimizer
    feed(w, micros_of(6, torch.bfloat16))
    saved = w.state_dict()
    assert extra_key(saved)
    assert all(isinstance(v, (torch.Tensor, int, float, bool, str, type(None))) for v in leaves(saved))
    own = {"state": saved["state"], "param_groups": saved["param_groups"]}
    assert state_bits(own) == state_bits(w.optimizer.state_dict())
    bare.load_state_dict(own)
    for k, p in enumerate(params_of(bare)):
        assert set(bare.state[p]) == {"step", "exp_avg", "exp_avg_sq"}
        assert bare.state[p]["step"].item() == 1, k


@pytest.mark.parametrize("update", ["fused", "wrapped"])
def test_a_bare_dict_closes_an_open_window(update):
    bare = AdamW([torch.nn.Parameter(torch.ones(3))], lr=0.3)
    set_grads(params_of(bare), [torch.ones(3)])
    bare.step()
    toy = Toy(2, n=3, make=AdamW, lr=0.1, update=update).run([1])
    toy.w.load_state_dict(bare.state_dict())
    assert toy.w.pending == 0
    assert not toy.w.master_grad(toy.p).any()
    assert toy.w.param_groups[0]["lr"] == 0.3
    assert toy.w.state[toy.p]["step"].item() == 1
    before = bits(toy.p)
    toy.run([5])
    assert bits(toy.p) == before
    toy.run([5])
    assert bits(toy.p) != before
    assert toy.w.updates == 1


@pytest.mark.parametrize("saved_by", ["bare", "wrapper"])
def test_a_bare_dict_derives_the_masters_again(saved_by):
    """6 updates of 2^-12 do not show in bf16; their 12 round to 2^-8, where the first 6 were kept in a master."""
    toy = Toy(1, dtype=torch.bfloat16, start=0.75, lr=2.0**-12, master_weights=True).run([1] * 6)
    assert toy.value == 0.75
    bare = SGD([torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))], lr=2.0**-12)
    toy.w.load_state_dict(bare.state_dict() if saved_by == "bare" else toy.w.state_dict())
    toy.run([1] * 6)
    assert toy.value == (0.75 if saved_by == "bare" else 0.75 - 2.0**-8)


@pytest.mark.parametrize(
    ("steps", "more", "value"),
    [(8, [5] * 6, -(1 + 2 + 30) / 8), (3, [5], -(1 + 2 + 5) / 3), (4, [5, 5], -13 / 4)],
)
def test_loading_into_another_number_of_steps(steps, more, value):
    saved = Toy(4).run([1, 2]).w.state_dict()
    toy = Toy(steps)
    with recorded() as caught:
        toy.w.load_state_dict(saved)
    assert len(caught) == (0 if steps == 4 else 1), [str(c.message) for c in caught]
    assert all("steps" in str(c.message) for c in caught)
    assert (toy.w.pending, toy.w.steps) == (2, steps)
    toy.run(more[:-1])
    assert toy.value == 0.0
    assert toy.w.will_update
    toy.run(more[-1:])
    assert toy.value == pytest.approx(value, rel=3e-7)
    assert toy.w.pending == 0


def test_a_loaded_window_longer_than_steps_closes_at_the_next_call():
    saved = Toy(8).run([1, 2, 3, 4, 5]).w.state_dict()
    toy = Toy(2)
    with recorded() as caught:
        toy.w.load_state_dict(saved)
    assert len(caught) == 1
    assert (toy.w.pending, toy.value, toy.w.will_update) == (5, 0.0, True)
    toy.micro(9)
    assert toy.value == pytest.approx(-4.0, rel=3e-7)
    assert (toy.w.pending, toy.w.updates) == (0, 1)
    toy.run([1, 3])
    assert toy.value == pytest.approx(-6.0, rel=3e-7)


def test_a_weighted_window_comes_back():
    first, second = Toy(3), Toy(3)
    first.micro(1, mean_of=10)
    first.micro(4, mean_of=torch.tensor(2))
    second.w.load_state_dict(copy.deepcopy(first.w.state_dict()))
    with pytest.raises(ValueError, match=r"weight|mean_of"):
        second.micro(1)
    second.w.zero_grad()
    second.micro(2, mean_of=1)
    assert second.value == pytest.approx(-20 / 13, rel=3e-7)


def test_a_loaded_window_of_another_reduction_keeps_its_sums():
    """Sums are what is kept, as with another `steps`: a window of 1 and 2 is the sum 3 and the mean so far 3 / 4."""
    for saved_as, loaded_as, value in (("mean", "sum", -10.0), ("sum", "mean", -2.5)):
        saved = Toy(4, reduction=saved_as).run([1, 2]).w.state_dict()
        toy = Toy(4, reduction=loaded_as)
        with recorded():
            toy.w.load_state_dict(saved)
        assert toy.run([3, 4]).value == value


@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16, **FP32_STATE}], ids=["fp32", "masters"])
def test_loading_copies(options):
    first, second = (Toy(4, n=3, make=AdamW, lr=2.0**-9, **options) for _ in range(2))
    first.run([1] * 6)
    second.p.data.copy_(first.p.data)
    second.w.load_state_dict(first.w.state_dict())
    before = snapshot(first.w), state_bits(first.w.state_dict())
    second.run([7] * 6)
    assert (snapshot(first.w), state_bits(first.w.state_dict())) == before


def test_a_copied_dict_does_not_follow_the_wrapper():
    toy = Toy(4).run([1, 2])
    saved = copy.deepcopy(toy.w.state_dict())
    toy.run([50, 50, 50])
    toy.w.load_state_dict(saved)
    toy.p.data.zero_()
    assert toy.run([3, 2]).value == -2.0


def test_loading_by_keyword_and_its_own_dict():
    toy = Toy(4).run([1, 2])
    toy.w.load_state_dict(state_dict=toy.w.state_dict())
    assert (toy.w.pending, toy.value) == (2, 0.0)
    assert toy.run([3, 2]).value == -2.0


def test_loading_its_own_dict_while_a_view_is_out():
    """Dropping the old window zeroes the views that were handed out, and the dict's sums are the same memory."""
    toy = Toy(4).run([1, 2])
    view = toy.w.master_grad(toy.p)
    toy.w.load_state_dict(toy.w.state_dict())
    assert toy.w.master_grad(toy.p).item() == 0.75
    assert toy.run([3, 2]).value == -2.0
    assert view.item() == 0.0


def test_loading_never_touches_parameters():
    w = build(dtype=torch.bfloat16, **FP32_STATE)
    feed(w, micros_of(6, torch.bfloat16))
    new = build(dtype=torch.bfloat16, seed=1, **FP32_STATE)
    before = [bits(p) for p in params_of(new)]
    new.load_state_dict(w.state_dict())
    assert [bits(p) for p in params_of(new)] == before


def test_saving_before_the_first_fold():
    toy, new = Toy(4), Toy(4)
    new.run([9])
    new.w.load_state_dict(copy.deepcopy(toy.w.state_dict()))
    assert new.w.pending == 0
    assert new.run([1, 2, 3, 2]).value == -2.0


def test_counters_are_saved():
    toy, new = Toy(2).run([1] * 5), Toy(2)
    new.w.load_state_dict(copy.deepcopy(toy.w.state_dict()))
    assert (new.w.updates, new.w.pending, new.w.updated) == (2, 1, False)
    assert (new.w.skipped_windows, new.w.skipped_micro_batches) == (0, 0)


def test_param_group_options_come_back():
    toy, new = Toy(2, make=AdamW, lr=0.1), Toy(2, make=AdamW, lr=0.5)
    toy.w.param_groups[0]["betas"] = (0.5, 0.75)
    new.w.load_state_dict(toy.w.state_dict())
    assert new.w.param_groups[0]["lr"] == 0.1
    assert new.w.param_groups[0]["betas"] == (0.5, 0.75)
    assert new.inner.param_groups is new.w.param_groups


def test_masters_of_frozen_parameters_are_saved():
    """12 updates of 2^-12 round to 2^-8; a master that is derived again in the middle has lost the first 6."""

    def build():
        model = [torch.nn.Parameter(torch.full((n,), 0.75, dtype=torch.bfloat16)) for n in (70, 5, 3)]
        return model, wrap(SGD(model[:2], lr=2.0**-12), steps=1, master_weights=True)

    def train(model, w, count):
        for _ in range(count):
            set_grads(model, [torch.ones_like(p) if p.requires_grad else None for p in model])
            w.step()

    model, w = build()
    train(model, w, 6)
    model[0].requires_grad_(False)
    w.add_param_group({"params": [model[2]]})  # the buffer is built anew, without the frozen one
    train(model, w, 3)
    saved = copy.deepcopy(w.state_dict())
    weights = [p.detach().clone() for p in model]
    with torch.no_grad():
        model[0].fill_(0.5)
    assert w.state_dict()["fusedaccum"]["masters"][0].eq(0.5).all()  # it belonged to other values
    w.load_state_dict(saved)
    model[0].data.copy_(weights[0])

    other, new = build()
    new.add_param_group({"params": [other[2]]})
    for p, values in zip(other, weights, strict=True):
        p.data.copy_(values)
    other[0].requires_grad_(False)
    new.load_state_dict(saved)
    for each, wrapper in ((model, w), (other, new)):
        train(each, wrapper, 1)
        each[0].requires_grad_(True)
        train(each, wrapper, 6)
        assert torch.equal(each[0].detach(), torch.full((70,), 0.75 - 2.0**-8).bfloat16())
    assert all(map(torch.equal, model, other))


def test_a_lazy_module_before_its_first_forward():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.LazyLinear(2), torch.nn.Linear(2, 1))
    w = wrap(SGD(model.parameters(), lr=1.0), 2)
    saved, twin = w.state_dict(), copy.deepcopy(w)
    twin.load_state_dict(saved)
    x = torch.ones(1, 3)
    for _ in range(2):
        model(x).sum().backward()
        w.step()
    assert w.updates == 1
    w.load_state_dict(saved)  # of the time when nobody knew the shapes
    model(x).sum().backward()
    w.step()
    fresh = wrap(SGD(torch.nn.Sequential(torch.nn.LazyLinear(2), torch.nn.Linear(2, 1)).parameters(), lr=1.0), 2)
    with pytest.raises(ValueError, match=r"parameter 0, which must be torch.float32 of shape None"):
        fresh.load_state_dict(w.state_dict())


def test_a_frozen_master_is_saved_again_after_a_copy_was_given_another_group():
    """It came with the copy and lost its segment before any update could look at it."""
    p, q = (torch.nn.Parameter(torch.full((3,), 0.75, dtype=torch.bfloat16)) for _ in range(2))
    w = wrap(SGD([p, q], lr=2.0**-12), steps=1, master_weights=True)
    set_grads([p, q], [torch.ones(3).bfloat16()] * 2)
    w.step()
    p.requires_grad_(False)
    twin = copy.deepcopy(w)
    twin.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    twin.step()
    assert twin.state_dict()["fusedaccum"]["masters"][0].tolist() == [0.75 - 2.0**-12] * 3
