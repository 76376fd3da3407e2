"""Compiles CUDA sources for the CPU, plain or with sanitizers, and runs what was compiled."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from torch.utils.cpp_extension import get_cxx_compiler

HERE = Path(__file__).parent
CSRC = HERE.parent.parent / "csrc"
SANITIZERS = {
    "plain": [],
    "address": ["-fsanitize=address,undefined"],
    "thread": ["-fsanitize=thread"],
}
# #pragma unroll is nvcc's. Contraction is off as in every build of the kernels. -g1: lines for the sanitizers' reports;
# all of -g takes a quarter longer.
FLAGS = ["-O1", "-g1", "-fPIC", "-Wall", "-Wno-unknown-pragmas", "-ffp-contract=off", "-fno-sanitize-recover=all"]
# A fiber's stack is memory that the leak checker does not know.
ENVIRONMENT = {"ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "halt_on_error=1:atexit_sleep_ms=0"}


class NoSanitizer(Exception):
    """The compiler cannot link a sanitizer's runtime. `any_other`: whether it can link another one."""

    def __init__(self, sanitizer: str, any_other: bool) -> None:
        super().__init__(
            f"{get_cxx_compiler()} cannot link {' '.join(SANITIZERS[sanitizer])}: install the compiler's sanitizer "
            "runtimes (they come with g++ in Debian and Ubuntu), or set CXX to a compiler that has them"
        )
        self.any_other = any_other


def call(command: list[str]) -> None:
    """Run a compiler; its messages are the error's."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-6000:]}")


@cache
def can_link(sanitizer: str) -> bool:
    """Whether an empty program with the sanitizer can be linked."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "empty.cpp")
        source.write_text("int main() {}\n")
        command = [*get_cxx_compiler().split(), *SANITIZERS[sanitizer], str(source), "-o", str(source.with_suffix(""))]
        return subprocess.run(command, capture_output=True).returncode == 0


def compile_object(source: Path, folder: Path, flags: list[str]) -> Path:
    """Compile one source. A .cu file sees the emulation first, as it would see CUDA's own header under nvcc."""
    command = [*get_cxx_compiler().split(), *FLAGS, *flags, f"-I{HERE}", f"-I{CSRC}"]
    language = ["-x", "c++", "-include", str(HERE / "emulation.h")] if source.suffix == ".cu" else []
    target = folder / f"{source.name}.o"
    call([*command, *language, "-c", str(source), "-o", str(target)])
    return target


def compile_objects(jobs: list[tuple[Path, list[str]]], folder: Path) -> list[Path]:
    """Compile sources, each with flags of its own, the largest first: the others fill the time beside it."""
    largest_first = sorted(jobs, key=lambda job: job[0].stat().st_size, reverse=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda job: compile_object(job[0], folder, job[1]), largest_first))


def build(sources: list[Path], target: Path, sanitizer: str = "plain", shared: bool = False) -> Path:
    """Compile and link a program, or a shared library, beside the scheduler. Objects go beside the target."""
    if not can_link(sanitizer):
        raise NoSanitizer(sanitizer, any(can_link(other) for other in SANITIZERS if other not in ("plain", sanitizer)))
    folder = target.parent / f"{target.name}.objects"
    folder.mkdir(parents=True, exist_ok=True)
    flags = SANITIZERS[sanitizer]
    # The scheduler tells ThreadSanitizer what orders the fibers; instrumented, it would be reported itself.
    objects = compile_objects([(HERE / "scheduler.cpp", ["-O2"]), *((source, flags) for source in sources)], folder)
    link = [*get_cxx_compiler().split(), *flags, "-pthread", *(["-shared"] if shared else [])]
    call([*link, *map(str, objects), "-o", str(target)])
    return target


def execute(
    program: Path, arguments: list[str], order: str = "forward", strict: bool = False, workers: int = 1, seed: int = 1
) -> subprocess.CompletedProcess[str]:
    """Run a program with the emulation's settings (scheduler.cpp)."""
    settings = {
        "EMULATION_ORDER": order,
        "EMULATION_SEED": str(seed),
        "EMULATION_STRICT": str(int(strict)),
        "EMULATION_WORKERS": str(workers),
    }
    options = {"env": {**os.environ, **ENVIRONMENT, **settings}, "capture_output": True, "text": True, "timeout": 300}
    command = [str(program), *arguments]
    done = subprocess.run(command, **options)
    # Where addresses are randomized in more bits than ThreadSanitizer knows, it gives up at the start.
    if "unexpected memory mapping" in done.stderr and shutil.which("setarch"):
        done = subprocess.run(["setarch", "-R", *command], **options)
    return done
