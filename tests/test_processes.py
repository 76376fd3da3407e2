"""The processes that tests of several ranks run in."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from processes import Failure, Lost, on_ranks


def who(x):
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), float(total), x


def fails_on_rank_1():
    if dist.get_rank() == 1:
        raise ValueError("one")


def dies_on_rank_1():
    if dist.get_rank() == 1:
        os._exit(3)


@pytest.mark.parametrize("world", [2, 4])
def test_every_rank_runs_the_function_and_they_hear_each_other(world):
    expected = [(r, world, float(sum(range(world))), "x") for r in range(world)]
    assert on_ranks(world, who, "x") == expected


def test_what_a_rank_raises_fails_the_test_or_is_returned():
    with pytest.raises(AssertionError, match=r"rank 1: [\s\S]*ValueError: one"):
        on_ranks(2, fails_on_rank_1)
    fine, failure = on_ranks(2, fails_on_rank_1, errors=True)
    assert fine is None
    assert isinstance(failure, Failure)
    assert failure[:2] == ("ValueError", "one")


def test_a_rank_that_dies_is_found_and_replaced():
    assert isinstance(on_ranks(2, dies_on_rank_1, errors=True)[1], Lost)
    assert on_ranks(2, who, 1)[1][:3] == (1, 2, 1.0)
