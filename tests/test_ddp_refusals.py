"""What does not go together with DistributedDataParallel and process_group: refused, with nothing changed."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch
import torch.distributed as dist
from ddp_cases import FOLDS, micro, toy, wrapped
from processes import on_ranks
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from wrapper_helpers import snapshot

import fusedaccum
from fusedaccum import FusedAccumOptimizer

X = [[1.0]]


def attempt(w, act, *args, in_backward=True):
    """(error, text, whether nothing was changed) of `act(*args)`.

    in_backward: but for gradients, of which a backward that fails leaves some.
    """

    def state():
        return {name: entry for name, entry in snapshot(w).items() if not (in_backward and name == "grads")}

    before = state()
    try:
        act(*args)
    except Exception as error:
        return type(error).__name__, str(error), state() == before
    return "nothing", "", True


def backward(model):
    model(torch.tensor(X)).sum().backward()


def backward_and_step(model, w):
    backward(model)
    w.step()


def reduced_by_ddp():
    """Gradients that DDP has reduced where they must not be."""
    found = {}
    model = toy()
    w, _ = wrapped(model, "none", "backward")
    found["folded in the backward"] = attempt(w, backward, model)
    with w.no_sync(model):
        backward(model)
    found["in its second backward"] = attempt(w, backward, model)
    w.reset()

    model = toy()
    w, _ = wrapped(model, "none")
    for name in ("mean_of", "sum_of"):
        backward(model)
        found[f"counted {name}"] = attempt(w, lambda name=name: w.step(**{name: 3}), in_backward=False)
        w.zero_grad()
    with w.no_sync(model):
        for g in (1, 3):
            micro(model, g, w, mean_of=2)
    found["value"] = float(model.module.weight.detach())
    return found


def test_gradients_that_ddp_reduces_where_they_must_not_be():
    for found in on_ranks(2, reduced_by_ddp):
        assert found.pop("value") == -2.0
        for what, (error, text, unchanged) in found.items():
            assert error == "RuntimeError", what
            for word in ("opt.no_sync(model)", "ddp_hook", "2 ranks", "item count" if "counted" in what else "fold='"):
                assert word in text, (what, text)
            assert unchanged, what


def hook_mistakes():
    found = {}
    group = dist.group.WORLD
    sgd = lambda params: torch.optim.SGD(params, lr=1.0)  # noqa: E731

    def hooked(state, model=None):
        model = model or toy()
        model.register_comm_hook(state, fusedaccum.ddp_hook)
        return model

    model = toy()
    bare = sgd(model.parameters())
    hooked(bare, model)
    found["no wrapper"] = attempt(bare, backward, model)

    for fold in FOLDS:
        model = toy()
        w = FusedAccumOptimizer(sgd(model.parameters()), 2, fold=fold)
        hooked(w, model)
        found["no group", fold] = attempt(w, backward, model)
        model = toy()
        w = FusedAccumOptimizer(sgd(model.parameters()), 2, fold=fold)
        hooked(w, model)
        with model.no_sync():
            found["no group, no_sync", fold] = attempt(w, backward_and_step, model, w)

        model = toy()
        w, _ = wrapped(model, "hook", fold)
        w.close()
        found["closed", fold] = attempt(w, backward, model)

        for synced in (True, False):
            for k in range(2):
                model = DistributedDataParallel(torch.nn.Linear(1, 1))
                both = [FusedAccumOptimizer(sgd([p]), 2, fold=fold, process_group=group) for p in model.parameters()]
                hooked(both[0], model)
                with contextlib.nullcontext() if synced else model.no_sync():
                    found[("part of the parameters", "another wrapper")[k], fold, synced] = attempt(
                        both[k], backward_and_step, model, both[k]
                    )

        model, elsewhere = toy(), toy()
        w, _ = wrapped(model, "none", fold)
        other, _ = wrapped(elsewhere, "none", fold)
        hooked(other, model)
        found["another wrapper", fold] = attempt(w, backward_and_step, model, w)
    return found


def test_a_hook_that_would_leave_gradients_to_nobody():
    right = {
        "no wrapper": ("TypeError", ["SGD", r"register_comm_hook\(opt, fusedaccum.ddp_hook\)"]),
        "no group": ("RuntimeError", ["process_group", "leave the hook out"]),
        "no group, no_sync": ("RuntimeError", ["process_group", "leave the hook out"]),
        "closed": ("RuntimeError", [r"close\(\)"]),
        "part of the parameters": ("RuntimeError", ["every parameter.*1 of 2|another wrapper", r"no_sync\(model\)"]),
        "another wrapper": ("RuntimeError", ["every parameter|another wrapper"]),  # whichever hook comes first
    }
    for found in on_ranks(2, hook_mistakes):
        assert len(found) == 17
        for what, (error, text, unchanged) in found.items():
            kind, words = right[what if isinstance(what, str) else what[0]]
            assert error == kind, (what, error, text)
            assert all(re.search(word, text) for word in words), (what, text)
            assert unchanged, what


def combinations():
    """What one of DDP's own options does not go together with."""
    found = {}
    model = DistributedDataParallel(torch.nn.Linear(1, 1), find_unused_parameters=True)
    w, _ = wrapped(model, "hook", "backward")
    w.micro_batch(last=True)
    found["last"] = attempt(w, backward, model)
    w.reset()

    class Sparse(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(4, 2, sparse=True)

        def forward(self, x):
            return self.embedding(x.long())

    model = DistributedDataParallel(Sparse())
    w, _ = wrapped(model, "hook", "backward")
    found["sparse"] = attempt(w, backward, model)
    sums = []
    for how, fold in (("hook", "step"), ("no_sync", "backward")):
        model = DistributedDataParallel(Sparse())
        start = model.module.embedding.weight.detach().clone()
        w, context = wrapped(model, how, fold)
        with context:
            for g in (0, 1 + dist.get_rank()):
                micro(model, g, w)
        sums.append((start - model.module.embedding.weight.detach())[:, 0].tolist())
    found["sums"] = sums

    inner = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    model = DistributedDataParallel(
        inner,
        delay_all_reduce_named_params=[("1.weight", inner[1].weight)],
        param_to_hook_all_reduce=inner[0].weight,
    )
    w, context = wrapped(model, "no_sync")
    with context:
        backward(model)
        found["delayed"] = attempt(w, w.step)  # nobody waits for DDP's reduction of that gradient

    model = toy()
    w, context = wrapped(model, "no_sync")
    with Join([model]), context:
        backward(model)
        found["join"] = attempt(w, w.step, in_backward=False)

    model = toy(static_graph=True)
    w, context = wrapped(model, "no_sync")
    with context:
        found["static_graph"] = attempt(w, backward, model)
    return found


def test_options_of_ddp_that_do_not_go_together_with_it():
    words = {
        "last": ["last=True", "find_unused_parameters", "no_sync(model)"],
        "sparse": ["sparse=False", "fold='step'"],
        "delayed": ["delay_all_reduce_named_params"],
        "join": ["join()", "step() without a gradient"],
        "static_graph": ["ASSERT"],  # torch's own
    }
    for found in on_ranks(2, combinations):
        for sums in found.pop("sums"):
            assert sums == pytest.approx([0.5, 0.25, 0.25, 0.0], abs=1e-6)
        assert found.keys() == words.keys()
        for what, (error, text, unchanged) in found.items():
            assert error == "RuntimeError", (what, text)
            assert all(word in text for word in words[what]), (what, text)
            assert unchanged, what


def another_group():
    """DDP over all of four ranks, process_group over two of them."""
    rank, found = dist.get_rank(), {}
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for fold in FOLDS:
        model = toy()
        w = FusedAccumOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), 1, fold=fold, process_group=pairs[rank // 2]
        )
        with w.no_sync(model):
            found[fold] = attempt(w, backward_and_step, model, w)
    return found


def test_a_process_group_that_is_smaller_than_ddps():
    for rank, found in enumerate(on_ranks(4, another_group)):
        for what, (error, text, unchanged) in found.items():
            assert error == "RuntimeError", what
            assert "[0, 1, 2, 3]" in text
            assert ("[0, 1]" if rank < 2 else "[2, 3]") in text
            assert unchanged


def no_sync_mistakes():
    model, other = toy(), toy()
    w, _ = wrapped(model, "none")
    sharded = fully_shard(torch.nn.Linear(2, 1))
    closed, _ = wrapped(other, "none")
    closed.close()
    found = {
        "module": attempt(w, w.no_sync, model.module, in_backward=False),
        "number": attempt(w, w.no_sync, 3, in_backward=False),
        "fsdp2": attempt(w, w.no_sync, sharded, in_backward=False),
        "other": attempt(w, w.no_sync, other, in_backward=False),
        "closed": attempt(w, closed.no_sync, other, in_backward=False),
    }
    with w.no_sync(model):
        inside = model.require_backward_grad_sync
    found["left"] = not inside and model.require_backward_grad_sync
    return found


def test_no_sync_of_what_it_has_no_meaning_for():
    right = {
        "module": ("TypeError", "Linear.*DistributedDataParallel.*without DDP"),
        "number": ("TypeError", "int"),
        "fsdp2": ("TypeError", r"set_requires_gradient_sync\(False\)"),
        "other": ("ValueError", "none of this optimizer's parameters"),
        "closed": ("RuntimeError", r"close\(\)"),
    }
    for found in on_ranks(2, no_sync_mistakes):
        assert found.pop("left")
        for what, (error, text, unchanged) in found.items():
            assert error == right[what][0], (what, text)
            assert re.search(right[what][1], text), text
            assert unchanged


def forgotten():
    """Models and wrappers that go away, or are copied, leave nothing behind that matters."""
    import copy
    import gc
    import weakref

    from fusedaccum import ddp

    model = toy()
    w, context = wrapped(model, "no_sync")
    with context:
        micro(model, 1, w)
    w.reset()
    watched = model in ddp._watches, len(model._forward_hooks)
    gone = weakref.ref(model)
    copied = copy.deepcopy(model)  # with our hook
    with contextlib.suppress(RuntimeError):
        copied(torch.tensor(X))
    del model, copied, context
    gc.collect()
    dead = gone() is None

    model = toy()
    w, _ = wrapped(model, "none")
    w.close()
    closed = model in ddp._watches, len(model._forward_hooks)
    w, _ = wrapped(model, "none")
    del w
    gc.collect()
    backward(model)
    dropped = model in ddp._watches, len(model._forward_hooks)
    return watched, dead, closed, dropped


def test_models_are_not_held_and_hooks_go_with_the_wrapper():
    assert on_ranks(2, forgotten) == [((True, 1), True, (False, 0), (False, 0))] * 2
