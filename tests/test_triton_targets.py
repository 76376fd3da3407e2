"""The Triton kernels for real GPUs: they compile, spill nothing, move 16 bytes at a time and not a byte too many.

And how often an operator copies and launches. The interpreter shows none of this. Speed and weak memory ordering are
not shown here either.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from machine_code import ARCHITECTURES, Budget, Kernel, read_kernels, table
from op_cases import Buffer, scalar, total_tensor

from fusedaccum.backends import triton as backend
from fusedaccum.ops import TILE

READING = ("found_inf_tiles", "sum_stale_tiles")
TILES = ("fold_tiles", *READING, "rescale_tiles", "emit_tiles", "adam_tiles", "sgd_tiles")
WITHOUT_TILES = ("sum_partials", "close")


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What `compile_triton.py` says, without a cache from before; two processes share the work."""
    script = Path(__file__).with_name("compile_triton.py")
    folder = str(tmp_path_factory.mktemp("cubins"))
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }

    def run(share: str) -> dict:
        command = [sys.executable, str(script), folder, share, *map(str, ARCHITECTURES)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(run, ("0/2", "1/2"))
    kernels = one["kernels"] + other["kernels"]
    assert len({entry["cubin"] for entry in kernels}) == len(kernels) == one["of"]
    return one | {"kernels": kernels}


@pytest.fixture(scope="session")
def read(compiled: dict) -> dict[int, list[tuple[Kernel, list[Budget]]]]:
    """Kernels and their budgets, by architecture."""
    found = {architecture: [] for architecture in ARCHITECTURES}
    for entry in compiled["kernels"]:
        (kernel,) = read_kernels(Path(entry["cubin"]))
        named = replace(kernel, name=f"{entry['name']}({entry['constants']})")
        found[entry["capability"]].append((named, [Budget(**budget) for budget in entry["budgets"]]))
    return found


@pytest.fixture(params=ARCHITECTURES, ids="sm_{}".format)
def kernels(request: pytest.FixtureRequest, read: dict) -> list[tuple[Kernel, list[Budget]]]:
    return read[request.param]


def base(kernel: Kernel) -> str:
    return kernel.name.split("(")[0]


def test_every_kernel_is_compiled(kernels):
    assert {base(kernel) for kernel, _ in kernels} == {*TILES, *WITHOUT_TILES}


def test_nothing_spills(kernels):
    for kernel, _ in kernels:
        assert (kernel.stack, kernel.local, kernel.spills) == (0, 0, 0), kernel


def test_registers_leave_room_for_enough_loads(kernels):
    """Of 65,536 registers, 64 for each of 256 threads are four blocks, 80 are three, up to 128 two.

    Random rounding takes more where a kernel has code for several mixtures of dtypes.
    """
    for kernel, _ in kernels:
        bound = 64 if base(kernel) != "adam_tiles" else 96 if "RANDOM=True" in kernel.name else 80
        assert kernel.registers <= bound, kernel


def test_full_tiles_move_16_bytes_at_a_time(kernels):
    """Tensors of 16 bits have 8 bytes for 4 elements; where nothing else is stored, those are the widest stores."""
    for kernel, budgets in kernels:
        if base(kernel) in WITHOUT_TILES:
            continue
        assert kernel.wide_loads > 0, kernel
        narrow = budgets and all(budget.what in ("16 bits", "16 bits, momentum") for budget in budgets)
        if base(kernel) not in READING and not narrow:
            assert kernel.wide_stores > 0, kernel


def test_full_tiles_move_what_the_budget_says(kernels, request, capsys):
    with capsys.disabled():
        print("\n" + table(request.node.callspec.id, kernels))
    for kernel, budgets in kernels:
        for budget in budgets:
            assert kernel.keeps(budget), f"{kernel.name}, {budget}: {kernel.nearest(budget)} of {kernel.paths}"


def test_found_inf_reads_full_tiles_once(kernels):
    """The budgets of a kernel that stores nothing speak of float32; its gradients may be of 16 bits."""
    (found_inf,) = (kernel for kernel, _ in kernels if base(kernel) == "found_inf_tiles")
    elements = TILE // (32 * backend.LAUNCH_OPTIONS["num_warps"])
    assert sorted(path.loaded // elements for path in found_inf.paths) == [2, 2, 4], found_inf


def test_which_devices_it_serves(compiled):
    """With the interpreter the CPU and no GPU, without it GPUs and not the CPU; each refusal says why."""
    assert backend.why_not(torch.device("cpu")) is None
    assert "TRITON_INTERPRET" in backend.why_not(torch.device("cuda"))
    assert compiled["why_not"]["cuda"] is None
    assert "TRITON_INTERPRET" in compiled["why_not"]["cpu"]
    assert "meta" in compiled["why_not"]["meta"]
    assert "meta" in backend.why_not(torch.device("meta"))


def calls_of_every_operator(buffer: Buffer) -> dict:
    """Each operator on a buffer of one segment of 17 elements, in an order in which a window has them."""
    ones, one, scalars = torch.ones(17), scalar(1.0), torch.tensor([1.0, 0.0, 0.0])
    steps, groups = torch.ones(1), torch.zeros(1, dtype=torch.int64)
    divisor = scalar(1.0, torch.float64)
    update = (*buffer.step_plan(), scalars, steps, groups)
    hyper = torch.tensor([[0.1, 0.9, 0.9, 1e-8, 0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    return {
        "fold": lambda: backend.fold(*buffer.fold_plan(), [ones], one, False),
        "found_inf": lambda: backend.found_inf(*buffer.plan(), [ones], one.clone()),
        "square_total": lambda: backend.square_total(*buffer.norm_plan(), total_tensor()),
        "close_window": lambda: backend.close_window(scalars, steps, buffer.marks, None, divisor, divisor, 1.0, False),
        "rescale": lambda: backend.rescale(*buffer.plan(), one),
        "emit": lambda: backend.emit(*buffer.step_plan(), scalars, [ones]),
        "adam": lambda: backend.adam(*update, hyper, [ones], [ones.clone()], [ones.clone()], [], [], None, False),
        "sgd": lambda: backend.sgd(*update, hyper[:, :6].contiguous(), [ones], [], [], None, True),
    }


def test_an_operator_copies_once_and_launches_once(monkeypatch):
    """But for the norm, whose second stage is a launch, and whose stale tiles are one where there are any.

    What torch launches is not counted: it zeroes the result of `found_inf`.
    """
    seen = []
    copy, launch = backend._to_device, backend._launch
    monkeypatch.setattr(backend, "_to_device", lambda *args: seen.append("copy") or copy(*args))
    monkeypatch.setattr(backend, "_launch", lambda *args, **kw: seen.append("launch") or launch(*args, **kw))
    calls = calls_of_every_operator(Buffer([17]))
    for op, call in calls.items():
        seen.clear()
        call()
        launches = 2 if op == "square_total" else 1
        assert seen == ["copy"] + ["launch"] * launches, op
    calls["square_total"]()
    seen.clear()
    calls["square_total"]()
    assert seen == ["copy", "launch"], "nothing is stale"


def test_nothing_is_launched_for_nothing_touched(monkeypatch):
    monkeypatch.setattr(backend, "_launch", lambda *args, **kw: pytest.fail("a launch"))
    calls = calls_of_every_operator(Buffer([17]))
    calls["adam"]()
    calls["sgd"]()


def test_graph_capture_is_refused(monkeypatch):
    """A graph would copy the table again at every replay, from pinned memory that others have by then."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    leader = SimpleNamespace(is_cuda=True, get_device=lambda: -1)
    with pytest.raises(RuntimeError, match=r'^fold: .* capture .* got .* capturing; use backend="compiled"$'):
        backend._to_device("fold", [1], leader)
