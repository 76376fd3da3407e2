"""DistributedDataParallel with process_group: the wrapper reduces, once a window, and DDP does not."""

from __future__ import annotations

import warnings

import pytest
import torch
from ddp_cases import ALL_FLAGS, Run, assert_right
from processes import on_ranks

LOW = "ignore:(?s).*(master_weights|rounding)"


def two_windows(dtype, cases, reentrant=None):
    """{case: what is wrong, bits}: every case trains two windows."""
    warnings.filterwarnings("ignore", "(?s).*master_weights")
    warnings.filterwarnings("error", "(?s).*reduces the gradients of every micro-batch")
    results = {}
    for case in cases:
        flags, how, fold = case
        run = Run(dict(flags), dtype, how, fold, group=True, reentrant=reentrant)
        run.window()
        run.window()
        run.w.close()
        results[case] = run.result()
    return results


def cases(hows, flags=ALL_FLAGS):
    return [
        (tuple(f.items()), how, fold)
        for f in flags
        for how in hows
        for fold in ("step", "backward")
        if not (how == "no_sync" and f["static_graph"])  # torch's own assertion, in the first window
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_windows_are_reduced_once_and_right_with_every_flag_of_ddp(dtype):
    assert_right(on_ranks(2, two_windows, dtype, cases(["no_sync", "hook"])))
