"""`micro_batch(last=True)`: the reduction begins inside the last backward, and ends with the same bits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from processes import on_ranks
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

from fusedaccum import FusedAccumOptimizer, collectives

SMALL = 0.02  # MiB: a layer's weight is a bucket


def model(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return torch.nn.Sequential(*(torch.nn.Linear(80, 80) for _ in range(4))).to(dtype)


def wrap(params, steps, **options):
    return FusedAccumOptimizer(
        AdamW(params, lr=0.01), steps, process_group=dist.group.WORLD, fold="backward", bucket_mb=SMALL, **options
    )


def run(m, opt, updates, last, used=lambda rank, update, i: range(4)):
    rank = dist.get_rank()
    g = torch.Generator().manual_seed(rank)
    for update in range(updates):
        for i in range(3):
            if last and i == 2:
                opt.micro_batch(last=True)
            x = torch.randn(4, 80, generator=g).to(m[0].weight.dtype)
            layers = used(rank, update, i)
            for k in layers:
                x = m[k](x)
            if layers:
                x.pow(2).mean().backward()
            opt.step()
    return torch.cat([p.detach().float().view(-1) for p in m.parameters()])


def same_bits(dtype, wire):
    """With and without overlap; and with layers that are not used by all ranks, or at all, in the last micro-batch;
    and with layers that a rank uses in every other window.
    """
    uneven = lambda rank, update, i: [k for k in range(4) if (k + rank + update + i) % 3]  # noqa: E731
    nothing = lambda rank, update, i: range(4) if i < 2 or (rank == 1 and update == 0) else []  # noqa: E731
    in_turns = lambda rank, update, i: [k for k in range(4) if (k + rank + update) % 2]  # noqa: E731
    for used in (lambda *_: range(4), uneven, nothing, in_turns):
        results = []
        for last in (False, True):
            m = model(0, dtype)
            masters = {"master_weights": True} if dtype != torch.float32 else {}
            opt = wrap(m.parameters(), 3, wire_dtype=wire, max_norm=1.0, **masters)
            results.append((run(m, opt, 3, last, used), opt.grad_norm, opt.updates))
            opt.close()
        assert torch.equal(results[0][0], results[1][0])
        assert results[0][1:] == results[1][1:]
        everybody = [torch.empty_like(results[0][0]) for _ in range(dist.get_world_size())]
        dist.all_gather(everybody, results[0][0])
        assert all(torch.equal(everybody[0], other) for other in everybody)
    return True


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_overlap_changes_no_bit(dtype, wire, size):
    if wire == torch.bfloat16 or size == 2:
        on_ranks(size, same_bits, dtype, wire)
    else:
        on_ranks(size, ring_order, dtype)


def ring_order(dtype):
    """Four ranks in a ring add in an order that depends on where a bucket begins: equal within rounding."""
    results = []
    for last in (False, True):
        m = model(0, dtype)
        masters = {"master_weights": True} if dtype != torch.float32 else {}
        opt = wrap(m.parameters(), 3, **masters)
        flat = run(m, opt, 2, last)
        everybody = [torch.empty_like(flat) for _ in range(4)]
        dist.all_gather(everybody, flat)
        assert all(torch.equal(flat, other) for other in everybody)
        results.append(flat)
        opt.close()
    torch.testing.assert_close(*results, rtol=1e-2 if dtype != torch.float32 else 1e-4, atol=1e-4)


def begins_inside():
    """How many buckets had left before the backward was over."""
    m = model()
    opt = wrap(m.parameters(), 2)
    m(torch.ones(1, 80)).sum().backward()
    opt.step()
    opt.micro_batch(last=True)
    sent = []
    m[0].weight.register_hook(lambda grad: sent.append(len(opt._window.overlap._sums)))
    m(torch.ones(1, 80)).sum().backward()
    for look in (lambda: opt.master_grad(m[0].weight), opt.state_dict, opt.consolidate):
        with pytest.raises(RuntimeError, match=r"on their way|being reduced"):
            look()
    opt.step()
    assert opt.updated
    opt.state_dict()
    return sent


def test_the_reduction_begins_inside_the_backward():
    assert on_ranks(2, begins_inside) == [[7], [7]]  # of 8: all but the one with the first weight


def late():
    m = model()
    opt = wrap(m.parameters(), 1)
    x = torch.ones(1, 80, requires_grad=True)

    def twice(x):
        return m[0](x)

    opt.micro_batch(last=True)
    out = checkpoint(twice, checkpoint(twice, x, use_reentrant=True), use_reentrant=True)
    before = [p.detach().clone() for p in m.parameters()]
    with pytest.raises(RuntimeError, match=r"after its bucket was sent.*last=True.*reset\(\)"):
        # The others' gradients come first, so that every bucket before that of the first layer has left.
        m[3](m[2](m[1](out))).sum().backward()
    with pytest.raises(RuntimeError, match=r"reset\(\)"):
        opt.step()
    opt.reset()
    assert all(torch.equal(p, q) for p, q in zip(m.parameters(), before, strict=True))
    for p in m.parameters():
        p.grad = None
    m(x).sum().backward()
    opt.step()
    assert opt.updates == 1

    opt.micro_batch(last=True)  # two backwards of one micro-batch
    m(x).sum().backward()
    with pytest.raises(RuntimeError, match="after its bucket was sent"):
        m(x).sum().backward()
    opt.reset()
    return torch.cat([p.detach().view(-1) for p in m.parameters()])


def test_a_gradient_that_comes_late_is_refused():
    one, other = on_ranks(2, late)
    assert torch.equal(one, other)


def announced():
    p = torch.nn.Parameter(torch.zeros(1))
    opt = FusedAccumOptimizer(SGD([p], lr=1.0), 3, process_group=dist.group.WORLD, fold="backward")
    opt.micro_batch(last=True)
    p.sum().backward()
    opt.step()
    assert opt.pending == 1
    with pytest.raises(RuntimeError, match=r"announced the last micro-batch.*flush\(\)"):
        opt.micro_batch()
    with pytest.raises(RuntimeError, match="announced the last micro-batch"):
        p.sum().backward()
    with pytest.raises(RuntimeError, match="announced the last micro-batch"):
        opt.step()
    p.grad = None
    assert opt.flush() is True
    assert p.item() == -1.0
    opt.micro_batch(last=True)
    opt.micro_batch()  # said otherwise before the backward
    for _ in range(3):
        p.sum().backward()
        opt.step()
    assert p.item() == -2.0
    opt.micro_batch(last=True)
    p.sum().backward()
    opt.reset()  # waits for what is on its way
    for _ in range(3):
        p.sum().backward()
        opt.step()
    assert p.item() == -3.0


def test_a_window_that_was_announced_as_over_takes_no_more():
    on_ranks(2, announced)


def test_it_needs_process_group_and_fold_backward():
    p = torch.nn.Parameter(torch.zeros(1))
    for fold in ("step", "backward"):
        opt = FusedAccumOptimizer(SGD([p], lr=1.0), 2, fold=fold)
        with pytest.raises(ValueError, match=r"last=True.*process_group and fold='backward'"):
            opt.micro_batch(last=True)
        opt.micro_batch(last=False)
        opt.close()
    assert collectives.CHUNK == 2**24
