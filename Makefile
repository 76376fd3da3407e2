# make demo | test | bench | lint | strict | format | clean. Needs Python 3.10 or later, a C++ compiler and make; the
# rest goes into $(VENV). TORCH takes whatever pip install takes.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
OUT ?= out
BENCH_FLAGS ?=

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
SOURCES := $(shell find csrc -type f) setup.py pyproject.toml
CXX_FILES := $(filter %.h %.cpp %.cu %.cuh,$(SOURCES))

# A stamp says that a step was done. The torch stamp is named after what was asked for: another TORCH is another stamp.
TORCH_STAMP := $(VENV)/.torch-$(shell printf '%s' '$(TORCH)' | cksum | cut -d ' ' -f 1)
BUILD_STAMP := $(VENV)/.built
TOOLS_STAMP := $(VENV)/.tools

.PHONY: demo test bench lint strict format clean distclean

demo: $(BUILD_STAMP)
	$(PY) -m fusedaccum demo --out $(OUT)

# One process: the kernels have threads of their own, and two cores are not shared well.
test: $(TOOLS_STAMP)
	$(PY) -m pytest -ra

# The published numbers come from python -m bench, which refuses a machine that is not quiet (bench/harness.py says why
# they do not come from pytest-benchmark). BENCH_FLAGS="--quick" only shows that it runs.
bench: $(TOOLS_STAMP)
	mkdir -p $(OUT)/bench
	$(PY) -m pytest bench/test_fold.py bench/test_step.py bench/test_window.py --benchmark-json=$(OUT)/bench/pytest.json \
	  --benchmark-columns=min,median,rounds --benchmark-group-by=group $(if $(findstring --quick,$(BENCH_FLAGS)),--quick)
	$(PY) -m bench.report $(OUT)/bench/pytest.json
	$(PY) -m bench --json $(OUT)/bench/bench.json $(BENCH_FLAGS)
	$(PY) -m bench.modes --json $(OUT)/bench/modes.json $(if $(findstring --quick,$(BENCH_FLAGS)),--quick)

lint: $(TOOLS_STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run -Werror $(CXX_FILES)

# Every file of kernels by itself, all warnings on, and nothing but csrc to include from: kernels know no torch header.
# CUDA sources as the tests' emulation reads them: #pragma unroll is nvcc's.
STRICT := $(CXX) -Wall -Wextra -Werror -fsyntax-only -Icsrc
strict:
	for file in csrc/cpu/*.cpp; do $(STRICT) $$file || exit 1; done
	for file in csrc/cuda/*.cu; do \
	  $(STRICT) -Wno-unknown-pragmas -Itests/emulation -include tests/emulation/emulation.h -x c++ $$file || exit 1; done

format: $(TOOLS_STAMP)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(CXX_FILES)

$(PY):
	$(PYTHON) -m venv $(VENV)

# setuptools and ninja are what the build needs beside torch (pyproject.toml, [build-system]).
$(TORCH_STAMP): | $(PY)
	$(PIP) install $(TORCH) "setuptools>=77" ninja
	rm -f $(VENV)/.torch-*
	touch $@

$(BUILD_STAMP): $(TORCH_STAMP) $(SOURCES)
	$(PIP) install --no-build-isolation -e ".[demo]"
	touch $@

# fusedaccum itself is installed by now, so this fetches what its extras name and builds nothing a second time.
$(TOOLS_STAMP): $(BUILD_STAMP)
	$(PIP) install "fusedaccum[demo,test,triton,dev]"
	touch $@

clean:
	rm -rf build dist *.egg-info $(OUT) .pytest_cache .ruff_cache .hypothesis .benchmarks
	rm -f fusedaccum/*.so $(BUILD_STAMP) $(TOOLS_STAMP)
	find fusedaccum tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
