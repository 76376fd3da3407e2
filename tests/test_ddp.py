"""DistributedDataParallel without process_group: DDP reduces, in every micro-batch, and the wrapper adds up."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
import torch.distributed as dist
from ddp_cases import ALL_FLAGS, Branches, Run, assert_right, batch, is_uneven, micro, toy, uses
from processes import on_ranks
from torch.nn.parallel import DistributedDataParallel
from wrapper_helpers import bits, snapshot

from fusedaccum import FusedAccumOptimizer


def synced(dtype):
    warnings.filterwarnings("ignore", "(?s).*master_weights")
    results = {}
    for flags in ALL_FLAGS:
        run = Run(flags, dtype, "sync", "step", group=False)
        # DDP rounds its mean over ranks to the parameter's dtype, which is not ours to mend.
        run.rounding = torch.finfo(dtype).eps if dtype != torch.float32 else 2.0**-23
        run.window()
        run.window()
        run.w.close()
        results[tuple(flags.items())] = run.result()
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_that_syncs_in_every_micro_batch_is_right_as_it_is(dtype):
    assert_right(on_ranks(2, synced, dtype))


def case_64():
    model = toy()
    w = FusedAccumOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), 2)
    for g in ((1, 3), (5, 7))[dist.get_rank()]:
        micro(model, g, w)
    return float(model.module.weight.detach())


def test_64_the_mean_of_two_micro_batches_on_two_ranks():
    assert on_ranks(2, case_64) == [-4.0, -4.0]


def refusals():
    """{what: (error, text, whether nothing was changed)} of what is refused without process_group."""
    said = {}

    def refuse(what, w, act):
        in_backward = what.startswith("fold=")  # which leaves the first gradient, as any backward that raises does

        def state():
            return {name: entry for name, entry in snapshot(w).items() if not (in_backward and name == "grads")}

        before = state()
        try:
            act()
        except (RuntimeError, ValueError, TypeError) as error:
            said[what] = (type(error).__name__, str(error), state() == before)
        else:
            said[what] = ("nothing", "", False)

    def wrapped(fold="step", model=None):
        model = model or toy()
        return model, FusedAccumOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), 2, fold=fold)

    x = torch.ones(1, 1)
    model, w = wrapped()
    with model.no_sync():
        model(x).sum().backward()
    refuse("the first one under no_sync", w, w.step)

    model, w = wrapped()
    micro(model, 1, w)
    with model.no_sync():
        model(x).sum().backward()
    with torch.no_grad():
        model(x)
    refuse("the second one under no_sync", w, w.step)
    w.zero_grad()
    model(x).sum().backward()
    with torch.no_grad():
        model(x)  # of which nothing comes that DDP could reduce
    w.step()  # which syncs, and goes on
    said["it goes on"] = float(model.module.weight.detach())

    module = torch.nn.Linear(1, 1)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["bias"])
    model = DistributedDataParallel(module)
    w = FusedAccumOptimizer(torch.optim.SGD([module.bias], lr=1.0), 1)
    module.bias.data.zero_()
    with model.no_sync():
        (model(x) * (1 + dist.get_rank())).sum().backward()
    w.step()  # of which DDP knows nothing
    said["an ignored one"] = float(module.bias.detach()) == -1 - dist.get_rank()

    later = toy()
    w = FusedAccumOptimizer(torch.optim.SGD(later.parameters(), lr=1.0), 2)
    newer = DistributedDataParallel(later.module)
    with newer.no_sync():
        newer(x).sum().backward()
        refuse("a model wrapped again", w, w.step)
    newer(x).sum().backward()
    w.step()
    w.reset()

    model, w = wrapped()
    model.module(x).sum().backward()
    refuse("the module of a model", w, w.step)

    module = torch.nn.Linear(1, 1)
    w = FusedAccumOptimizer(torch.optim.SGD(module.parameters(), lr=1.0), 2)
    model = DistributedDataParallel(module)
    with model.no_sync():
        model(x).sum().backward()
    refuse("a model that is newer than the wrapper", w, w.step)

    for name in ("mean_of", "sum_of"):
        model, w = wrapped()
        model(x).sum().backward()
        refuse(f"step({name})", w, lambda w=w, name=name: w.step(**{name: 3}))
        refuse(f"micro_batch({name})", w, lambda w=w, name=name: w.micro_batch(**{name: 3}))

    model, w = wrapped("backward")
    refuse("fold='backward'", w, lambda: model(x).sum().backward())
    model, w = wrapped("backward")
    with model.no_sync():
        refuse("fold='backward' under no_sync", w, lambda: model(x).sum().backward())
    for _, w in (wrapped(),):
        refuse("no_sync without a group", w, lambda w=w, m=model: w.no_sync(m))
    return said


def test_what_nobody_would_reduce_is_refused_before_anything_is_changed():
    for said in on_ranks(2, refusals):
        assert said.pop("it goes on") == -1.0
        assert said.pop("an ignored one")
        words = {
            "step(": ("ValueError", "item counts", "process_group"),
            "micro_batch(": ("ValueError", "item counts", "process_group"),
            "fold=": ("RuntimeError", "fold='step'", "process_group", "ddp_hook"),
            "no_sync without": ("RuntimeError", "process_group", "steps=None"),
            "": ("RuntimeError", "no_sync", "process_group", "opt.no_sync", "ddp_hook", "2 ranks"),
        }
        assert len(said) == 12
        for what, (error, text, unchanged) in said.items():
            kind, *needed = next(v for k, v in words.items() if what.startswith(k))
            assert error == kind, (what, text)
            assert all(word in text for word in needed), (what, text)
            assert unchanged, what


def steps_none(flags, clip):
    """Native accumulation, no_sync() on all but the last of 3, and ours with steps=None: the bits of both."""
    runs = []
    uneven = is_uneven(flags)
    for ours in (False, True):
        module = Branches(never=uneven)
        model = DistributedDataParallel(module, **flags)
        opt = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.3)
        if ours:
            opt = FusedAccumOptimizer(opt, None, update="wrapped")
        norms = []
        if flags["static_graph"]:  # whose first backward has to sync: torch asserts it
            model(batch(9, 0, torch.float32), uses(dist.get_rank(), uneven)).sum().backward()
            opt.zero_grad()
        for k in range(9):
            last = k % 3 == 2
            with contextlib.nullcontext() if last else model.no_sync():
                x = batch(k, dist.get_rank(), torch.float32)
                (model(x, uses(dist.get_rank(), uneven)).sum() / 3).backward()
            if last:
                if clip:
                    norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), 0.7)))
                opt.step()
                opt.zero_grad(set_to_none=k == 2)
        if ours:
            opt.close()
        runs.append((norms, [bits(p) for p in module.parameters()]))
    return runs


def all_steps_none():
    return {(*flags.items(), clip): steps_none(flags, clip) for flags in ALL_FLAGS for clip in (False, True)}


def test_steps_none_is_native_accumulation_with_no_sync_bit_by_bit():
    results = on_ranks(2, all_steps_none)
    for case in results[0]:
        for native, ours in (result[case] for result in results):
            assert ours == native, case
        assert results[0][case] == results[1][case], case


def low_precision(dtype, world_of_one):
    alone = None
    if world_of_one:
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        alone = groups[dist.get_rank()]
    model = DistributedDataParallel(torch.nn.Linear(2, 1).to(dtype), process_group=alone)
    w = FusedAccumOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), None, master_weights=True)
    before = snapshot(w)
    try:
        model(torch.ones(1, 2, dtype=dtype)).sum().backward()
    except TypeError as error:
        return str(error), snapshot(w) == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_steps_none_names_the_way_out_for_a_16_bit_ddp_model(dtype):
    for text, unchanged in (*on_ranks(2, low_precision, dtype, False), *on_ranks(2, low_precision, dtype, True)):
        for word in (str(dtype), "FP32", "autocast", "steps=N", "ddp_hook"):
            assert word in text
        assert unchanged


def compiled():
    """The forwards of a compiled DDP model are seen, before and after it was compiled."""
    seen = []
    for wrap_first in (False, True):
        torch._dynamo.reset()
        model = toy()
        make = lambda model=model: FusedAccumOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), 2)  # noqa: E731
        if wrap_first:
            w = make()
        fast = torch.compile(model, backend="aot_eager")
        if not wrap_first:
            fast(torch.ones(1, 1)).sum().backward()
            w = make()
            w.zero_grad()
        micro(fast, dist.get_rank(), w)
        with model.no_sync():
            fast(torch.ones(1, 1)).sum().backward()
        try:
            w.step()
        except RuntimeError as error:
            seen.append("no_sync" in str(error))
        w.zero_grad()
        micro(fast, dist.get_rank() + 4, w)
        seen.append(float(model.module.weight.detach()))
    return seen


def test_what_torch_compile_makes_of_a_ddp_model_is_seen_to_sync_or_not():
    assert on_ranks(2, compiled) == [[True, -2.5, True, -2.5]] * 2
