"""shard="zero1": each rank updates its share, with the values of an unsharded wrapper over the same ranks."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from processes import on_ranks
from torch.optim import SGD, AdamW
from zero1_runs import (
    BF16,
    digest,
    make_params,
    micro_batch,
    same_bits,
    state_bits,
    state_bytes,
    train,
    wrap,
)

from fusedaccum import FusedAccumOptimizer, collectives

FP32 = torch.float32
KINDS = {
    "fp32": ((FP32, FP32), {}),
    "mixed": ((FP32, BF16), {"master_weights": True, "state_dtype": FP32}),
    "bf16": ((BF16, BF16), {}),
    "fp16": ((torch.float16, FP32), {"master_weights": True}),
}


def both(make, kind, windows=4, **more):
    """Parameters, trained sharded and not."""
    dtypes, options = KINDS[kind]
    results = []
    for shard in ("zero1", None):
        params = make_params(dtypes)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*(masters|decay)")
            opt = wrap(make, params, shard=shard, **options, **more)
        train(opt, params, windows)
        results.append((params, opt))
    return results


def equals_unsharded(cases):
    digests = []
    for make, kind in cases:
        (params, opt), (others, other) = both(make, kind)
        assert opt.updates == other.updates == 4
        assert max(map(len, opt._window.zero1.cuts.values())) > 1
        assert opt.grad_norm == pytest.approx(other.grad_norm, rel=1e-12)
        start = make_params(KINDS[kind][0])
        assert same_bits(params, others), (make, kind)
        assert not any(same_bits([p], [q]) for p, q in zip(params, start, strict=True) if p.numel())
        digests += digest(params)
    return digests


CASES = [("adamw", "mixed"), ("sgd", "fp32"), ("plain", "bf16"), ("amsgrad", "fp16"), ("nesterov", "mixed")]


@pytest.mark.parametrize(("world", "cases"), [(2, [*CASES, ("amsgrad", "fp32"), ("sgd", "bf16")]), (4, CASES[:2])])
def test_equal_to_unsharded(world, cases):
    """Bit by bit, and every rank holds the same parameters."""
    digests = on_ranks(world, equals_unsharded, cases)
    assert digests == digests[:1] * world


def in_a_smaller_group(chunk):
    """Ranks with other numbers in the group, and sums that are sent in pieces."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    collectives.CHUNK, was = chunk, collectives.CHUNK
    try:
        states, results = [], []
        for shard in ("zero1", None):
            p = torch.nn.Parameter(torch.zeros(300))
            optimizer = SGD([p], lr=1.0, momentum=0.5)
            opt = FusedAccumOptimizer(optimizer, 1, process_group=group, shard=shard, wire_dtype=BF16)
            for scale in (1.0, 2.0):
                p.grad = torch.arange(300.0).remainder(16) * scale
                opt.step()
            opt.consolidate(to=1)
            states.append(opt.state_dict()["state"].get(0))
            results.append(p)
    finally:
        collectives.CHUNK = was
    assert same_bits(results[:1], results[1:])
    if dist.get_rank() == 2:
        assert torch.equal(states[0]["momentum_buffer"], states[1]["momentum_buffer"])
    return digest(results)


def test_a_group_of_some_ranks_and_sums_in_pieces():
    _, first, second = on_ranks(3, in_a_smaller_group, 64)
    assert first == second


# Norm, and what is not finite


def norm_and_clipping():
    digests = []
    for options in ({"max_norm": 0.5}, {"max_norm": 0.5, "wire_dtype": BF16}, {"reduction": "sum", "fold": "backward"}):
        pairs = []
        for shard in ("zero1", None):
            params = make_params()
            opt = wrap("adamw", params, shard=shard, **options)
            train(opt, params, 3)
            pairs.append((params, opt.grad_norm))
        (params, norm), (others, other) = pairs
        wire = "wire_dtype" in options
        assert norm == pytest.approx(other, rel=2**-8 if wire else 1e-6)
        for p, q in zip(params, others, strict=True):
            # Adam's quotient of a sum that is nearly 0 has any sign; what a window changes is at most 2 * lr.
            torch.testing.assert_close(p, q, rtol=1e-5, atol=0.02 * 6 if wire else 1e-6)
        digests += [*digest(params), norm]
    return digests


def test_norm_and_clipping_are_of_all_shares():
    first, *others = on_ranks(2, norm_and_clipping)
    assert others == [first]


def bf16_wire():
    """A sum is rounded when it is sent, and not again."""
    rank = dist.get_rank()
    p = torch.nn.Parameter(torch.zeros(300))
    opt = FusedAccumOptimizer(
        SGD([p], lr=1.0), 1, process_group=dist.group.WORLD, shard="zero1", wire_dtype=BF16, reduction="sum"
    )
    p.grad = torch.full_like(p, 1.0 if rank else 2.0**-8)
    opt.step()
    return p.unique().tolist()


def test_a_bf16_wire_rounds_once():
    assert on_ranks(2, bf16_wire) == [[-(1 + 2.0**-8) / 2]] * 2


def not_finite():
    """On one rank, in an element that another one owns."""
    rank = dist.get_rank()
    for make in ("adamw", "sgd"):
        params = make_params((torch.float32, BF16))
        opt = wrap(make, params, nonfinite="skip_window", master_weights=True, state_dtype=FP32)
        train(opt, params, 1, missing=0)
        before, state = [p.detach().clone() for p in params], state_bits(opt)
        with torch.no_grad():
            grads = [torch.ones_like(p) for p in params]
            if rank == 1:
                grads[0].view(-1)[0] = float("inf")
        micro_batch(opt, params, grads)
        micro_batch(opt, params, [torch.ones_like(p) for p in params])
        assert same_bits(params, before)
        assert state_bits(opt) == state
        assert (opt.updated, opt.updates, opt.skipped_windows, opt.grad_norm) == (False, 1, 1, float("inf"))
        train(opt, params, 1, missing=0, first=5)
        assert opt.updates == 2
    return digest(params)


def test_what_is_not_finite_on_one_rank_is_skipped_by_all():
    first, second = on_ranks(2, not_finite)
    assert first == second


def raises():
    rank = dist.get_rank()
    params = make_params()
    opt = wrap("sgd", params, steps=1, nonfinite="raise")
    grads = [torch.ones_like(p) for p in params]
    if rank == 1:
        grads[5][0] = float("nan")
    with pytest.raises(
        FloatingPointError, match=r"in parameter \(param_groups\[1\]\['params'\]\[0\], shape \(9003,\)\);"
    ):
        micro_batch(opt, params, grads)
    assert same_bits(params, make_params())
    opt.reset()
    train(opt, params, 1, steps=1)
    return digest(params)


def test_raise_names_the_parameter_on_every_rank():
    first, second = on_ranks(2, raises)
    assert first == second


# Memory


def memory(kind, make):
    dtypes, options = KINDS[kind]
    sizes = []
    for shard in ("zero1", None):
        params = make_params(dtypes)
        opt = wrap(make, params, shard=shard, **options)
        train(opt, params, 1, missing=0)
        sizes.append(state_bytes(opt))
        for p, entries in opt.optimizer.state.items():
            for key, value in entries.items():
                assert shard is None or key == "step" or (value.dim() == 1 and value.numel() <= p.numel())
    return sizes


@pytest.mark.parametrize("world", [2, 4])
def test_moments_and_masters_are_divided_by_the_number_of_ranks(world):
    results = on_ranks(world, memory, "mixed", "adamw")
    whole = results[0][1]
    assert all(w == whole for _, w in results)
    for i in range(2):  # moments, masters
        pieces = [mine[i] for mine, _ in results]
        assert sum(pieces) == whole[i] > 0
        # The padding of segments and shares makes them differ a little.
        assert max(pieces) <= whole[i] / world * 1.1


def tiny():
    """Fewer elements than ranks * 64: some ranks own nothing."""
    p = torch.nn.Parameter(torch.zeros(3))
    e = torch.nn.Parameter(torch.zeros(0))
    opt = FusedAccumOptimizer(AdamW([p, e], lr=0.5), 1, process_group=dist.group.WORLD, shard="zero1", max_norm=1.0)
    for _ in range(2):
        for q in (p, e):
            q.grad = torch.ones_like(q)
        opt.step()
    alone = torch.nn.Parameter(torch.zeros(3))
    other = FusedAccumOptimizer(AdamW([alone], lr=0.5), 1, max_norm=1.0)
    for _ in range(2):
        alone.grad = torch.ones(3)
        other.step()
    assert torch.equal(p, alone)
    opt.consolidate()
    steps = [float(entries["step"]) for entries in opt.state_dict()["state"].values()]
    return len(opt.optimizer.state), steps, opt.updates


def test_a_model_smaller_than_the_shares():
    first, *others = on_ranks(4, tiny)
    assert first == (1, [2.0, 2.0], 2)
    assert others == [(1, [2.0, 2.0], 2), *[(0, [2.0, 2.0], 2)] * 2]  # the empty one is the second's


# Views, padding, hooks


def looks():
    rank, size = dist.get_rank(), dist.get_world_size()
    params = make_params((BF16, BF16))
    opt = wrap("adamw", params, steps=2, master_weights=True, state_dtype=FP32)
    ones = [torch.full_like(p, 1.0 + rank) for p in params]
    micro_batch(opt, params, [g.clone() for g in ones])
    views = [opt.master_grad(p) for p in params]
    assert all(v.eq((1.0 + rank) / 2).all() for v in views)  # this rank's own
    seen = []

    def look(optimizer, args, kwargs):
        for call in (lambda: opt.master_grad(params[0]), opt.state_dict, lambda: copy.deepcopy(opt)):
            with pytest.raises(RuntimeError, match=r"shard='zero1'.*share alone"):
                call()
        seen.append(opt.grad_norm)

    handle = opt.register_step_pre_hook(look)
    micro_batch(opt, params, [g.clone() for g in ones])
    handle.remove()
    assert len(seen) == 1
    assert not any(v.any() for v in views)
    assert not any(opt.master_grad(p).any() for p in params)
    for buffer in opt._window.buffers:
        assert len(buffer.padding()) > 3
        assert not any(p.any() for p in buffer.padding())
        assert buffer.flat.numel() % (64 * size) == 0
    for share, side in opt._window.update.sides.items():
        # What is not dense in memory is looked at anew.
        dense = [k for k, p in enumerate(share.params) if p is not params[6] and p.numel()]
        assert all(map(side.masters.is_current, dense))  # nothing is derived again where nobody has written
    versions = [p._version for p in params]
    grads = [None if k == 5 else g for k, g in enumerate(ones)]
    for _ in range(2):
        micro_batch(opt, params, [None if g is None else g.clone() for g in grads])
    changed = [p._version > v for p, v in zip(params, versions, strict=True) if p.numel()]
    assert changed == [k != 5 for k, p in enumerate(params) if p.numel()]
    return digest(params)


def test_views_read_as_zero_and_hooks_are_told():
    first, second = on_ranks(2, looks)
    assert first == second


def a_hook_raises():
    """On one rank: the others wait for it, and flush() there ends the window."""
    params = make_params()
    opt = wrap("sgd", params, steps=1)
    train(opt, params, 1, steps=1, missing=0)
    if dist.get_rank() == 1:

        def fail(*_):
            handle.remove()
            raise KeyError("a hook")

        handle = opt.register_step_pre_hook(fail)
        with pytest.raises(KeyError, match="a hook"):
            train(opt, params, 1, steps=1, missing=0, first=1)
        with pytest.raises(RuntimeError, match=r"flush\(\) ends it, for which the others are waiting"):
            opt.step()
        assert opt.flush()
    else:
        train(opt, params, 1, steps=1, missing=0, first=1)
    return [opt.updates, *digest(params)]


def test_a_hook_that_raises_on_one_rank():
    first, second = on_ranks(2, a_hook_raises)
    assert first == second
    assert first[0] == 2


# What is refused


def refusals():
    group, params = dist.group.WORLD, make_params()
    complex_ = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))

    def make(optimizer, **options):
        FusedAccumOptimizer(optimizer, **{"steps": 2, "process_group": group, "shard": "zero1", **options})

    for words, call in {
        "needs a process_group": lambda: make(SGD(params, lr=1), process_group=None),
        "process_group=.*steps=None": lambda: make(SGD(params, lr=1), steps=None),
        "rounding='stochastic' is not supported.*master_weights": lambda: make(
            SGD(params, lr=1), rounding="stochastic"
        ),
        "shard='zero1' needs the fused update.*RMSprop": lambda: make(torch.optim.RMSprop(params, lr=1)),
        "shard='zero1' needs the fused update.*'wrapped' was asked": lambda: make(SGD(params, lr=1), update="wrapped"),
        "shard='zero1' needs the fused update.*complex64": lambda: make(SGD([complex_], lr=1)),
    }.items():
        with pytest.raises(ValueError, match=words):
            call()
    opt = wrap("adamw", params, fold="backward")
    with pytest.raises(ValueError, match=r"last=True.*shard='zero1'"):
        opt.micro_batch(last=True)
    for to in (2, -1, True, "0"):
        with pytest.raises(ValueError, match=r"consolidate\(to=.*0 to 1"):
            opt.consolidate(to=to)
    return True


def test_what_is_refused():
    assert on_ranks(2, refusals) == [True, True]
