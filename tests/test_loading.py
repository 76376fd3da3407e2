"""What loading refuses leaves everything as it was; and a momentum buffer that no update has started stays one."""

from __future__ import annotations

import copy
import io
import pickle
import re
import warnings

import numpy as np
import pytest
import torch
from torch.optim import SGD, AdamW
from wrapper_helpers import (
    LOW_PRECISION,
    Toy,
    both_updates,
    params_of,
    recorded,
    refused,
    set_grads,
    snapshot,
    state_bits,
    tidy,  # noqa: F401
    update_in_use,
    wrap,
)

pytestmark = LOW_PRECISION

SHAPES = [(3,), (2, 2), (5,)]
MASTERS = {"master_weights": True, "state_dtype": torch.float32}


def build(make=AdamW, shapes=SHAPES, micros=5, scale=1.0, dtype=torch.bfloat16, steps=4, groups=1, **options):
    params = [torch.nn.Parameter(torch.full(s, 1.5, dtype=dtype)) for s in shapes]
    listed = [{"params": params[:-1]}, {"params": params[-1:]}] if groups == 2 else params
    w = wrap(make(listed, lr=0.25), steps, **options)
    for k in range(micros):
        set_grads(params, [torch.full(p.shape, scale * (k + 1), dtype=dtype) for p in params])
        w.step()
    return w


def detached(w):
    """The dict as it comes from a file."""
    buffer = io.BytesIO()
    torch.save(w.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


ABSENT = object()
NO_INT = [None, "4", 2.0, True, -1, [1], torch.tensor(2)]
NO_TUPLE = [None, 3, "x", {}, [], ()]


def changed(k, value):
    return lambda old: (*old[:k], value(old[k]) if callable(value) else value, *old[k + 1 :])


NO_TENSORS = [
    *NO_TUPLE,
    list,
    lambda old: dict(enumerate(old)),
    lambda old: old[:-1],
    lambda old: (*old, None),
    changed(0, torch.Tensor.numpy),
    changed(1, torch.Tensor.to_sparse),
    changed(1, lambda t: t.to("meta")),
    changed(0, torch.Tensor.bfloat16),
    changed(0, torch.Tensor.double),
    changed(1, torch.Tensor.flatten),
    changed(2, lambda t: t[:-1]),
    changed(0, 1.0),
]
REFUSED = {
    "version": [ABSENT, None, 0, 2, "1", True],
    "steps": [ABSENT, *NO_INT, 0],
    "length": [ABSENT, *NO_INT, 0],
    "pending": [ABSENT, *NO_INT, 0, 5],
    "reduction": [ABSENT, None, "max", 3, torch.ones(3), ["mean"]],
    "mode": [ABSENT, None, "other", 3, torch.ones(3), ["plain"]],
    "items": [
        ABSENT,
        *NO_TUPLE,
        0.0,
        torch.ones(1),
        *((x,) for x in (None, -1.0, float("nan"), float("inf"), 2.0, torch.ones(2), torch.ones(1), "3")),
        (0.0, 0.0),
    ],
    "kept": [ABSENT, -1.0, 5.0, float("nan"), float("inf"), 2, "2", True, torch.ones(1)],
    "updates": [ABSENT, *NO_INT],
    "skipped_windows": [ABSENT, *NO_INT],
    "skipped_micro_batches": [ABSENT, *NO_INT],
    "rounding": [*NO_TUPLE[:-1], (1,), (1, 2, 3), (-1, 0), (0, -1), (0, 2**63), (0, True), (0, 1.0), ("0", 0)],
    "dropped": [None, 0, 1, "True", (), torch.tensor(True)],
    "begun": [
        *NO_TUPLE[:-1],
        *(
            (1.0,),
            (1.0, None),
            (None, None, False),
            (-1.0, None, False),
            ("1", None, True),
            (torch.ones(2), None, True),
        ),
        *((1.0, 2.0, False), (1.0, None, 1), (1.0, -1.0, True), (1.0, "2", True), (1.0, torch.ones(2), True)),
    ],
    "sums": [ABSENT, *NO_TENSORS],
    "masters": [ABSENT, *NO_TENSORS],
    "sharded": [
        *NO_TUPLE,
        {},
        {"sums": {}},
        {"sums": {}, "masters": ()},
        {"sums": {0: None}, "masters": {}},
        *({"sums": {}, "masters": {}, kind: {i: torch.ones(3)}} for kind in ("sums", "masters") for i in (0, 9)),
    ],
    "sharded_sums": [*NO_TUPLE[:-1], (-1,), (0,), (3,), ("0",), (None,), (True,)],
    "shapes": [ABSENT, *NO_TUPLE, lambda old: old[:-1], lambda old: old[::-1], changed(0, [3]), changed(0, ("3",))],
    "unstarted": [ABSENT, *NO_TUPLE[:-1], (-1,), (3,), ("0",), (None,), (True,)],
    "rank": [*NO_TUPLE[:-1], (1,), (0, 1, 2), (-1, 2), ("0", 2), (True, 2)],
    "state_layout": [ABSENT, None, 3, "", "another"],
    "state_witness": [ABSENT, *NO_TUPLE, lambda old: dict.fromkeys(old, False), {"another": True}],
}


def describe(value):
    return "absent" if value is ABSENT else "changed" if callable(value) else repr(value)


DAMAGE = [(field, value) for field, values in REFUSED.items() for value in values]


def test_every_field_has_its_damage():
    assert set(REFUSED) == set(build().state_dict()["fusedaccum"])


@pytest.mark.parametrize(("field", "damage"), DAMAGE, ids=[f"{f}-{describe(v)}" for f, v in DAMAGE])
def test_a_damaged_field_is_refused_and_changes_nothing(field, damage):
    loaded = detached(build(**MASTERS))
    window = loaded["fusedaccum"]
    if damage is ABSENT:
        del window[field]
    else:
        window[field] = damage(window[field]) if callable(damage) else damage
    w = build(micros=6, scale=-2.0, **MASTERS)
    before, dict_before = snapshot(w), state_bits(w.state_dict())
    with pytest.raises(ValueError, match=r"fusedaccum|saved") as caught:
        w.load_state_dict(loaded)
    assert re.search("undamaged|drop the key|load", str(caught.value))
    assert snapshot(w) == before
    assert state_bits(w.state_dict()) == dict_before


@pytest.mark.parametrize("saved", [{}, [], 3, "x", (), torch.ones(1)], ids=repr)
def test_a_window_that_is_none_is_refused(saved):
    w = build()
    before = snapshot(w)
    with pytest.raises(ValueError, match="drop the key"):
        w.load_state_dict({**detached(build()), "fusedaccum": saved})
    assert snapshot(w) == before


@pytest.mark.parametrize(
    ("field", "value"),
    [("pending", 3), ("updates", 7), ("skipped_windows", 2), ("skipped_micro_batches", 9), ("updates", np.int64(3))],
)
def test_another_value_that_can_be_is_loaded(field, value):
    loaded = detached(build())
    loaded["fusedaccum"][field] = value
    w = build(micros=0)
    w.load_state_dict(loaded)
    assert getattr(w, field) == value
    assert w.master_grad(params_of(w)[0]).tolist() == [1.25] * 3


def test_steps_none_is_told_apart():
    loaded = detached(build())
    loaded["fusedaccum"]["steps"] = None
    with pytest.raises(ValueError, match=r"'steps'.*None.*int of at least 1.*drop the key"):
        build().load_state_dict(loaded)


OTHERS = {
    "missing": {"shapes": SHAPES[:-1]},
    "extra": {"shapes": [*SHAPES, (1,)]},
    "another order": {"shapes": SHAPES[::-1]},
    "another shape": {"shapes": [(3,), (4,), (5,)]},
    "another number of groups": {"groups": 2},
}


@pytest.mark.parametrize("micros", [4, 5], ids=["between windows", "open window"])
@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_other_parameters_are_refused(other, micros):
    loaded = detached(build(micros=micros))
    w = build(micros=6, **other)
    before = snapshot(w)
    with pytest.raises(ValueError, match="parameter") as caught:
        w.load_state_dict(loaded)
    assert snapshot(w) == before
    if "shapes" in other:
        assert "same parameters in the same order" in str(caught.value)


TORCHS = {
    "no state": lambda d: d.pop("state"),
    "no groups": lambda d: d.pop("param_groups"),
    "state is None": lambda d: d.update(state=None),
    "groups are None": lambda d: d.update(param_groups=None),
    "group without params": lambda d: d["param_groups"][0].pop("params"),
    "a parameter's state": lambda d: d["state"].pop(0),
    "a moment": lambda d: d["state"][0].pop("exp_avg"),
    "moment of another shape": lambda d: d["state"][0].update(exp_avg=torch.ones(7)),
    "state of no parameter": lambda d: d["state"].update({9: {"exp_avg": torch.ones(1)}}),
    "group without betas": lambda d: d["param_groups"][0].pop("betas"),
    "lr of text": lambda d: d["param_groups"][0].update(lr="text"),
}


@pytest.mark.parametrize("micros", [0, 6], ids=["fresh", "used"])
@pytest.mark.parametrize("damage", TORCHS.values(), ids=TORCHS)
def test_damage_to_torchs_part_is_what_torch_makes_of_it(damage, micros):
    """Refused with torch's own error and nothing changed, or loaded with torch's result; and never a part of it."""
    loaded = detached(build())
    damage(loaded)
    w, bare = build(micros=micros, scale=-2.0), build(micros=micros, scale=-2.0).optimizer
    before = snapshot(w)
    try:
        bare.load_state_dict({key: value for key, value in loaded.items() if key != "fusedaccum"})
    except Exception as error:
        with pytest.raises(type(error)):
            w.load_state_dict(loaded)
        assert snapshot(w) == before
    else:
        w.load_state_dict(loaded)
        assert (w.pending, w.updates) == (1, 1)
        mine, theirs = snapshot(w), snapshot(bare)
        assert (mine["state"], mine["groups"]) == (theirs["state"], theirs["groups"])


def test_a_warning_that_is_an_error_loads_nothing():
    loaded = detached(build())
    w = build(micros=6, steps=8)
    before = snapshot(w)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="steps=4"):
            w.load_state_dict(loaded)
    assert snapshot(w) == before


def test_the_warning_points_at_the_caller():
    with recorded() as caught:
        build(steps=8).load_state_dict(detached(build()))
    (warning,) = [c for c in caught if "steps=4" in str(c.message)]
    assert warning.filename == __file__


def test_a_window_longer_than_steps_is_saved_and_loaded_again():
    first, second, third = Toy(8).run([1, 2, 3, 4, 5]), Toy(2), Toy(2)
    with recorded():
        second.w.load_state_dict(detached(first.w))
    third.w.load_state_dict(detached(second.w))
    assert third.w.pending == 5
    assert third.run([9]).value == pytest.approx(-4.0, rel=3e-7)


# A momentum buffer that no update has started


def dampened(**options):
    return Toy(1, make=lambda p, lr: SGD(p, lr=lr, momentum=0.5, dampening=0.25), **options)


def skipped_by_the_device(**options):
    toy = dampened(**options)
    toy.micro(7, mean_of=torch.tensor(0.0))
    assert toy.value == 0.0
    return toy


def loaded_into(make):
    def way(toy):
        new = make()
        new.w.load_state_dict(detached(toy.w))
        return new.w

    return way


def with_another_group(toy):
    toy.w.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    return toy.w


def closed_and_wrapped_again(toy):
    toy.w.close()
    return wrap(toy.inner, 1, update=update_in_use(toy.w))


WAYS = {
    "close": closed_and_wrapped_again,
    "nothing": lambda toy: toy.w,
    "load": loaded_into(dampened),
    "load into a started one": loaded_into(lambda: dampened(start=64.0).run([64])),
    "load its own": lambda toy: [toy.w, toy.w.load_state_dict(toy.w.state_dict())][0],
    "pickle": lambda toy: pickle.loads(pickle.dumps(toy.w)),
    "deepcopy": lambda toy: copy.deepcopy(toy.w),
    "saved and gone on": lambda toy: [toy.w, toy.w.state_dict()][0],
    "add_param_group": with_another_group,
}


@both_updates
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_update_after_a_skipped_first_is_the_first(way, update):
    w = way(skipped_by_the_device(update=update))
    p = params_of(w)[0]
    start = p.item()
    for moved in (-1.0, -1.0 - (0.5 + 0.75)):  # the first by g, the second by 0.5 * g + 0.75 * g
        set_grads([p], [torch.ones(1)])
        w.step(mean_of=torch.tensor(2.0))
        assert p.item() - start == moved


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_started_momentum_buffer_stays_started(way):
    toy = dampened().run([1])
    toy.micro(7, mean_of=torch.tensor(0.0))
    w = way(toy)
    p = params_of(w)[0]
    start = p.item()
    set_grads([p], [torch.ones(1)])
    w.step()
    assert p.item() - start == -(0.5 + 0.75)


@pytest.mark.parametrize("how", ["load", "close"])
def test_a_bare_optimizer_takes_it_up_as_the_first(how):
    toy = skipped_by_the_device()
    if how == "close":
        bare = toy
        bare.w.close()
    else:
        saved = detached(toy.w)
        del saved["fusedaccum"]
        bare = dampened()
        bare.inner.load_state_dict(saved)
    set_grads([bare.p], [torch.ones(1)])
    bare.inner.step()
    assert bare.value == -1.0


@pytest.mark.parametrize("options", [{"update": "fused"}, {"state_dtype": torch.float32}], ids=str)
def test_a_sum_that_the_update_cannot_take_is_refused_before_anything_is_loaded(options):
    """Of a complex parameter, which is frozen here: the fused update was possible without it."""

    def build(frozen, **more):
        params = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))]
        params[1].requires_grad_(not frozen)
        return params, wrap(SGD(params, lr=0.1), 4, **more)

    params, w = build(False)
    set_grads(params, [torch.ones(2), torch.ones(2, dtype=torch.complex64)])
    w.step()
    saved = detached(w)
    params, other = build(True, **options)
    params[0].grad = torch.ones(2)
    other.step()
    other.param_groups[0]["lr"] = 0.7
    with refused(other, "complex64"):
        other.load_state_dict(saved)


@pytest.mark.parametrize("fold", ["step", "backward"])
def test_a_parameter_that_was_frozen_inside_a_window_is_one_parameter(fold):
    """It holds a sum here and in the dict, and is judged once for whether it shares its storage."""
    params = [torch.nn.Parameter(torch.ones(n)) for n in (2, 3)]
    w = wrap(SGD(params, lr=1.0), 2, update="fused", fold=fold)
    sum((p * 2).sum() for p in params).backward()
    w.step()
    params[0].requires_grad_(False)
    w.load_state_dict(copy.deepcopy(w.state_dict()))
    w.flush()
    assert [p.tolist() for p in params] == [[-1.0] * 2, [-1.0] * 3]
