"""Whole windows with FP32 masters, ours and the two rivals that are seen most."""

from __future__ import annotations

import pytest

from bench import window


@pytest.mark.parametrize("shapes", ["gpt2", "400x10486"])
@pytest.mark.parametrize("contender", [window.Ours, window.AddSums, window.ForeachSums])
def test_window(shapes, contender, make_case, measure):
    case = make_case(shapes, "masters")
    measure(contender(case), case, case.kind.least_window_bytes, f"window, {shapes}, masters")
