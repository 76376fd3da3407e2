"""Compile the Triton kernels for an NVIDIA GPU that need not be there, and print what came out, as JSON.

A program of its own, because Triton decides on its interpreter when it is imported. Argument: the compute capability.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fusedaccum.backends import _triton_kernels as kernels
from fusedaccum.backends import triton as backend

TOOL = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
TYPES = {
    "*fp32": ("flat", "scale", "scalars", "steps", "factor"),
    "*fp64": ("partials", "total", "divisor", "hyper"),
    "*i64": ("tiles", "grads", "groups", "table"),
    "*u8": ("marks",),
    "fp64": ("max_norm",),
    "i32": ("tile_count", "segment_count"),
}
KERNELS = [
    (kernels.fold_tiles, {"NORM": True, "BLOCK": backend.FOLD_BLOCK}),
    (kernels.fold_tiles, {"NORM": False, "BLOCK": backend.FOLD_BLOCK}),
    (kernels.sum_stale_tiles, {"BLOCK": backend.FOLD_BLOCK}),
    (kernels.sum_partials, {"BLOCK": backend.SUM_BLOCK}),
    (kernels.close, {"CLIP": True, "BLOCK": backend.SUM_BLOCK}),
    (kernels.rescale_tiles, {"BLOCK": backend.FOLD_BLOCK}),
    (kernels.emit_tiles, {"BLOCK": backend.FOLD_BLOCK}),
    (kernels.adam_tiles, {"ZERO": True, "BLOCK": backend.STEP_BLOCK}),
    (kernels.sgd_tiles, {"ZERO": True, "BLOCK": backend.STEP_BLOCK}),
]


def disassemble(cubin: bytes, *options: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([TOOL, *options, file.name], capture_output=True, text=True, check=True).stdout


def compile_for(capability: int, kernel: triton.JITFunction, constants: dict[str, object]) -> dict[str, object]:
    types = {name: kind for kind, names in TYPES.items() for name in names}
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    # As a launch finds them: torch's allocations are aligned to far more than 16 bytes.
    attributes = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if signature[name].startswith("*")
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", capability, 32)
    cubin = triton.compile(source, target=target, options=backend.LAUNCH_OPTIONS).asm["cubin"]
    assembly, usage = disassemble(cubin, "-sass"), disassemble(cubin, "-res-usage")
    return {
        "name": kernel.__name__,
        "stack": int(re.search(r"STACK:(\d+)", usage)[1]),
        "local": int(re.search(r"LOCAL:(\d+)", usage)[1]),
        "wide_loads": assembly.count("LDG.E.128"),
        "wide_stores": assembly.count("STG.E.128"),
    }


if __name__ == "__main__":
    compiled = [compile_for(int(sys.argv[1]), kernel, constants) for kernel, constants in KERNELS]
    reasons = {name: backend.why_not(torch.device(name)) for name in ("cpu", "cuda", "meta")}
    print(json.dumps({"kernels": compiled, "why_not": reasons}))
