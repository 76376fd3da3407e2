"""Builds the C++ operators (`fusedaccum._C`) and, with nvcc, the CUDA kernels (`fusedaccum._cuda`).

FUSEDACCUM_CUDA=auto (default) builds the kernels where that is possible, 1 insists on it, 0 leaves them out.
Without a C++ compiler the package is installed without either, and runs on its other backends.
"""

import os
import shutil
from glob import glob

import torch
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension, get_cxx_compiler

COMMON = ["-O3", "-g0", "-fvisibility=hidden", "-ffp-contract=off", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
NVCC = ["-O3", "--fmad=false"]


def cuda_obstacle(switch: str) -> str | None:
    """Why the CUDA kernels are not built, in words; None if they are."""
    if switch not in ("auto", "0", "1"):
        raise SystemExit(f"FUSEDACCUM_CUDA={switch} is not known; use auto, 0 or 1")
    if switch == "0":
        return "not built: FUSEDACCUM_CUDA=0"
    if shutil.which("nvcc") is None:
        return "not built: nvcc is not on PATH"
    return None if torch.version.cuda else "not built: this torch was built without CUDA"


def extensions() -> list:
    """The extension modules that can be built here."""
    switch = os.environ.get("FUSEDACCUM_CUDA", "auto")
    obstacle = cuda_obstacle(switch)
    if obstacle and switch == "1":
        raise SystemExit(f"FUSEDACCUM_CUDA=1, but the CUDA kernels are {obstacle}")
    if shutil.which(get_cxx_compiler().split()[0]) is None:
        print(f"fusedaccum: no C++ compiler ({get_cxx_compiler()}): installing without the `compiled` backend")
        return []
    if obstacle:
        print(f"fusedaccum: CUDA kernels {obstacle}")
    sources = [*sorted(glob("csrc/*.cpp")), *sorted(glob("csrc/cpu/*.cpp"))]
    flags = [*COMMON, f'-DFUSEDACCUM_CUDA_STATUS="{obstacle or "built"}"']
    modules = [CppExtension("fusedaccum._C", sources, extra_compile_args={"cxx": flags})]
    if not obstacle:
        sources = [*sorted(glob("csrc/cuda/*.cpp")), *sorted(glob("csrc/cuda/*.cu"))]
        flags = {"cxx": [*COMMON, "-DUSE_CUDA"], "nvcc": NVCC}
        modules.append(CUDAExtension("fusedaccum._cuda", sources, extra_compile_args=flags))
    return modules


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildExtension})
