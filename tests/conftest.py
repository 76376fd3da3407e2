"""Fixtures that every test file shares."""

from __future__ import annotations

import os

# Triton reads this when it is imported: its kernels run in its interpreter, on the CPU. With TRITON_INTERPRET=0 in the
# environment its tests on a GPU run, and those on the CPU cannot.
os.environ.setdefault("TRITON_INTERPRET", "1")
# And the frameworks this: models are made from configs, nothing is to be fetched.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import contextlib
import functools
import gc
import importlib
import importlib.metadata
import shutil
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType

import numpy as np
import pytest
import torch
from hypothesis import settings
from machine_code import Compiled, compile_sources

from fusedaccum import backends

# The operator tests run once for each line. One more backend or device is one more line. `emulated` is csrc/cuda
# executed on the CPU (tests/emulated.py), its threads in three orders.
TARGETS = (
    ("reference", "cpu"),
    ("triton", "cpu"),
    ("compiled", "cpu"),
    ("emulated forward", "cpu"),
    ("emulated reverse", "cpu"),
    ("emulated random", "cpu"),
    pytest.param(("compiled", "cuda"), marks=pytest.mark.gpu),
    pytest.param(("triton", "cuda"), marks=pytest.mark.gpu),
)

# The same examples at every run, unless tests/test_stateful.py is asked for many new ones. No deadline: the
# interpreter's first call is slow.
LONG = int(os.environ.get("FUSEDACCUM_EXAMPLES", "0"))
settings.register_profile("fusedaccum", deadline=None, derandomize=not LONG)
settings.load_profile("fusedaccum")


def patch_once_a_launch() -> None:
    """Have Triton's interpreter replace the builtins of triton.language once in a launch.

    It does so again at each call of a function inside a kernel, where they are replaced already, and reads every member
    of three modules and classes to find them: half of the time of the Triton tests.
    """
    with contextlib.suppress(ImportError):
        from triton import language as tl
        from triton.runtime import interpreter

        patch = getattr(interpreter, "_patch_lang", None)
        scope = getattr(interpreter, "_LangPatchScope", None)
        if patch is None or scope is None:
            return  # a Triton that does it otherwise

        @functools.cache
        def languages(function: FunctionType) -> list[ModuleType]:
            return [module for module in (tl, tl.core) if any(m is module for m in function.__globals__.values())]

        def patch_lang(function: FunctionType) -> object:
            is_done = not any(tl.core.is_builtin(language.load) for language in languages(function))
            return scope() if is_done else patch(function)

        interpreter._patch_lang = patch_lang


patch_once_a_launch()


# What decides whether a framework's tests pass, beside us.
FRAMEWORKS = ("torch", "accelerate", "transformers", "lightning", "pytorch-lightning", "triton", "numpy")


def pytest_report_header() -> str:
    return "versions: " + ", ".join(f"{name} {version_of(name)}" for name in FRAMEWORKS)


def version_of(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def why_no_gpu() -> str | None:
    """Why tests marked `gpu` cannot run, in words; None if they can."""
    if not torch.version.cuda:
        return "needs a GPU: this torch was built without CUDA"
    return None if torch.cuda.is_available() else "needs a GPU: torch finds no CUDA device"


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: a test that collects garbage need not look through them for half a second."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or extension modules report at exit that their objects were never freed


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := why_no_gpu()):
        pytest.skip(reason)


def backend_module(name: str, device: torch.device) -> ModuleType:
    """The module of a backend that must be able to serve `device`."""
    if name.startswith("emulated"):
        module = importlib.import_module("emulated")
        module.in_order(name.split()[1])
        return module
    reason = backends.why_not(name, device)
    if name == "triton" and device.type == "cuda" and reason and "TRITON_INTERPRET" in reason:
        pytest.skip(f"needs TRITON_INTERPRET=0: {reason}")
    if reason is not None:
        pytest.fail(f"backend {name} cannot serve {device}: {reason}")
    return backends.select(device, name)


@pytest.fixture(params=TARGETS, ids="-".join)
def backend(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """A backend's module; tensors that the test makes are on its device. One that cannot be had is a failure."""
    name, device_name = request.param
    device = torch.device(device_name)
    module = backend_module(name, device)
    torch.manual_seed(0)
    # Triton's interpreter computes with numpy, which warns of infinities and NaNs that the tests want.
    with device, np.errstate(all="ignore"):
        yield module


@pytest.fixture(scope="session")
def compiled_by_nvcc(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[Compiled]]:
    """csrc/cuda for an architecture, compiled when the first test asks for it."""
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on PATH: the CUDA C++ kernels cannot be compiled here")
    folder = tmp_path_factory.mktemp("nvcc")
    return functools.cache(lambda architecture: compile_sources(architecture, folder))
