#!/usr/bin/env bash
# What only a GPU can show, in 6 minutes: builds for its architecture, runs the tests marked gpu, compute-sanitizer, CUDA
# graphs and the benchmark, and prints a summary of less than 60 lines last. Needs torch with CUDA, nvcc, pytest; no
# network. Without a GPU it says by name what was skipped, and still compiles the kernels and runs the scripts dry.
#
#   bash bench/gpu_check.sh [FILE]      FILE: where all output goes as well, out/gpu_check.txt by default
#
# PYTHON: the interpreter. MODELS: models of the benchmark (bench/gpu/cases.py). COMMIT: where there is no git to ask.
# TOTAL: seconds for everything.
# Exit code: 0 if nothing failed.
set -uo pipefail
cd "$(dirname "$0")/.."

root=$PWD
log=${1:-out/gpu_check.txt}
mkdir -p "$(dirname "$log")" || exit 1
beside=$(cd "$(dirname "$log")" && pwd)
build=$beside/gpu_build
work=$beside/gpu_check
total=${TOTAL:-360}
tail_seconds=10 # for the summary, and for what a time limit overruns

# A section ends by its limit, or where the 6 minutes do, whatever it does. What matters most comes first.
build_limit=80 operators_limit=20 tests_limit=60 graph_limit=20 table_limit=150 sanitizer_limit=30 triton_limit=90

# The tables of operator cases run on a GPU too; the other tests have nothing to do there.
tests="tests/test_gpu.py tests/test_gpu_modes.py tests/test_fold.py tests/test_norm.py tests/test_boundary.py tests/test_steps.py tests/test_rounding_bits.py tests/test_op_errors.py tests/test_live.py"

choose_python() {
  local candidate
  for candidate in ${PYTHON:-python3 "$root/.venv/bin/python"}; do
    "$candidate" -c "import torch" 2>"$work/python.log" && command -v "$candidate" && return
  done
  return 1
}

# Facts about this machine, as shell variables.
facts() {
  "$python" - <<'END'
import platform, shlex, torch

cuda = torch.cuda.is_available()
reason = "" if cuda else "no CUDA device" if torch.version.cuda else "torch without CUDA, so no CUDA device"
names = {
    "no_gpu": reason,
    "device": ", ".join(torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())) if cuda else "none",
    "arch": "{}.{}".format(*torch.cuda.get_device_capability()) if cuda else "",
    "versions": f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}, Python {platform.python_version()}",
}
for name, value in names.items():
    print(f"{name}={shlex.quote(value)}")
END
}

result() { printf '%s  %s: %s\n' "$1" "$2" "$3" | tee -a "$work/results"; }

# section NAME LIMIT COMMAND...: run it, show and keep its output in $output, leave its exit code in $rc. It gets less
# than LIMIT seconds where less is left, and none if nothing is.
section() {
  local name=$1 limit=$2 left=$((total - tail_seconds - SECONDS)) begin=$SECONDS
  shift 2
  output=$work/$(echo "$name" | tr -c 'a-zA-Z0-9\n' '_').log
  printf '\n== %s\n' "$name"
  if ((left < limit)); then limit=$left; fi
  if ((limit < 1)); then
    echo "no time left" >"$output"
    rc=124
  else
    timeout -k 5 "$limit" "$@" >"$output" 2>&1
    rc=$?
  fi
  cat "$output"
  took="$((SECONDS - begin)) s"
  if ((rc == 124 || rc == 137)); then took="stopped after $took"; fi
}

last_line() { grep -v '^[[:space:]]*$' "$output" | tail -n 1 | cut -c 1-150; }

# What is said of a section whose exit code is its verdict.
verdict() { # NAME DETAIL
  if ((rc == 0)); then result pass "$1" "${2:-$(last_line)} ($took)"; else result FAIL "$1" "$(last_line) ($took)"; fi
}

in_build() { (cd "$work" && exec "$@"); } # out of the source tree: `python -m` looks there first
export -f in_build

build_package() {
  local name="build"
  if [[ -n $no_gpu ]]; then
    result skip "$name" "$no_gpu: the package that Python finds is used"
    compile_kernels
    return
  fi
  rm -rf "$build/lib"
  export TORCH_CUDA_ARCH_LIST=$arch FUSEDACCUM_CUDA=1
  section "$name" $build_limit "$python" setup.py -q egg_info --egg-base "$build" \
    build --build-base "$build/temp" --build-lib "$build/lib"
  verdict "$name" "for sm_${arch/./}"
}

# Without a GPU: at least compile the kernels, for the architecture that the goals are about.
compile_kernels() {
  local name="kernels compiled"
  if ! command -v nvcc >/dev/null; then
    result skip "$name" "no nvcc on PATH"
    return
  fi
  section "$name" $build_limit bash -c 'ls csrc/cuda/*.cu | xargs -P "$(nproc)" -I {} sh -c \
    "nvcc -arch=sm_90 -O3 --fmad=false -c -o $0/\$(basename {}).o {} || exit 255"' "$build"
  verdict "$name" "$(ls csrc/cuda/*.cu | wc -l) files for sm_90"
}

run_tests() { # NAME LIMIT PYTEST-ARGUMENTS...
  local name=$1 limit=$2
  shift 2
  section "$name" "$limit" bash -c 'in_build "$@"' - "$python" -m pytest -c "$root/pyproject.toml" \
    --rootdir="$root" -p no:cacheprovider -q -rfE -m gpu "$@"
  if ((rc == 0)) && [[ -n $no_gpu ]]; then
    result skip "$name" "$no_gpu; pytest says: $(last_line)"
  else
    verdict "$name" ""
  fi
}

find_sanitizer() {
  command -v compute-sanitizer || { [[ -x $CUDA_HOME/bin/compute-sanitizer ]] && echo "$CUDA_HOME/bin/compute-sanitizer"; }
}

# sanitize NAME TOOL PATTERN ENDING SCRIPT-ARGUMENTS...: the output must hold the tool's PATTERN and the script's ENDING.
sanitize() {
  local name=$1 tool=$2 pattern=$3 ending=$4 checker
  shift 4
  if [[ -n $no_gpu ]]; then
    result skip "$name" "$no_gpu"
    return
  elif ! checker=$(find_sanitizer); then
    result skip "$name" "no compute-sanitizer on PATH or in $CUDA_HOME/bin"
    return
  fi
  # Each tensor gets a block of its own, or what lies behind it is the allocator's and nobody minds. What torch asks the
  # driver in vain is no error of ours.
  section "$name" $sanitizer_limit bash -c 'in_build "$@"' - env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$checker" \
    --tool "$tool" --kernel-name kns=fusedaccum --report-api-errors no "$python" -m bench.gpu.sanitize \
    --backend compiled "$@"
  if grep -q "Device not supported" "$output"; then
    result skip "$name" "compute-sanitizer does not support this device here"
  elif grep -q "$pattern" "$output" && grep -q "$ending" "$output"; then
    result pass "$name" "$(grep -m 1 "$pattern" "$output" | sed 's/^=* *//' | cut -c 1-100) ($took)"
  else
    result FAIL "$name" "$(last_line) ($took)"
  fi
}

run_benchmark() {
  local name="benchmark" left=$((total - tail_seconds - SECONDS)) arguments=(--json "$work/bench.json")
  arguments+=(--summary "$work/bench_summary")
  if [[ -n $no_gpu ]]; then
    # Small stand-ins, and no torch.compile, whose minutes would show nothing.
    arguments+=(--device cpu --box 0.01 --only fold step window --models ${MODELS:-gpt2 10000x64})
  else
    if ((left > table_limit)); then left=$table_limit; fi
    arguments+=(--seconds $((left - 15)) ${MODELS:+--models $MODELS})
  fi
  section "$name" $table_limit bash -c 'in_build "$@"' - "$python" -m bench.gpu "${arguments[@]}"
  if ((rc == 0)) && [[ -n $no_gpu ]]; then
    result skip "$name" "$no_gpu; its dry run on a CPU ended well ($took)"
  elif ((rc == 0)); then
    result pass "$name" "all goals reached ($took)"
  elif ((rc == 1)) && [[ -s $work/bench_summary ]]; then
    result FAIL "$name" "not all goals reached, or not all measured ($took)"
  else
    result FAIL "$name" "$(last_line) ($took)"
  fi
}

summary() {
  local failed skipped
  failed=$(grep -c '^FAIL' "$work/results")
  skipped=$(grep -c '^skip' "$work/results")
  printf '\n== summary\n'
  echo "date: $(date -u '+%Y-%m-%d %H:%M UTC'), $SECONDS s"
  echo "device: $device; driver $(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | sed 1q |
    grep . || echo none)"
  echo "versions: $versions; nvcc $(nvcc --version 2>/dev/null | sed -n 's/^Cuda.*release //p' | grep . || echo none)"
  echo "commit: ${COMMIT:-$(git describe --always --dirty 2>/dev/null || echo unknown)}"
  cat "$work/results"
  if [[ -s $work/bench_summary ]]; then cat "$work/bench_summary"; fi
  echo "$(grep -c '^pass' "$work/results") passed, $failed failed, $skipped skipped"
  return $((failed > 0))
}

main() {
  local CUDA_HOME=${CUDA_HOME:-}
  rm -f "$work"/*
  : >"$work/results"
  if ! python=$(choose_python); then
    cat "$work/python.log"
    echo "FAIL  no Python with torch: set PYTHON"
    return 1
  fi
  eval "$(facts)"
  # nvcc on PATH can be a script that stands for the toolkit's.
  if [[ -z $CUDA_HOME ]] && command -v nvcc >/dev/null; then
    CUDA_HOME=$(realpath "$(nvcc --dryrun -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p')")
  fi
  export CUDA_HOME python root work
  build_package
  if [[ -n $no_gpu ]]; then export PYTHONPATH=$root; else export PYTHONPATH=$build/lib:$root; fi
  section "operators" $operators_limit bash -c 'in_build "$@"' - "$python" -m bench.gpu.sanitize --backend compiled \
    --device "$([[ -n $no_gpu ]] && echo cpu || echo cuda)"
  verdict "operators" ""
  # shellcheck disable=SC2086
  run_tests "tests" $tests_limit $(printf "$root/%s " $tests)
  run_tests "CUDA graphs" $graph_limit "$root/tests/test_gpu_graphs.py"
  run_benchmark
  sanitize "memcheck" memcheck "ERROR SUMMARY: 0 errors" "all operators ran"
  sanitize "memcheck finds a planted fault" memcheck "Invalid __global__" "planted" --plant
  sanitize "racecheck" racecheck "RACECHECK SUMMARY: 0 hazards" "all operators ran"
  if [[ -n $no_gpu ]]; then
    result skip "tests of the Triton backend" "$no_gpu"
  else
    # shellcheck disable=SC2086
    TRITON_INTERPRET=0 run_tests "tests of the Triton backend" $triton_limit $(printf "$root/%s " $tests) -k triton
  fi
  summary
}

mkdir -p "$build" "$work"
main | tee "$log"
exit "${PIPESTATUS[0]}"
