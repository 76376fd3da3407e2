"""Compile the Triton kernels for NVIDIA GPUs that need not be there, and print what came out, as JSON.

A program of its own, because Triton decides on its interpreter when it is imported. Arguments: a folder, in which it
leaves a cubin for each kernel and capability; SHARE/SHARES, which part of the work is this process's; and compute
capabilities.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import triton
from machine_code import ADAM, EMIT, FOLD, RESCALE, SGD, SQUARE, Budget
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fusedaccum.backends import _triton_kernels as kernels
from fusedaccum.backends import _triton_rules as rules
from fusedaccum.backends import triton as backend

TYPES = {
    "*fp32": ("flat", "scale", "scalars", "steps", "factor", "found_inf"),
    "*fp64": ("partials", "total", "divisor", "hyper"),
    "*i64": ("tiles", "groups", "random", "table"),
    "*u8": ("marks", "live"),
    "fp64": ("max_norm",),
    "i32": ("tile_count", "segment_count"),
}
# Codes of the lists, in the operator's order.
SINGLE, LOW = kernels.FLOAT32.value, kernels.BFLOAT16.value
ADAM_LISTS = {
    "fp32": (SINGLE, SINGLE, SINGLE),
    "16 bits": (LOW, LOW, LOW),
    "16 bits, fp32 moments": (LOW, SINGLE, SINGLE),
    "16 bits, fp32 moments and master": (LOW, SINGLE, SINGLE, 0, SINGLE),
}
SGD_LISTS = {
    "fp32": (SINGLE,),
    "fp32, momentum": (SINGLE, SINGLE),
    "16 bits": (LOW,),
    "16 bits, momentum": (LOW, LOW),
    "16 bits, fp32 momentum and master": (LOW, SINGLE, SINGLE),
}


def kind(codes: tuple[int, ...]) -> int:
    return sum(code << 2 * k for k, code in enumerate(codes))


def steps(kernel: triton.JITFunction, lists: dict[str, tuple[int, ...]], budgets: dict[str, Budget]) -> list[tuple]:
    """Each mixture of dtypes by itself, and all in one kernel, as a model with all of them has it."""
    constants = {"LIVE": True, "RANDOM": False, "ZERO": False, "BLOCK": backend.BLOCK}
    alone = [(kernel, constants | {"KINDS": (kind(codes),)}, [budgets[name]]) for name, codes in lists.items()]
    zeroing = constants | {"KINDS": (kind(lists["fp32"]),), "ZERO": True}
    every = constants | {"KINDS": tuple(sorted(kind(codes) for codes in lists.values()))}
    together = [(kernel, every | change, list(budgets.values())) for change in ({}, {"LIVE": False})]
    # Masters leave nothing to random rounding, and the wrapper has either.
    without_masters = {name: codes for name, codes in lists.items() if "master" not in name}
    low = [(name,) for name in without_masters if "16 bits" in name]
    random = [
        (
            kernel,
            constants | {"RANDOM": True, "KINDS": tuple(sorted(kind(lists[name]) for name in names))},
            [budgets[name] for name in names],
        )
        for names in (*low, tuple(without_masters))
    ]
    return [*alone, (kernel, zeroing, [budgets["fp32"].zeroing]), *together, *random]


def launches() -> list[tuple[triton.JITFunction, dict[str, object], list[Budget]]]:
    """Kernels with their constants, and what full tiles may move."""
    choices = (False, True)
    block = {"BLOCK": backend.BLOCK}
    alike = {"LIVE": True, "RANDOM": False, **block}
    close = {"CLIP": True, "BLOCK": backend.SUM_BLOCK}
    with_max = {"KINDS": (kind((SINGLE,) * 3), kind((SINGLE,) * 4)), "ZERO": True, **alike}
    return [
        *((kernels.fold_tiles, {"LIVE": x, "NORM": y, **block}, list(FOLD)) for x in choices for y in choices),
        (kernels.found_inf_tiles, block, []),
        (kernels.sum_stale_tiles, block, list(SQUARE)),
        (kernels.sum_partials, {"BLOCK": backend.SUM_BLOCK}, []),
        *((kernels.close, {**close, "SKIP_NONFINITE": x, "LIVE": x}, []) for x in choices),
        (kernels.rescale_tiles, block, list(RESCALE)),
        *((kernels.emit_tiles, {"LIVE": x, **block}, list(EMIT)) for x in choices),
        *steps(rules.adam_tiles, ADAM_LISTS, ADAM),
        (rules.adam_tiles, with_max, []),
        *steps(rules.sgd_tiles, SGD_LISTS, SGD),
    ]


def compile_for(capability: int, kernel: triton.JITFunction, constants: dict[str, object]) -> bytes:
    types = {name: kind for kind, names in TYPES.items() for name in names}
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    # As a launch finds them: torch's allocations are aligned to far more than 16 bytes.
    attributes = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if signature[name].startswith("*")
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=backend.LAUNCH_OPTIONS).asm["cubin"]


def main(folder: Path, share: int, shares: int, capabilities: list[int]) -> None:
    made = []
    jobs = [(capability, k, *launch) for capability in capabilities for k, launch in enumerate(launches())]
    for capability, k, kernel, constants, budgets in jobs[share::shares]:
        cubin = folder / f"{k}_{capability}.cubin"
        cubin.write_bytes(compile_for(capability, kernel, constants))
        shown = ", ".join(f"{name}={value}" for name, value in constants.items() if name != "BLOCK")
        entry = {"capability": capability, "name": kernel.__name__, "constants": shown, "cubin": str(cubin)}
        made.append(entry | {"budgets": [vars(budget) for budget in budgets]})
    reasons = {name: backend.why_not(torch.device(name)) for name in ("cpu", "cuda", "meta")}
    print(json.dumps({"kernels": made, "of": len(jobs), "why_not": reasons}))


if __name__ == "__main__":
    share, shares = map(int, sys.argv[2].split("/"))
    main(Path(sys.argv[1]), share, shares, [int(argument) for argument in sys.argv[3:]])
