"""FSDP2 on real ranks, beside FSDP2's own accumulation with the bare optimizer and beside one process in float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from processes import on_ranks
from shards import in_one_process, mesh_of, model_of, policy, shard, train, whole
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, AdamW
from wrapper_helpers import LOW_PRECISION, assert_within_budget, bits

from fusedaccum import FusedAccumOptimizer

pytestmark = LOW_PRECISION

STEPS, MICRO_BATCHES = 4, 8
MAKERS = {
    "adamw": lambda params: AdamW(params, lr=0.01, weight_decay=0.1),
    "sgd": lambda params: SGD(params, lr=0.1, momentum=0.9),
}
BF16 = {"dtype": torch.bfloat16}
PLAIN = [
    {"update": "wrapped"},
    {"update": "wrapped", "fold": "backward"},
    {"update": "wrapped", "fold": "backward", "bucket_mb": 1e-5},
    {"update": "wrapped", "sync": "last"},
    {"update": "wrapped", "sync": "last", "fold": "backward"},
    {"update": "wrapped", "steps": None},
    {"update": "wrapped", "steps": None, "sync": "last"},
    {"update": "wrapped", "reshard": False},
    {"update": "wrapped", "reduce_dtype": torch.float32},
    {"update": "wrapped", "reduce_dtype": torch.bfloat16, "fold": "backward", "reshard": False},
    {"update": "wrapped", "root_only": True, "fold": "backward"},
    {"update": "wrapped", "root_only": True, "steps": None},
    {"update": "fused"},
    {"update": "fused", "fold": "backward", "make": "sgd"},
    {"update": "fused", "steps": None, "make": "sgd"},
]


def build(case):
    mesh = mesh_of(*case.get("mesh", ()))
    options = {"reshard_after_forward": case.get("reshard", True)}
    if "reduce_dtype" in case:
        options["mp_policy"] = policy(case["reduce_dtype"])
    model = model_of(case.get("dtype", torch.float32))
    if case.get("root_only"):
        return fully_shard(model, mesh=mesh, **options)
    return shard(model, mesh, **options)


OURS = ("update", "fold", "bucket_mb", "max_norm", "master_weights", "state_dtype", "rounding")


def run(case):
    """(ours, native): parameters, bits of every moment on this rank, norm, updates."""
    make, sync = MAKERS[case.get("make", "adamw")], case.get("sync", "each")
    native = build(case)
    bare = make(native.parameters())
    native_norms = train(native, bare, STEPS, MICRO_BATCHES, sync, 1 / STEPS, max_norm=float("inf"))
    model = build(case)
    steps = case.get("steps", STEPS)
    wrapper = FusedAccumOptimizer(
        make(model.parameters()), steps=steps, **{name: case[name] for name in OURS if name in case}
    )
    train(model, wrapper, STEPS, MICRO_BATCHES, sync, 1 if steps else 1 / STEPS)
    assert all(p.grad is None for p in model.parameters())
    for p, q in zip(model.parameters(), native.parameters(), strict=True):
        for key in bare.state[q]:
            mine, theirs = wrapper.state[p][key], bare.state[q][key]
            assert type(mine) is type(theirs), key
            if key != "step":
                assert (mine.placements, mine.device_mesh, mine.shape) == (p.placements, p.device_mesh, p.shape)
    ours, theirs = whole(model.parameters()), whole(native.parameters())
    moments = [whole(s[k] for s in o.state.values() for k in s if k != "step") for o in (wrapper, bare)]
    return ours, theirs, moments, wrapper.grad_norm, native_norms[-1], wrapper.updates


def runs(cases):
    return [run(case) for case in cases]


def check(cases, ranks):
    """Every case: ranks end with the same bits, equal to native ones where the update is the optimizer's own."""
    truths = {}
    for case, results in zip(cases, zip(*on_ranks(ranks, runs, cases), strict=True), strict=True):
        ours, native, (moments, native_moments), norm, native_norm, updates = results[0]
        assert updates == MICRO_BATCHES // STEPS, case
        for other in results[1:]:
            assert list(map(bits, other[0])) == list(map(bits, ours)), case
            assert other[3] == norm, case
        plain = case.get("dtype", torch.float32) == torch.float32
        if case["update"] == "wrapped" and plain and "max_norm" not in case:
            assert list(map(bits, ours + moments)) == list(map(bits, native + native_moments)), case
        make = case.get("make", "adamw")
        if make not in truths:
            truths[make] = in_one_process(MAKERS[make], STEPS, MICRO_BATCHES, ranks)
        truth, norms = truths[make]
        for mine, theirs, right in zip(ours, native, truth, strict=True):
            assert_within_budget(mine, theirs, right)
        low = "reduce_dtype" in case or not plain
        assert norm == pytest.approx(norms[-1], rel=2e-2 if low else 1e-5), case
        assert norm == pytest.approx(native_norm, rel=2e-2 if low else 1e-6), case


def test_two_ranks():
    check(PLAIN, 2)


def test_bf16_parameters_on_two_ranks():
    masters = {"master_weights": True, "state_dtype": torch.float32, **BF16}
    check(
        [
            {"update": "wrapped", **BF16},
            {"update": "wrapped", "sync": "last", "reduce_dtype": torch.float32, **BF16},
            {"update": "fused", **masters},
            {"update": "fused", "fold": "backward", "reduce_dtype": torch.bfloat16, **masters},
            {"update": "fused", "steps": None, **masters},
        ],
        2,
    )


def test_four_ranks_and_hsdp():
    check(
        [
            {"update": "wrapped"},
            {"update": "fused", "fold": "backward"},
            {"update": "wrapped", "mesh": (2, 2)},
            {"update": "fused", "mesh": (2, 2), "fold": "backward"},
            {"update": "fused", "mesh": (2, 2), "steps": None, "sync": "last"},
        ],
        4,
    )


def clips():
    """Clipping is torch's own, over shards: (largest difference of a parameter, norms, whether it clipped)."""
    found = []
    for shape in ((), (2, 2)) if dist.get_world_size() == 4 else ((),):
        models = [shard(model_of(), mesh_of(*shape)) for _ in range(2)]
        bare = SGD(models[0].parameters(), lr=0.1)
        norms = train(models[0], bare, STEPS, MICRO_BATCHES, scale=1 / STEPS, max_norm=0.1)
        wrapper = FusedAccumOptimizer(SGD(models[1].parameters(), lr=0.1), steps=STEPS, max_norm=0.1)
        train(models[1], wrapper, STEPS, MICRO_BATCHES)
        pairs = zip(*(whole(model.parameters()) for model in models), strict=True)
        found.append((max(float((a - b).abs().max()) for a, b in pairs), norms[-1], wrapper.grad_norm))
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_clip_norm_is_that_of_all_shards(ranks):
    results = on_ranks(ranks, clips)
    assert all(result == results[0] for result in results)
    for difference, native, ours in results[0]:
        assert native > 0.1
        assert ours == pytest.approx(native, rel=1e-6)
        assert difference < 1e-7
