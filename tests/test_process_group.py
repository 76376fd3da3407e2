"""`process_group`: one reduction a window, after which every rank has updated by the mean over all ranks."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from processes import on_ranks
from torch.optim import SGD, AdamW

from fusedaccum import FusedAccumOptimizer, GatedScheduler

BF16 = torch.bfloat16


def world():
    return dist.group.WORLD


def wrap(params, steps, lr=1.0, **options):
    return FusedAccumOptimizer(SGD(params, lr=lr), steps, process_group=world(), **options)


def feed(opt, p, *gradients, **count):
    """Each gradient as a micro-batch of its own, by a backward."""
    for g in gradients:
        if count and opt._window.in_backward is not None:
            opt.micro_batch(**count)
        if g is not None:
            (p * g).sum().backward()
        opt.step(**({} if opt._window.in_backward is not None else count))


# The right values of small cases


def small_cases():
    rank = dist.get_rank()
    p = torch.nn.Parameter(torch.zeros(1))
    for fold in ("step", "backward"):
        for dtype in (torch.float32, BF16):
            p.data.zero_()
            opt = wrap([p], 2, fold=fold, wire_dtype=dtype)
            feed(opt, p, *((1.0, 3.0), (5.0, 7.0))[rank])
            assert (p.item(), opt.grad_norm, opt.updates) == (-4.0, 4.0, 1)

            p.data.zero_()
            opt.close()
            opt = wrap([p], 2, fold=fold, reduction="sum")
            feed(opt, p, *((1.0, 3.0), (5.0, 7.0))[rank])
            assert p.item() == -8.0  # a sum over micro-batches, a mean over ranks
            opt.close()

            p.data.zero_()  # every item has the gradient 1
            opt = wrap([p], 2, fold=fold)
            for n in ((5, 20), (10, 3))[rank]:
                feed(opt, p, 1.0, mean_of=n)
            assert p.item() == -1.0
            for n in ((5, 20), (10, 3))[rank]:
                feed(opt, p, 1.0, mean_of=torch.tensor(n) if rank else n)
            assert p.item() == -2.0
            for n in ((0, 0), (10, 30))[rank]:
                feed(opt, p, float("nan") if n == 0 else 4.0, mean_of=n)
            assert p.item() == -6.0
            feed(opt, p, 7.0, 8.0, mean_of=0)
            assert (p.item(), opt.updates, opt.skipped_windows, opt.updated) == (-6.0, 3, 1, False)
            for _ in range(2):  # rank 0 drops gradients, rank 1 counts items and has none
                feed(opt, p, 2.0 if rank == 0 else None, mean_of=3 * rank)
            assert (p.item(), opt.updates, opt.skipped_windows) == (-6.0, 3, 2)
            opt.close()
    return True


def test_small_cases():
    assert on_ranks(2, small_cases) == [True, True]


# Segments


def touched_segments(nonfinite):
    """A is used on rank 0 in its first micro-batch, B on rank 1 in its second, C never; windows before left values."""
    rank = dist.get_rank()
    a, b, c = (torch.nn.Parameter(torch.zeros(5000)) for _ in range(3))
    opt = FusedAccumOptimizer(
        AdamW([a, b, c], lr=0.125, weight_decay=0.5), 2, process_group=world(), nonfinite=nonfinite
    )
    for _ in range(2):  # stale values, another one on each rank
        for _ in range(2):
            ((a + b + c).sum() * (rank + 1000.0)).backward()
            opt.step()
    before = [x.detach().clone() for x in (a, b, c)]
    steps = opt.state[c]["step"].clone()
    for i in range(2):
        used = a if (rank, i) == (0, 0) else b if (rank, i) == (1, 1) else None
        if used is not None:
            (used * 8.0).sum().backward()
        opt.step()
    moved = [not torch.equal(x, y) for x, y in zip((a, b, c), before, strict=True)]
    assert moved == [True, True, False]
    assert opt.state[c]["step"] == steps
    assert opt.state[a]["step"] == steps + 1
    assert opt.grad_norm == pytest.approx((2 * 5000 * (8.0 / 4) ** 2) ** 0.5)
    return torch.cat([a.detach(), b.detach(), opt.state[a]["exp_avg"], opt.state[b]["exp_avg_sq"]])


@pytest.mark.parametrize("nonfinite", ["propagate", "skip_window"])
def test_a_segment_touched_anywhere_is_updated_everywhere_and_no_other(nonfinite):
    one, other = on_ranks(2, touched_segments, nonfinite)
    assert torch.equal(one, other)


# What is not finite


def not_finite():
    rank = dist.get_rank()
    p, q = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3))
    opt = wrap([p, q], 2, nonfinite="skip_window")
    schedule = GatedScheduler(torch.optim.lr_scheduler.StepLR(opt, 1, 0.5), opt)
    feed(opt, p, 1.0, float("inf") if rank == 1 else 1.0)
    schedule.step()
    assert (opt.skipped_windows, opt.updates, opt.updated, p.sum().item()) == (1, 0, False, 0.0)
    feed(opt, p, 1.0, 1.0)
    schedule.step()
    assert (opt.updates, p.tolist(), opt.param_groups[0]["lr"]) == (1, [-1.0] * 3, 0.5)
    opt.close()

    p.data.zero_()
    opt = wrap([p, q], 2, nonfinite="raise")
    feed(opt, p, float("nan") if rank == 0 else 1.0)  # nobody knows of it yet
    for _ in range(2):  # and once more, by flush(), without the other rank
        with pytest.raises(FloatingPointError, match=r"2 ranks .*params.*\[0\].*reset\(\)"):
            opt.flush() if opt.pending == 2 else feed(opt, p, 1.0)
    with pytest.raises(RuntimeError, match=r"was reduced.*reset\(\)"):
        opt.step()
    assert p.tolist() == [0.0] * 3
    opt.reset()
    p.grad = None
    feed(opt, p, 1.0, 1.0)
    assert p.tolist() == [-1.0] * 3
    return True


def test_what_is_not_finite_on_one_rank_counts_on_all():
    on_ranks(2, not_finite)


# Short windows


def flushes():
    rank, size = dist.get_rank(), dist.get_world_size()
    p = torch.nn.Parameter(torch.zeros(1))
    opt = wrap([p], 5)
    assert opt.flush() is False  # nobody has anything
    assert opt.grad_norm is None
    feed(opt, p, *([1.0] * (rank + 1)))  # 1, 2, ... micro-batches
    assert opt.flush() is True
    assert p.item() == -1.0
    feed(opt, p, *([2.0] * (3 if rank == 0 else 0)))  # only rank 0 has a window
    assert (opt.flush(), p.item(), opt.pending, opt.updates) == (True, -3.0, 0, 2)
    feed(opt, p, *([5.0 if rank else 1.0] * 4), *([5.0] if rank else [None]))  # rank 0 has no fifth micro-batch
    assert p.item() == pytest.approx(-3.0 - (4.0 + 25.0 * (size - 1)) / (5 * size))
    assert opt.updates == 3
    empty = wrap([torch.nn.Parameter(torch.zeros(1))], 3)
    empty.step()
    assert empty.flush() is False  # micro-batches, none with a gradient
    return True


@pytest.mark.parametrize("size", [2, 4])
def test_flush_divides_by_the_count_over_ranks(size):
    on_ranks(size, flushes)


# Precision of the wire


def wire(size):
    """Worst error over the bound: one rounding of each contribution, one of the sum."""
    torch.manual_seed(dist.get_rank())
    x = torch.randn(70_001) * 10 ** torch.randint(-6, 6, (70_001,)).float()
    p = torch.nn.Parameter(torch.zeros(70_001))
    opt = wrap([p], 1, wire_dtype=BF16, reduction="sum")
    p.grad = x.clone()
    opt.step()
    parts = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(parts, x)
    exact = sum(part.double() for part in parts)
    rounding = 2.0**-8 * (sum(part.double().abs() for part in parts) + exact.abs())
    worst = ((p.double() * -size - exact).abs() / (rounding * 1.02 + 1e-30)).max().item()
    return worst, p.detach()


@pytest.mark.parametrize("size", [2, 4])
def test_a_bf16_wire_rounds_twice_whatever_the_number_of_ranks(size):
    results = on_ranks(size, wire, size)
    assert all(torch.equal(results[0][1], p) for _, p in results)
    assert 0.3 < results[0][0] <= 1.0


# Hooks


def hooks():
    rank = dist.get_rank()
    p, q = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    opt = wrap([p, q], 2, max_norm=100.0)
    seen = []

    def look(optimizer, args, kwargs):
        seen.append((optimizer.master_grad(p).tolist(), optimizer.master_grad(q).tolist()))
        optimizer.master_grad(p).mul_(2)

    handle = opt.register_step_pre_hook(look)
    feed(opt, p if rank else q, 2.0, 6.0)
    assert seen == [([2.0] * 2, [2.0] * 2)]
    assert (p.tolist(), q.tolist()) == ([-4.0] * 2, [-2.0] * 2)
    assert opt.grad_norm == pytest.approx((2 * 16 + 2 * 4) ** 0.5)
    handle.remove()

    def fails(optimizer, args, kwargs):
        optimizer.master_grad(p)
        raise KeyError("hook")

    handle = opt.register_step_pre_hook(fails)
    with pytest.raises(KeyError):
        feed(opt, p, 2.0, 4.0)
    assert opt.pending == 2
    handle.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved = copy.deepcopy(opt.state_dict())
    assert opt.flush() is True  # the other ranks are not asked again: each has the sums of all
    assert p.tolist() == [-7.0] * 2
    opt.load_state_dict(saved)  # what a rank saves then is its share
    assert (opt.flush(), p.tolist()) == (True, [-10.0] * 2)

    opt.register_step_pre_hook(lambda o, a, k: o.reset())
    feed(opt, p, 2.0, 4.0)
    assert (p.tolist(), opt.pending, opt.updated) == ([-10.0] * 2, 0, False)
    return True


def test_hooks_see_and_edit_the_mean_over_ranks():
    on_ranks(2, hooks)


def saves_its_share():
    """What is saved of a reduced window stands for as many micro-batches as the rank has put in."""
    rank = dist.get_rank()
    p = torch.nn.Parameter(torch.zeros(2))
    opt = wrap([p], 8)
    for _ in range(1 + 2 * rank):
        feed(opt, p, 4.0)

    def fails(optimizer, args, kwargs):
        raise KeyError("hook")

    handle = opt.register_step_pre_hook(fails)
    with pytest.raises(KeyError):
        opt.flush()
    handle.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved = copy.deepcopy(opt.state_dict())
    assert saved["fusedaccum"]["sums"][0].tolist() == [(1 + 2 * rank) * 4.0 / 8] * 2
    opt.load_state_dict(saved)
    assert (opt.flush(), p.tolist()) == (True, [-4.0] * 2)


def has_nothing_to_count(empty, on_device):
    """One rank flushes an empty window, the other one that counts items: 8 of them, with a sum of 16."""
    p = torch.nn.Parameter(torch.zeros(2))
    opt = wrap([p], 4)
    if dist.get_rank() != empty:
        feed(opt, p, 16.0, sum_of=torch.tensor(8.0) if on_device else 8)
    assert opt.flush() is True
    return p.tolist()


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("empty", [0, 1])
def test_a_rank_without_a_window_beside_one_that_counts_items(empty, on_device):
    assert on_ranks(2, has_nothing_to_count, empty, on_device) == [[-2.0] * 2] * 2


def test_a_saved_share_counts_as_many_micro_batches_as_the_rank_had():
    on_ranks(2, saves_its_share)


# Every class of optimizer, groups of ranks, copies


def other_optimizers_and_groups():
    rank = dist.get_rank()
    groups = [dist.new_group(pair) for pair in ([0, 2], [1, 3])]
    mine = groups[rank % 2]
    with pytest.raises(TypeError, match="process_group"):
        FusedAccumOptimizer(SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), 2, process_group=groups[1 - rank % 2])
    p = torch.nn.Parameter(torch.zeros(1))
    opt = FusedAccumOptimizer(SGD([p], lr=1.0), 1, process_group=mine)
    feed(opt, p, float(rank))
    assert p.item() == -(1.0 if rank % 2 == 0 else 2.0)
    torch.manual_seed(0)
    m = torch.nn.Linear(5, 3)
    opt = FusedAccumOptimizer(torch.optim.NAdam(m.parameters(), lr=0.01), 2, process_group=mine, update="wrapped")
    with pytest.raises(TypeError, match="process_group cannot be pickled"):
        pickle.dumps(opt)
    opt, m = copy.deepcopy((opt, m))
    torch.manual_seed(rank)
    for _ in range(4):
        m(torch.randn(2, 5)).sum().backward()
        opt.step()
    return rank % 2, torch.cat([p.detach().view(-1) for p in m.parameters()])


def test_groups_of_ranks_and_wrapped_updates():
    results = on_ranks(4, other_optimizers_and_groups)
    assert torch.equal(results[0][1], results[2][1])
    assert torch.equal(results[1][1], results[3][1])
    assert not torch.equal(results[0][1], results[1][1])


def everything_frozen(shard):
    p = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    opt = FusedAccumOptimizer(SGD([p], lr=1.0), 2, process_group=dist.group.WORLD, shard=shard)
    opt.step()
    opt.consolidate()
    opt.step()
    opt.step(mean_of=torch.tensor(2.0 * dist.get_rank()))
    assert opt.flush() is False
    assert (opt.updates, opt.skipped_windows, opt.pending) == (0, 0, 0)
    p.requires_grad_(True)
    p.grad = torch.ones(3) * dist.get_rank()
    opt.step()
    assert opt.flush() is True
    assert p.tolist() == [0.5] * 3


@pytest.mark.parametrize("shard", [None, "zero1"])
def test_windows_in_which_every_parameter_is_frozen(shard):
    on_ranks(2, everything_frozen, shard)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"nonfinite": "skip_micro"}, ValueError, "nonfinite='skip_micro'.*skip_window"),
        ({"amp_scaling": True}, ValueError, "amp_scaling=True.*bfloat16"),
        ({"steps": None}, ValueError, "process_group=.*steps=None"),
        ({"wire_dtype": torch.float16}, ValueError, "wire_dtype=torch.float16"),
        ({"process_group": "world"}, TypeError, "process_group='world'.*ProcessGroup"),
        ({"process_group": -100}, TypeError, "process_group=-100.*this rank belongs to"),
    ],
    ids=str,
)
def test_refused(options, error, words, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        p = torch.nn.Parameter(torch.zeros(1))
        given = {"steps": 2, "process_group": dist.group.WORLD, **options}
        with pytest.raises(error, match=words):
            FusedAccumOptimizer(SGD([p], lr=1.0), **given)
        opt = FusedAccumOptimizer(SGD([p], lr=1.0), 2, process_group=dist.group.WORLD)
        feed(opt, p, 1.0, 3.0)  # a group of one
        assert (p.item(), opt.flush()) == (-2.0, False)
    finally:
        dist.destroy_process_group()
