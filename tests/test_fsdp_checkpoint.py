"""Open windows of FSDP2 models, saved and loaded: on the same mesh, on others, and by torch's own helpers."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import on_ranks
from shards import distributed, loss_of, mesh_of, model_of, shard, whole
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import Shard
from torch.nn import Parameter
from torch.optim import SGD, AdamW
from wrapper_helpers import LOW_PRECISION, bits, snapshot

from fusedaccum import FusedAccumOptimizer

pytestmark = LOW_PRECISION

STEPS, END = 4, 10
MASTERS = {"master_weights": True, "state_dtype": torch.float32}
CASES = [
    (torch.float32, {"update": "fused"}),
    (torch.float32, {"update": "wrapped"}),
    (torch.bfloat16, MASTERS),
]
CUTS = (6, 8)  # inside a window, and at a boundary


def build(dtype, options, steps=STEPS):
    model = shard(model_of(dtype), mesh_of())
    return model, FusedAccumOptimizer(AdamW(model.parameters(), lr=0.01), steps=steps, **options)


def feed(model, wrapper, first, last):
    """The same samples on every rank: a run does not depend on their number, but for rounding."""
    for k in range(first, last):
        loss_of(model, k, rank=0).backward()
        wrapper.step()
        wrapper.zero_grad()


def facts(model, wrapper):
    """Whole parameters, sums, moments, by their bits, and counts."""
    params = list(model.parameters())
    tensors = [*params, *(wrapper.master_grad(p) for p in params)]
    tensors += [wrapper.state[p][key] for p in params for key in ("exp_avg", "exp_avg_sq")]
    masters = wrapper.state_dict()["fusedaccum"]["sharded"]["masters"]
    tensors += [masters[k] for k in sorted(masters)]
    steps = [float(wrapper.state[p]["step"]) for p in params]
    return list(map(bits, whole(tensors))), steps, wrapper.pending, wrapper.updates


def saves(folder):
    found = []
    for number, (dtype, options) in enumerate(CASES):
        for cut in CUTS:
            model, wrapper = build(dtype, options)
            feed(model, wrapper, 0, cut)
            dcp.save({"model": model, "opt": wrapper}, checkpoint_id=f"{folder}/{number}-{cut}")
            at_cut = facts(model, wrapper)
            sums = whole(wrapper.state_dict()["fusedaccum"]["sharded"]["sums"].values())
            assert all(bool(s.any()) == (cut == 6) for s in sums)  # nothing of a window that is over is saved
            stream = io.BytesIO()
            torch.save({"model": model.state_dict(), "opt": wrapper.state_dict()}, stream)
            feed(model, wrapper, cut, END)
            at_end = facts(model, wrapper)
            way = WAYS[(number + CUTS.index(cut)) % 3]
            twin, copied = way(stream, dtype, options, cut)
            assert facts(twin, copied) == at_cut, (number, cut, way)
            feed(twin, copied, cut, END)
            assert facts(twin, copied) == at_end, (number, cut, way)
            found.append((at_cut, at_end))
    return found


def _by_torch_save(stream, dtype, options, cut):
    model, wrapper = build(dtype, options)
    stream.seek(0)
    saved = torch.load(stream, weights_only=True)
    model.load_state_dict(saved["model"])
    wrapper.load_state_dict(saved["opt"])
    return model, wrapper


def _again(dtype, options, cut):
    model, wrapper = build(dtype, options)
    feed(model, wrapper, 0, cut)
    return model, wrapper


def _by_pickle(stream, dtype, options, cut):
    model, wrapper = _again(dtype, options, cut)
    saved = pickle.loads(pickle.dumps(wrapper.state_dict()))
    feed(model, wrapper, 0, 1)  # something else: the dict was a copy
    twin = build(dtype, options)
    twin[0].load_state_dict(_again(dtype, options, cut)[0].state_dict())
    twin[1].load_state_dict(saved)
    wrapper.reset()
    return twin


def _by_deepcopy(stream, dtype, options, cut):
    model, wrapper = _again(dtype, options, cut)
    saved = copy.deepcopy(wrapper.state_dict())
    wrapper.reset()
    feed(model, wrapper, 0, 3)
    model.load_state_dict(_again(dtype, options, cut)[0].state_dict())
    wrapper.load_state_dict(saved)
    return model, wrapper


WAYS = (_by_torch_save, _by_pickle, _by_deepcopy)


def loads(folder, cuts):
    found = []
    for number, (dtype, options) in enumerate(CASES):
        for cut in cuts:
            model, wrapper = build(dtype, options)
            feed(model, wrapper, 0, 3 if cut == 6 else 0)  # a window of its own, that loading has to drop
            get_optimizer_state_dict(model, wrapper)  # the state that DCP loads into
            dcp.load({"model": model, "opt": wrapper}, checkpoint_id=f"{folder}/{number}-{cut}")
            at_cut = facts(model, wrapper)
            feed(model, wrapper, cut, END)
            found.append((at_cut, facts(model, wrapper)))
            wrapper.reset()
    return found


def test_a_window_is_loaded_bit_by_bit_into_other_meshes(tmp_path):
    saved = on_ranks(2, saves, str(tmp_path))
    assert saved[0] == saved[1]
    for ranks, cuts in ((2, CUTS), (4, CUTS[:1]), (1, CUTS)):
        expected = [each for k, each in enumerate(saved[0]) if CUTS[k % 2] in cuts]
        for loaded in on_ranks(ranks, loads, str(tmp_path), cuts):
            for case, ((at_cut, at_end), (was_cut, was_end)) in enumerate(zip(loaded, expected, strict=True)):
                assert at_cut == was_cut, (ranks, case)
                assert at_end[1:] == was_end[1:], (ranks, case)
                assert ranks != 2 or at_end == was_end, (ranks, case)


def torch_helpers():
    """`get_optimizer_state_dict` and its like know nothing of windows, and leave the open one alone when they read."""
    model, wrapper = build(torch.bfloat16, MASTERS)
    feed(model, wrapper, 0, 1)
    first = get_optimizer_state_dict(model, wrapper)
    said = [set(first), wrapper.pending, wrapper.updates]
    feed(model, wrapper, 1, 4)
    saved = get_state_dict(model, wrapper)
    before = facts(model, wrapper)
    other, new = build(torch.bfloat16, MASTERS)
    set_state_dict(other, new, model_state_dict=saved[0], optim_state_dict=saved[1])
    set_optimizer_state_dict(other, new, saved[1])
    n = 3 * len(list(model.parameters()))  # parameters, sums and first moments
    said.append(facts(other, new)[0][:n] == before[0][:n])
    # A warm-up from 0 whose first gradients are zeros on one rank, but not on all, is no such call.
    p = Parameter(distributed(torch.ones(2), mesh_of(), [Shard(0)]))
    warm = FusedAccumOptimizer(AdamW([p], lr=0.0), 2)
    p.grad = distributed(torch.tensor([1.0, 0.0]), mesh_of(), [Shard(0)])
    warm.step(None)
    said.append(warm.pending)
    warm.reset()
    return said


def test_torchs_own_helpers():
    for keys, pending, updates, same, warm in on_ranks(2, torch_helpers):
        assert (keys, pending, updates, same, warm) == ({"state", "param_groups"}, 1, 0, True, 1)


def misfits(folder):
    """Dicts that do not fit, each refused with everything as it was."""
    model, wrapper = build(torch.float32, {})
    feed(model, wrapper, 0, 5)
    saved = wrapper.state_dict()
    plain = model_of()
    other = FusedAccumOptimizer(AdamW(plain.parameters(), lr=0.01), STEPS)
    loss_of(plain, 0).backward()
    other.step()
    texts = []

    def fails(target, value):
        before = snapshot(target) if target is other else facts(model, wrapper)
        with pytest.raises(ValueError, match=r"fusedaccum|saved") as caught:
            target.load_state_dict(value)
        texts.append(str(caught.value))
        assert before == (snapshot(target) if target is other else facts(model, wrapper))

    fails(other, saved)
    fails(other, {**saved, "fusedaccum": {**saved["fusedaccum"], "sharded": {"sums": {}, "masters": {}}}})
    fails(wrapper, {**saved, "fusedaccum": {**saved["fusedaccum"], "sharded": {"sums": {}, "masters": {}}}})
    full = tuple(wrapper.master_grad(p).full_tensor() for p in model.parameters())
    fails(wrapper, {**saved, "fusedaccum": {**saved["fusedaccum"], "sums": full}})
    pair = mesh_of(1, 2)
    moved = {k: distributed(t.full_tensor(), pair, [Shard(0), Shard(0)]) for k, t in _sums(saved).items()}
    fails(wrapper, {**saved, "fusedaccum": {**saved["fusedaccum"], "sharded": {"sums": moved, "masters": {}}}})
    half = {k: t.bfloat16() for k, t in _sums(saved).items()}
    fails(wrapper, {**saved, "fusedaccum": {**saved["fusedaccum"], "sharded": {"sums": half, "masters": {}}}})
    for w in (wrapper, other):
        w.reset()
    return texts


def _sums(saved):
    return saved["fusedaccum"]["sharded"]["sums"]


def test_what_does_not_fit_is_refused(tmp_path):
    for texts in on_ranks(2, misfits, str(tmp_path)):
        for text, words in zip(
            texts, ["none here", "did not come", "did not come", "before sharding", "dcp.load", "bfloat16"], strict=True
        ):
            assert words in text


def holds_no_sums():
    """steps=None: a window is p.grad, which torch does not save; SGD without momentum leaves no state."""
    model = shard(model_of())
    wrapper = FusedAccumOptimizer(SGD(model.parameters(), lr=0.1), None)
    loss_of(model, 0).backward()
    saved = wrapper.state_dict()["fusedaccum"]
    wrapper.zero_grad()
    return saved["sharded"], saved["sharded_sums"], dist.get_rank()


def test_steps_none_saves_no_sums():
    for sharded, sums, _ in on_ranks(2, holds_no_sums):
        assert (sharded, sums) == ({"sums": {}, "masters": {}}, ())
