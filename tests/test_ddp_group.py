"""DistributedDataParallel with process_group: the wrapper reduces, once a window, and DDP does not."""

from __future__ import annotations

import warnings

import pytest
import torch
from ddp_cases import ALL_FLAGS, FOLDS, HOWS, Run, assert_right
from processes import on_ranks


def two_windows(dtype, cases, reentrant=None):
    """{case: what is wrong, bits}: every case trains two windows."""
    results = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*master_weights")
        warnings.filterwarnings("ignore", "(?s).*find_unused_parameters=true")
        warnings.filterwarnings("error", "(?s).*reduces the gradients of every micro-batch")
        for case in cases:
            flags, how, fold = case
            run = Run(dict(flags), dtype, how, fold, group=True, reentrant=reentrant)
            run.window()
            run.window()
            run.w.close()
            results[case] = run.result()
    return results


def cases(hows=HOWS, flags=ALL_FLAGS):
    return [
        (tuple(f.items()), how, fold)
        for f in flags
        for how in hows
        for fold in FOLDS
        if not (how == "no_sync" and f["static_graph"])  # torch's own assertion, in the first window
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_windows_are_reduced_once_and_right_with_every_flag_of_ddp(dtype):
    assert_right(on_ranks(2, two_windows, dtype, cases()))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers(reentrant):
    """Reentrant ones DDP takes with static_graph only, or under no_sync()."""
    flags = [f for f in ALL_FLAGS if f["static_graph"] if reentrant] or ALL_FLAGS[1:4]
    some = cases(["hook"], flags) + cases(["no_sync"], ALL_FLAGS[:2])
    assert_right(on_ranks(2, two_windows, torch.float32, some, reentrant))


def four():
    return two_windows(torch.bfloat16, [(tuple(ALL_FLAGS[k].items()), "hook", fold) for k in (2, 5) for fold in FOLDS])


def test_four_ranks():
    assert_right(on_ranks(4, four))
