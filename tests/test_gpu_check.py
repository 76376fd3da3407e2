"""bench/gpu_check.sh where there is no GPU: a dry run, and a machine of stubs that shows what it does with a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = "bench/gpu_check.sh"
LIMIT = 60  # lines of a summary

# Stands for python3 on a machine with a GPU. What it is asked to do goes into $CALLS, and how it fares into its name.
PYTHON = r"""#!/bin/sh
echo "$*" >> "$CALLS"
case "$*" in
  "-c import torch") exit 0 ;;
  "-") cat > /dev/null; echo "no_gpu='$NO_GPU' device='Stub GPU' arch=9.0 versions='torch 0'" ;;
  setup.py*) echo "for $TORCH_CUDA_ARCH_LIST, insisting: $FUSEDACCUM_CUDA"; exit ${BUILD:-0} ;;
  "-m pytest "*) sleep ${SLOW:-0}; echo "12 passed in 1.00s"; exit ${TESTS:-0} ;;
  "-m bench.gpu.sanitize "*--plant*) echo planted; exit 1 ;;
  "-m bench.gpu.sanitize "*) echo "all operators ran on cuda, 117 results are the reference's" ;;
  *) while [ $# -gt 1 ]; do [ "$1" = --summary ] && echo "pass  goal: reached" > "$2"; shift; done; exit ${GOALS:-0} ;;
esac
"""
SANITIZER = r"""#!/bin/sh
echo "compute-sanitizer $*" >> "$CALLS"
tool=$2
while [ "$1" != "$STUB" ]; do shift; done
"$@"
case "$tool $*" in
  *--plant*) echo "========= ${PLANTED:-Invalid __global__ read of size 16 bytes}" ;;
  memcheck*) echo "========= ${MEMCHECK:-ERROR SUMMARY: 0 errors}" ;;
  *) echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)" ;;
esac
"""
NVCC = r"""#!/bin/sh
case "$*" in
  *dryrun*) echo '#$ TOP=/' ;;
  *--version*) echo "Cuda compilation tools, release 13.0, V13.0.0" ;;
  *) echo "nvcc $*" >> "$CALLS"; exit ${COMPILE:-0} ;;
esac
"""
PASSED = ["build", "operators", "tests", "CUDA graphs", "benchmark", "memcheck", "memcheck finds a planted fault"]
PASSED += ["racecheck", "tests of the Triton backend"]


@pytest.fixture
def check(tmp_path):
    """Run the script with stubs first on PATH; returns its exit code, its summary's lines, its file, the calls."""
    bin_folder, calls = tmp_path / "bin", tmp_path / "calls"
    bin_folder.mkdir()
    calls.touch()
    for name, text in (("stub-python", PYTHON), ("compute-sanitizer", SANITIZER), ("nvcc", NVCC)):
        (bin_folder / name).write_text(text)
        (bin_folder / name).chmod(0o755)

    def run(python=str(bin_folder / "stub-python"), **variables):
        path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "PYTHON": python, "STUB": python, "CALLS": str(calls), **variables}
        output = tmp_path / "result" / "check.txt"
        command = ["bash", SCRIPT, str(output)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
        assert output.read_text() == done.stdout, done.stderr
        lines = done.stdout.partition("== summary\n")[2].splitlines()
        return SimpleNamespace(code=done.returncode, lines=lines, text=done.stdout, calls=calls.read_text())

    return run


def verdicts(lines):
    """{name: pass, FAIL or skip} of a summary."""
    found = (re.fullmatch(r"(pass|FAIL|skip)  ([^:]+): .*", line) for line in lines)
    return {match[2]: match[1] for match in found if match}


def test_without_a_gpu_it_says_what_it_skipped(check):
    done = check(python=sys.executable, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", MODELS="gpt2")
    assert done.code == 0, done.text
    assert len(done.lines) < LIMIT
    assert [line.partition(":")[0] for line in done.lines[:4]] == ["date", "device", "versions", "commit"]
    ran = {"kernels compiled": "pass", "operators": "pass"}
    assert verdicts(done.lines) == {name: "skip" for name in [*PASSED, "goals"]} | ran
    for line in done.lines:
        if line.startswith("skip"):
            assert "no CUDA device" in line or "CPU DRY RUN" in line
    sources = sorted(path.name for path in (ROOT / "csrc" / "cuda").glob("*.cu"))
    assert sorted(re.findall(r" csrc/cuda/(\w+\.cu)$", done.calls, re.MULTILINE)) == sources
    assert "GB/s" not in "\n".join(done.lines)
    assert re.search(r"pytest says: \d+ skipped", done.text)


def test_a_kernel_that_does_not_compile_fails_the_check(check):
    done = check(NO_GPU="no CUDA device", COMPILE="1")
    assert done.code == 1
    assert verdicts(done.lines)["kernels compiled"] == "FAIL"
    assert verdicts(done.lines)["benchmark"] == "skip"


def test_on_a_gpu_machine_everything_is_run(check):
    done = check()
    assert done.code == 0, done.text
    assert verdicts(done.lines) == {name: "pass" for name in [*PASSED, "goal"]}
    assert "device: Stub GPU" in done.lines[1]
    assert "for 9.0, insisting: 1" in done.text
    assert "--tool memcheck --kernel-name kns=fusedaccum" in done.calls
    assert "--tool racecheck" in done.calls
    seconds = int(re.search(r"--seconds (\d+)", done.calls)[1])
    assert 100 <= seconds <= 150


@pytest.mark.parametrize(
    ("variables", "failed"),
    [
        ({"BUILD": "1"}, {"build"}),
        ({"TESTS": "1"}, {"tests", "CUDA graphs", "tests of the Triton backend"}),
        ({"GOALS": "1"}, {"benchmark"}),
        ({"MEMCHECK": "ERROR SUMMARY: 3 errors"}, {"memcheck"}),
        ({"PLANTED": "ERROR SUMMARY: 0 errors"}, {"memcheck finds a planted fault"}),
    ],
    ids=str,
)
def test_a_failed_section_stops_no_other(check, variables, failed):
    done = check(**variables)
    assert done.code == 1
    found = verdicts(done.lines)
    assert {name for name, word in found.items() if word == "FAIL"} == failed
    assert found.keys() == {*PASSED, "goal"}


def test_a_checker_that_does_not_know_the_device_is_skipped_by_name(check):
    done = check(MEMCHECK="Error: Device not supported.", PLANTED="Device not supported")
    assert done.code == 0
    assert verdicts(done.lines)["memcheck"] == "skip"


def test_sections_end_when_the_time_is_over(check):
    done = check(TOTAL="14", SLOW="30")
    found = verdicts(done.lines)
    assert done.code == 1
    assert (found["build"], found["tests"], found["racecheck"]) == ("pass", "FAIL", "FAIL")
    assert "no time left" in done.text


def test_the_script_names_every_file_with_tests_for_a_gpu():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert listed.returncode == 0, listed.stdout + listed.stderr
    files = set(re.findall(r"^(tests/test_\w+\.py)::", listed.stdout, re.MULTILINE))
    assert {"tests/test_gpu.py", "tests/test_gpu_graphs.py"} <= files
    assert files == set(re.findall(r"tests/test_\w+\.py", (ROOT / SCRIPT).read_text()))
