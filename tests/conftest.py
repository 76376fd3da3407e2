"""Fixtures that every test file shares."""

from __future__ import annotations

import os

# Triton reads this when it is imported: from here on its kernels run in its interpreter, on the CPU.
os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import settings

from fusedaccum import backends

# The operator tests run once for each line. One more backend or device is one more line.
TARGETS = (
    ("reference", "cpu"),
    ("triton", "cpu"),
    ("compiled", "cpu"),
)

# No deadline: the interpreter's first call is slow.
settings.register_profile("fusedaccum", deadline=None)
settings.load_profile("fusedaccum")


@pytest.fixture(params=TARGETS, ids="-".join)
def backend(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """A backend's module; tensors that the test makes are on its device. One that cannot be had is a failure."""
    name, device_name = request.param
    device = torch.device(device_name)
    reason = backends.why_not(name, device)
    if reason is not None:
        pytest.fail(f"backend {name} cannot serve {device}: {reason}")
    torch.manual_seed(0)
    # Triton's interpreter computes with numpy, which warns of infinities and NaNs that the tests want.
    with device, np.errstate(all="ignore"):
        yield backends.select(device, name)
