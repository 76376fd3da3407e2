"""The C++ extension: what was built, the same bits on every instruction set, and what happens without a compiler.

Run as a script, this file prints a digest of the results of every operator, for the tests of the instruction sets.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fusedaccum.backends import compiled
from fusedaccum.ops import ALIGN, TILE, TOTAL, TOUCHED

ROOT = Path(__file__).parent.parent
OPERATORS = ("fold", "found_inf", "square_total", "close_window", "rescale", "emit", "adam", "sgd")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (0, 1, 15, 16, 17, 4095, 4096, 4097, 9000)


def arguments(op: str, sizes: tuple[int, ...] = SIZES, seed: int = 0) -> tuple:
    """Arguments of one operator, in a window whose segments have all been touched; dtypes go round in each list."""
    draw = torch.Generator().manual_seed(seed)
    offsets = [0]
    for numel in sizes:
        offsets.append(offsets[-1] + (numel + ALIGN - 1) // ALIGN * ALIGN)
    segments = torch.tensor(list(zip(offsets, sizes, strict=False)))
    tiles = torch.tensor(
        [
            (k, start, offset + start, min(TILE, numel - start))
            for k, (offset, numel) in enumerate(segments.tolist())
            for start in range(0, numel, TILE)
        ]
    )

    def listed(shift: int, scale: float = 1.0, dtypes: tuple[torch.dtype, ...] = DTYPES) -> list[Tensor]:
        tensors = [torch.randn(numel, generator=draw) * scale for numel in sizes]
        for tensor in tensors:  # values at which roundings differ: inf, the largest below it, a subnormal, zero
            tensor[:4] = torch.tensor([float("inf"), 65519.0, 1e-7, -0.0])[: tensor.numel()]
        return [tensor.to(dtypes[(k + shift) % len(dtypes)]) for k, tensor in enumerate(tensors)]

    def squares(shift: int) -> list[Tensor]:
        return [tensor.abs() for tensor in listed(shift, 0.1)]

    flat = torch.randn(offsets[-1], generator=draw)
    partials = torch.zeros(tiles.shape[0], dtype=torch.float64)
    marks = torch.full((len(sizes),), TOUCHED, dtype=torch.uint8)
    marks[1::4] = 0  # with 3 dtypes in turn, some of each remain
    plan, step_plan = (flat, marks, segments, tiles), (flat, marks, None, segments, tiles)
    scalars, steps = torch.tensor([0.3, 0.0, 1.0]), torch.arange(len(sizes)) + 1.0
    groups = torch.arange(len(sizes)) % 2
    total, divisor = torch.tensor([3.0], dtype=torch.float64), torch.tensor([1.7], dtype=torch.float64)
    adamw, adam = (1e-2, 0.9, 0.999, 1e-8, 0.1, 1, 0, 0), (1e-2, 0.8, 0.99, 1e-6, 0.1, 0, 1, 1)
    nesterov, plain = (1e-2, 0.9, 0, 0.1, 1, 0), (1e-2, 0.8, 0.1, 0, 0, 1)
    masters = [t if k % 2 else t[:0] for k, t in enumerate(listed(0, dtypes=(torch.float32,)))]

    grads = [*listed(0)[:-1], None]
    random = torch.arange(len(sizes) + 2) + 2**40

    def update(*rows: tuple) -> tuple:
        return (*step_plan, scalars, steps, groups, torch.tensor(rows, dtype=torch.float64), listed(0))

    return {
        "fold": lambda: (
            flat,
            partials,
            marks,
            torch.zeros_like(marks),
            segments,
            tiles,
            grads,
            torch.tensor([0.3]),
            True,
        ),
        "found_inf": lambda: (*plan, grads, torch.zeros(1)),
        "square_total": lambda: (flat, partials, marks, segments, tiles, torch.zeros(TOTAL, dtype=torch.float64)),
        "close_window": lambda: (scalars, steps, marks, None, total, divisor, 0.5, True),
        "rescale": lambda: (*plan, torch.tensor([0.3])),
        "emit": lambda: (*step_plan, scalars, listed(1)),
        "adam": lambda: (*update(adamw, adam), listed(1), squares(2), squares(0), masters, random, True),
        "sgd": lambda: (*update(nesterov, plain), listed(1), masters, random, False),
    }[op]()


def digest(sizes: tuple[int, ...] = SIZES) -> str:
    """Of everything that the operators leave behind. Which of two NaNs survives is the processor's choice."""
    sha = hashlib.sha256()
    for op in OPERATORS:
        args = arguments(op, sizes)
        getattr(compiled, op)(*args)
        for arg in args:
            for tensor in arg if isinstance(arg, list) else [arg]:
                if isinstance(tensor, Tensor):
                    tensor = tensor.masked_fill(tensor.isnan(), 0) if tensor.is_floating_point() else tensor
                    sha.update(tensor.view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def run(command: list[str], cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120
    )


def test_build_info() -> None:
    info = compiled.build_info()
    assert info["isa"] in info["isas_built"]
    assert info["isas_built"][-1] == "baseline"
    assert info["compiler"].split()[0] in ("gcc", "clang")
    assert info["torch_target"] == "2.10"
    assert info["cuda"].startswith(("built", "not built: "))
    assert (info["tile"], info["align"]) == (TILE, ALIGN)


def test_every_isa_gives_the_same_bits() -> None:
    ran = 0
    for isa in compiled.build_info()["isas_built"]:
        done = run([sys.executable, __file__], FUSEDACCUM_ISA=isa)
        if f"this processor has no {isa}" in done.stderr:
            continue
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == f"{isa} {digest()}"
        ran += 1
    assert ran >= 1  # baseline runs everywhere


def test_any_number_of_threads_gives_the_same_bits() -> None:
    """Shares of threads are cut by elements: inside a segment, between small ones, and in the last, partial tile."""
    before, seen = torch.get_num_threads(), set()
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            seen |= {
                (sizes, digest(sizes)) for sizes in ((1, 70000, 64, 4097, 100001, 0, 3), (200, 40000), (4096,) * 64)
            }
    finally:
        torch.set_num_threads(before)
    assert len(seen) == 3


def test_unknown_isa_is_refused() -> None:
    done = run([sys.executable, __file__], FUSEDACCUM_ISA="avx9")
    assert done.returncode != 0
    assert "FUSEDACCUM_ISA=avx9 is not known; use avx512, avx2 or baseline" in done.stderr


@pytest.mark.parametrize("op", OPERATORS)
def test_opcheck(op: str) -> None:
    torch.library.opcheck(getattr(torch.ops.fusedaccum, op).default, arguments(op, sizes=(0, 5, 70)))


@pytest.mark.parametrize("op", OPERATORS)
def test_version_counters(op: str) -> None:
    """A tensor that the schema declares as written is one that autograd is told about, and no other is."""
    args = arguments(op)
    tensors = [[t for t in arg if t is not None] if isinstance(arg, list) else [arg] for arg in args]
    before = [[t._version for t in row if isinstance(t, Tensor)] for row in tensors]
    getattr(compiled, op)(*args)
    zero = args[-1]
    for argument, row, old in zip(
        getattr(torch.ops.fusedaccum, op).default._schema.arguments, tensors, before, strict=True
    ):
        written = argument.alias_info is not None and argument.alias_info.is_write
        if op in ("adam", "sgd") and argument.name == "flat":
            written = zero
        for tensor, version in zip(row, old, strict=False):
            assert (tensor._version > version) == written, argument.name


def test_autograd_finds_out_about_a_changed_parameter() -> None:
    args = list(arguments("sgd", sizes=(5,)))
    parameter = args[9][0] = torch.ones(5, requires_grad=True)
    loss = parameter.square().sum()
    compiled.sgd(*args)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_meta_tensor_beside_data_is_refused() -> None:
    args = list(arguments("fold", sizes=(5, 6)))
    args[6] = [torch.ones(5), torch.ones(6, device="meta")]
    with pytest.raises(RuntimeError, match=r"fold: grads\[1\] must be on cpu, got meta"):
        compiled.fold(*args)


def test_other_devices_get_a_reason() -> None:
    assert compiled.why_not(torch.device("cpu")) is None
    assert "xpu" in compiled.why_not(torch.device("xpu"))
    if not compiled.build_info()["cuda"].startswith("built"):
        assert "the CUDA kernels are not built: " in compiled.why_not(torch.device("cuda"))


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of what is installed from, without anything that a build left behind."""
    copy = tmp_path / "sources"
    copy.mkdir()
    for name in ("csrc", "fusedaccum"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for path in ROOT.iterdir():
        if path.suffix in (".py", ".toml", ".md", ".in") or path.name == "LICENSE":
            shutil.copy(path, copy)
    return copy


WITHOUT_EXTENSION = """
import torch, fusedaccum
from fusedaccum import backends
assert fusedaccum.__file__.startswith({target!r}), fusedaccum.__file__
cpu = torch.device("cpu")
print(backends.why_not("compiled", cpu))
print(backends.select(cpu).__name__)
"""


def test_install_without_compiler(sources: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    install = "pip install --verbose --no-build-isolation --no-deps --no-index --disable-pip-version-check --target"
    done = run(
        [sys.executable, "-m", *install.split(), str(target), str(sources)], CXX="/nonexistent", FUSEDACCUM_CUDA="auto"
    )
    assert done.returncode == 0, done.stderr
    assert "no C++ compiler (/nonexistent): installing without the `compiled` backend" in done.stdout + done.stderr
    assert not list(target.rglob("*.so"))

    # -S keeps an editable install of this package out of the way.
    path = os.pathsep.join([str(target), *(entry for entry in sys.path if entry.endswith("site-packages"))])
    script = WITHOUT_EXTENSION.format(target=str(target))
    done = run([sys.executable, "-S", "-c", script], cwd=tmp_path, PYTHONPATH=path, TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr
    reason, chosen = done.stdout.splitlines()
    assert reason.startswith("the C++ operators cannot be loaded (No module named 'fusedaccum._C')")
    assert chosen == "fusedaccum.backends.reference"


@pytest.mark.parametrize(
    ("switch", "reason"),
    [("1", "FUSEDACCUM_CUDA=1, but the CUDA kernels are not built: nvcc is not on PATH"), ("2", "use auto, 0 or 1")],
)
def test_cuda_switch_fails_loudly(sources: Path, tmp_path: Path, switch: str, reason: str) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    done = run([sys.executable, "setup.py", "--version"], cwd=sources, FUSEDACCUM_CUDA=switch, PATH=str(empty))
    assert done.returncode != 0
    assert reason in done.stderr


if __name__ == "__main__":
    print(compiled.build_info()["isa"], digest())
