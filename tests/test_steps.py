"""The update rules on every backend, against float64 and stock torch.optim."""

from __future__ import annotations

import itertools

import pytest
import torch
from op_cases import DTYPES, NAMES, SIZES, bits, same_bits
from step_cases import GROUPS, PLAIN, Exact, Stock, Update, check_against_stock

from fusedaccum.ops import TOUCHED

RULES = ("adam", "sgd")
COMBINATIONS = list(itertools.product(DTYPES, DTYPES, (False, True)))


def sizes_for(rule: str, first: int) -> list[int]:
    """A size for each group; from `first` to `first` each group meets another one."""
    return [SIZES[(k + first) % len(SIZES)] for k in range(len(GROUPS[rule]))]


def update_of_ones(rule: str, sizes: list[int], groups: list[dict[str, float]] | None = None) -> Update:
    """The second update of float32 tensors, every gradient 1."""
    update = Update(rule, sizes, [2] * len(sizes), torch.float32, torch.float32, groups=groups)
    update.buffer.fill([torch.ones(n) for n in sizes])
    return update


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("param", "state", "master"), COMBINATIONS, ids=lambda x: NAMES.get(x) if x in NAMES else f"master={x}"
)
def test_one_update_with_every_option(backend, rule, param, state, master):
    """All groups in one call, each with its own options, step count and size, in every mix of dtypes.

    Stock torch starts from the same values in float32: the same arithmetic, so that only the last rounding may differ.
    """
    index = COMBINATIONS.index((param, state, master))
    sizes = sizes_for(rule, index)
    steps = [(1, 7, 2, 1000)[(k + index) % 4] for k in range(len(sizes))]
    update = Update(rule, sizes, steps, param, state, master)
    update.scalars[0] = 0.3
    grads = [torch.randn(n) * 4 for n in sizes]
    update.buffer.fill(grads)
    exact, stock = [], []
    for k, (group, step, grad) in enumerate(zip(update.groups, steps, grads, strict=True)):
        start = (update.source(k).float(), group, step, {n: t.float() for n, t in update.state_of(k).items()})
        exact.append(Exact(rule, *start))
        stock.append(Stock(rule, *start))
        exact[k].update(grad.double() * update.scalars[0].double())
        stock[k].update(grad * update.scalars[0])
    update.run(backend)
    check_against_stock(update, exact, stock)
    update.check_surroundings()
    assert all(same_bits(update.buffer.segment(k), grad) for k, grad in enumerate(grads))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16", "bf16 with fp32 masters"])
def test_twenty_updates_stay_with_stock_torch(backend, rule, kind):
    """Element by element, from the first update on; stock torch runs in the dtype that we keep p in."""
    param = {name: dtype for dtype, name in NAMES.items()}[kind[:4]]
    master = "masters" in kind
    held = torch.float32 if master else param
    # The first groups hold every option; all of them take part where rounding hides the least.
    sizes = [33 + k for k in range(len(GROUPS[rule]) if held == torch.float32 else 4)]
    update = Update(rule, sizes, [1] * len(sizes), param, held, master)
    starts = [(update.source(k), group, 1, update.state_of(k)) for k, group in enumerate(update.groups)]
    exact = [Exact(rule, *start) for start in starts]
    stock = [Stock(rule, *start) for start in starts]
    update.scalars[0] = 0.3
    for _ in range(20):
        # Away from 0, whose square a float16 moment would lose in stock torch.
        grads = [(torch.rand(n) + 0.5) * (torch.randint(0, 2, (n,)) * 2 - 1) * 4 for n in sizes]
        update.buffer.fill(grads)
        update.run(backend)
        update.steps += 1
        for k, grad in enumerate(grads):
            exact[k].update(grad.double() * update.scalars[0].double())
            stock[k].update(grad * update.scalars[0])
    check_against_stock(update, exact, stock)
    update.check_surroundings()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("zero", [False, True])
def test_skip_leaves_every_bit(backend, rule, zero):
    sizes = sizes_for(rule, 0)
    update = Update(rule, sizes, [3] * len(sizes), torch.bfloat16, torch.float32, master=True)
    update.buffer.fill([torch.full((n,), torch.nan) if k % 2 else None for k, n in enumerate(sizes)])
    update.scalars.copy_(torch.tensor([torch.nan, 1.0, torch.nan]))
    before = [tensor.clone() for tensor in update.tensors()]
    update.run(backend, zero)
    flat, flat_before = update.tensors()[0], before[0]
    assert all(same_bits(a, b) for a, b in zip(update.tensors()[1:], before[1:], strict=True))
    for k in range(len(sizes)):
        offset, numel = update.buffer.segments[k].tolist()
        if zero and k % 2:
            assert (bits(update.buffer.segment(k)) == 0).all()
        else:
            assert same_bits(flat[offset : offset + numel], flat_before[offset : offset + numel])
    update.check_surroundings()


@pytest.mark.parametrize("rule", RULES)
def test_zero_stores_positive_zeros_and_changes_nothing_else(backend, rule):
    sizes = sizes_for(rule, 3)
    torch.manual_seed(1)
    plain = update_of_ones(rule, sizes)
    torch.manual_seed(1)
    zeroing = update_of_ones(rule, sizes)
    plain.run(backend, False)
    zeroing.run(backend, True)
    for k in range(len(sizes)):
        assert (bits(zeroing.buffer.segment(k)) == 0).all()
        assert (plain.buffer.segment(k) == 1).all()
        assert all(same_bits(a, zeroing.values(k)[name]) for name, a in plain.values(k).items())
    zeroing.check_surroundings()


@pytest.mark.parametrize("rule", RULES)
def test_untouched_segments_keep_every_bit(backend, rule):
    """Stale NaNs in flat, weight decay, moments that would decay: nothing may move without a gradient."""
    sizes = sizes_for(rule, 5)
    update = update_of_ones(rule, sizes)
    untouched = range(0, len(sizes), 2)
    for k in untouched:
        update.buffer.segment(k).fill_(torch.nan)
        update.buffer.marks[k] = 0
    before = [{n: t.clone() for n, t in update.values(k).items()} for k in range(len(sizes))]
    flat = update.buffer.flat.clone()
    update.run(backend, True)
    for k in untouched:
        offset, numel = update.buffer.segments[k].tolist()
        assert all(same_bits(t, update.values(k)[n]) for n, t in before[k].items())
        assert same_bits(update.buffer.segment(k), flat[offset : offset + numel])
    changed = [k for k, n in enumerate(sizes) if n and not same_bits(before[k]["p"], update.source(k))]
    assert changed == [k for k, n in enumerate(sizes) if n and k not in untouched]


def test_state_of_options_that_are_off_is_left_alone(backend):
    """A group whose amsgrad or momentum was switched off keeps what it had, unread."""
    adam, sgd = (update_of_ones(rule, [17], [PLAIN[rule]]) for rule in RULES)
    adam.state["max_exp_avg_sq"][0] = torch.full((17,), torch.nan)
    sgd.state["momentum_buffer"][0] = torch.full((17,), torch.nan)
    for update in (adam, sgd):
        update.run(backend)
        assert update.lists()[-2][0].isnan().all()
        assert update.params[0].isfinite().all()


def test_lists_that_do_not_apply_may_be_left_out(backend):
    """Empty lists, untouched parameters of 0 elements, and segments of 0 elements."""
    sizes = [17, 5, 0]
    update = update_of_ones("adam", sizes)
    update.buffer.marks[1] = 0
    update.state["max_exp_avg_sq"].clear()
    for tensors in (update.params, update.state["exp_avg"], update.state["exp_avg_sq"]):
        tensors[1] = torch.zeros(0)
    before = update.params[0].clone()
    update.run(backend)
    assert (update.params[0] != before).all()

    update = update_of_ones("sgd", [17], [PLAIN["sgd"]])
    update.state["momentum_buffer"].clear()
    before = update.params[0].clone()
    update.run(backend)
    assert torch.allclose(update.params[0], before - PLAIN["sgd"]["lr"], atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_masters_of_some_parameters_only(backend, rule):
    """bf16 loses a step of 2^-12 near 1; a master keeps it."""
    update = Update(rule, [17, 17], [2, 2], torch.bfloat16, torch.float32, master=True)
    update.masters[1] = torch.zeros(0)
    update.hyper[:, 0] = 2.0**-12
    update.buffer.fill([torch.ones(17)] * 2)
    for tensor in [*update.params, update.masters[0]]:
        tensor.fill_(1.0)
    for moments in update.state.values():
        for moment in moments:
            moment.fill_(1.0)
    update.run(backend)
    assert (update.params[1] == 1.0).all()
    assert (update.masters[0] != 1.0).all()
    assert (update.params[0] == 1.0).all()


def test_nonfinite_multipliers_and_gradients_propagate(backend):
    for rule, multiplier in itertools.product(RULES, (torch.nan, 1.0)):
        update = update_of_ones(rule, [17, 17])
        update.scalars[0] = multiplier
        update.buffer.segment(0)[3] = torch.inf
        update.buffer.segment(0)[4] = torch.nan
        update.run(backend)
        lost = ~update.params[0].isfinite()
        assert lost.tolist() == ([True] * 17 if multiplier != multiplier else [k in (3, 4) for k in range(17)])


@pytest.mark.parametrize("rule", RULES)
def test_no_weight_decay_is_no_arithmetic(backend, rule):
    """-inf is a usual value of a mask that is kept as a parameter: 0 * inf would make it NaN."""
    update = update_of_ones(rule, [17], [PLAIN[rule]])
    update.params[0].fill_(-torch.inf)
    update.run(backend)
    assert (update.params[0] == -torch.inf).all()


@pytest.mark.parametrize("rule", RULES)
def test_any_step_count(backend, rule):
    """Bias corrections are computed in float64: in float32 those of a first update are off in the fourth digit."""
    for step in (1, 2, 3, 10_000, 2**24 - 1):
        update = Update(
            rule, [65, 65], [step, step], torch.float32, torch.float32, groups=[PLAIN[rule], GROUPS[rule][0]]
        )
        grads = [torch.randn(65), torch.randn(65)]
        update.buffer.fill(grads)
        starts = [(update.source(k), group, step, update.state_of(k)) for k, group in enumerate(update.groups)]
        exact, stock = [Exact(rule, *start) for start in starts], [Stock(rule, *start) for start in starts]
        for k, grad in enumerate(grads):
            exact[k].update(grad)
            stock[k].update(grad)
        update.run(backend)
        check_against_stock(update, exact, stock)


@pytest.mark.parametrize("rule", RULES)
def test_written_tensors_tell_autograd(backend, rule):
    sizes = [17] * len(GROUPS[rule])
    update = Update(rule, sizes, [2] * len(sizes), torch.bfloat16, torch.float32, master=True)
    update.params = [torch.nn.Parameter(p) for p in update.params]
    update.buffer.fill([torch.ones(n) for n in sizes], TOUCHED)
    written = [update.buffer.flat] + [t for tensors in update.lists() for t in tensors if t.numel()]
    before = [tensor._version for tensor in written]
    update.run(backend, True)
    assert all(tensor._version > version for tensor, version in zip(written, before, strict=True))
