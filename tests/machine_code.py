"""Reads what the GPU will execute: registers, spills, and the bytes that a full tile moves for each element.

`read_kernels` disassembles a cubin, or an object that holds one, with cuobjdump (of the CUDA toolkit, or the one that
comes with Triton's package; no GPU, no driver) and knows nothing of how it was made: nvcc and Triton are read alike,
for sm_80, sm_90 and sm_100.

How bytes for each element are counted is said in `sass.py`.

`python tests/machine_code.py` compiles the CUDA C++ kernels and prints their table, beside the budgets.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from sass import ACCESS, FullTile, full_tiles, instructions
from torch.utils.cpp_extension import COMMON_NVCC_FLAGS, include_paths


@dataclass(frozen=True)
class Budget:
    """Bytes that a full tile may move for each element."""

    what: str
    reads: int
    writes: int
    paths: int = 1  # how many there are with these numbers: bfloat16 and float16 are two
    elements: int = 8  # that a thread must have in hand at least: fewer keep too few loads in flight

    @property
    def total(self) -> int:
        return self.reads + self.writes

    @property
    def zeroing(self) -> Budget:
        """The same, where the step also stores the zeros."""
        return replace(self, what=f"{self.what}, zeroing", writes=self.writes + 4)


# Gradients of G bytes: G + 4 at the first touch, then G + 4 + 4.
FOLD = (
    Budget("16 bits, first touch", 2, 4, paths=2),
    Budget("16 bits, later", 2 + 4, 4, paths=2),
    Budget("fp32, first touch", 4, 4),
    Budget("fp32, later", 4 + 4, 4),
)
SQUARE = (Budget("full tile", 4, 0),)
RESCALE = (Budget("full tile", 4, 4),)
EMIT = (Budget("fp32", 4, 4), Budget("16 bits", 4, 2, paths=2))
ADAM = {
    "fp32": Budget("fp32", 16, 12),
    "16 bits": Budget("16 bits", 4 + 2 + 2 + 2, 2 + 2 + 2),
    "16 bits, fp32 moments": Budget("16 bits, fp32 moments", 4 + 2 + 4 + 4, 2 + 4 + 4),
    "16 bits, fp32 moments and master": Budget("16 bits, fp32 moments and master", 16, 14),
}
SGD = {
    "fp32": Budget("fp32", 4 + 4, 4),
    "fp32, momentum": Budget("fp32, momentum", 4 + 4 + 4, 4 + 4),
    "16 bits": Budget("16 bits", 4 + 2, 2),
    "16 bits, momentum": Budget("16 bits, momentum", 4 + 2 + 2, 2 + 2),
    "16 bits, fp32 momentum and master": Budget("16 bits, fp32 momentum and master", 12, 10),
}


@dataclass
class Kernel:
    name: str
    registers: int
    stack: int
    local: int
    spills: int  # instructions that use local memory
    wide_loads: int  # LDG.E.128
    wide_stores: int  # STG.E.128
    accesses: dict[str, int]  # by instruction and bytes: {"LDG 16": 12, ...}
    paths: list[FullTile]

    def nearest(self, budget: Budget) -> list[float]:
        """Bytes for each element, on those paths that come nearest to a budget; nothing where no path can be meant."""
        found = [
            moved
            for path in self.paths
            for elements, moved in path.of_element(budget.writes)
            if elements >= budget.elements
        ]
        least = min((abs(moved - budget.total) for moved in found), default=0)
        return [moved for moved in found if abs(moved - budget.total) == least]

    def keeps(self, budget: Budget) -> bool:
        """Whether as many paths as there must be move exactly so many bytes."""
        found = self.nearest(budget)
        return len(found) >= budget.paths and found[0] == budget.total


def cuobjdump() -> str:
    """The disassembler: the toolkit's on PATH, else Triton's. RuntimeError where there is neither."""
    found = shutil.which("cuobjdump")
    spec = None if found else find_spec("triton")
    if spec is not None:
        found = os.path.join(os.path.dirname(spec.origin), "backends", "nvidia", "bin", "cuobjdump")
    if found is None or not os.path.exists(found):
        raise RuntimeError("cuobjdump: neither on PATH nor in Triton's package; pip install triton has it")
    return found


def read_kernels(cubin: Path) -> list[Kernel]:
    """All kernels of a cubin or an object."""
    usage, listing = (
        subprocess.run([cuobjdump(), option, str(cubin)], capture_output=True, text=True, check=True).stdout
        for option in ("-res-usage", "-sass")
    )
    used = {m[1]: m[2] for m in re.finditer(r"Function (\S+):\n(.*)", usage)}
    _, *parts = re.split(r"Function : (\S+)", listing)
    return [_kernel(name, used[name], text) for name, text in zip(parts[::2], parts[1::2], strict=True)]


def _kernel(symbol: str, usage: str, text: str) -> Kernel:
    resources = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    code = instructions(text)
    accesses: dict[str, int] = {}
    for instruction in code:
        if ACCESS.match(instruction.op):
            what = f"{instruction.op.split('.')[0]} {instruction.width}"
            accesses[what] = accesses.get(what, 0) + 1
    return Kernel(
        name=demangled(symbol),
        registers=resources["REG"],
        stack=resources["STACK"],
        local=resources["LOCAL"],
        spills=sum(instruction.op.split(".")[0] in ("LDL", "STL") for instruction in code),
        wide_loads=accesses.get("LDG 16", 0),
        wide_stores=accesses.get("STG 16", 0),
        accesses=accesses,
        paths=full_tiles(code),
    )


def demangled(symbol: str) -> str:
    """A C++ name without its arguments and namespaces; Triton's names stay as they are."""
    if not symbol.startswith("_Z") or shutil.which("c++filt") is None:
        return symbol
    name = subprocess.run(["c++filt", symbol], capture_output=True, text=True, check=True).stdout.strip()
    found = re.search(r"(\w+(?:<[^()]*>)?)\((?!anonymous)", name)
    return found[1] if found else name


# The CUDA C++ kernels

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
ARCHITECTURES = (80, 90, 100)
LINKED = 90  # tests/test_cuda_build.py makes a library of these objects, so that they are compiled once
# Folds take two packs of 8 elements, steps two of 4. SGD has no code of its own for 16 bits without momentum.
NAMED = {
    "fold_kernel": tuple(replace(budget, elements=16) for budget in FOLD),
    "square_kernel": SQUARE,
    "rescale_kernel": RESCALE,
    "emit_kernel": EMIT,
    "adam_kernel": tuple(replace(budget, paths=1 if name == "fp32" else 2) for name, budget in ADAM.items()),
    "sgd_kernel": tuple(budget for name, budget in SGD.items() if name != "16 bits"),
}


def budgets_of(kernel: Kernel) -> Sequence[Budget]:
    """What the full tiles of a named kernel may move; nothing for kernels that do not work on tiles.

    Steps have an instance that also stores the zeros. Which of the two this is shows in what most paths keep to.
    """
    budgets = NAMED.get(kernel.name.split("<")[0], ())
    zeroing = [budget.zeroing for budget in budgets]
    is_step = kernel.name.startswith(("adam", "sgd"))
    return zeroing if is_step and sum(map(kernel.keeps, zeroing)) > sum(map(kernel.keeps, budgets)) else budgets


def nvcc_flags() -> list[str]:
    """The list NVCC of setup.py: what is looked at here is what is built there."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "NVCC":
            return ast.literal_eval(node.value)
    raise RuntimeError("setup.py: there is no list NVCC any more; read the flags from where they are now")


NVCC_FLAGS = nvcc_flags()  # once, and here: Python 3.11's ast.parse fails now and then in several threads


@dataclass
class Compiled:
    """What nvcc makes of a .cu file for one architecture: the object for LINKED, for the others a cubin."""

    path: Path
    kernels: list[Kernel]


def object_flags(source: Path) -> list[str]:
    """nvcc's, as torch's BuildExtension gives them; the architecture is missing."""
    includes = [flag for path in (*include_paths(), sysconfig.get_path("include")) for flag in ("-isystem", path)]
    name = f"-DTORCH_EXTENSION_NAME={source.stem}"
    flags = ["-c", "-Xcompiler", "-fPIC", "-DUSE_CUDA", name, "-std=c++20", *includes]
    return [*COMMON_NVCC_FLAGS, *NVCC_FLAGS, *flags] if source.suffix == ".cu" else flags


def compile_source(source: Path, architecture: int, folder: Path) -> Compiled:
    is_linked = architecture == LINKED
    target = folder / f"{source.stem}_{architecture}.{'o' if is_linked else 'cubin'}"
    flags = object_flags(source) if is_linked else [*NVCC_FLAGS, "-cubin"]
    command = ["nvcc", *flags, f"-arch=sm_{architecture}", "-o", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
    return Compiled(target, read_kernels(target))


def compile_sources(architecture: int, folder: Path) -> list[Compiled]:
    """All of csrc/cuda for one architecture; two compilations at a time, the longest first."""
    largest_first = sorted(SOURCES, key=lambda source: source.stat().st_size, reverse=True)
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda source: compile_source(source, architecture, folder), largest_first))


def table(title: str, kernels: Sequence[tuple[Kernel, Sequence[Budget]]]) -> str:
    """A line for each kernel, and one for each of its budgets. Instances with the same numbers have one line."""
    lines = [f"{title:<56}{'registers':>10}{'LDG.E.128':>10}{'STG.E.128':>10}{'B/element':>10}{'budget':>7}"]
    known = set()
    for kernel, budgets in kernels:
        numbers = f"{kernel.registers:>10}{kernel.wide_loads:>10}{kernel.wide_stores:>10}"
        if (kernel.name.split("<")[0], numbers, *budgets) in known:
            continue
        known.add((kernel.name.split("<")[0], numbers, *budgets))
        lines.append(f"{kernel.name:<56}{numbers}")
        for budget in budgets:
            found = kernel.nearest(budget)
            lines.append(f"    {budget.what:<82}{f'{found[0]:g}' if found else 'none':>10}{budget.total:>7}")
    return "\n".join(lines)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        for architecture in ARCHITECTURES:
            kernels = [kernel for made in compile_sources(architecture, Path(place)) for kernel in made.kernels]
            print(table(f"sm_{architecture}", [(kernel, budgets_of(kernel)) for kernel in kernels]), end="\n\n")
