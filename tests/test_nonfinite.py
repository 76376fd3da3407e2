"""Infinities and NaNs under each policy: what is left out leaves no trace in parameters, state, counts or schedules."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import StepLR
from wrapper_helpers import LOW_PRECISION, Toy, bits, tidy, update_in_use, use_two_buffers, wrap  # noqa: F401

from fusedaccum import GatedScheduler

INF, NAN = float("inf"), float("nan")
both = pytest.mark.parametrize("update", ["fused", "wrapped"])
skips = pytest.mark.parametrize("policy", ["skip_window", "skip_micro"])
BAD = pytest.mark.parametrize("bad", [INF, -INF, NAN], ids=["inf", "-inf", "nan"])
MAKERS = {
    "adamw": lambda params: AdamW(params, lr=0.05, weight_decay=0.3),
    "amsgrad": lambda params: Adam(params, lr=0.05, amsgrad=True),
    "momentum": lambda params: SGD(params, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "sgd": lambda params: SGD(params, lr=0.1),
}
every_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
SHAPES = [(5,), (3, 4), (4097,)]
N = 4


class Run:
    def __init__(self, make, policy, update="auto", dtype=torch.float32, steps=N, **options):
        torch.manual_seed(0)
        self.params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
        self.w = wrap(make(self.params), steps, nonfinite=policy, update=update, **options)

    def micro(self, seed, bad=None, absent=(), **weight):
        """Gradients of a seed; `bad` is (parameter, value)."""
        torch.manual_seed(seed)
        for k, p in enumerate(self.params):
            grad = torch.randn_like(p)
            if bad is not None and bad[0] == k:
                grad.view(-1)[-1] = bad[1]
            p.grad = None if k in absent else grad
        self.w.step(**weight)

    def left(self):
        """Bits of all that an update leaves behind; a state of zeros that was never updated counts as none."""
        state = []
        for p in self.params:
            entries = self.w.state.get(p, {})
            updated = any(bool(torch.as_tensor(v).any()) for v in entries.values() if v is not None)
            state.append({k: bits(v) for k, v in entries.items() if v is not None} if updated else {})
        return [bits(p) for p in self.params], state


def same(a, b):
    return a.left() == b.left()


@both
@every_maker
@BAD
def test_a_skipped_window_leaves_no_trace(make, update, bad):
    """Wherever in the window it was; the next windows are as if it had never been."""
    run, twin = Run(make, "skip_window", update), Run(make, "propagate", update)
    for window, position in enumerate([0, 1, 3, None, 2, None]):
        for k in range(N):
            run.micro(10 * window + k, bad=(1, bad) if k == position else None)
            if position is None:
                twin.micro(10 * window + k)
        assert run.w.updated == (position is None)
        assert same(run, twin)
        assert bool(torch.tensor(run.w.grad_norm).isfinite()) == (position is None)
    assert (run.w.updates, run.w.skipped_windows, run.w.skipped_micro_batches) == (2, 4, 0)


@both
@every_maker
@BAD
def test_a_skipped_micro_batch_leaves_the_mean_of_the_others(make, update, bad):
    run, twin = Run(make, "skip_micro", update), Run(make, "propagate", update)
    left_out = 0
    for window, positions in enumerate([{0}, {3}, {0, 1, 2}, set(), {0, 1, 2, 3}, {1}]):
        for k in range(N):
            run.micro(10 * window + k, bad=(2, bad) if k in positions else None)
            assert run.w.pending == (k + 1) % N
            if k not in positions:
                twin.micro(10 * window + k)
        left_out += len(positions)
        if twin.w.pending:
            twin.w.flush()
        assert run.w.updated == (len(positions) < N)
        assert same(run, twin)
    assert (run.w.updates, run.w.skipped_windows, run.w.skipped_micro_batches) == (5, 1, left_out)


@both
@every_maker
def test_a_parameter_whose_only_gradients_were_skipped_is_left_alone(make, update):
    """No weight decay, no moment, no count: as one without a gradient."""
    run, twin = Run(make, "skip_micro", update), Run(make, "propagate", update)
    for k in range(N):
        run.micro(k, bad=(0, NAN) if k == 1 else None, absent=(2,) if k != 1 else ())
        if k != 1:
            twin.micro(k, absent=(2,))
    twin.w.flush()
    assert same(run, twin)


@both
def test_case_84(update):
    def toy(policy):
        return Toy(4, make=SGD, nonfinite=policy, update=update)

    window = toy("skip_window").run([1, NAN, 1, 1])
    assert (window.value, window.w.updates) == (0.0, 0)
    assert window.run([1] * 4).value == -1.0
    micro = toy("skip_micro").run([1, NAN, 1, 1])
    assert (micro.value, micro.w.updates) == (-1.0, 1)


def test_case_86_the_wrapped_optimizer_is_not_called():
    toy = Toy(2, make=lambda p, lr: SGD(p, lr=lr, momentum=0.9), nonfinite="skip_window", update="wrapped")
    fired = []
    toy.w.register_step_pre_hook(lambda *_: fired.append("pre"))
    toy.w.register_step_post_hook(lambda *_: fired.append("post"))
    toy.run([NAN, NAN])
    assert not toy.inner.state
    assert fired == []
    toy.run([1, 1])
    assert fired == ["pre", "post"]


@both
def test_case_117_nothing_of_a_skipped_micro_batch_is_in_the_next_window(update):
    toy = Toy(2, n=2, nonfinite="skip_micro", update=update).run([(NAN, 5.0), (1.0, 1.0)])
    assert toy.value == [-1.0, -1.0]
    assert toy.run([(1.0, 1.0), (1.0, 1.0)]).value == [-2.0, -2.0]


@both
@skips
def test_a_gated_schedule_stays_where_nothing_was_updated(update, policy):
    toy = Toy(2, nonfinite=policy, update=update)
    scheduler = GatedScheduler(StepLR(toy.inner, 1, gamma=0.5), toy.w)
    for gradients, rate in (([NAN, NAN], 1.0), ([1, 1], 0.5), ([INF, INF], 0.5), ([1, 1], 0.25)):
        for g in gradients:
            toy.micro(g)
            scheduler.step()
        assert toy.inner.param_groups[0]["lr"] == rate


@both
def test_weights_and_skipping(update):
    """A micro-batch that is left out counts no items either; numbers and tensors."""
    for number in (float, torch.tensor):
        run, twin = Run(MAKERS["sgd"], "skip_micro", update), Run(MAKERS["sgd"], "propagate", update)
        for k, items in enumerate([3, 5, 2, 7]):
            run.micro(k, bad=(1, NAN) if k == 2 else None, mean_of=number(items))
            if k != 2:
                twin.micro(k, mean_of=number(items))
        twin.w.flush()
        for a, b in zip(run.params, twin.params, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
        run.micro(1, bad=(1, NAN), sum_of=number(4))
        run.w.flush()
        assert (run.w.skipped_windows, run.w.updates) == (1, 1)


@both
@skips
def test_a_short_window(update, policy):
    run, twin = Run(MAKERS["adamw"], policy, update), Run(MAKERS["adamw"], "propagate", update)
    run.micro(0)
    run.micro(1, bad=(0, NAN))
    updated = run.w.flush()
    assert updated == (policy == "skip_micro")
    if updated:
        twin.micro(0)
        twin.w.flush()
    assert same(run, twin)
    run.micro(2)
    run.w.reset()
    run.micro(3)
    twin.micro(3)
    assert run.w.flush()
    assert twin.w.flush()
    assert same(run, twin)


@both
@skips
def test_sums_of_finite_gradients_that_overflow_are_skipped(update, policy):
    toy = Toy(2, nonfinite=policy, update=update, reduction="sum").run([3e38, 3e38])
    assert (toy.value, toy.w.updates, toy.w.skipped_windows) == (0.0, 0, 1)


@both
def test_raise_names_the_parameters_and_changes_nothing(update):
    run, twin = Run(MAKERS["momentum"], "raise", update), Run(MAKERS["momentum"], "propagate", update)
    for each in (run, twin):
        each.micro(0)
    with pytest.raises(FloatingPointError, match=r"param_groups\[0\]\['params'\]\[1\], shape \(3, 4\)"):
        run.micro(1, bad=(1, NAN))
    assert run.w.pending == 1
    assert run.params[1].grad is not None
    run.w.zero_grad()
    for each in (run, twin):
        for k in (2, 3, 4):
            each.micro(k)
    assert same(run, twin)
    assert run.w.updates == 1


def test_propagate_lets_it_through():
    assert torch.tensor(Toy(1).run([NAN]).value).isnan()


@LOW_PRECISION
@skips
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_masters_are_as_before(policy, dtype):
    run = Run(MAKERS["adamw"], policy, dtype=dtype, master_weights=True)
    for k in range(N):
        run.micro(k)
    masters = [m.clone() for m in run.w._window.update.side(run.w._window.buffers[0]).masters.tensors]
    before = run.left()
    for k in range(N):
        run.micro(k, bad=(2, INF))
    assert run.left() == before
    after = run.w._window.update.side(run.w._window.buffers[0]).masters.tensors
    assert all(map(torch.equal, masters, after))


@pytest.mark.parametrize("how", ["state_dict", "deepcopy"])
@both
def test_an_open_window_with_something_left_out_is_saved(update, how):
    """Two folded and one left out of four: the mean is over three at the end, also where one parameter has none yet."""
    run, twin = Run(MAKERS["adamw"], "skip_micro", update), Run(MAKERS["adamw"], "propagate", update)
    run.micro(0, absent=(2,))
    run.micro(1, bad=(0, NAN))
    run.micro(2, absent=(2,))
    if how == "state_dict":
        resumed = Run(MAKERS["adamw"], "skip_micro", update)
        resumed.w.load_state_dict(copy.deepcopy(run.w.state_dict()))
    else:
        resumed = copy.deepcopy(run)
    assert (resumed.w.pending, resumed.w.skipped_micro_batches) == (3, 1)
    resumed.micro(3, absent=(2,))
    for k in (0, 2, 3):
        twin.micro(k, absent=(2,))
    twin.w.flush()
    assert same(resumed, twin)


@skips
def test_on_several_devices_one_decides_for_all(monkeypatch, policy):
    use_two_buffers(monkeypatch)
    run, twin = Run(MAKERS["adamw"], policy, steps=2), Run(MAKERS["adamw"], "propagate", steps=2)
    run.micro(0)
    run.micro(1, bad=(1, NAN))
    if policy == "skip_micro":
        twin.micro(0)
        twin.w.flush()
    assert len(run.w._window.buffers) == 2
    assert same(run, twin)


@both
@pytest.mark.parametrize("change", ["a group is added", "a parameter is unfrozen"])
def test_what_was_summed_before_the_buffer_grew_counts(update, change):
    """Under skip_micro only the device knows which segments hold a sum, and a new buffer must be told."""
    p, q = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    q.requires_grad_(change == "a group is added")
    w = wrap(SGD([p, q], lr=1.0), 2, nonfinite="skip_micro", update=update)
    p.grad = torch.ones(2)
    w.step()
    if change == "a group is added":
        w.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    else:
        q.requires_grad_(True)
    q.grad = torch.ones(2)
    w.step()
    assert (p.tolist(), q.tolist()) == ([-0.5] * 2, [-0.5] * 2)


@both
def test_what_is_left_beside_a_skipped_micro_batch_may_be_no_gradient_at_all(update):
    """No update then: the optimizer is not called, no hook speaks of one, and the window counts as skipped."""
    for number in (None, 2.0, torch.tensor(2.0)):
        toy = Toy(2, nonfinite="skip_micro", update=update)
        toy.micro(NAN, mean_of=number)
        toy.w.step(mean_of=number)
        assert (toy.w.updated, toy.w.updates, toy.w.skipped_windows, toy.value) == (False, 0, 1, 0.0)


@both
@pytest.mark.parametrize("policy", ["propagate", "skip_window", "skip_micro", "raise"])
@pytest.mark.parametrize("number", [float, torch.tensor])
def test_items_that_count_0_and_no_gradient(update, policy, number):
    """A window whose items all count 0 is a skipped one, with gradients or without; a merely empty one is not."""
    for items, skipped in ((0.0, 1), (3.0, 0), (None, 0)):
        toy = Toy(2, nonfinite=policy, update=update)
        for _ in range(2):
            toy.w.step(mean_of=None if items is None else number(items))
        assert (toy.w.updated, toy.w.updates, toy.w.skipped_windows) == (False, 0, skipped)


def test_a_loaded_window_remembers_that_all_was_left_out():
    toy, resumed = Toy(4, nonfinite="skip_micro").run([NAN, INF]), Toy(4, nonfinite="skip_micro")
    resumed.w.load_state_dict(copy.deepcopy(toy.w.state_dict()))
    for each in (toy, resumed):
        assert each.w.flush() is False
        assert (each.w.updates, each.w.skipped_windows) == (0, 1)


@both
def test_a_call_before_any_parameter_can_have_a_gradient_counts(update):
    """skip_micro counts what it kept, and a micro-batch without a gradient is kept, also before there is a buffer."""
    p = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
    w = wrap(SGD([p], lr=1.0), 2, nonfinite="skip_micro", update=update)
    w.step()
    p.requires_grad_(True)
    p.grad = torch.ones(1)
    w.step()
    assert (p.item(), w.updates, w.skipped_windows) == (-0.5, 1, 0)
    for items in (0.0, 3.0):  # nothing is left out of a window without gradients whose items count
        w.step(mean_of=items)
    assert (w.updates, w.skipped_windows, w.skipped_micro_batches) == (1, 0, 0)


@pytest.mark.parametrize("left_out", ["not finite", "counts 0"])
def test_a_momentum_buffer_that_nothing_has_started_is_not_taken_along(left_out):
    """To the wrapped update, for which one that is there is a started one: dampening would hold for the first."""
    p, c = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    options = {"nonfinite": "skip_window"} if left_out == "not finite" else {}
    w = wrap(SGD([p], lr=0.1, momentum=0.9, dampening=0.5), 1, **options)
    p.grad = torch.full((3,), float("inf") if options else 1.0)
    w.step(mean_of=None if options else torch.tensor(0.0))
    w.add_param_group({"params": [c]})
    p.grad, c.grad = torch.ones(3), torch.ones_like(c)
    w.step(mean_of=None if options else 1.0)
    assert p.tolist() == pytest.approx([0.9] * 3)
    assert update_in_use(w) == "wrapped"
