"""Every optimizer of torch with every set of options that torch's own tests list for it, run beside the bare one.

`python tests/optimizer_cases.py` writes what came out into README.md.
"""

from __future__ import annotations

import functools
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from test_trajectories import assert_same_run
from torch.testing._internal.common_optimizers import (
    _get_optim_inputs_including_global_cliquey_kwargs as torchs_own_cases,
)
from torch.testing._internal.common_optimizers import optim_db
from wrapper_helpers import DTYPES, make_params, make_windows, params_of, state_bits, train_stock, train_wrapped

from fusedaccum import FusedAccumOptimizer

STEPS, WINDOWS = 3, 2
UPDATES = ("wrapped", "fused")
FUSED = ("AdamW", "Adam", "SGD")
REFUSED = ("LBFGS", "SparseAdam")
EQUAL, REFUSED_HERE, TORCH_CANNOT = "equal", "refused", "torch cannot"
LOW = (torch.bfloat16, torch.float16)

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- optimizer table: begin -->", "<!-- optimizer table: end -->"


@dataclass(frozen=True)
class Case:
    """One line of torch's database. Cases are told apart by class and description."""

    name: str
    about: str
    options: dict[str, Any] = field(compare=False)

    def __str__(self):
        return f"{self.name}, {self.about}"

    @property
    def shapes(self):
        """Muon takes matrices only."""
        return [(8, 6), (5, 7)] if self.name == "Muon" else [(33,), (5, 7)]

    @property
    def can_fuse(self):
        return self.name in FUSED and not self.options.get("differentiable")

    def why_torch_cannot(self, dtype):
        """Why the bare optimizer is nothing to be equal to, or None."""
        if self.name == "SGD" and self.options.get("fused") and dtype in LOW and torchs_fused_sgd_stands_still(dtype):
            return (
                "on a CPU, SGD(fused=True) leaves whole vectors of bf16 and fp16 parameters as they are, and reads its "
                "momentum at wrong addresses (pytorch/pytorch#191763)"
            )
        return None

    def build(self, dtype, **changed):
        """The optimizer on fresh parameters: small ones, so that a step of 1e-3 shows in bf16 as well."""
        random = torch.Generator().manual_seed(7)
        start = [((torch.rand(s, generator=random) - 0.5) / 16).bfloat16() for s in self.shapes]
        params = make_params(start, dtype)
        if self.options.get("differentiable"):
            # torch itself refuses to write to a leaf that requires grad while it records.
            params = [p.requires_grad_(False) for p in params]
        return getattr(torch.optim, self.name)(params, **(deepcopy(self.options) | changed))


@functools.cache
def torchs_fused_sgd_stands_still(dtype) -> bool:
    p = torch.nn.Parameter(torch.ones(64, dtype=dtype))
    p.grad = torch.ones_like(p)
    torch.optim.SGD([p], lr=0.5, fused=True).step()
    return not torch.equal(p.detach(), torch.full_like(p, 0.5))


@functools.cache
def cases() -> tuple[Case, ...]:
    """What torch expands its database to for a CPU, and `foreach`, which it leaves out there although it runs."""
    found = []
    for info in optim_db:
        name = info.optim_cls.__name__
        for entry in torchs_own_cases("cpu", torch.float32, info):
            found.append(Case(name, entry.desc, entry.kwargs))
            flags = [f for f in info.supported_impls if entry.kwargs.get(f)]
            if "foreach" in info.supported_impls and not flags:
                found.append(Case(name, f"{entry.desc} & foreach", entry.kwargs | {"foreach": True}))
    return tuple(dict.fromkeys(found))


@functools.cache
def exact_windows(case, dtype):
    """Windows whose mean float32 holds exactly, whatever the rounding of a scale of 1/3, and bf16 and fp16 do not.

    Each gradient is 3 k / 2^e with an integer k < 86: float32(1/3) times it rounds to k / 2^e, and so does the sum, as
    nothing cancels. The micro-batches differ by a factor of 8, so that the mean has about 13 bits. Every third element
    is much smaller in the second window, or amsgrad would do nothing.
    """
    windows = make_windows(case.shapes, WINDOWS, STEPS, torch.float32)

    def exact(g, window, micro):
        value = 3 * (40 * g).round() / 2 ** (6 + 3 * micro)
        if window == 1:
            value.view(-1)[::3] /= 64
        return value.to(dtype)

    return [[[exact(g, k, i) for g in grads] for i, grads in enumerate(window)] for k, window in enumerate(windows)]


@functools.cache
def bare_run(case, dtype, grad_dtype):
    """The bare optimizer in `dtype`, fed the means of gradients of `grad_dtype`."""
    plain = {"fused": False} if case.why_torch_cannot(dtype) else {}
    optimizer = case.build(dtype, **plain)
    train_stock(optimizer, exact_windows(case, grad_dtype))
    return optimizer


def everything(optimizer):
    """Parameters, state and groups, by their bits."""
    params = params_of(optimizer)
    groups = [{k: state_bits(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return {
        "parameters": [state_bits(p) for p in params],
        "state": [state_bits(dict(optimizer.state[p])) for p in params],
        "groups": groups,
    }


@functools.cache
def outcome(case, dtype, update) -> str:
    """EQUAL, or REFUSED_HERE or TORCH_CANNOT with the reason, or what differs."""
    if update == "wrapped" and (reason := case.why_torch_cannot(dtype)):
        return f"{TORCH_CANNOT}: {reason}"
    inner = case.build(dtype)
    try:
        wrapper = FusedAccumOptimizer(inner, steps=STEPS, update=update)
    except (TypeError, ValueError) as error:
        return f"{REFUSED_HERE}: {error}"
    train_wrapped(wrapper, exact_windows(case, dtype))
    if wrapper.updates != WINDOWS:
        return f"{wrapper.updates} updates"
    stock = bare_run(case, dtype, dtype)
    if update == "fused":
        return beyond_the_budget(inner, stock, bare_run(case, torch.float64, dtype)) or EQUAL
    ours, theirs = everything(inner), everything(stock)
    different = [what for what in ours if ours[what] != theirs[what]]
    return f"other bits in {', '.join(different)}" if different else EQUAL


def beyond_the_budget(ours, stock, truth) -> str | None:
    """What in `ours` errs more than twice as much as `stock` and one rounding, or None.

    Stock torch has to be right itself, or the budget allows anything: two updates are worth two to four roundings.
    """
    for p, exact in zip(params_of(stock), params_of(truth), strict=True):
        allowed = 2 * torch.finfo(p.dtype).eps * exact.abs().max()
        if not (p.double() - exact).abs().max() <= allowed:
            return "stock torch is wrong"
    try:
        assert_same_run(ours, stock, truth)
    except AssertionError as error:
        return f"beyond the budget: {error}"
    return None


def cell(name, dtype, update) -> str:
    """How many option sets of a class came out equal, and how many did not; or that all were refused."""
    results = [outcome(case, dtype, update) for case in cases() if case.name == name]
    equal = results.count(EQUAL)
    wrong = len(results) - equal - sum(result.startswith((REFUSED_HERE, TORCH_CANNOT)) for result in results)
    if wrong:
        return f"{equal}, {wrong} wrong"
    return str(equal or ("-" if update == "fused" else "refused"))


def table() -> str:
    """The README's table, from the results."""
    short = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    heads = [f"{update}, {short[dtype]}" for update in UPDATES for dtype in DTYPES]
    lines = ["| PyTorch " + minor_version() + " | option sets | " + " | ".join(heads) + " |"]
    lines.append("|---|" + "---:|" * (len(heads) + 1))
    for name in sorted({case.name for case in cases()}, key=str.lower):
        count = sum(case.name == name for case in cases())
        counts = [cell(name, dtype, update) for update in UPDATES for dtype in DTYPES]
        lines.append(f"| `{name}` | {count} | " + " | ".join(counts) + " |")
    return "\n".join(lines)


def minor_version() -> str:
    return ".".join(torch.__version__.split(".")[:2])


def readme_parts() -> tuple[str, str, str]:
    """README.md before, inside and after the markers."""
    before, rest = README.read_text().split(BEGIN)
    inside, after = rest.split(END)
    return before, inside, after


if __name__ == "__main__":
    before, _, after = readme_parts()
    README.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}")
