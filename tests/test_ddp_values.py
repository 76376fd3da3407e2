"""DistributedDataParallel with process_group: right values, what is sent, and what else may be there."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
import torch.distributed as dist
from ddp_cases import FOLDS, HOWS, batch, micro, toy, wrapped
from processes import on_ranks
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from wrapper_helpers import bits

import fusedaccum
from fusedaccum import FusedAccumOptimizer


def values():
    """The weight after a window, for each way: of micro-batches with item counts, and without."""
    rank, found = dist.get_rank(), {}
    for how in HOWS:
        for fold in FOLDS:
            model = toy()
            w, context = wrapped(model, how, fold)
            with context:
                for g in ((1, 3), (5, 7))[rank]:
                    micro(model, g, w)
            found[how, fold, "plain"] = float(model.module.weight.detach())
            with context if how == "hook" else w.no_sync(model):
                for n in ((5, 20), (10, 3))[rank]:
                    if fold == "backward":
                        w.micro_batch(mean_of=n)
                    micro(model, 1, w, **({"mean_of": n} if fold == "step" else {}))
            found[how, fold, "weighted"] = float(model.module.weight.detach())
            with context if how == "hook" else w.no_sync(model):
                for g in (1, 2):  # two backwards in each micro-batch
                    model(torch.tensor([[float(g + rank)]])).sum().backward()
                    micro(model, 10, w)
            found[how, fold, "two backwards"] = float(model.module.weight.detach())
    return found


def test_3_and_64_equal_and_unequal_micro_batches_on_two_ranks():
    right = {"plain": -4.0, "weighted": -5.0, "two backwards": -5.0 - 12.0}
    for found in on_ranks(2, values):
        assert found == {key: right[key[-1]] for key in found}


def mixed():
    """DDP reduces some micro-batches of a window, and not others; and all of them."""
    rank, found = dist.get_rank(), []
    for fold in ("step",):
        for syncs in ((True, False), (False, True), (True, True)):
            model = toy()
            w, _ = wrapped(model, "none", fold)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for window in ((1, 3), (5, 7)), ((2, 2), (4, 12)):
                    for g, sync in zip(window[rank], syncs, strict=True):
                        with contextlib.nullcontext() if sync else w.no_sync(model):
                            micro(model, g, w)
            said = [str(c.message) for c in caught if "process_group" in str(c.message)]
            found.append((float(model.module.weight.detach()), len(said), all("no_sync(model)" in s for s in said)))
    return found


def test_ddp_that_reduces_beside_us_gives_the_same_mean_and_one_warning():
    assert on_ranks(2, mixed) == [[(-9.0, 1, True)] * 3] * 2


class TwoLayers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Parameter(torch.full((4,), 0.5)) for _ in range(3))

    def forward(self, use, factor):
        return (getattr(self, use) * factor).sum()


def case_60():
    """A is used in the first micro-batch of rank 0, B in the second of rank 1; everywhere else C is."""
    found = {}
    rank = dist.get_rank()
    for how in HOWS:
        for fold in FOLDS:
            for as_view in (False, True):
                model = DistributedDataParallel(
                    TwoLayers(), find_unused_parameters=True, gradient_as_bucket_view=as_view
                )
                w = FusedAccumOptimizer(
                    torch.optim.AdamW(model.parameters(), lr=0.25, weight_decay=0.5),
                    2,
                    fold=fold,
                    process_group=dist.group.WORLD,
                )
                if how == "hook":
                    model.register_comm_hook(w, fusedaccum.ddp_hook)
                inner = model.module
                for window in ("ac", "cb"), ("cc", "cc"):
                    before = [bits(p) for p in inner.parameters()]
                    with w.no_sync(model) if how == "no_sync" else contextlib.nullcontext():
                        for use in window[rank]:
                            model(use, 2.0 + rank).backward()
                            w.step()
                    moved = [bits(p) != old for p, old in zip(inner.parameters(), before, strict=True)]
                    found[how, fold, as_view, window] = moved, [bits(p) for p in inner.parameters()]
                found[how, fold, as_view, "counts"] = [float(w.state[p]["step"]) for p in inner.parameters()], []
                w.close()
    return found


def test_60_a_parameter_is_updated_on_all_ranks_where_one_has_used_it_and_on_none_otherwise():
    one, other = on_ranks(2, case_60)
    assert one == other
    for (*_, what), (moved, _) in one.items():
        assert moved == {"counts": [1, 1, 2], ("cc", "cc"): [False, False, True]}.get(what, [True, True, True]), what


class Nothing(torch.autograd.Function):
    """The gradient that a custom function may leave out. DDP makes zeros of it, with which AdamW would go on."""

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        return None


class NoGradient(TwoLayers):
    def forward(self, use, factor):
        return (Nothing.apply(self.a) + self.b + self.c).sum() * factor


def left_out():
    """{case: which of two parameters are updated}. The buckets hold a parameter each, and those of none are skipped."""
    found = {}
    for how in HOWS:
        for fold in FOLDS:
            for flags in (
                {},
                {"gradient_as_bucket_view": True},
                {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
            ):
                skips = len(flags) > 1
                model = DistributedDataParallel((TwoLayers if skips else NoGradient)(), bucket_cap_mb=1e-6, **flags)
                inner = torch.optim.AdamW(model.parameters(), lr=0.25, weight_decay=0.5)
                w = FusedAccumOptimizer(inner, 2, fold=fold, process_group=dist.group.WORLD)
                if how == "hook":
                    model.register_comm_hook(w, fusedaccum.ddp_hook)
                params = list(model.parameters())
                moved = []
                with w.no_sync(model) if how == "no_sync" else contextlib.nullcontext():
                    for use in "abcaac":
                        before = [bits(p) for p in params]
                        model(use, 2.0 + dist.get_rank()).backward()
                        w.step()
                        moved.append([bits(p) != old for p, old in zip(params, before, strict=True)])
                found[how, fold, skips, len(flags)] = moved[1::2], [bits(p) for p in params]
    return found


def test_a_parameter_without_any_gradient_is_not_updated_whatever_ddp_puts_there():
    one, other = on_ranks(2, left_out)
    assert one == other
    for (*_, skips, _), (moved, _) in one.items():
        if skips:
            assert moved == [[True, True, False], [True, False, True], [True, False, True]]
        else:
            assert moved == [[False, True, True]] * 3


def traffic():
    """{case: the collectives of a window}, DDP's and ours."""
    found = {}
    for how in (*HOWS, "sync"):
        for name in ("plain", "find_unused_parameters", "buffers"):
            inner = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
            if name == "buffers":
                inner.register_buffer("seen", torch.zeros(3))
            model = DistributedDataParallel(inner, find_unused_parameters=name == "find_unused_parameters")
            w, _ = wrapped(model, how if how != "sync" else "none", steps=4)
            for _ in range(2):  # buckets are rebuilt, and parameters compared, in the first window
                with (
                    profile(activities=[ProfilerActivity.CPU]) as seen,
                    w.no_sync(model) if how == "no_sync" else contextlib.nullcontext(),
                ):
                    for k in range(4):
                        micro(model, 1, w, x=batch(k, dist.get_rank(), torch.float32))
            calls = {e.key: e.count for e in seen.key_averages() if e.key.startswith("gloo:")}
            found[how, name] = calls.get("gloo:all_reduce", 0), calls.get("gloo:broadcast", 0)
    return found


def test_what_is_sent_in_a_window_of_four():
    """All-reduces and broadcasts: ours are one of the sums and one of which segments are touched."""
    warned = {key: counts for key, counts in on_ranks(2, traffic)[0].items() if key[0] == "sync"}
    assert warned == {
        ("sync", "plain"): (4 + 2, 0),
        ("sync", "find_unused_parameters"): (4 + 4 + 2, 0),
        ("sync", "buffers"): (4 + 2, 4),
    }
    ours = {key: counts for key, counts in on_ranks(2, traffic)[1].items() if key[0] != "sync"}
    assert ours == {
        ("no_sync", "plain"): (2, 0),
        ("no_sync", "find_unused_parameters"): (2, 0),
        ("no_sync", "buffers"): (2, 0),
        ("hook", "plain"): (2, 0),
        ("hook", "find_unused_parameters"): (4 + 2, 0),  # which parameters were used
        ("hook", "buffers"): (2, 4),  # rank 0's, ahead of each forward
    }


class Early(torch.nn.Module):
    """One weight, in a reentrant checkpoint, whose backward runs inside the other one and ends it."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(1, 1, bias=False)
        self.inner.weight.data.zero_()

    def forward(self, x):
        return checkpoint(self.inner, x.requires_grad_(), use_reentrant=True) * 1.0


def by_hand():
    """A gradient that somebody has set stays, where DDP has it for an unused one."""
    found = []
    for as_view in (False, True):
        for fold in FOLDS:
            model = DistributedDataParallel(TwoLayers(), find_unused_parameters=True, gradient_as_bucket_view=as_view)
            w, _ = wrapped(model, "hook", fold)
            for g in (1.0, 3.0):
                model.module.b.grad = torch.full((4,), g)
                model("a", g).backward()
                w.step()
            found.append([float(p.detach()[0]) for p in model.parameters()])
    return found


def test_a_gradient_that_was_set_by_hand():
    assert on_ranks(2, by_hand) == [[[-1.5, -1.5, 0.5]] * 4] * 2


def watched():
    """Hooks of others on a parameter, registered before and after ours, see its gradient in every backward."""
    found = {}
    for as_view in (False, True):
        for fold in FOLDS:
            model = toy(gradient_as_bucket_view=as_view)
            p, seen = model.module.weight, []
            w, _ = wrapped(model, "hook", fold)
            p.register_post_accumulate_grad_hook(lambda q, seen=seen: seen.append(float(q.grad)))
            for g in (1, 2, 4, 8):
                micro(model, g, w)
            found[as_view, fold] = seen, float(p.detach())

            model = DistributedDataParallel(Early(), static_graph=True, gradient_as_bucket_view=as_view)
            p, seen = model.module.inner.weight, []
            w, _ = wrapped(model, "hook", fold)
            for g in (1, 2, 4, 8):  # DDP is done, and copies, while the outer backward has not ended
                handle = p.register_post_accumulate_grad_hook(lambda q, seen=seen: seen.append(float(q.grad)))
                micro(model, g, w)
                handle.remove()
            found[as_view, fold, "reentrant"] = seen, float(p.detach())
    return found


def test_hooks_of_others_see_the_gradients():
    for found in on_ranks(2, watched):
        assert set(map(repr, found.values())) == {"([1.0, 2.0, 4.0, 8.0], -7.5)"}


def several():
    """Two models with one wrapper, and one model with two wrappers; a model of another wrapper is no affair of ours."""
    rank, found = dist.get_rank(), []
    for fold in FOLDS:
        one, two = toy(), toy()
        w = FusedAccumOptimizer(
            torch.optim.SGD([*one.parameters(), *two.parameters()], lr=1.0),
            2,
            fold=fold,
            process_group=dist.group.WORLD,
        )
        one.register_comm_hook(w, fusedaccum.ddp_hook)
        for g in (1, 3):
            one(torch.tensor([[g + 2.0 * rank]])).sum().backward()
            if g == 3:
                with w.no_sync(two):
                    two(torch.tensor([[4.0 * rank]])).sum().backward()
            w.step()
        found.append((float(one.module.weight.detach()), float(two.module.weight.detach())))

        model = DistributedDataParallel(torch.nn.Linear(1, 1))
        both = [
            FusedAccumOptimizer(torch.optim.SGD([p], lr=1.0), 2, fold=fold, process_group=dist.group.WORLD)
            for p in model.parameters()
        ]
        start = [float(p.detach()) for p in model.parameters()]
        with both[0].no_sync(model), both[1].no_sync(model):
            for g in (1, 3):
                model(torch.tensor([[g + 2.0 * rank]])).sum().backward()
                for w in both:
                    w.step()
        found.append(tuple(float(p.detach()) - s for p, s in zip(model.parameters(), start, strict=True)))
    return found


def test_several_models_and_several_wrappers():
    for found in on_ranks(2, several):
        for got, right in zip(found, [(-3.0, -1.0), (-3.0, -1.0)] * 2, strict=True):
            assert got == pytest.approx(right, abs=1e-6)


def overlapped():
    found = []
    for _ in range(1):
        model = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4))))
        w, _ = wrapped(model, "hook", "backward", bucket_mb=1e-5)
        for k in range(4):
            w.micro_batch(last=w.will_update)
            micro(model, 1, w, x=batch(k, dist.get_rank(), torch.float32))
        found = [bits(p) for p in model.parameters()]
    return w.updates, found


def test_the_last_backward_may_send_under_the_hook():
    one, other = on_ranks(2, overlapped)
    assert one == other
    assert one[0] == 2


def groups_of_two():
    """DDP over two of four ranks, reduced or not, and process_group over all of them."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    found = []
    for how in (*HOWS, "sync"):
        for fold in FOLDS if how != "sync" else FOLDS[:1]:
            model = toy(process_group=pairs[rank // 2])
            w, context = wrapped(model, how if how != "sync" else "none", fold)
            with context, warnings.catch_warnings():
                warnings.filterwarnings("ignore", "(?s).*reduces the gradients of every micro-batch")
                micro(model, rank, w)
                micro(model, 2 * rank, w)
            found.append(float(model.module.weight.detach()))
    return found


def test_ddp_over_a_part_of_the_ranks():
    assert on_ranks(4, groups_of_two) == [[-2.25] * 5] * 4


def alone():
    """DDP on one rank copies into `p.grad` too, and reads it in the second backward of a micro-batch."""
    groups = [dist.new_group([rank]) for rank in range(2)]
    found = []
    for as_view in (False, True):
        for group in (None, dist.group.WORLD):
            model = toy(process_group=groups[dist.get_rank()], gradient_as_bucket_view=as_view)
            inner = torch.optim.SGD(model.parameters(), lr=1.0)
            w = FusedAccumOptimizer(inner, 2, fold="backward", process_group=group)
            for g in (1, 3):
                for part in (g, 10 * g):
                    model(torch.tensor([[float(part)]])).sum().backward()
                    assert model.module.weight.grad is None
                w.step()
            found.append(float(model.module.weight.detach()))
    return found


def test_ddp_on_one_rank():
    assert on_ranks(2, alone) == [[-22.0] * 4] * 2


def compiled():
    found = []
    for how in HOWS:
        for fold in FOLDS:
            torch._dynamo.reset()
            model = toy()
            w, context = wrapped(model, how, fold)
            fast = torch.compile(model, backend="aot_eager")
            with context if how == "hook" else w.no_sync(fast):
                for g in (1, 3, 5, 7):
                    micro(fast, g + dist.get_rank(), w)
            found.append(float(model.module.weight.detach()))
    return found


def test_compiled_models():
    assert on_ranks(2, compiled) == [[-9.0] * 4] * 2
