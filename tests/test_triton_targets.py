"""The Triton kernels for a real GPU: they compile, spill nothing, and move 16 bytes at a time.

The interpreter shows none of this. Speed and weak memory ordering are not shown here either.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fusedaccum.backends import triton as backend

IN_PLACE = ("fold_tiles", "rescale_tiles", "adam_tiles", "sgd_tiles")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What `compile_triton.py` says of compute capability 9.0, without a cache from before."""
    script = Path(__file__).with_name("compile_triton.py")
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run([sys.executable, str(script), "90"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_kernels_compile_without_spills(compiled):
    assert len(compiled["kernels"]) == 9
    for kernel in compiled["kernels"]:
        assert (kernel["stack"], kernel["local"]) == (0, 0), kernel


def test_whole_blocks_move_16_bytes_at_a_time(compiled):
    for kernel in compiled["kernels"]:
        if kernel["name"] in (*IN_PLACE, "sum_stale_tiles", "emit_tiles"):
            assert kernel["wide_loads"] > 0, kernel
        if kernel["name"] in (*IN_PLACE, "emit_tiles"):
            assert kernel["wide_stores"] > 0, kernel


def test_which_devices_it_serves(compiled):
    """With the interpreter the CPU and no GPU, without it GPUs and not the CPU; each refusal says why."""
    assert backend.why_not(torch.device("cpu")) is None
    assert "TRITON_INTERPRET" in backend.why_not(torch.device("cuda"))
    assert compiled["why_not"]["cuda"] is None
    assert "TRITON_INTERPRET" in compiled["why_not"]["cpu"]
    assert "meta" in compiled["why_not"]["meta"]
    assert "meta" in backend.why_not(torch.device("meta"))
