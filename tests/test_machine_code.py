"""The CUDA C++ kernels as nvcc makes them: no spills, few registers, 16 bytes at a time, no byte more than budgeted.

`python tests/machine_code.py` prints the table by itself. Speed, occupancy and memory ordering are not shown here.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from machine_code import ARCHITECTURES, NAMED, Compiled, Kernel, budgets_of, table

# found_inf_kernel works on tiles, and stores nothing that its bytes could be counted by.
WITHOUT_TILES = {"sum_kernel", "close_kernel", "probe_kernel", "clear_kernel", "found_inf_kernel"}


@pytest.fixture(params=ARCHITECTURES, ids="sm_{}".format)
def kernels(request: pytest.FixtureRequest, compiled_by_nvcc: Callable[[int], list[Compiled]]) -> list[Kernel]:
    return [kernel for made in compiled_by_nvcc(request.param) for kernel in made.kernels]


def base(kernel: Kernel) -> str:
    return kernel.name.split("<")[0]


def test_every_operator_has_its_kernels(kernels):
    assert {base(kernel) for kernel in kernels} == {*NAMED, *WITHOUT_TILES}


def test_nothing_spills(kernels):
    for kernel in kernels:
        assert (kernel.stack, kernel.local, kernel.spills) == (0, 0, 0), kernel


def test_a_fold_leaves_room_for_four_blocks(kernels):
    for kernel in kernels:
        if base(kernel) == "fold_kernel":
            assert kernel.registers <= 64, kernel


def test_tiles_move_16_bytes_at_a_time(kernels):
    for kernel in kernels:
        if base(kernel) in {*NAMED, "found_inf_kernel"}:
            assert kernel.wide_loads > 0, kernel
        if base(kernel) in NAMED and base(kernel) != "square_kernel":
            assert kernel.wide_stores > 0, kernel


def test_addresses_are_known_to_be_global(kernels):
    """LD and ST, without the G, first find out what kind of memory an address is in."""
    for kernel in kernels:
        generic = {what: count for what, count in kernel.accesses.items() if what.startswith(("LD ", "ST "))}
        assert not generic, f"{kernel.name}: {generic}; make the pointer with __cvta_global_to_generic"


def test_full_tiles_move_what_the_budget_says(kernels, request, capsys):
    named = [kernel for kernel in kernels if base(kernel) in NAMED]
    with capsys.disabled():
        print("\n" + table(request.node.callspec.id, [(kernel, budgets_of(kernel)) for kernel in kernels]))
    for kernel in named:
        for budget in budgets_of(kernel):
            assert kernel.keeps(budget), f"{kernel.name}, {budget}: {kernel.nearest(budget)} of {kernel.paths}"
