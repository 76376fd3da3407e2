"""`wrapping`: an optimizer class for code that builds the optimizer itself."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from optimizer_cases import REFUSED, cases
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from wrapper_helpers import (
    LOW_PRECISION,
    bits,
    params_of,
    recorded,
    state_bits,
    update_in_use,
)

from fusedaccum import FusedAccumOptimizer, wrapping

pytestmark = LOW_PRECISION


def parameters(dtype=torch.float32):
    return [torch.nn.Parameter(torch.full(shape, 0.5, dtype=dtype)) for shape in ((3, 4), (5,))]


def backward(optimizer, k=1):
    sum((p * (k + i)).sum() for i, p in enumerate(params_of(optimizer))).backward()


def train(optimizer, windows=2):
    for k in range(windows):
        backward(optimizer, k + 1)
        backward(optimizer, k + 2)
        optimizer.step()
        optimizer.zero_grad()


def test_it_is_a_class_of_optimizers():
    cls = wrapping(AdamW)
    assert isinstance(cls, type)
    assert issubclass(cls, FusedAccumOptimizer)
    assert issubclass(cls, Optimizer)
    assert cls.__name__ == "FusedAccumAdamW"
    assert "AdamW" in cls.__doc__
    opt = cls(parameters(), lr=0.25, betas=(0.5, 0.75))
    assert isinstance(opt, cls)
    assert type(opt.optimizer) is AdamW
    assert (opt.steps, opt.defaults["lr"], opt.param_groups[0]["betas"]) == (None, 0.25, (0.5, 0.75))
    assert repr(opt).startswith("FusedAccumAdamW (steps=None")


def test_it_does_what_the_wrapper_does():
    made = wrapping(AdamW)(parameters(), lr=0.1)
    by_hand = FusedAccumOptimizer(AdamW(parameters(), lr=0.1), None)
    for opt in (made, by_hand):
        train(opt)
    assert state_bits(params_of(made)) == state_bits(params_of(by_hand))
    assert made.updates == by_hand.updates == 2


def test_steps_and_options_go_to_the_wrapper():
    cls = wrapping(SGD, 2, max_norm=1.0, nonfinite="skip_window", update="wrapped")
    opt = cls([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
    assert (opt.steps, update_in_use(opt)) == (2, "wrapped")
    (p,) = params_of(opt)
    for g in ([6.0, 0.0], [0.0, 8.0]):
        (p * torch.tensor(g)).sum().backward()
        opt.step()
    assert p.tolist() == pytest.approx([-0.6, -0.8])
    callable_steps = wrapping(SGD, steps=lambda update: update + 1)(parameters(), lr=1.0)
    assert not callable(callable_steps.pending)
    for _ in range(3):
        backward(callable_steps)
        callable_steps.step()
    assert callable_steps.updates == 2


def test_groups_as_a_trainer_gives_them():
    """Called as cls(groups, **kwargs), with options of their own in a group, and names."""
    one, two = parameters()
    groups = [{"params": [("one", one)], "weight_decay": 0.5}, {"params": [("two", two)], "lr": 0.125}]
    opt = wrapping(SGD)(groups, lr=0.25)
    assert [g["lr"] for g in opt.param_groups] == [0.25, 0.125]
    assert [g["weight_decay"] for g in opt.param_groups] == [0.5, 0]
    assert opt.param_groups[1]["param_names"] == ["two"]
    schedule = StepLR(opt, 1, gamma=0.5)
    with recorded() as warned:
        train(opt, 1)
        schedule.step()
    assert not warned
    assert [g["lr"] for g in opt.param_groups] == [0.125, 0.0625]
    opt.add_param_group({"params": [("three", torch.nn.Parameter(torch.ones(2)))]})
    train(opt, 1)
    assert opt.updates == 2


def test_parameters_may_be_a_generator():
    model = torch.nn.Linear(2, 2)
    assert len(params_of(wrapping(SGD)(model.parameters(), lr=0.1))) == 2
    assert len(params_of(wrapping(SGD)(model.named_parameters(), lr=0.1))) == 2


@pytest.mark.parametrize("name", sorted({case.name for case in cases()} - set(REFUSED)))
def test_every_optimizer_can_be_wrapped(name):
    """Bit by bit as the wrapper around one that was built."""
    inner = getattr(torch.optim, name)
    matrices = [[torch.nn.Parameter(torch.full((3, 4), 0.5))] for _ in range(2)]
    made = wrapping(inner, update="wrapped")(matrices[0])
    by_hand = FusedAccumOptimizer(inner(matrices[1]), None, update="wrapped")
    for opt in (made, by_hand):
        train(opt)
    assert bits(matrices[0][0]) == bits(matrices[1][0])


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_wrapped_is_refused_when_it_is_built(name):
    with pytest.raises(TypeError, match=f"{name} is not supported"):
        wrapping(getattr(torch.optim, name))(parameters())


# Copies


@pytest.mark.parametrize("how", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("steps", [None, 3])
def test_copies(how, steps):
    opt = wrapping(AdamW, steps, max_norm=1.0)(parameters(), lr=0.1)
    for _ in range(4):
        backward(opt)
        opt.step()
        opt.zero_grad()
    with recorded() as warned:
        other = how(opt)
    assert not warned
    assert type(other).__name__ == type(opt).__name__ == "FusedAccumAdamW"
    assert isinstance(other, FusedAccumOptimizer)
    assert (other.updates, other.pending, other.steps) == (opt.updates, opt.pending, steps)
    for o in (opt, other):
        train(o)
        o.reset()
    assert state_bits(params_of(other)) == state_bits(params_of(opt))
    again = how(other)
    assert again.optimizer.defaults == opt.optimizer.defaults


def test_a_shallow_copy_shares_the_window():
    opt = wrapping(SGD)(parameters(), lr=0.1)
    train(copy.copy(opt))
    assert opt.updates == 2


def test_state_dicts_are_those_of_any_wrapper():
    opt = wrapping(AdamW)(parameters(), lr=0.1)
    train(opt)
    saved = copy.deepcopy(opt.state_dict())
    other = FusedAccumOptimizer(AdamW(parameters(), lr=0.1), None)
    other.load_state_dict(saved)
    assert other.updates == 2
    bare = AdamW(parameters(), lr=0.1)
    bare.load_state_dict({key: saved[key] for key in ("state", "param_groups")})
    assert float(bare.state[params_of(bare)[0]]["step"]) == 2


# Subclasses


class Halving(SGD):
    """An optimizer of one's own, which is never fused."""

    def __init__(self, params, lr=1.0, *, extra=1):
        super().__init__(params, lr)
        self.extra = extra

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] *= 0.5
        return super().step(closure)


def test_a_class_of_ones_own():
    opt = wrapping(Halving)(parameters(), extra=3)
    assert (opt.optimizer.extra, update_in_use(opt)) == (3, "wrapped")
    train(opt)
    assert opt.param_groups[0]["lr"] == 0.25
    with pytest.raises(ValueError, match=r"exactly AdamW.*Halving"):
        wrapping(Halving, update="fused")(parameters())


def test_the_class_can_be_subclassed():
    class Logged(wrapping(SGD)):
        def __init__(self, params, lr=0.5):
            super().__init__(params, lr=lr)
            self.seen = []

        def step(self, closure=None):
            result = super().step(closure)
            self.seen.append(self.grad_norm)
            return result

    opt = Logged(parameters())
    train(opt)
    assert len(opt.seen) == 2
    assert opt.param_groups[0]["lr"] == 0.5


# Arguments


@pytest.mark.parametrize("given", [None, "AdamW", 3, torch.nn.Linear, object], ids=str)
def test_what_is_no_optimizer_class_is_refused(given):
    with pytest.raises(TypeError, match=r"wrapping: .* must be a class derived from torch.optim.Optimizer"):
        wrapping(given)


def test_an_optimizer_that_was_built_is_refused():
    with pytest.raises(TypeError, match="goes to FusedAccumOptimizer"):
        wrapping(SGD(parameters(), lr=0.1))


@pytest.mark.parametrize("cls", [FusedAccumOptimizer, wrapping(SGD)])
def test_wrapping_twice_is_refused(cls):
    with pytest.raises(TypeError, match="wraps an optimizer already; wrap the bare class once"):
        wrapping(cls)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"steps": 0}, ValueError, "steps=0"),
        ({"steps": 1.5}, TypeError, "steps=1.5"),
        ({"reduction": "sum"}, ValueError, "no meaning with steps=None"),
        ({"nonsense": 1}, TypeError, "unknown option 'nonsense'"),
        ({"max_norm": -1}, ValueError, "max_norm=-1"),
        ({"steps": 2, "nonfinite": "ignore"}, ValueError, "nonfinite='ignore'"),
        ({"process_group": object()}, TypeError, "process_group"),
    ],
    ids=str,
)
def test_bad_options_are_refused_at_once(options, error, words):
    with pytest.raises(error, match=words):
        wrapping(SGD, **options)


def test_bad_arguments_of_the_optimizer_are_its_own_to_refuse():
    cls = wrapping(AdamW)
    with pytest.raises(ValueError, match="Invalid learning rate"):
        cls(parameters(), lr=-1.0)
    with pytest.raises(TypeError, match="unexpected keyword"):
        cls(parameters(), momentum=0.9)
    with pytest.raises(ValueError, match="empty parameter list"):
        cls([])
    with pytest.raises(TypeError, match="float64"):
        cls([torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))])
