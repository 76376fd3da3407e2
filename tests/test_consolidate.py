"""`consolidate()`: after it any rank's state dict holds the window of all, for any number of ranks."""

from __future__ import annotations

import io
import warnings

import pytest
import torch
import torch.distributed as dist
from processes import on_ranks
from torch.optim import SGD

from fusedaccum import FusedAccumOptimizer


def wrap(params, steps, **options):
    return FusedAccumOptimizer(SGD(params, lr=1.0), steps, process_group=dist.group.WORLD, **options)


def micro_batch(opt, p, value, count=None):
    (p * value).sum().backward()
    opt.step(**({} if count is None else {"mean_of": count}))


def save_half_a_window(weighted, on_device):
    """After 2 of 4 micro-batches: what rank 1 saves, and the parameters that the window ends with without a stop."""
    rank, size = dist.get_rank(), dist.get_world_size()
    p, q = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    opt = wrap([p, q], 4)
    count = (lambda n: torch.tensor(n) if on_device and rank else n) if weighted else (lambda n: None)
    micro_batch(opt, p, 1.0 + rank, count(2 + rank))
    micro_batch(opt, q if rank == 0 else p, 4.0, count(2))
    with pytest.warns(UserWarning, match=f"rank {rank} alone, of {size}.*consolidate"):
        opt.state_dict()
    opt.consolidate()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        file = io.BytesIO()
        torch.save(opt.state_dict(), file)
    end(opt, p, q, count)
    return file.getvalue() if rank == size - 1 else None, p.tolist(), q.tolist()


def end(opt, p, q, count):
    """The other half, equal on all ranks."""
    micro_batch(opt, q, 8.0, count(4))
    micro_batch(opt, p, 2.0, count(4))
    assert opt.updates == 1


def load_half_a_window(saved, weighted):
    p, q = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    opt = wrap([p, q], 4)
    opt.load_state_dict(torch.load(io.BytesIO(saved), weights_only=True))
    assert opt.pending == 2
    end(opt, p, q, (lambda n: n) if weighted else (lambda n: None))
    return p.tolist(), q.tolist()


@pytest.mark.parametrize(("weighted", "on_device"), [(False, False), (True, False), (True, True)])
def test_half_a_window_goes_on_in_any_number_of_ranks(weighted, on_device):
    results = on_ranks(2, save_half_a_window, weighted, on_device)
    assert results[0][1:] == results[1][1:]
    # Means over all micro-batches, or items: 2 and 3 + 2 and 2 + 4 and 4 + 4 and 4.
    p, q = (1.0 + 2.0 + 4.0 + 2.0 + 2.0, 4.0 + 8.0 + 8.0)
    expected = [-p / 8, -q / 8]
    if weighted:
        expected = [-(2 + 3 * 2 + 2 * 4 + 4 * 2 + 4 * 2) / 25, -(2 * 4 + 4 * 8 + 4 * 8) / 25]
    assert [results[0][1][0], results[0][2][0]] == pytest.approx(expected)
    for size in (2, 4):
        # With item counts the other half of a world of 4 counts for more: 25 becomes 33 items, or 17 a pair of ranks.
        again = on_ranks(size, load_half_a_window, results[1][0], weighted)
        assert all(r == again[0] for r in again)
        assert [again[0][0][0], again[0][1][0]] == pytest.approx(expected)


def uneven_and_begun():
    rank = dist.get_rank()
    p = torch.nn.Parameter(torch.zeros(2))
    opt = wrap([p], 4)
    opt.consolidate()  # nothing to do
    for _ in range(rank + 1):
        micro_batch(opt, p, 1.0)
    with pytest.raises(RuntimeError, match=r"equally many.*\[1, 2\]"):
        opt.consolidate()
    assert opt.master_grad(p).tolist() == [0.25 * (rank + 1)] * 2
    assert opt.flush() is True
    assert p.tolist() == [-1.0] * 2
    opt.close()
    with pytest.raises(RuntimeError, match=r"close\(\)"):
        opt.consolidate()
    opt = wrap([p], 4, fold="backward")
    p.sum().backward()
    with pytest.raises(RuntimeError, match=r"ended by step\(\)"):
        opt.consolidate()
    opt.reset()
    micro_batch(opt, p, 1.0)
    opt.consolidate()
    (p * (1.0 + rank)).sum().backward()
    with pytest.warns(UserWarning, match=f"rank {rank} alone, of.*consolidate"):
        opt.state_dict()  # what the backward has folded is of this rank alone
    opt.reset()
    p.data.zero_()

    opt = wrap([p], 2)  # what is consolidated goes on here too
    micro_batch(opt, p, 2.0 + 4.0 * rank)
    opt.consolidate()
    assert opt.master_grad(p).tolist() == [2.0] * 2
    micro_batch(opt, p, 2.0)
    assert p.tolist() == [-3.0] * 2
    with warnings.catch_warnings(record=True) as caught:
        micro_batch(opt, p, 1.0)
        opt.consolidate()
        micro_batch(opt, p, 1.0)
        micro_batch(opt, p, 1.0)
        warnings.simplefilter("always")
        opt.state_dict()  # a micro-batch after it is of this rank alone
        opt.flush()
    assert [str(w.message).count("consolidate()") for w in caught] == [1]


def test_windows_that_cannot_be_consolidated_and_windows_after_it():
    on_ranks(2, uneven_and_begun)


def test_without_process_group_there_is_nothing_to_do():
    p = torch.nn.Parameter(torch.zeros(2))
    opt = FusedAccumOptimizer(SGD([p], lr=1.0), 2)
    micro_batch(opt, p, 1.0)
    opt.consolidate()
    micro_batch(opt, p, 3.0)
    assert p.tolist() == [-2.0] * 2


def takes_the_sums_of_another(shard):
    p = torch.nn.Parameter(torch.zeros(3))
    opt = FusedAccumOptimizer(torch.optim.SGD([p], lr=1.0), 2, process_group=dist.group.WORLD, shard=shard)
    (p * (1.0 + dist.get_rank())).sum().backward()
    opt.step()
    with pytest.warns(UserWarning, match="rank . alone, of 2"):
        mine = opt.state_dict()
    opt.load_state_dict(mine)  # its own
    saved = [None, None]
    dist.all_gather_object(saved, mine)
    other = saved[1 - dist.get_rank()]
    with pytest.raises(ValueError, match="alone had summed up" if shard is None else "pieces|alone had summed up"):
        opt.load_state_dict(other)
    assert opt.pending == 1
    assert opt.master_grad(p).tolist() == [(1.0 + dist.get_rank()) / 2] * 3
    plain = FusedAccumOptimizer(torch.optim.SGD([p], lr=1.0), 2)
    if shard is None:
        plain.load_state_dict(other)  # no rank at all: what one had is all there is
        plain.reset()
    opt.consolidate()
    whole = [None, None]
    dist.all_gather_object(whole, opt.state_dict())
    opt.load_state_dict(whole[1 - dist.get_rank()])
    opt.flush()
    assert p.tolist() == [-1.5] * 3


@pytest.mark.parametrize("shard", [None, "zero1"])
def test_a_window_of_one_rank_alone_loads_into_no_other(shard):
    on_ranks(2, takes_the_sums_of_another, shard)
