"""An open window through every way of copying or saving, `torch.distributed.checkpoint` included, bit by bit."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict
from torch.optim import SGD, AdamW
from wrapper_helpers import (
    LOW_PRECISION,
    Toy,
    bits,
    both_updates,
    make_windows,
    params_of,
    recorded,
    set_grads,
    snapshot,
    tidy,  # noqa: F401
    uniform,
    wrap,
)

pytestmark = [LOW_PRECISION, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

SHAPES = [(33,), (5, 7), (4097,)]
MAKERS = {
    "sgd": lambda params: SGD(params, lr=0.05, momentum=0.9, dampening=0.25, weight_decay=0.1),
    "amsgrad": lambda params: AdamW(params, lr=0.05, amsgrad=True),
}
CONFIGURATIONS = {
    "fused-fp32": (torch.float32, {"update": "fused"}),
    "fused-bf16": (torch.bfloat16, {"update": "fused", "master_weights": True, "state_dtype": torch.float32}),
    "fused-bf16-stochastic": (torch.bfloat16, {"rounding": "stochastic", "rounding_seed": 5}),
    "wrapped-fp32": (torch.float32, {"update": "wrapped"}),
    "wrapped-bf16": (torch.bfloat16, {"update": "wrapped"}),
}


class Model(torch.nn.Module):
    def __init__(self, dtype, seed=0):
        super().__init__()
        self.layers = torch.nn.ParameterList(uniform(*s, seed=seed + k, dtype=dtype) for k, s in enumerate(SHAPES))


def build(make, dtype, options, seed=0):
    model = Model(dtype, seed)
    return model, wrap(make(model.parameters()), 4, **options)


def feed(w, micros):
    for grads in micros:
        set_grads(params_of(w), grads)
        w.step()
        w.zero_grad()


def through_file(model, w, fresh, path):
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": w.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    new_model, new = fresh()
    new_model.load_state_dict(saved["model"])
    new.load_state_dict(saved["opt"])
    return new


def through_dcp(model, w, fresh, path):
    dcp.save({"model": model, "opt": w}, checkpoint_id=path)
    new_model, new = fresh()
    get_optimizer_state_dict(new_model, new)
    dcp.load({"model": new_model, "opt": new}, checkpoint_id=path)
    return new


WAYS = {
    "file": through_file,
    "pickle": lambda model, w, fresh, path: pickle.loads(pickle.dumps(w)),
    "deepcopy": lambda model, w, fresh, path: copy.deepcopy(w),
    "dcp": through_dcp,
}


@pytest.mark.parametrize("done", [6, 8], ids=["open window", "between windows"])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize(("dtype", "options"), CONFIGURATIONS.values(), ids=CONFIGURATIONS)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_rest_of_the_run_has_the_same_bits(way, dtype, options, make, done, tmp_path):
    micros = make_windows(SHAPES, 1, 16, dtype)[0]
    model, straight = build(make, dtype, options)
    feed(straight, micros[:done])
    resumed = way(model, straight, lambda: build(make, dtype, options, seed=7), tmp_path)
    assert resumed is not straight
    before = snapshot(resumed, norm=False)
    assert before == snapshot(straight, norm=False)
    feed(straight, micros[done:])
    feed(resumed, micros[done:])
    after = snapshot(resumed)
    assert after == snapshot(straight)
    assert after["params"] != before["params"]
    assert resumed.updates == 4


def through(path, w, new):
    dcp.save({"opt": w}, checkpoint_id=path)
    dcp.load({"opt": new}, checkpoint_id=path)
    return new


@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16, "master_weights": True}], ids=["fp32", "masters"])
def test_dcp_into_a_new_wrapper_without_state(options, tmp_path):
    """In bfloat16, six updates of 2^-12 show in the masters alone; their twelve round to 2^-8."""
    toy, new = (Toy(2, start=0.75, lr=2.0**-12, **options) for _ in range(2))
    toy.run([1] * 13)
    new.p.data.copy_(toy.p.data)
    through(tmp_path, toy.w, new.w)
    assert (new.w.pending, new.w.updates) == (1, 6)
    assert new.w.master_grad(new.p).item() == 0.5
    assert new.run([1] * 11).value == toy.run([1] * 11).value == 0.75 - (2.0**-8 if options else 12 * 2.0**-12)


@pytest.mark.parametrize(("saved", "there"), [([1], []), ([], [1]), ([1], [5]), ([], [])])
def test_dcp_between_open_and_empty_windows(saved, there, tmp_path):
    toy, new = Toy(2).run(saved), Toy(2).run(there)
    through(tmp_path, toy.w, new.w)
    assert new.w.pending == len(saved)
    assert new.run([3] * (2 - len(saved))).value == toy.run([3] * (2 - len(saved))).value


@pytest.mark.parametrize("there", [None, 5.0, torch.tensor(5.0)], ids=["fresh", "number", "tensor"])
@pytest.mark.parametrize("count", [3.0, torch.tensor(3.0)], ids=["number", "tensor"])
def test_dcp_takes_item_counts_of_either_kind(count, there, tmp_path):
    toy, new = Toy(2), Toy(2)
    toy.micro(1, mean_of=count)
    if there is not None:
        new.micro(7, mean_of=there)
    through(tmp_path, toy.w, new.w)
    new.micro(2, mean_of=1)
    assert new.value == pytest.approx(-5 / 4)


@pytest.mark.parametrize("partial", [False, True], ids=["strict", "partial"])
@pytest.mark.parametrize("pending", [0, 1])
@pytest.mark.parametrize("options", [{"make": AdamW}, {"make": lambda p, lr: SGD(p, lr=lr, momentum=0.9)}])
def test_state_that_dcp_leaves_out_is_missed(options, pending, partial, tmp_path):
    """A new optimizer has no moments for DCP to load into; a run that goes on without them is wrong in silence."""
    toy, new = Toy(2, lr=0.1, **options).run([1] * (2 + pending)), Toy(2, lr=0.5, **options).run([9])
    dcp.save({"opt": toy.w}, checkpoint_id=tmp_path)
    before = snapshot(new.w)
    planner = dcp.DefaultLoadPlanner(allow_partial_load=partial)
    with pytest.raises(ValueError, match="get_optimizer_state_dict"):
        dcp.load({"opt": new.w}, checkpoint_id=tmp_path, planner=planner)
    assert snapshot(new.w) == before


def test_other_state_than_was_saved_is_missed(tmp_path):
    """Strict loading raises by itself; partial loading would leave the second parameter's moments as they were."""
    ws = []
    for grads in ([torch.ones(2), None], [torch.ones(2), torch.ones(3)]):
        params = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3))]
        ws.append(wrap(AdamW(params, lr=0.1), 1))
        set_grads(params, grads)
        ws[-1].step()
    dcp.save({"opt": ws[0]}, checkpoint_id=tmp_path)
    with pytest.raises(ValueError, match="state"):
        dcp.load({"opt": ws[1]}, checkpoint_id=tmp_path, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["save", "async_save"])
def test_dcp_in_a_process_group_of_one(asynchronous, tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        toy, new = Toy(4).run([1, 2]), Toy(4)
        if asynchronous:
            dcp.async_save({"opt": toy.w}, checkpoint_id=tmp_path / "saved").result()
        else:
            dcp.save({"opt": toy.w}, checkpoint_id=tmp_path / "saved")
        dcp.load({"opt": new.w}, checkpoint_id=tmp_path / "saved")
        assert new.w.pending == 2
        assert new.run([3, 2]).value == -2.0
    finally:
        torch.distributed.destroy_process_group()


def test_dcp_into_another_number_of_steps(tmp_path):
    toy, new = Toy(4).run([1, 2]), Toy(3)
    with recorded() as caught:
        through(tmp_path, toy.w, new.w)
    assert any("steps=4" in str(c.message) for c in caught)
    assert new.run([3]).value == pytest.approx(-2.0)


def test_nothing_is_held_where_nothing_is_open():
    toy = Toy(2, n=1000).run([1, 1])
    saved = toy.w.state_dict()["fusedaccum"]
    assert saved["sums"] == saved["masters"] == (None,)


@pytest.mark.parametrize("pending", [0, 1])
@pytest.mark.parametrize("make", [AdamW, SGD])
def test_94_get_optimizer_state_dict(make, pending):
    model = torch.nn.Linear(3, 2)
    w = wrap(make(model.parameters(), lr=0.1), steps=4)
    for _ in range(pending):
        model(torch.ones(1, 3)).sum().backward()
        w.step()
        w.zero_grad()
    before = [bits(p) for p in model.parameters()]
    saved = get_optimizer_state_dict(model, w)
    assert (w.pending, w.updates) == (pending, 0)
    assert [bits(p) for p in model.parameters()] == before
    assert set(saved) == {"state", "param_groups"}
    if make is AdamW:
        assert set(saved["state"]) == {"weight", "bias"}
        assert all(w.state[p]["exp_avg"].shape == p.shape for p in model.parameters())
    assert w.param_groups[0]["lr"] == 0.1


@both_updates
def test_a_warm_up_from_zero_whose_first_gradients_are_zero(update):
    """It looks like torch.distributed.checkpoint making state; that says step(closure=None), loops do not."""
    p = torch.nn.Parameter(torch.ones(1))
    inner = AdamW([p], lr=1e-3)
    torch.optim.lr_scheduler.LambdaLR(inner, lambda k: k / 10)
    w = wrap(inner, 2, update=update)
    for pending in (1, 0):
        p.grad = torch.zeros(1)
        w.step()
        assert w.pending == pending
    assert inner.state[p]["step"] == 1


def test_moments_of_their_own_dtype_through_torchs_helpers():
    """They name the state by the parameters' names, and torch's loader casts it to the parameters' dtype."""
    models = [torch.nn.Linear(3, 2).bfloat16() for _ in range(2)]
    old, new = (wrap(AdamW(m.parameters(), lr=0.1), 1, master_weights=True, state_dtype=torch.float32) for m in models)
    models[0](uniform(4, 3, dtype=torch.bfloat16)).sum().backward()
    old.step()
    weights, moments = get_state_dict(models[0], old)
    set_state_dict(models[1], new, model_state_dict=weights, optim_state_dict=moments)
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            assert new.state[q][key].dtype == torch.float32
            assert bits(new.state[q][key]) == bits(old.state[p][key])
            assert new.state[q][key] is not old.state[p][key]
