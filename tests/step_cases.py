"""What the tests of the update rules share: options, the rules in float64, stock torch, a state to run them on."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from op_cases import TINY, UNIT, Buffer, guards_intact, place, same_bits
from torch import Tensor

from fusedaccum.ops import ADAM_COLUMNS, SGD_COLUMNS

ADAM = dict(lr=0.05, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, decoupled=0, amsgrad=0, maximize=0)
SGD = dict(lr=0.05, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=0, maximize=0)

# One group each, the fullest first. beta2 = 0.5 makes v fall now and then, so that a maximum of it shows.
ADAM_GROUPS = [
    ADAM | dict(amsgrad=1, beta1=0.8, beta2=0.5, maximize=1, weight_decay=0.2, decoupled=1, eps=1e-2),
    ADAM | dict(amsgrad=1, beta1=0.8, beta2=0.5, maximize=1, weight_decay=0.2),
    ADAM | dict(weight_decay=0.1, decoupled=1),
    ADAM,
    ADAM | dict(weight_decay=0.1),
    ADAM | dict(maximize=1, lr=0.02),
    ADAM | dict(amsgrad=1, beta2=0.5),
    ADAM | dict(beta1=0.5, beta2=0.7, eps=1e-2),
    ADAM | dict(beta1=0.0, lr=0.3, eps=0.1),
]
SGD_GROUPS = [
    SGD | dict(momentum=0.8, nesterov=1, weight_decay=0.2, maximize=1),
    SGD | dict(momentum=0.7, dampening=0.5, weight_decay=0.2, maximize=1),
    SGD | dict(momentum=0.9),
    SGD,
    SGD | dict(weight_decay=0.1),
    SGD | dict(maximize=1, lr=0.3),
    SGD | dict(momentum=0.9, dampening=0.3),
    SGD | dict(momentum=0.8, nesterov=1),
]

# The lists of each rule, apart from params and masters, in the operator's order.
STATE = {"adam": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), "sgd": ("momentum_buffer",)}
PLAIN = {"adam": ADAM, "sgd": SGD}
GROUPS = {"adam": ADAM_GROUPS, "sgd": SGD_GROUPS}
COLUMNS = {"adam": ADAM_COLUMNS, "sgd": SGD_COLUMNS}


def keeps(rule: str, group: dict[str, float], name: str) -> bool:
    """Whether the optimizer of a group has this state."""
    if name == "max_exp_avg_sq":
        return bool(group["amsgrad"])
    return rule == "adam" or group["momentum"] != 0


def exact_adam(group: dict[str, float], step: int, g: Tensor, p: Tensor, state: dict[str, Tensor]) -> Tensor:
    """One update in float64, in the terms of torch.optim.Adam; changes `state`, returns the new p."""
    g = -g if group["maximize"] else g
    if group["decoupled"]:
        p = p * (1 - group["lr"] * group["weight_decay"])
    else:
        g = g + group["weight_decay"] * p
    state["exp_avg"] = group["beta1"] * state["exp_avg"] + (1 - group["beta1"]) * g
    state["exp_avg_sq"] = group["beta2"] * state["exp_avg_sq"] + (1 - group["beta2"]) * g**2
    square = state["exp_avg_sq"]
    if group["amsgrad"]:
        square = state["max_exp_avg_sq"] = torch.maximum(state["max_exp_avg_sq"], square)
    m_hat = state["exp_avg"] / (1 - group["beta1"] ** step)
    v_hat = square / (1 - group["beta2"] ** step)
    return p - group["lr"] * m_hat / (v_hat.sqrt() + group["eps"])


def exact_sgd(group: dict[str, float], step: int, g: Tensor, p: Tensor, state: dict[str, Tensor]) -> Tensor:
    g = (-g if group["maximize"] else g) + group["weight_decay"] * p
    if group["momentum"]:
        before = state["momentum_buffer"]
        state["momentum_buffer"] = g if step == 1 else group["momentum"] * before + (1 - group["dampening"]) * g
        g = g + group["momentum"] * state["momentum_buffer"] if group["nesterov"] else state["momentum_buffer"]
    return p - group["lr"] * g


EXACT = {"adam": exact_adam, "sgd": exact_sgd}


def stock_optimizer(rule: str, group: dict[str, float], p: Tensor) -> torch.optim.Optimizer:
    if rule == "sgd":
        flags = dict(nesterov=bool(group["nesterov"]), maximize=bool(group["maximize"]))
        numbers = {name: group[name] for name in ("lr", "momentum", "dampening", "weight_decay")}
        return torch.optim.SGD([p], **numbers, **flags, foreach=False)
    kind = torch.optim.AdamW if group["decoupled"] else torch.optim.Adam
    flags = dict(amsgrad=bool(group["amsgrad"]), maximize=bool(group["maximize"]))
    numbers = {name: group[name] for name in ("lr", "eps", "weight_decay")}
    return kind([p], betas=(group["beta1"], group["beta2"]), **numbers, **flags, foreach=False)


class Stock:
    """torch.optim on one parameter at a time, from any state, in one dtype."""

    def __init__(self, rule: str, p: Tensor, group: dict[str, float], step: int, state: dict[str, Tensor]) -> None:
        self.p = torch.nn.Parameter(p.clone())
        self.optimizer = stock_optimizer(rule, group, self.p)
        if step > 1:
            held = {name: value.clone() for name, value in state.items() if keeps(rule, group, name)}
            if rule == "adam":
                held["step"] = torch.tensor(float(step - 1), device="cpu")
            self.optimizer.state[self.p].update(held)

    def update(self, g: Tensor) -> None:
        self.p.grad = g.to(self.p.dtype)
        self.optimizer.step()

    def values(self) -> dict[str, Tensor]:
        state = self.optimizer.state[self.p]
        return {"p": self.p.detach()} | {name: state[name] for name in state if name != "step"}


class Update:
    """The arguments of `adam` or `sgd`: segment k follows group k, whose row in `hyper` is another than k.

    Every tensor is guarded and starts off its alignment. State that a group does not keep is empty, as is a master that
    there is not.
    """

    def __init__(
        self,
        rule: str,
        sizes: Sequence[int],
        steps: Sequence[int],
        param: torch.dtype,
        state: torch.dtype,
        master: bool = False,
        groups: Sequence[dict[str, float]] | None = None,
    ) -> None:
        self.rule, self.groups = rule, (groups or GROUPS[rule])[: len(sizes)]
        self.buffer = Buffer(sizes)
        count = len(sizes)
        rows = [[float(group[name]) for name in COLUMNS[rule]] for group in reversed(self.groups)]
        self.hyper = torch.tensor(rows, dtype=torch.float64)
        self.rows = torch.arange(count - 1, -1, -1)
        self.steps = torch.tensor(steps, dtype=torch.float32)
        self.scalars = torch.tensor([1.0, 0.0, 0.0])
        self.random: Tensor | None = None
        start = [torch.randn(n) for n in sizes]
        self.params = [place(p.to(param), k % 17) for k, p in enumerate(start)]
        self.masters = [place(p, (k + 3) % 17) for k, p in enumerate(start)] if master else []
        self.state = {
            name: [
                self._moment(name, group, n, step, state, (k + 5 * i) % 17)
                for k, (group, n, step) in enumerate(zip(self.groups, sizes, steps, strict=True))
            ]
            for i, name in enumerate(STATE[rule])
        }

    def _moment(
        self, name: str, group: dict[str, float], numel: int, step: int, dtype: torch.dtype, offset: int
    ) -> Tensor:
        if not keeps(self.rule, group, name):
            return torch.zeros(0, dtype=dtype)
        if name == "momentum_buffer":
            # At its first update a buffer is written without being read.
            values = torch.full((numel,), torch.nan) if step == 1 else torch.randn(numel)
            return place(values.to(dtype), offset)
        values = torch.rand(numel) + 0.1 if name.endswith("sq") else torch.randn(numel) / 4
        return place((torch.zeros(numel) if step == 1 else values).to(dtype), offset)

    def lists(self) -> list[list[Tensor]]:
        return [self.params, *self.state.values(), self.masters]

    def run(self, backend: ModuleType, zero: bool = False) -> None:
        rest = (self.scalars, self.steps, self.rows, self.hyper, *self.lists(), self.random, zero)
        getattr(backend, self.rule)(*self.buffer.step_plan(), *rest)

    def source(self, k: int) -> Tensor:
        """What the rule reads p from."""
        return self.masters[k] if self.masters else self.params[k]

    def state_of(self, k: int) -> dict[str, Tensor]:
        return {name: tensors[k] for name, tensors in self.state.items()}

    def values(self, k: int) -> dict[str, Tensor]:
        kept = {name: value for name, value in self.state_of(k).items() if keeps(self.rule, self.groups[k], name)}
        return {"p": self.source(k), **kept}

    def tensors(self) -> list[Tensor]:
        """Everything that an operator could write."""
        fixed = [self.buffer.flat, self.buffer.marks, self.buffer.partials, self.buffer.segments, self.buffer.tiles]
        fixed += [self.scalars, self.steps, self.rows, self.hyper]
        return fixed + [tensor for tensors in self.lists() for tensor in tensors]

    def check_surroundings(self) -> None:
        assert self.buffer.padding_intact()
        assert all(guards_intact(tensor) for tensors in self.lists() for tensor in tensors if tensor.numel())
        for k, master in enumerate(self.masters):
            assert same_bits(self.params[k], master.to(self.params[k].dtype)), f"parameter {k} is not its master"


class Exact:
    """One segment's trajectory in float64, and the largest magnitudes that its values have had."""

    def __init__(self, rule: str, p: Tensor, group: dict[str, float], step: int, state: dict[str, Tensor]) -> None:
        self.group, self.step, self.rule = group, step, rule
        self.now = {name: value.double() for name, value in state.items() if keeps(rule, group, name)}
        self.p = p.double()
        self.scale = {name: value.abs().nan_to_num() for name, value in self.now.items()}
        self.scale["p"] = self.p.abs() + group["lr"]

    def update(self, g: Tensor) -> None:
        self.p = EXACT[self.rule](self.group, self.step, g.double(), self.p, self.now)
        self.step += 1
        for name, value in self.values().items():
            self.scale[name] = torch.maximum(self.scale[name], value.abs())

    def values(self) -> dict[str, Tensor]:
        return {"p": self.p, **self.now}


def check_against_stock(update: Update, exact: list[Exact], stock: list[Stock]) -> None:
    """Each element of ours errs at most twice as much as stock torch's worst, plus one rounding of how it is stored.

    Errors are counted in units of the largest magnitude that the value had on its way (for p: plus the learning rate,
    the size of a step), so that one number speaks for elements of all magnitudes.
    """
    for name in {name for one in exact for name in one.values()}:
        segments = [k for k, one in enumerate(exact) if name in one.values()]
        worst = max(_relative_error(exact[k], name, stock[k].values()[name]) for k in segments)
        for k in segments:
            ours = update.values(k)[name]
            got = _relative_error(exact[k], name, ours, TINY[ours.dtype])
            assert got <= 2 * worst + UNIT[ours.dtype], f"{name} of group {update.groups[k]}: {got} against {worst}"


def _relative_error(exact: Exact, name: str, values: Tensor, below: float = 0.0) -> float:
    """The largest error of `values` over its scale; errors up to `below` are those of one rounding to a subnormal."""
    if not values.numel():
        return 0.0
    assert values.isfinite().all()
    error = (values.double() - exact.values()[name]).abs() - below
    return (error.clamp_min(0) / exact.scale[name].clamp_min(2.0**-126)).max().item()
