"""Builds the C++ operators (`fusedaccum._C`) and, with nvcc and a torch with CUDA, the kernels (`fusedaccum._cuda`).

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
SWITCH = os.environ.get("FUSEDACCUM_CUDA", "auto")


def compile_args(cuda_status: str) -> dict:
    return {"cxx": [*COMMON, f'-DFUSEDACCUM_CUDA_STATUS="{cuda_status}"']}


def cuda_obstacle() -> str | None:
    """Why the CUDA kernels are not built, in words; None if they are."""
    if SWITCH not in ("auto", "0", "1"):
        raise SystemExit(f"FUSEDACCUM_CUDA={SWITCH} is not known; use auto, 0 or 1")
    if SWITCH == "0":
        return "FUSEDACCUM_CUDA=0"
    if shutil.which("nvcc") is None:
        return "nvcc is not on PATH"
    return None if torch.version.cuda else "this torch was built without CUDA"


def extensions(obstacle: str | None) -> list:
    """The extension modules that can be built here."""
    if obstacle and SWITCH == "1":
        raise SystemExit(f"FUSEDACCUM_CUDA=1, but the CUDA kernels are not built: {obstacle}")
    if shutil.which(get_cxx_compiler().split()[0]) is None:
        print(f"fusedaccum: no C++ compiler ({get_cxx_compiler()}): installing without the `compiled` backend")
        return []
    status = f"not built: {obstacle}" if obstacle else "built"
    print(f"fusedaccum: CUDA kernels {status}")
    sources = sorted([*glob("csrc/*.cpp"), *glob("csrc/cpu/*.cpp")])
    modules = [CppExtension("fusedaccum._C", sources, extra_compile_args=compile_args(status))]
    sources = sorted([*glob("csrc/cuda/*.cpp"), *glob("csrc/cuda/*.cu")])
    flags = {"cxx": [*COMMON, "-DUSE_CUDA"], "nvcc": NVCC}
    return modules if obstacle else [*modules, CUDAExtension("fusedaccum._cuda", sources, extra_compile_args=flags)]


class Build(BuildExtension):
    """Goes on without the CUDA kernels where torch refuses nvcc for its version, unless they were insisted on."""

    def build_extensions(self) -> None:
        try:
            super().build_extensions()
        except RuntimeError as error:
            if "CUDA version" not in str(error) or SWITCH == "1":
                raise
            reason = "not built: nvcc is of another CUDA version than this torch"
            print(f"fusedaccum: CUDA kernels {reason}")
            self.extensions = self.extensions[:1]
            self.extensions[0].extra_compile_args = compile_args(reason)
            super().build_extensions()


setup(ext_modules=extensions(cuda_obstacle()), cmdclass={"build_ext": Build})
