"""Ranks that are not at the same point are found out, by all of them, before anything is sent or changed."""

from __future__ import annotations

import datetime
import os
import time

import pytest
import torch
import torch.distributed as dist
from processes import Failure, Lost, on_ranks
from torch.optim import SGD

from fusedaccum import FusedAccumOptimizer


def differ(kind):
    """What every rank raises where rank 1 does otherwise, and the parameters and sums that are left."""
    rank = dist.get_rank()
    one = rank == 1
    p, q = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(4 if kind == "shapes" and one else 3))
    q.requires_grad_(not (kind == "frozen" and one))
    if kind == "memory format":
        q.data = torch.zeros(3, 2).t() if one else torch.zeros(2, 3)
    fold = "backward" if kind.startswith("last") else "step"
    if kind == "values" and one:
        q.data.fill_(1.0)
    steps = 1 if kind == "steps" and one else 2
    if kind == "function":
        steps = lambda update: 1 + rank % 2  # noqa: E731
    opt = FusedAccumOptimizer(SGD([p, q], lr=1.0), steps, process_group=dist.group.WORLD, fold=fold)
    if kind == "wrapped later" and one:
        (p * 2).sum().backward()
        p.grad = None
        opt.close()
        opt = FusedAccumOptimizer(SGD([p, q], lr=1.0), steps, process_group=dist.group.WORLD)
    if kind in ("number", "wrapped later"):
        opt._window.ranks.windows = 5 if one else 4
    count = {"mean_of": 3} if kind == "weights" and one else {}
    try:
        for i in range(2):
            if kind == "last" and i == 1:
                opt.micro_batch(last=one)
            ((p * 2).sum() + (q.sum() if q.requires_grad else 0)).backward()
            if kind == "uneven" and one and i == 1:
                opt.flush()
            opt.step(**count)
    except RuntimeError as error:
        return str(error), p.tolist(), opt.master_grad(p).tolist() if kind != "last" or not one else None, opt.updates
    return None


CASES = {
    "values": ["rank 0: parameters and optimizer state whose", "rank 1: parameters and optimizer", "broadcast"],
    "steps": ["rank 0: 2 micro-batches a window", "rank 1: 1 micro-batches a window", "`steps`"],
    "function": ["rank 0: 1 micro-batches a window", "rank 1: 2 micro-batches a window"],
    "weights": ["rank 0: plain micro-batches", "rank 1: weighted micro-batches", "mean_of"],
    "shapes": ["digest", "same shapes"],
    "frozen": ["digest", "frozen"],
    "memory format": ["digest", "same memory format"],
    "number": ["rank 0: 4 windows closed", "rank 1: 5 windows closed"],
    "last": ["rank 0: closing a full window in step()", "rank 1: in the backward that", "last=True"],
    "uneven": ["rank 0: closing a full window in step()", "rank 1: in flush()", "step() without a gradient"],
}


@pytest.mark.parametrize("kind", CASES)
def test_ranks_that_differ(kind):
    for result in on_ranks(2, differ, kind):
        assert result is not None
        text, values, _, updates = result
        assert all(word in text for word in [*CASES[kind], "nothing was sent"]), text
        assert values == [0.0] * 3
        assert updates == 0


def differ_in_options(options):
    """What a rank is told where rank 1 has other options, and what its parameter is then."""
    p = torch.nn.Parameter(torch.zeros(3))
    mine = options if dist.get_rank() else {}
    opt = FusedAccumOptimizer(SGD([p], lr=1.0), 1, process_group=dist.group.WORLD, **mine)
    p.sum().backward()
    with pytest.raises(RuntimeError) as error:
        opt.step()
    return str(error.value), p.tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"wire_dtype": torch.bfloat16},
        {"max_norm": 0.5},
        {"reduction": "sum"},
        {"nonfinite": "raise"},
        {"update": "wrapped"},
        {"bucket_mb": 0.5, "fold": "backward"},  # how gradients are folded may differ
        {"shard": "zero1"},
    ],
    ids=str,
)
def test_ranks_that_differ_in_options(options):
    (first, *_), (second, *_) = results = on_ranks(2, differ_in_options, options)
    assert all("options and hyper-parameters with digest" in text and "nothing was sent" in text for text, _ in results)
    name, value = next(iter(options.items()))
    assert "this one, rank 1, has " in second
    assert f"{name}={value}" in second
    assert f"{name}={value}" not in first
    assert [values for _, values in results] == [[0.0] * 3] * 2


def differ_in_order(how):
    """Parameters that are alike but for the order: of two of one shape, of rows, of elements in memory."""
    one = dist.get_rank() == 1
    p, q = torch.nn.Parameter(torch.full((2, 3), 1.0)), torch.nn.Parameter(torch.full((2, 3), 2.0))
    params = [p, q]
    if how == "parameters" and one:
        params = [q, p]
    if how == "rows":
        p.data[int(one)] = 5.0
    if how == "elements" and one:
        p.data = p.data.t().contiguous().t()
    if how == "shape" and one:
        params = [torch.nn.Parameter(torch.full((3, 2), 1.0)), q]
    opt = FusedAccumOptimizer(SGD(params, lr=1.0), 1, process_group=dist.group.WORLD)
    (params[0] * 2).sum().backward()
    with pytest.raises(RuntimeError, match="the same order"):
        opt.step()
    assert opt.updates == 0


@pytest.mark.parametrize("how", ["parameters", "rows", "elements", "shape"])
def test_ranks_that_differ_in_the_order_of_parameters_or_elements(how):
    on_ranks(2, differ_in_order, how)


def drops_what_is_on_its_way():
    """A backward that raises on rank 1 after buckets have left, and a `reset()` there: rank 0 must not update alone."""
    params = [torch.nn.Parameter(torch.zeros(300)) for _ in range(3)]
    opt = FusedAccumOptimizer(
        SGD(params, lr=1.0), 1, process_group=dist.group.WORLD, fold="backward", bucket_mb=300 * 4 / 2**20
    )
    one = dist.get_rank() == 1

    def micro_batch():
        sum((i + 1.0) * p.sum() for i, p in enumerate(params)).backward()

    opt.micro_batch(last=True)
    if one:
        hook = params[0].register_hook(lambda grad: (_ for _ in ()).throw(KeyError("a hook")))
        with pytest.raises(KeyError):
            micro_batch()
        hook.remove()
        opt.reset()
    micro_batch()
    with pytest.raises(RuntimeError, match=r"3 buckets sent .* rank 1: 0 buckets .*nothing was updated"):
        opt.step()
    assert all(not p.any() for p in params)
    opt.reset()
    micro_batch()
    opt.step()  # all agree again
    assert [p[0].item() for p in params] == [-1.0, -2.0, -3.0]


def test_a_window_that_one_rank_has_dropped_on_its_way_is_no_update():
    on_ranks(2, drops_what_is_on_its_way)


def consolidate_beside_flush():
    p = torch.nn.Parameter(torch.zeros(3))
    opt = FusedAccumOptimizer(SGD([p], lr=1.0), 2, process_group=dist.group.WORLD)
    (p * 2).sum().backward()
    opt.step()
    with pytest.raises(RuntimeError, match=r"rank 0: in flush\(\), rank 1: in consolidate\(\)"):
        opt.consolidate() if dist.get_rank() else opt.flush()
    assert opt.master_grad(p).tolist() == [1.0] * 3
    assert opt.flush() is True  # all agree again
    assert p.tolist() == [-2.0] * 3


def test_after_a_refusal_the_window_goes_on():
    on_ranks(2, consolidate_beside_flush)


def one_gives_up():
    """Rank 0 drops a window that rank 1 updates with."""
    rank = dist.get_rank()
    p = torch.nn.Parameter(torch.zeros(3))
    opt = FusedAccumOptimizer(SGD([p], lr=1.0), 1, process_group=dist.group.WORLD)

    def hook(*_):
        if rank == 0:
            raise ValueError("rank 0 alone")

    handle, saved = opt.register_step_pre_hook(hook), opt.state_dict()
    p.sum().backward()
    try:
        opt.step()
    except ValueError:
        opt.reset()
    handle.remove()
    assert p.tolist() == [-float(rank)] * 3
    p.sum().backward()
    with pytest.raises(RuntimeError, match=r"rank 0: 1 windows dropped by reset\(\).*rank 1: 0 windows.*load a saved"):
        opt.step()
    opt.load_state_dict(saved)
    p.data.zero_()
    p.sum().backward()
    opt.step()
    return p.tolist()


def test_a_window_that_one_rank_drops_and_another_updates_with():
    assert on_ranks(2, one_gives_up) == [[-1.0] * 3] * 2


# Ranks that do not come


def absent(how):
    p = torch.nn.Parameter(torch.zeros(300_000))
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    opt = FusedAccumOptimizer(SGD([p], lr=1.0), 1, process_group=group)
    p.sum().backward()
    opt.step()
    if dist.get_rank() == 1:
        if how == "dies":
            os._exit(1)
        if how == "sleeps":
            time.sleep(2.5)
        if how == "fewer":
            return "done"
        if how == "dies in the reduction":
            opt._window.ranks.add_up = lambda *_: os._exit(1)
    p.sum().backward()
    begun = time.monotonic()
    try:
        opt.step()
    except RuntimeError as error:
        assert opt.updates == 1
        assert p[0].item() == -1.0
        return str(error), time.monotonic() - begun
    return "no error"


@pytest.mark.parametrize("how", ["dies", "sleeps", "fewer", "dies in the reduction"])
def test_a_rank_that_does_not_come_is_an_error_that_names_the_collective(how):
    result = on_ranks(2, absent, how, errors=True)[0]
    assert not isinstance(result, Failure | Lost), result
    text, seconds = result
    what = "the reduction of a window" if how == "dies in the reduction" else "the exchange of headers at window 1"
    assert what in text
    assert "rank 0 of 2" in text
    assert "within the process group's timeout" in text
    assert seconds < 5


def differ_later(kind):
    """What a rank is told where rank 1 has gone its own way after a window, and how far the parameter moved by then."""
    p = torch.nn.Parameter(torch.zeros(3))
    opt = FusedAccumOptimizer(SGD([p], lr=1.0), 1, process_group=dist.group.WORLD)

    def window():
        p.sum().backward()
        opt.step()

    window()
    before = p.tolist()
    saved = opt.state_dict()
    if dist.get_rank() == 1:
        if kind == "rate":
            opt.param_groups[0]["lr"] = 0.5
        elif kind == "rate as a tensor":
            opt.param_groups[0]["lr"] = torch.tensor(0.5)
        else:
            opt.load_state_dict(saved)
    with pytest.raises(RuntimeError) as error:
        window()
    return str(error.value), p.tolist() == before


@pytest.mark.parametrize("kind", ["rate", "rate as a tensor", "load"])
def test_ranks_that_part_after_a_window(kind):
    for rank, (text, as_it_was) in enumerate(on_ranks(2, differ_later, kind)):
        assert as_it_was
        assert "learning rates too" in text
        assert f"this one, rank {rank}, has" in text
        mine = {"rate": "'lr': 0.5", "rate as a tensor": "'lr': 0.5", "load": "1 states loaded"}[kind]
        assert (mine in text) == (rank == 1)


def outside_of_the_group():
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        return True
    with pytest.raises(TypeError, match=r"outside of it, and must be a torch.distributed.ProcessGroup"):
        FusedAccumOptimizer(SGD([torch.nn.Parameter(torch.zeros(3))], lr=1.0), 1, process_group=group)
    return True


def test_a_rank_outside_of_the_group():
    assert on_ranks(2, outside_of_the_group) == [True, True]


def begins_with_other_state():
    """Rank 1's optimizer was used before it was wrapped."""
    p = torch.nn.Parameter(torch.ones(3))
    inner = torch.optim.Adam([p], lr=0.0)
    if dist.get_rank() == 1:
        p.grad = torch.ones(3)
        inner.step()
        p.grad = None
    opt = FusedAccumOptimizer(inner, 1, process_group=dist.group.WORLD)
    p.sum().backward()
    with pytest.raises(RuntimeError, match="equal optimizer state"):
        opt.step()
    return p.tolist()


def test_ranks_that_begin_with_other_optimizer_state():
    assert on_ranks(2, begins_with_other_state) == [[1.0] * 3] * 2


def consolidates_for_different_ranks():
    p = torch.nn.Parameter(torch.ones(3))
    opt = FusedAccumOptimizer(SGD([p], lr=1.0), 2, process_group=dist.group.WORLD)
    (p * (1 + dist.get_rank())).sum().backward()
    opt.step()
    with pytest.raises(RuntimeError, match=r"rank 0: in consolidate.* with to=0, rank 1: in .* with to=1"):
        opt.consolidate(to=dist.get_rank())
    return opt.master_grad(p).tolist()


def test_consolidate_for_different_ranks_leaves_the_windows():
    assert on_ranks(2, consolidates_for_different_ranks) == [[0.5] * 3, [1.0] * 3]
