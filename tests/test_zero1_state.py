"""State dicts of shard="zero1": one rank's pieces, and after `consolidate()` the whole, for any number of ranks."""

from __future__ import annotations

import copy
import io
import re
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import on_ranks
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import AdamW
from zero1_runs import (
    BF16,
    OPTIMIZERS,
    digest,
    gradients,
    groups_of,
    make_params,
    micro_batch,
    same_bits,
    state_bits,
    state_bytes,
    train,
    wrap,
)

from fusedaccum import FusedAccumOptimizer

FP32 = torch.float32
MIXED = (FP32, BF16)
MASTERS = {"master_weights": True, "state_dtype": FP32}


def stored(state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    return file.getvalue()


def loaded(file):
    return torch.load(io.BytesIO(file), weights_only=True)


def same_params(params):
    """New ones with the same values and order in memory."""
    return [torch.nn.Parameter(p.detach().clone(memory_format=torch.preserve_format)) for p in params]


# One rank's pieces


def half_a_window(opt, params, half, rank=None):
    micro_batch(opt, params, gradients(params, 77, half, dist.get_rank() if rank is None else rank, missing=0))


@pytest.mark.filterwarnings("ignore:(?s).*alone, of")
def resumes(make):
    rank, size = dist.get_rank(), dist.get_world_size()
    warnings.filterwarnings("ignore", message="(?s).*alone, of")
    params = make_params(MIXED)
    opt = wrap(make, params, **MASTERS)
    train(opt, params, 3)
    half_a_window(opt, params, 0)
    file = stored(opt.state_dict())
    copied, copies = copy.deepcopy((opt, params))
    others = same_params(params)
    new = wrap(make, others, **MASTERS)
    state = loaded(file)
    assert state["state"] == {}
    assert list(state["fusedaccum"]["zero1"]) == [f"rank {rank} of {size}"]
    new.load_state_dict(state)
    assert state_bits(new) == state_bits(opt)
    for w, ps in ((opt, params), (new, others), (copied, copies)):
        assert w.pending == 1
        half_a_window(w, ps, 1)
        train(w, ps, 2, first=10)
        assert w.updates == 6
    assert same_bits(params, others)
    assert same_bits(params, copies)
    assert state_bits(new) == state_bits(opt) == state_bits(copied)
    return digest(params)


@pytest.mark.parametrize("make", ["adamw", "sgd"])
def test_resuming_inside_a_window_on_the_same_ranks(make):
    first, second = on_ranks(2, resumes, make)
    assert first == second


def a_rank_s_dict(_):
    params = make_params()
    opt = wrap("adamw", params)
    train(opt, params, 2)
    return stored(opt.state_dict())


def refuses(files):
    """Another rank's, another number of ranks, an unsharded wrapper, a bare optimizer."""
    rank = dist.get_rank()
    params = make_params()
    opt = wrap("adamw", params)
    train(opt, params, 1, first=5)
    before = state_bits(opt), digest(params)
    for file in (files[1 - rank], files[2]):
        with pytest.raises(ValueError, match=rf"consolidate\(\).*rank \d of \d.*is rank {rank} of 2"):
            opt.load_state_dict(loaded(file))
    assert before == (state_bits(opt), digest(params))
    unsharded = wrap("adamw", params, shard=None)
    with pytest.raises(ValueError, match=r"consolidate\(\).*has no shard='zero1'"):
        unsharded.load_state_dict(loaded(files[rank]))
    state = loaded(files[rank])
    with pytest.raises(ValueError, match="different number of parameter groups"):
        OPTIMIZERS["adamw"](groups_of(params)).load_state_dict(state)
    assert "consolidate()" in state["param_groups"][-1]["params"][0]
    fewer = FusedAccumOptimizer(AdamW(params[:3]), 2, process_group=dist.group.WORLD, shard="zero1")
    with pytest.raises(ValueError, match="same parameters in the same order"):
        fewer.load_state_dict(state)
    other = make_params()
    other[0] = torch.nn.Parameter(torch.zeros(300, 42))
    with pytest.raises(ValueError, match="same parameters in the same order"):
        wrap("adamw", other).load_state_dict(state)
    return True


def test_pieces_are_refused_elsewhere():
    files = [*on_ranks(2, a_rank_s_dict, 0), on_ranks(4, a_rank_s_dict, 0)[3]]
    assert on_ranks(2, refuses, files) == [True, True]


# The whole


def consolidates(make, to):
    """A rank's whole dict, after 2 windows and a half; and its parameters then and after the window and two more."""
    params = make_params(MIXED)
    opt = wrap(make, params, **MASTERS)
    train(opt, params, 2)
    half_a_window(opt, params, 0, rank=0)  # the same on all ranks, so that any number of them can go on
    opt.consolidate(to=to)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        file = stored(opt.state_dict())
    then = [p.detach().clone() for p in params]
    half_a_window(opt, params, 1, rank=0)
    train(opt, params, 2, rank=0, first=10)
    assert "zero1" in opt.state_dict()["fusedaccum"]  # what was held is gone
    return file, then, [p.detach() for p in params]


def goes_on(make, file, then, shard, steps=2):
    params = make_params(MIXED)
    with torch.no_grad():
        for p, q in zip(params, then, strict=True):
            p.copy_(q)
    opt = wrap(make, params, shard=shard, **MASTERS)
    train(opt, params, 1, first=50)  # there is something to replace
    opt.optimizer.zero_grad()
    with torch.no_grad():
        for p, q in zip(params, then, strict=True):
            p.copy_(q)
    opt.load_state_dict(loaded(file))
    if shard:
        for p, entries in opt.optimizer.state.items():
            for key, value in entries.items():
                assert key == "step" or value.untyped_storage().nbytes() == value.nbytes <= 4 * p.numel()
    half_a_window(opt, params, 1, rank=0)
    train(opt, params, 2, rank=0, first=10)
    opt.consolidate()
    opt.reset()
    return [p.detach() for p in params], state_bytes(opt)


@pytest.mark.parametrize("make", ["adamw", "sgd"])
def test_the_whole_loads_into_any_number_of_ranks(make):
    """1, 2 and 4, sharded and not, bit by bit: with equal ranks the mean over them is that of one."""
    (file, then, end), (other, _, _) = on_ranks(2, consolidates, make, None)
    assert file == other
    bare = OPTIMIZERS[make](groups_of(make_params(MIXED)))
    state = loaded(file)
    bare.load_state_dict({key: state[key] for key in ("state", "param_groups")})
    for p, entries in bare.state.items():
        assert all(key == "step" or value.shape == p.shape for key, value in entries.items())
        assert "step" not in entries or float(entries["step"]) in (1.0, 2.0)
    assert len(state["state"]) >= 7
    sizes = []
    for world, shard in ((1, "zero1"), (2, "zero1"), (4, "zero1"), (2, None)):
        for params, size in on_ranks(world, goes_on, make, file, then, shard):
            assert same_bits(params, end), (world, shard)
            sizes.append((world, shard, size))
    whole = sizes[-1][2]
    for world in (1, 2, 4):
        for i in range(2):
            assert sum(size[i] for w, shard, size in sizes if (w, shard) == (world, "zero1")) == whole[i]


def from_elsewhere(make):
    """A bare optimizer's state, by its dict and by wrapping it, equals an unsharded wrapper's that took it."""
    rank = dist.get_rank()
    params = make_params()
    bare = OPTIMIZERS[make](groups_of(params))
    for w in range(2):
        for p, g in zip(params, gradients(params, w, 0, 0, missing=0), strict=True):
            p.grad = g
        bare.step()
        bare.zero_grad()
    results = []
    for way in ("load", "wrap"):
        for shard in ("zero1", None):
            mine = same_params(params)
            optimizer = OPTIMIZERS[make](groups_of(mine))
            if way == "wrap":
                optimizer.load_state_dict(bare.state_dict())
            opt = FusedAccumOptimizer(optimizer, 2, process_group=dist.group.WORLD, shard=shard)
            if way == "load":
                opt.load_state_dict(bare.state_dict())
            train(opt, mine, 2, rank=rank, first=3)
            results.append(mine)
    assert all(same_bits(results[0], other) for other in results[1:])
    return digest(results[0])


@pytest.mark.parametrize("make", ["amsgrad", "sgd"])
def test_a_state_made_elsewhere_is_cut(make):
    first, second = on_ranks(2, from_elsewhere, make)
    assert first == second


def frozen_is_whole():
    """What is frozen when a state is loaded is kept whole by every rank, and cut when it is thawed."""
    rank = dist.get_rank()
    params = make_params(MIXED)
    opt = wrap("adamw", params, shard=None, **MASTERS)
    train(opt, params, 2, missing=0)
    file = stored(opt.state_dict())
    mine = same_params(params)
    for i in (0, 5):
        mine[i].requires_grad_(False)
    sharded = wrap("adamw", mine, **MASTERS)
    sharded.load_state_dict(loaded(file))
    sharded.consolidate()
    whole, was = sharded.state_dict(), loaded(file)
    for i in (0, 5):
        for key, value in was["state"][i].items():
            assert torch.equal(whole["state"][i][key], value)
    assert torch.equal(whole["fusedaccum"]["masters"][5], was["fusedaccum"]["masters"][5])
    for i in (0, 5):
        mine[i].requires_grad_(True)
    train(opt, params, 2, rank=rank, first=2, missing=0)
    train(sharded, mine, 2, rank=rank, first=2, missing=0)
    assert same_bits(params, mine)
    sharded.consolidate()
    assert torch.equal(sharded.state_dict()["fusedaccum"]["masters"][5], opt.state_dict()["fusedaccum"]["masters"][5])


def test_the_state_of_what_is_frozen_is_whole_and_is_cut_later():
    on_ranks(2, frozen_is_whole)


def one_holds():
    """consolidate(to=1): the others' dicts stay what they are; close() leaves a whole state where it is held."""
    rank = dist.get_rank()
    params = make_params(MIXED)
    opt = wrap("adamw", params, **MASTERS)
    train(opt, params, 2, missing=0)
    with pytest.raises(RuntimeError, match=r"close\(\) would leave pieces.*consolidate\(\)"):
        opt.close()
    opt.consolidate(to=1)
    assert ("zero1" in opt.state_dict()["fusedaccum"]) == (rank == 0)
    opt.consolidate()
    whole = opt.state_dict()
    moment = whole["state"][0]["exp_avg"]
    assert moment.shape == params[0].shape
    opt.close()
    state = opt.optimizer.state
    assert same_bits([state[params[0]]["exp_avg"]], [moment])
    opt.optimizer.step()
    again = wrap_again(opt.optimizer)
    train(again, params, 1, first=4, missing=0)
    assert float(state[params[0]]["step"]) == 3.0
    assert again.updates == 1
    return whole["state"][4]["exp_avg"].stride()


def wrap_again(optimizer):
    return FusedAccumOptimizer(optimizer, 2, process_group=dist.group.WORLD, shard="zero1", **MASTERS)


def test_consolidate_to_one_rank_and_close():
    assert on_ranks(2, one_holds) == [(360, 1, 40, 8)] * 2


def different_ranks():
    opt = wrap("adamw", params := make_params())
    train(opt, params, 1)
    opt.consolidate(to=dist.get_rank())


def different_states():
    opt = wrap("adamw", params := make_params())
    train(opt, params, 1, missing=0)
    if dist.get_rank():
        del opt.optimizer.state[params[5]]["exp_avg"]  # of which both have a piece
    opt.consolidate()


def test_ranks_that_do_not_agree():
    for function, words in (
        (different_ranks, r"with to=0, rank 1: .*with to=1"),
        (different_states, "do not belong together"),
    ):
        for failure in on_ranks(2, function, errors=True):
            assert failure.type == "RuntimeError"
            assert re.search(words, failure.message), failure


# torch.distributed.checkpoint


def through_dcp(folder):
    """The wrapper itself, with pieces of every rank: into the same ranks. torch's helpers take and give the whole."""
    params = make_params(MIXED)
    opt = wrap("adamw", params, **MASTERS)
    model = torch.nn.ParameterList(params)
    with pytest.raises(KeyError, match=r"consolidate\(\) on every rank"):
        get_optimizer_state_dict(model, opt)
    assert [group["lr"] for group in opt.param_groups] == [0.02, 0.01]
    train(opt, params, 2)
    dcp.save({"opt": opt}, checkpoint_id=folder)
    others = same_params(params)
    new = wrap("adamw", others, **MASTERS)
    dcp.load({"opt": new}, checkpoint_id=folder)
    assert state_bits(new) == state_bits(opt)
    with pytest.raises(KeyError, match=r"consolidate\(\) on every rank"):
        get_optimizer_state_dict(model, opt)
    opt.consolidate()
    helped = get_optimizer_state_dict(model, opt)
    third = wrap("adamw", same_params(params), **MASTERS)
    set_optimizer_state_dict(
        torch.nn.ParameterList(third.param_groups[0]["params"] + third.param_groups[1]["params"]), third, helped
    )
    assert state_bits(third) == state_bits(opt)
    for w, ps in ((opt, params), (new, others)):
        train(w, ps, 2, first=5)
    assert same_bits(params, others)
    return digest(params)


def test_dcp(tmp_path):
    first, second = on_ranks(2, through_dcp, str(tmp_path))
    assert first == second
