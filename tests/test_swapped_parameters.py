"""Parameters that become others under the same name or the same Python object: swapped, parametrized, made late."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.utils import parametrize
from torch.optim import SGD
from wrapper_helpers import LOW_PRECISION, both_updates, micro_batch, set_grads, tidy, wrap  # noqa: F401

pytestmark = LOW_PRECISION


@pytest.fixture
def _swapping():
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@both_updates
@pytest.mark.usefixtures("_swapping")
@pytest.mark.parametrize("moment", ["between windows", "inside a window"])
def test_conversions_that_swap_parameters(moment, update):
    """`model.to` swaps what is in the tensor under the same Python object."""
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    weight, w = model.weight, wrap(SGD(model.parameters(), lr=1.0), 2, update=update)
    shift = moment == "inside a window"
    dtypes = (torch.float32, torch.bfloat16, torch.float32, torch.float16)
    for k in range(7):
        model.to(dtypes[(k + shift) // 2])
        micro_batch(w, model(torch.full((1, 2), float(k), dtype=weight.dtype)).sum())
    assert model.weight is weight
    assert weight.tolist() == [[-(0.5 + 2.5 + 4.5)] * 2]


@both_updates
def test_swap_tensors(update):
    """Sums, moments and steps belong to the Python object, as torch's own state does."""
    a, b = torch.nn.Parameter(torch.zeros(70)), torch.nn.Parameter(torch.full((70,), 10.0))
    w = wrap(SGD([a], lr=1.0), 2, update=update)
    micro_batch(w, a.sum())
    torch.utils.swap_tensors(a, b)
    micro_batch(w, (a * 3.0).sum())
    assert (a.tolist(), b.tolist()) == ([8.0] * 70, [0.0] * 70)


@both_updates
def test_swap_tensors_of_other_shapes_inside_a_window(update):
    """Sums that fit no longer are given up, with the warning that says so."""
    a, b = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3))
    w = wrap(SGD([a, b], lr=1.0), 2, update=update)
    set_grads([a, b], [torch.ones(2), torch.ones(3)])
    w.step()
    torch.utils.swap_tensors(a, b)
    set_grads([a, b], [torch.full((3,), 4.0), torch.full((2,), 6.0)])
    with pytest.warns(UserWarning, match="2 parameters left the optimizer or changed shape"):
        w.step()
    assert (a.tolist(), b.tolist()) == ([-2.0] * 3, [-3.0] * 2)


def test_masters_of_a_swapped_parameter():
    """The master is derived from what the parameter holds now."""
    p = torch.nn.Parameter(torch.full((70,), 0.25, dtype=torch.bfloat16))
    other = torch.nn.Parameter(torch.full((70,), 0.75, dtype=torch.bfloat16))
    w = wrap(SGD([p], lr=2.0**-12), steps=1, master_weights=True)
    for k in range(20):
        if k == 4:
            torch.utils.swap_tensors(p, other)
        set_grads([p], [torch.ones(70)])
        w.step()
    assert torch.equal(p.detach(), torch.full((70,), 0.75 - 2.0**-8).bfloat16())


@both_updates
def test_a_parametrization_inside_a_window(update):
    class Double(torch.nn.Module):
        def forward(self, x):
            return x * 2

        def right_inverse(self, x):
            return x / 2

    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    w = wrap(SGD(model.parameters(), lr=1.0), 2, update=update)
    micro_batch(w, model(torch.ones(1, 2)).sum())
    parametrize.register_parametrization(model, "weight", Double())
    micro_batch(w, model(torch.ones(1, 2)).sum())
    assert model.parametrizations.weight.original.tolist() == [[-1.5] * 2]


@both_updates
@pytest.mark.parametrize("replaced", ["by the user", "by swapping"])
def test_a_model_made_on_meta(replaced, update, request):
    if replaced == "by swapping":
        request.getfixturevalue("_swapping")
    with torch.device("meta"):
        model = torch.nn.Linear(2, 1, bias=False)
    w = wrap(SGD(model.parameters(), lr=1.0), 2, update=update)
    with pytest.raises(RuntimeError, match=r"meta hold no values.*to_empty.*param_groups"):
        w.step()
    assert w.pending == 0
    model.to_empty(device="cpu")
    torch.nn.init.zeros_(model.weight)
    if replaced == "by the user":
        w.param_groups[0]["params"] = list(model.parameters())
    for g in (1.0, 3.0):
        micro_batch(w, model(torch.full((1, 2), g)).sum())
    assert model.weight.tolist() == [[-2.0] * 2]


@both_updates
@pytest.mark.parametrize("moment", ["before the first fold", "inside a window", "between windows"])
def test_a_lazy_module(moment, update):
    """As in torch.optim, its parameters may stand in the optimizer before their shape is known."""
    p, lazy = torch.nn.Parameter(torch.zeros(2)), torch.nn.LazyLinear(2, bias=False)
    w = wrap(SGD([p, *lazy.parameters()], lr=1.0), 2, update=update)
    early = {"before the first fold": 0, "inside a window": 1, "between windows": 2}[moment]
    for _ in range(early):
        micro_batch(w, p.sum())
    lazy(torch.ones(1, 3))
    torch.nn.init.zeros_(lazy.weight)
    for _ in range(4 - early):
        micro_batch(w, p.sum() + (lazy.weight * 2).sum())
    assert p.tolist() == [-2.0] * 2
    assert torch.equal(lazy.weight.detach(), torch.full((2, 3), -float(4 - early)))


def test_a_lazy_module_is_saved_before_and_after_it_has_a_shape():
    lazy = torch.nn.LazyLinear(2)
    w = wrap(SGD(lazy.parameters(), lr=1.0), 2)
    assert w.state_dict()["fusedaccum"]["shapes"] == (None, None)
    lazy(torch.ones(1, 3))
    assert w.state_dict()["fusedaccum"]["shapes"] == ((2, 3), (2,))


BECOMES = {
    "another shape": lambda: torch.zeros(2, 5),
    "another order in memory": lambda: torch.zeros(3, 2).t(),
    "complex": lambda: torch.zeros(2, 3, dtype=torch.complex64),
    "bfloat16": lambda: torch.zeros(2, 3, dtype=torch.bfloat16),
}
every_change = pytest.mark.parametrize("become", BECOMES.values(), ids=BECOMES)


def trained(tensor, **options):
    """(parameter, wrapper over it) with one of two micro-batches folded."""
    p = torch.nn.Parameter(tensor)
    w = wrap(SGD([p], lr=1.0), 2, **options)
    p.grad = torch.arange(1.0, p.numel() + 1).view(p.shape).to(p.dtype)
    w.step()
    return p, w


@every_change
@pytest.mark.parametrize("moment", ["inside a window", "between windows"])
def test_a_parameter_that_becomes_complex_or_another(moment, become):
    """A sum that fits no longer is given up with the warning; what comes after is right."""
    p, w = trained(torch.zeros(2, 3))
    if moment == "between windows":
        w.reset()
        w.step()
    p.data = become()
    p.grad = torch.full_like(p, 2.0)
    fits = become in (BECOMES["another order in memory"], BECOMES["bfloat16"])
    if moment == "between windows" or fits:
        w.step()
    else:
        with pytest.warns(UserWarning, match="1 parameters left the optimizer or changed shape"):
            w.step()
    was = torch.arange(1.0, 7.0).view(2, 3) / 2 if moment == "inside a window" and fits else 0.0
    assert torch.equal(p.detach().to(torch.complex64), -(torch.ones(p.shape) + was).to(torch.complex64))


@every_change
def test_loading_right_after_a_parameter_has_changed(become):
    """The loaded sums belong to what the parameter is now, not to the buffer that was built for what it was."""
    p, w = trained(torch.zeros(2, 3))
    w.reset()
    _, other = trained(become())
    p.data = become()
    w.load_state_dict(copy.deepcopy(other.state_dict()))
    w.flush()
    assert torch.equal(p.detach(), -torch.arange(1.0, p.numel() + 1).view(p.shape).to(p.dtype))


@every_change
@pytest.mark.filterwarnings("ignore:.*changed shape")
def test_saving_right_after_a_parameter_has_changed(become):
    """What is saved then can be loaded."""
    p, w = trained(torch.zeros(2, 3))
    p.data = become()
    saved = copy.deepcopy(w.state_dict())
    q, other = trained(become())
    other.load_state_dict(saved)
    for wrapper in (w, other):
        (r,) = wrapper.param_groups[0]["params"]
        r.grad = torch.ones_like(r)
        wrapper.step()
    assert torch.equal(p, q)
    assert p.count_nonzero() == p.numel()


def test_saving_masters_right_after_a_parameter_has_changed():
    p, w = trained(torch.zeros(2, 3, dtype=torch.bfloat16), master_weights=True)
    w.flush()
    p.data = torch.full((4,), 0.75, dtype=torch.bfloat16)
    assert w.state_dict()["fusedaccum"]["masters"] == (None,)
    set_grads([p], [torch.full((4,), 2.0**-12)])
    w.step()
    w.flush()
    assert torch.equal(w.state_dict()["fusedaccum"]["masters"][0], torch.full((4,), 0.75 - 2.0**-12))


@every_change
@pytest.mark.filterwarnings("ignore:.*changed shape")
def test_master_grad_right_after_a_parameter_has_changed(become):
    """It has the parameter's shape, and the sum where that still fits."""
    p, w = trained(torch.zeros(2, 3))
    p.data = become()
    fits = become in (BECOMES["another order in memory"], BECOMES["bfloat16"])
    dtype = torch.complex64 if p.is_complex() else torch.float32
    expected = torch.arange(1.0, 7.0).view(2, 3) / 2 if fits else torch.zeros(p.shape, dtype=dtype)
    assert w.master_grad(p).dtype == expected.dtype
    assert torch.equal(w.master_grad(p), expected)
