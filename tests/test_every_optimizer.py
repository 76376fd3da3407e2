"""Every optimizer of torch, with every option that torch's own tests know, wrapped: equal to the bare one."""

from __future__ import annotations

import pytest
import torch
from optimizer_cases import (
    BEGIN,
    EQUAL,
    FUSED,
    LOW,
    REFUSED,
    TORCH_CANNOT,
    UPDATES,
    bare_run,
    beyond_the_budget,
    cases,
    everything,
    exact_windows,
    minor_version,
    outcome,
    readme_parts,
    table,
)
from wrapper_helpers import (
    DTYPES,
    LOW_PRECISION,
    bits,
    make_params,
    mean64,
    params_of,
    refused,
    set_grads,
    tidy,  # noqa: F401
    train_stock,
    update_in_use,
    wrap,
)

from fusedaccum import FusedAccumOptimizer

pytestmark = LOW_PRECISION

WRAPPABLE = [case for case in cases() if case.name not in REFUSED]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def every_case(chosen):
    return pytest.mark.parametrize("case", chosen, ids=str)


def test_every_class_of_torch_is_here():
    classes = {name for name, value in vars(torch.optim).items() if isinstance(value, type)} - {"Optimizer"}
    assert {case.name for case in cases()} == classes
    assert {*FUSED, *REFUSED} < classes
    assert len({str(case) for case in cases()}) == len(cases())


# What torch itself computes at random is no measure: optimizer_cases.py looks for it, and says so in the table.
COMPARABLE = [(case, dtype) for case in WRAPPABLE for dtype in DTYPES if not case.why_torch_cannot(dtype)]


@pytest.mark.parametrize(("case", "dtype"), COMPARABLE, ids=str)
def test_54_the_wrapped_update_is_the_bare_optimizer_bit_by_bit(case, dtype):
    assert outcome(case, dtype, "wrapped") == EQUAL


@every_dtype
@every_case([case for case in WRAPPABLE if case.can_fuse])
def test_the_fused_update_errs_no_more_than_torch(case, dtype):
    assert outcome(case, dtype, "fused") == EQUAL


@every_dtype
@every_case([case for case in WRAPPABLE if not case.can_fuse])
def test_what_cannot_be_fused_is_refused(case, dtype):
    optimizer = case.build(dtype)
    reason = "differentiable" if case.name in FUSED else rf"exactly AdamW.* is {case.name}\b"
    with refused(optimizer, "fused", reason, "use update='auto' or 'wrapped'"):
        FusedAccumOptimizer(optimizer, steps=3, update="fused")


@every_dtype
@pytest.mark.parametrize("update", ["auto", *UPDATES])
@every_case([case for case in cases() if case.name in REFUSED])
def test_what_cannot_be_wrapped_is_refused_by_name(case, dtype, update):
    optimizer = case.build(dtype)
    why = {"LBFGS": "closure several times", "SparseAdam": "sparse gradients only"}[case.name]
    with refused(optimizer, f"{case.name} is not supported", why, "without the wrapper"):
        FusedAccumOptimizer(optimizer, steps=3, update=update)


@every_case(WRAPPABLE)
def test_auto_fuses_what_can_be_fused(case):
    chosen = update_in_use(wrap(case.build(torch.bfloat16), 3))
    assert chosen == ("fused" if case.can_fuse else "wrapped")


def test_what_torch_cannot_do_is_little():
    left_out = {
        (case.name, case.options.get("fused"), dtype)
        for case in cases()
        for dtype in DTYPES
        if outcome(case, dtype, "wrapped").startswith(TORCH_CANNOT)
    }
    assert left_out <= {("SGD", True, dtype) for dtype in LOW}


@every_case([case for case in WRAPPABLE if case.options.get("differentiable")])
def test_differentiable_with_a_leaf_that_requires_grad(case):
    """Torch refuses to write to one; its error comes through and nothing has changed."""

    def leaf():
        inner = case.build(torch.float32)
        params_of(inner)[0].requires_grad_(True)
        return inner

    grads = [torch.ones(s) for s in case.shapes]
    bare, inner = leaf(), leaf()
    w = wrap(inner, 1)
    before = [bits(p) for p in params_of(inner)]
    for optimizer in (bare, w):
        set_grads(params_of(optimizer), grads)
        with pytest.raises(RuntimeError, match="leaf Variable"):
            optimizer.step()
    assert w.updates == 0
    assert [bits(p) for p in params_of(inner)] == before


# What the tests above can see


@pytest.mark.parametrize("name", ["Adam", "Muon"])
@every_dtype
def test_the_mean_is_exact_in_float32_and_has_to_be_rounded_below(name, dtype):
    case = next(case for case in WRAPPABLE if case.name == name)
    for window in exact_windows(case, dtype):
        for mean in mean64(window):
            assert torch.equal(mean.float().double(), mean)
            rounded = (mean.to(dtype).double() != mean).double().mean()
            assert rounded == 0 if dtype == torch.float32 else rounded > 0.25


# Options that are the default written as a tensor, or that two updates do not show: ASGD averages from update t0 on,
# RAdam has no denominator before its sixth update, Rprop's step sizes are bounds.
SHOWS_NOTHING = {
    "ASGD, t0",
    "Muon, Tensor lr",
    "RAdam, non-default eps",
    "Rprop, non-default step_sizes",
    "SGD, tensor lr",
}
PLAIN = [
    case
    for case in WRAPPABLE
    if not any(case.options.get(flag) for flag in ("foreach", "fused", "differentiable"))
    and case.about != "default"
    and str(case) not in SHOWS_NOTHING
]


@every_case(PLAIN)
def test_no_option_can_get_lost(case):
    """Back at its default, each option of a set gives other bits and, where it is fused, breaks the budget."""
    cls = getattr(torch.optim, case.name)
    defaults = cls(make_params([torch.ones(2, 2)], torch.float32)).defaults
    changed = [name for name, value in case.options.items() if value not in (defaults[name], False)]
    assert changed
    for name in changed:
        if name == "momentum" and case.options.get("nesterov"):
            continue  # torch takes no nesterov without momentum
        broken = case.build(torch.float32, **{name: defaults[name]})
        train_stock(broken, exact_windows(case, torch.float32))
        stock = bare_run(case, torch.float32, torch.float32)
        assert everything(broken)["parameters"] != everything(stock)["parameters"], name
        if case.can_fuse:
            assert beyond_the_budget(broken, stock, bare_run(case, torch.float64, torch.float32)), name


def test_the_table_in_the_readme_is_what_came_out():
    shown = readme_parts()[1].strip()
    if f"PyTorch {minor_version()} " not in shown:
        pytest.skip(f"this is PyTorch {minor_version()}; README.md has the results of: {shown.split('|')[1].strip()}")
    assert shown == table(), f"write it anew with `python tests/optimizer_cases.py` ({BEGIN})"
