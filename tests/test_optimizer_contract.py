"""The wrapper as a torch optimizer: identity, which update, hooks, closures, copies, autograd's versions."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import weakref

import pytest
import torch
from torch.optim import SGD, Adam, AdamW
from wrapper_helpers import (
    LOW_PRECISION,
    Toy,
    let_go,
    params_of,
    set_grads,
    snapshot,
    tidy,  # noqa: F401
    update_in_use,
    wrap,
)

from fusedaccum import FusedAccumOptimizer

UPDATES = ("fused", "wrapped")
both_updates = pytest.mark.parametrize("update", UPDATES)


# What the object is


def test_it_is_a_torch_optimizer():
    toy = Toy()
    assert isinstance(toy.w, torch.optim.Optimizer)
    assert toy.w.optimizer is toy.inner
    for name in ("param_groups", "state", "defaults"):
        assert getattr(toy.w, name) is getattr(toy.inner, name)
    assert inspect.ismethod(toy.w.step)
    assert toy.w.step.__func__ is FusedAccumOptimizer.step
    assert type(FusedAccumOptimizer) is type
    assert "__slots__" not in vars(FusedAccumOptimizer)
    assert toy.w.__dict__


def test_it_can_be_subclassed():
    class Mine(FusedAccumOptimizer):
        def step(self, closure=None, **weight):
            self.calls = getattr(self, "calls", 0) + 1
            return super().step(closure, **weight)

    p = torch.nn.Parameter(torch.zeros(1))
    w = Mine(SGD([p], lr=1.0), steps=2)
    for g in (1.0, 3.0):
        set_grads([p], [torch.tensor([g])])
        w.step()
    assert (w.calls, p.item()) == (2, -2.0)


@pytest.mark.parametrize("name", ["param_groups", "state"])
def test_assignment_reaches_the_wrapped_optimizer(name):
    toy = Toy(make=AdamW, lr=0.1)
    other = copy.copy(getattr(toy.inner, name))
    setattr(toy.w, name, other)
    assert getattr(toy.inner, name) is other
    assert getattr(toy.w, name) is other


@pytest.mark.parametrize(
    ("make", "options", "chosen"),
    [
        (AdamW, {}, "fused"),
        (Adam, {}, "fused"),
        (SGD, {}, "fused"),
        (type("AdamW", (AdamW,), {}), {}, "wrapped"),
        (torch.optim.RMSprop, {}, "wrapped"),
        (AdamW, {"differentiable": True}, "wrapped"),
    ],
    ids=["AdamW", "Adam", "SGD", "subclass", "RMSprop", "differentiable"],
)
def test_which_update_auto_takes(make, options, chosen):
    toy = Toy(2, make=lambda params, lr: make(params, lr=lr, **options), lr=0.1)
    assert update_in_use(toy.w) == chosen


def test_a_subclass_steps_itself():
    class Loud(AdamW):
        steps_taken = 0

        def step(self, closure=None):
            Loud.steps_taken += 1
            return super().step(closure)

    Toy(2, make=Loud, lr=0.1).run([1] * 6)
    assert Loud.steps_taken == 3


# Hooks and closures


@both_updates
def test_step_hooks_fire_once_per_update(update):
    toy = Toy(3, update=update)
    seen = []
    pre = toy.w.register_step_pre_hook(lambda opt, args, kwargs: seen.append(("pre", opt is toy.w, toy.value)))
    toy.w.register_step_post_hook(lambda opt, args, kwargs: seen.append(("post", opt is toy.w, toy.value)))
    toy.run([1] * 7)
    assert seen == [("pre", True, 0.0), ("post", True, -1.0), ("pre", True, -1.0), ("post", True, -2.0)]
    pre.remove()
    toy.w.flush()
    assert seen[4:] == [("post", True, -3.0)]


def test_state_dict_hooks_fire_once():
    toy = Toy(2).run([1])
    seen = []
    toy.w.register_state_dict_pre_hook(lambda opt: seen.append("save pre"))
    toy.w.register_state_dict_post_hook(lambda opt, saved: seen.append("save post"))
    toy.w.register_load_state_dict_pre_hook(lambda opt, saved: seen.append("load pre"))
    toy.w.register_load_state_dict_post_hook(lambda opt: seen.append("load post"))
    saved = toy.w.state_dict()
    assert seen == ["save pre", "save post"]
    toy.w.load_state_dict(saved)
    assert seen[2:] == ["load pre", "load post"]


def test_state_dict_hooks_can_replace_the_dict():
    toy = Toy(2).run([1])
    toy.w.register_state_dict_post_hook(lambda opt, saved: {**saved, "mine": 1})
    saved = toy.w.state_dict()
    assert saved.pop("mine") == 1
    toy.w.register_load_state_dict_pre_hook(lambda opt, given: saved)
    toy.w.load_state_dict({})
    assert toy.w.pending == 1


def test_97_the_hook_dictionaries_of_torch_are_there():
    toy, plain = Toy(), SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    names = [name for name in vars(plain) if name.endswith("_hooks")]
    assert names
    for name in names:
        assert isinstance(getattr(toy.w, name), dict), name


def test_a_closure_runs_every_time_with_gradients_enabled():
    toy = Toy(4)
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        toy.w.zero_grad()
        loss = (toy.p * 2 + 7).sum()
        loss.backward()
        return loss.item()

    with torch.no_grad():
        values = [toy.w.step(closure) for _ in range(5)]
    assert calls == [True] * 5
    assert values == [7.0, 7.0, 7.0, 7.0, 3.0]
    assert toy.value == -2.0
    assert toy.w.step() is None


# Copies


def trained_mid_window(make=AdamW):
    model = torch.nn.Linear(5, 3)
    w = wrap(make(model.parameters(), lr=0.1), steps=4)
    random = torch.Generator().manual_seed(0)
    run_on(w, [[torch.randn(p.shape, generator=random) for p in params_of(w)] for _ in range(6)])
    rest = [[torch.randn(p.shape, generator=random) for p in params_of(w)] for _ in range(6)]
    return model, w, rest


def run_on(w, micros):
    for grads in micros:
        set_grads(params_of(w), grads)
        w.step()
        w.zero_grad()


def through_pickle(pair):
    return pickle.loads(pickle.dumps(pair))


def through_torch_save(pair):
    stream = io.BytesIO()
    torch.save(pair, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


@pytest.mark.parametrize("copied_by", [copy.deepcopy, through_pickle, through_torch_save])
def test_copies_keep_the_window(copied_by):
    model, w, rest = trained_mid_window()
    twin_model, twin = copied_by((model, w))
    assert twin.optimizer is not w.optimizer
    assert params_of(twin)[0] is twin_model.weight
    assert (twin.steps, twin.pending, twin.updates) == (4, 2, 1)
    assert twin.param_groups is twin.optimizer.param_groups
    assert twin.state is twin.optimizer.state
    before = snapshot(w)
    run_on(twin, rest)
    assert snapshot(w) == before
    run_on(w, rest)
    assert snapshot(w) == snapshot(twin)
    assert twin.updates == 3
    twin.close()


def test_a_copy_keeps_hooks_apart():
    _, w, rest = trained_mid_window()
    twin = copy.deepcopy(w)
    fired = []
    w.register_step_post_hook(lambda *_: fired.append(1))
    run_on(twin, rest)
    assert not fired
    twin.close()


# Proxies and the end


def test_methods_run_with_a_proxy_as_self():
    """Lightning and Fabric copy `__dict__` into an object of their own and call methods with that as self."""
    toy = Toy(2)
    proxy = object.__new__(type("Proxy", (FusedAccumOptimizer,), {}))
    proxy.__dict__.update(vars(toy.w))
    for g, one in ((1.0, proxy), (3.0, toy.w), (5.0, proxy), (7.0, proxy)):
        set_grads([toy.p], [torch.tensor([g])])
        one.step()
        one.zero_grad()
        assert (proxy.pending, proxy.updates, proxy.updated) == (toy.w.pending, toy.w.updates, toy.w.updated)
    assert toy.value == -8.0
    proxy.steps = 3
    assert toy.w.steps == 3


def test_a_closed_wrapper_gives_its_optimizer_back():
    toy = Toy(2).run([1, 1])
    toy.w.close()
    set_grads([toy.p], [torch.ones(1)])
    toy.inner.step()
    assert toy.value == -2.0
    again = wrap(toy.inner, steps=1)
    set_grads([toy.p], [torch.ones(1)])
    again.step()
    assert (toy.value, again.updates) == (-3.0, 1)


def test_an_optimizer_outlives_its_wrapper():
    toy = Toy(2).run([1, 1])
    let_go(toy.w)
    del toy.w
    gc.collect()
    assert wrap(toy.inner, steps=1).updates == 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"update": "wrapped"},
        {"fold": "backward"},
        {"steps": None},
        {"rounding": "stochastic", "state_dtype": torch.float32},
        {"master_weights": True, "state_dtype": torch.float32},
    ],
    ids=lambda options: ",".join(options) or "default",
)
@LOW_PRECISION
def test_a_wrapper_that_is_dropped_gives_its_memory_back_at_once(options):
    """Not only when the garbage collector comes, which does not see how large a flat buffer is."""
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    wrapper = FusedAccumOptimizer(AdamW([p]), **{"steps": 2, **options})
    for _ in range(2):
        (p * 2).sum().backward()
        wrapper.step()
    assert wrapper.grad_norm > 0
    wrapper.state_dict()
    p.grad = None
    flat = weakref.ref(wrapper._window.buffers[0].flat)
    gc.disable()
    try:
        del wrapper
        assert flat() is None
    finally:
        gc.enable()
