"""Backends: modules that implement `fusedaccum.ops.Backend`, and the one function that chooses among them."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType

import torch

NAMES = ("compiled", "triton", "reference")


def why_not(name: str, device: torch.device) -> str | None:
    """The reason why backend `name` cannot serve tensors on `device`, in words; None if it can."""
    try:
        module = importlib.import_module(f"fusedaccum.backends.{name}")
    except ImportError as error:
        return str(error)
    return module.why_not(device)


def warn_that_it_is_slow(device: torch.device) -> None:
    """Say that nothing faster than plain torch was found, and why: pip hides what a build without a compiler says."""
    reasons = "; ".join(f"{name}: {why_not(name, device)}" for name in NAMES if name != "reference")
    warnings.warn(
        f"fusedaccum runs on its slow `reference` backend on {device} ({reasons}); backend='reference' says that you "
        "want that",
        UserWarning,
        stacklevel=3,
    )


def select(device: torch.device, name: str = "auto") -> ModuleType:
    """The backend module for tensors on `device`.

    name: "auto" takes the first of `NAMES` that can serve `device`; any other name must be able to.

    Raises ValueError for an unknown name, RuntimeError with the reason for one that cannot serve `device`.
    """
    if name not in ("auto", *NAMES):
        raise ValueError(f"backend={name!r} is not known; use one of {('auto', *NAMES)}")
    for candidate in NAMES if name == "auto" else (name,):
        reason = why_not(candidate, device)
        if reason is None:
            if name == "auto" and candidate == "reference":
                warn_that_it_is_slow(device)
            return importlib.import_module(f"fusedaccum.backends.{candidate}")
    raise RuntimeError(f"backend={name!r} cannot serve {device}: {reason}; backend='auto' takes one that can")
