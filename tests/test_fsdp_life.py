"""FSDP2 models as people make and use them: built on meta, frozen in part, offloaded, scaled, checkpointed, beside
tensor parallelism.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from processes import on_ranks
from shards import SIZES, closing, data_of, loss_of, model_of, shard, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint
from wrapper_helpers import LOW_PRECISION, bits

from fusedaccum import FusedAccumOptimizer

pytestmark = [LOW_PRECISION, pytest.mark.filterwarnings("ignore:(?s).*")]


def adamw(model, steps=2, **options):
    return FusedAccumOptimizer(AdamW(model.parameters(), lr=0.01, weight_decay=0.1), steps, **options)


def feed(model, wrapper, count):
    for k in range(count):
        loss_of(model, k).backward()
        wrapper.step()
        wrapper.zero_grad()
    return list(map(bits, whole(model.parameters())))


def start(model):
    with torch.no_grad():
        for k, p in enumerate(model.parameters()):
            p.fill_(0.1 * (k + 1))
    return model


def makings():
    """The same bits, however the model came about and gradients are taken."""
    right = None
    for fold in ("step", "backward"):
        model = start(shard(model_of()))
        found = [feed(model, adamw(model, fold=fold), 4)]

        model = shard(model_of(device="meta"))  # the wrapper comes before there is any memory
        wrapper = adamw(model, fold=fold)
        found.append(feed(start(model.to_empty(device="cpu")), wrapper, 4))

        model = shard(model_of(), offload_policy=CPUOffloadPolicy(pin_memory=False))
        found.append(feed(start(model), adamw(model, fold=fold), 4))

        model = model_of()
        for layer in model[1:4]:  # a reentrant one needs an input that requires grad
            layer.forward = _checkpointed(layer.forward, reentrant=fold == "backward")
        model = start(shard(model))
        found.append(feed(model, adamw(model, fold=fold), 4))

        model = start(shard(model_of()))
        wrapper = adamw(model, fold=fold)
        feed(model, wrapper, 1)
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
        with closing(wrapper):
            pass
        found.append(feed(start(model), adamw(model, fold=fold), 4))
        right = right or found[0]
        same = [f == right for f in found]
        assert same == [True] * 5, (fold, same)
    return right


def _checkpointed(forward, reentrant):
    return lambda x: checkpoint(forward, x, use_reentrant=reentrant)


def frozen():
    """Which parameters have changed: with the first layer frozen, and after it was unfrozen."""
    model = shard(model_of())
    wrapper, before = adamw(model), whole(model.parameters())
    changed = []
    for frozen in (True, False):
        for p in model[0].parameters():
            p.requires_grad_(not frozen)
        feed(model, wrapper, 2)
        changed.append([bits(p) != bits(q) for p, q in zip(whole(model.parameters()), before, strict=True)])
    return changed, [len(wrapper.state[p]) for p in model.parameters()]


def scaled(amp_scaling):
    """Four micro-batches, the second with an overflow in the last rank's shard."""
    model = shard(model_of(torch.float16 if amp_scaling else torch.float32))
    wrapper = FusedAccumOptimizer(SGD(model.parameters(), lr=0.1), 2, amp_scaling=amp_scaling)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for k in range(4):
        scaler.scale(loss_of(model, k)).backward()
        if k == 1 and dist.get_rank() == dist.get_world_size() - 1:
            model[0].weight.grad.to_local()[0] = float("inf")
        scaler.step(wrapper)
        scaler.update()
        wrapper.zero_grad()
    finite = all(p.isfinite().all() for p in whole(model.parameters()))
    counts = (wrapper.updates, wrapper.skipped_micro_batches, wrapper.pending, scaler.get_scale(), finite)
    wrapper.reset()
    return counts


def test_models_as_they_are_made_and_used():
    results = on_ranks(2, makings)
    assert results[0] == results[1]
    for changed, entries in on_ranks(2, frozen):
        assert changed == [[False] * 2 + [True] * 4, [True] * 6]
        assert entries == [3] * 6
    assert on_ranks(2, scaled, False) == [(1, 0, 1, 4.0, True)] * 2
    assert on_ranks(2, scaled, True) == [(2, 1, 0, 4.0, True)] * 2


def tensor_parallel_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(SIZES[0], 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 1))


def beside_tensor_parallelism(cases):
    """Sharded over "tp" and, with four ranks, by FSDP2 over "dp": (largest difference from one process, norms)."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    ranks, rank, found = mesh["dp"].size(), mesh["dp"].get_local_rank(), []
    for options in cases:
        model, one = tensor_parallel_model(), tensor_parallel_model()
        parallelize_module(model, mesh["tp"], {"2": ColwiseParallel(), "3": RowwiseParallel()})
        if ranks > 1:
            for layer in model:
                fully_shard(layer, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
        wrapper, bare = adamw(model, **options), AdamW(one.parameters(), lr=0.01, weight_decay=0.1)
        steps = wrapper.steps or 1
        for k in range(4):
            model(data_of(k, rank).float()).square().mean().backward()
            wrapper.step()
            wrapper.zero_grad()
            for r in range(ranks):
                (one(data_of(k, r).float()).square().mean() / ranks / steps).backward()
            if k % steps == steps - 1:
                norm = nn.utils.clip_grad_norm_(one.parameters(), float("inf")).item()
                bare.step()
                bare.zero_grad()
        pairs = zip(whole(model.parameters()), whole(one.parameters()), strict=True)
        found.append((max(float((a - b).abs().max()) for a, b in pairs), wrapper.grad_norm, norm))
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallelism(ranks):
    cases = [{"fold": "step"}, {"fold": "backward"}, {"update": "wrapped"}, {"steps": None}]
    results = on_ranks(ranks, beside_tensor_parallelism, cases)
    assert all(result == results[0] for result in results)
    for difference, ours, right in results[0]:
        assert difference < 5e-7
        assert ours == pytest.approx(right, rel=1e-6)


def partial_gradients():
    """Replicated parameters whose gradients each rank has a part of: the sum, in FP32, beside one process."""
    x, found = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0)), []
    one = nn.LayerNorm(8)
    one(x).square().mean().backward()
    for options in ({}, {"fold": "backward"}, {"steps": None}):
        model = parallelize_module(
            nn.LayerNorm(8), init_device_mesh("cpu", (dist.get_world_size(),)), SequenceParallel()
        )
        wrapper = FusedAccumOptimizer(SGD(model.parameters(), lr=1.0), **{"steps": 1, **options})
        before = whole(model.parameters())
        model(x).full_tensor().square().mean().backward()
        if not options:
            assert "Partial" in str(model.weight.grad.placements)
        wrapper.step()
        for p, q, r in zip(whole(model.parameters()), before, one.parameters(), strict=True):
            found.append(float((q - p - r.grad).abs().max()))
        wrapper.zero_grad()
    return found


def test_gradients_that_are_parts_of_a_sum():
    for found in on_ranks(2, partial_gradients):
        assert max(found) < 1e-6


def mixed():
    """A plain parameter beside shards, whose gradient the ranks do not share: they stay together all the same."""
    model = shard(model_of())
    extra = nn.Parameter(torch.zeros(2))
    wrapper = FusedAccumOptimizer(SGD([*model.parameters(), extra], lr=1.0), 1, max_norm=0.5, nonfinite="skip_window")
    said = []
    for value in (1.0 + dist.get_rank(), float("nan") if dist.get_rank() else 0.0):
        loss_of(model, 0).backward()
        extra.grad = torch.full((2,), value)
        wrapper.step()
        said.append((repr(wrapper.grad_norm), wrapper.updates, list(map(bits, whole(model.parameters())))))
    return said


def test_plain_parameters_beside_shards():
    a, b = on_ranks(2, mixed)
    assert a == b
    assert [updates for _, updates, _ in a] == [1, 1]
