"""shard="zero1" where parameters come, go, thaw or change: shares move, and what is kept for them moves along."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from processes import on_ranks
from torch.optim import SGD, AdamW
from zero1_runs import BF16, OPTIMIZERS, digest, gradients, make_params, micro_batch, same_bits, state_bits, train

from fusedaccum import FusedAccumOptimizer

FP32 = torch.float32
MASTERS = {"master_weights": True, "state_dtype": FP32}


def both(life, *args, **options):
    """A life of a wrapper, sharded and not: parameters are equal, and so is the whole state."""
    ends = []
    for shard in ("zero1", None):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", message="(?s).*(alone, of|masters|decay)")
            params = make_params((FP32, BF16))
            opt = life(shard, params, *args, **options)
        opt.consolidate()
        saved = opt.state_dict()
        whole = [
            (i, key, value.float() if key != "step" else value)
            for i, entries in sorted(saved["state"].items())
            for key, value in sorted(entries.items())
        ]
        masters = [m for m in saved["fusedaccum"]["masters"] if m is not None]
        opt.reset()
        ends.append((params, whole, masters))
    (params, whole, masters), (others, other, other_masters) = ends
    assert same_bits(params, others)
    assert [w[:2] for w in whole] == [w[:2] for w in other]
    assert same_bits([w[2] for w in whole], [w[2] for w in other])
    assert same_bits(masters, other_masters)
    assert len(masters) == len(other_masters)
    return digest(params)


def wrapped(optimizer, shard, **options):
    return FusedAccumOptimizer(optimizer, 2, process_group=dist.group.WORLD, shard=shard, **MASTERS, **options)


def moving(shard, params, make):
    """Begin with a few, freeze, thaw, add, replace and convert, inside windows and between them."""
    early, late = params[2:5], params[5:]
    for p in params[:2]:
        p.requires_grad_(False)
    opt = wrapped(OPTIMIZERS[make]([{"params": params[:5]}]), shard)
    train(opt, early, 2)
    opt.add_param_group({"params": late, "lr": 0.03})
    train(opt, params[2:], 2, first=2)
    rank = dist.get_rank()
    micro_batch(opt, params[2:], gradients(params[2:], 4, 0, rank, missing=0))
    for p in params[:2]:
        p.requires_grad_(True)
    if rank == 1:
        opt.state_dict()  # sees the change before the others do
    micro_batch(opt, params, gradients(params, 4, 1, rank, missing=0))
    train(opt, params, 2, first=5)
    params[4].requires_grad_(False)
    params[4].grad = None
    rest = params[:4] + params[5:]
    train(opt, rest, 2, first=8)
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))  # with the shares that it was saved with
    params[4].requires_grad_(True)
    train(opt, params, 1, first=11)
    with torch.no_grad():  # elsewhere in memory, in another order, and from outside
        params[0].data = params[0].data.t().contiguous().t()
        params[5].mul_(1.5)
    train(opt, params, 2, first=13, missing=0)
    return opt


def converting(shard, params, make):
    """Parameters change their dtype, and with it their run: FP32 moments stay as they are."""
    opt = wrapped(OPTIMIZERS[make]([{"params": params}]), shard)
    train(opt, params, 2, missing=0)
    params[5].data = params[5].data.float()
    params[0].data = params[0].data.to(BF16)
    train(opt, params, 2, first=3, missing=0)
    return opt


def changes(make):
    return [*both(moving, make), *both(converting, make)]


@pytest.mark.parametrize(("world", "make"), [(2, "adamw"), (2, "sgd"), (4, "amsgrad")])
def test_shares_move(world, make):
    first, *others = on_ranks(world, changes, make)
    assert others == [first] * (world - 1)


def moments_follow():
    """Without a state_dtype, moments are converted along with their parameter, those of a piece too."""
    ends = []
    for shard in ("zero1", None):
        p = torch.nn.Parameter(torch.linspace(-1, 1, 500).view(10, 50))
        opt = FusedAccumOptimizer(AdamW([p], lr=0.1), 1, process_group=dist.group.WORLD, shard=shard)
        train(opt, [p], 1, steps=1, missing=0)
        p.data = p.data.to(torch.float16)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*masters")
            train(opt, [p], 1, steps=1, missing=0, first=1)
        assert opt.optimizer.state[p]["exp_avg"].dtype == torch.float16
        ends.append(p)
    assert same_bits(ends[:1], ends[1:])
    return True


def test_moments_follow_a_new_dtype():
    assert on_ranks(2, moments_follow) == [True, True]


def unstarted():
    """Dampening tells a momentum buffer that no update has started from one that holds zeros."""
    ends = []
    for shard in ("zero1", None):
        params = [torch.nn.Parameter(torch.zeros(100)) for _ in range(3)]
        params[2].requires_grad_(False)
        optimizer = SGD(params, lr=1.0, momentum=0.5, dampening=0.5)
        opt = FusedAccumOptimizer(optimizer, 1, process_group=dist.group.WORLD, shard=shard, nonfinite="skip_window")
        micro_batch(opt, params[:2], [torch.full((100,), float("inf"))] * 2)
        opt.consolidate()
        assert not any("momentum_buffer" in entries for entries in opt.state_dict()["state"].values())
        params[2].requires_grad_(True)
        for _ in range(2):
            micro_batch(opt, params, [torch.ones(100) for _ in params])
        assert opt.updates == 2
        ends.append(params)
    assert same_bits(*ends)
    assert ends[0][0].unique().tolist() == [-2.0]
    return True


def test_a_momentum_buffer_that_was_not_started():
    assert on_ranks(2, unstarted) == [True, True]


def while_closing():
    params = make_params()
    params[3].requires_grad_(False)
    opt = wrapped(SGD(params, lr=0.5), "zero1")
    rest = params[:3] + params[4:]
    train(opt, rest, 1, missing=0)

    def thaw(*_):
        params[3].requires_grad_(True)

    before, handle = [p.detach().clone() for p in params], opt.register_step_pre_hook(thaw)
    with pytest.raises(RuntimeError, match=r"while the window is being closed.*reset"):
        train(opt, rest, 1, first=1, missing=0)
    handle.remove()
    assert same_bits(params, before)
    opt.reset()
    train(opt, params, 1, first=2, missing=0)
    return [opt.updates, *digest(params)]


def test_not_while_a_window_is_being_closed():
    first, second = on_ranks(2, while_closing)
    assert first == second
    assert first[0] == 2


def another_wrapper_s():
    """Pieces that a wrapper which is gone has left behind are not taken for a state."""
    params = make_params()
    optimizer = AdamW(params, lr=0.1)
    opt = wrapped(optimizer, "zero1")
    train(opt, params, 1, missing=0)
    del opt
    again = wrapped(optimizer, "zero1")
    before = state_bits(again), digest(params)
    with pytest.raises(ValueError, match=r"has shape.*consolidate\(\)"):
        train(again, params, 1, missing=0)
    assert before == (state_bits(again), digest(params))
    again.reset()
    return True


def test_another_wrapper_s_pieces_are_refused():
    assert on_ranks(2, another_wrapper_s) == [True, True]


def loads_alone():
    """Rank 0 goes back to pieces that were cut in another way."""
    params = make_params()
    params[0].requires_grad_(False)
    opt = wrapped(AdamW(params, lr=0.1), "zero1")
    train(opt, params[1:], 1, missing=0)
    saved = copy.deepcopy(opt.state_dict())
    params[0].requires_grad_(True)
    train(opt, params, 1, first=1, missing=0)
    if dist.get_rank() == 0:
        opt.load_state_dict(saved)
    before = digest(params)
    with pytest.raises(RuntimeError, match=r"rank 0: options and .*load a state on every rank"):
        train(opt, params, 1, first=2, missing=0)
    assert digest(params) == before
    opt.reset()
    return True


def test_a_state_that_one_rank_alone_has_loaded():
    assert on_ranks(2, loads_alone) == [True, True]
