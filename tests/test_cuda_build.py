"""`fusedaccum._cuda` compiled by nvcc, linked and imported where there is no GPU, beside any torch.

The one thing missing is called by nobody here: what a torch with CUDA says of devices and streams
(tests/emulation/torch_cuda.cpp).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from machine_code import LINKED, Compiled, object_flags
from torch.utils.cpp_extension import library_paths

from fusedaccum.backends.compiled import _OPERATORS

ROOT = Path(__file__).parent.parent
CUDA = ROOT / "csrc" / "cuda"
STUB = ROOT / "tests" / "emulation" / "torch_cuda.cpp"
pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc on PATH")

IMPORT = """
import sys, torch
import fusedaccum._C
sys.path.insert(0, {folder!r})
import _cuda
info = _cuda.build_info()
print(info["architectures"], info["toolkit"])
for name in {operators!r}:
    print(torch._C._dispatch_has_kernel_for_dispatch_key("fusedaccum::" + name, "CUDA"))
"""


def compile_object(source: Path, folder: Path) -> Path:
    """nvcc hands a .cpp on to the C++ compiler, which it tells where CUDA's headers are."""
    target = folder / f"{source.name}.o"
    flags = [*object_flags(source), "-DTORCH_TARGET_VERSION=0x020a000000000000", "-O0"]
    done = subprocess.run(["nvcc", *flags, str(source), "-o", str(target)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="module")
def module(compiled_by_nvcc: Callable[[int], list[Compiled]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cuda")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda source: compile_object(source, folder), [*sorted(CUDA.glob("*.cpp")), STUB]))
    objects += [made.path for made in compiled_by_nvcc(LINKED)]
    target = folder / "_cuda.so"
    link = ["nvcc", "-shared", "-cudart", "static", *map(str, objects), "-o", str(target)]
    link += [f"-L{path}" for path in library_paths()]
    done = subprocess.run([*link, "-ltorch", "-ltorch_cpu", "-lc10"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


def test_it_is_imported_and_registers_every_operator(module: Path) -> None:
    script = IMPORT.format(folder=str(module.parent), operators=_OPERATORS)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    facts, *registered = done.stdout.splitlines()
    assert facts.startswith(f"[{LINKED}0] ")
    assert registered == ["True"] * len(_OPERATORS)
