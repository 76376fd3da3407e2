"""The backend `emulated`: csrc/cuda, operators and kernels, executed on CPU tensors by tests/emulation.

Importing this module compiles it where the sources have changed since it was compiled last.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
import types
from pathlib import Path

import torch
from torch.utils.cpp_extension import get_cxx_compiler, include_paths, library_paths

from fusedaccum.backends import compiled

sys.path.insert(0, str(Path(__file__).parent / "emulation"))
import build

ROOT = Path(__file__).parent.parent
SOURCES = [*sorted(build.CSRC.glob("cuda/*.cu")), build.CSRC / "cuda" / "ops.cpp", build.HERE / "operators.cpp"]
RENAMED = {
    "aoti_torch_device_type_cuda": "aoti_torch_device_type_cpu",
    "aoti_torch_create_cuda_guard": "emulated_create_cuda_guard",
    "aoti_torch_delete_cuda_guard": "emulated_delete_cuda_guard",
    "aoti_torch_get_current_cuda_stream": "emulated_get_current_cuda_stream",
}
TORCH_FLAGS = [
    "-DUSE_CUDA",
    "-DTORCH_TARGET_VERSION=0x020a000000000000",
    "-DFUSEDACCUM_CUDA_OPERATORS=STABLE_TORCH_LIBRARY_IMPL(fusedaccum_emulated, CompositeExplicitAutograd, m)",
    *(f"-D{name}={other}" for name, other in RENAMED.items()),
    *(f"-isystem{path}" for path in include_paths()),
]


def flags_for(source: Path) -> list[str]:
    return [*TORCH_FLAGS, "-O0"] if source.suffix == ".cpp" else ["-O2", "-fno-strict-aliasing"]


def library() -> Path:
    """The shared library, named after what it was made of."""
    made_of = [*sorted(build.CSRC.rglob("*.*")), *sorted(build.HERE.glob("*.*")), Path(__file__)]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in made_of if path.is_file()))
    digest.update(f"{get_cxx_compiler()} {torch.__version__}".encode())
    target = ROOT / "build" / "emulated" / f"{digest.hexdigest()[:16]}.so"
    if not target.exists():
        folder = target.with_suffix("")
        folder.mkdir(parents=True, exist_ok=True)
        jobs = [(build.HERE / "scheduler.cpp", ["-O2"]), *((source, flags_for(source)) for source in SOURCES)]
        objects = build.compile_objects(jobs, folder)
        unfinished = folder / "library.so"
        link = [*get_cxx_compiler().split(), "-shared", "-pthread", *map(str, objects), "-o", str(unfinished)]
        build.call([*link, *(f"-L{path}" for path in library_paths()), "-ltorch", "-ltorch_cpu", "-lc10"])
        unfinished.rename(target)  # at once: another process may be looking for it
    return target


torch.ops.load_library(str(library()))
_set = ctypes.CDLL(str(library())).emulation_set
_ops = torch.ops.fusedaccum_emulated
_library = compiled.complete("fusedaccum_emulated")


def _bound(name: str) -> types.FunctionType:
    """`compiled`'s function for an operator, calling the emulated operator."""
    function = getattr(compiled, name)
    names = {**vars(compiled), f"_{name}": getattr(_ops, name).default}
    return types.FunctionType(function.__code__, names, name, function.__defaults__)


def in_order(order: str) -> None:
    """Have threads and blocks run forward, in reverse or at random from now on, and divergence be an error."""
    _set(order.encode(), b"1", b"1", b"1")


def why_not(device: torch.device) -> str | None:
    return None if device.type == "cpu" else "the emulation executes kernels on the CPU"


fold, found_inf, square_total, close_window, rescale, emit, adam, sgd = map(_bound, compiled._OPERATORS)
