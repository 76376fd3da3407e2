"""What an accumulating optimizer means, in float64 and in few words: the model that tests/stateful.py holds against.

Nothing here is of the package. A parameter is a vector. An error beside a value says how far float32, or the
parameter's dtype, may be off: it counts roundings. After each update the machine hands back what it read
(`Param.adopt`), so that an error speaks of one update.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

FLOAT32 = torch.finfo(torch.float32).eps / 2
UNKNOWN = object()  # a norm of which nothing is promised


@dataclass(frozen=True)
class Count:
    """The item count of a micro-batch. word: "mean_of", "sum_of", or None without one. on_device: nobody reads it."""

    word: str | None
    items: float
    on_device: bool

    @property
    def drops(self) -> bool:
        """Whether its micro-batch counts nothing: its gradients may hold anything."""
        return self.word is not None and self.items == 0

    @property
    def scale(self) -> float:
        """What its gradients are multiplied by."""
        return {None: 1.0, "mean_of": self.items, "sum_of": float(self.items > 0)}[self.word]


NO_COUNT = Count(None, 0, False)


def rounding(value: Tensor, dtype: torch.dtype) -> Tensor:
    """How far one rounding to `dtype` may move `value`."""
    info = torch.finfo(dtype)
    return info.eps / 2 * value.abs() + info.smallest_normal * info.eps


def gap(value: Tensor, dtype: torch.dtype) -> Tensor:
    """How far the neighbours of `value` in `dtype` are apart; 0 at 0."""
    return torch.where(value != 0, torch.finfo(dtype).eps * 2.0 ** (torch.frexp(value).exponent - 1), 0.0)


@dataclass(eq=False)
class Param:
    """One parameter: what is read of it, what its window holds, what its optimizer remembers."""

    value: Tensor
    dtype: torch.dtype
    group: int
    error: Tensor | float = 0.0
    grad: Tensor | None = None
    sum: Tensor | None = None  # of count * gradient, not divided
    size: Tensor | float = 0.0  # sum of the absolute values of the same
    moments: dict[str, Tensor] = field(default_factory=dict)
    moment_errors: dict[str, Tensor] = field(default_factory=dict)
    count: int = 0  # updates
    master: Tensor | None = None
    master_error: Tensor | float = 0.0
    rounded: Tensor | None = None  # what was read when the master was last known to belong to it

    def follow(self) -> None:
        """The master takes up what was written to the parameter; elements that were not changed keep theirs."""
        if self.master is None:
            self.master, self.master_error = self.value, torch.zeros_like(self.value)
        else:
            same = (self.value == self.rounded) | (self.value.isnan() & self.rounded.isnan())
            self.master = torch.where(same, self.master, self.value)
            self.master_error = torch.where(same, self.master_error, 0.0)
        self.rounded = self.value

    def add(self, part: Tensor) -> None:
        self.sum = part if self.sum is None else self.sum + part
        self.size = self.size + part.abs()

    def adopt(self, value: Tensor, moments: dict[str, Tensor]) -> None:
        """Go on from what was read, now that it was judged."""
        if self.master is not None and self.rounded is None:  # just updated
            self.rounded = value
        self.value, self.error = value, 0.0
        self.moments, self.moment_errors = moments, {}


def sgd(p: Param, o: dict, start: Tensor, g: Tensor, dg: Tensor, unit: float) -> tuple[Tensor, Tensor]:
    """torch.optim.SGD: the new value and its error, counted in roundings of `unit`; sets the moment."""
    grad = g + o["weight_decay"] * start
    size = g.abs() + o["weight_decay"] * start.abs()
    error = dg + 2 * unit * size
    if o["momentum"]:
        old = p.moments.get("momentum_buffer")
        if old is not None:
            keep, take = o["momentum"], 1 - o["dampening"]
            grad = keep * old + take * grad
            error = take * error + 3 * unit * (keep * old.abs() + take * size)
        p.moments, p.moment_errors = {"momentum_buffer": grad}, {"momentum_buffer": error}
    return start - o["lr"] * grad, o["lr"] * error + 2 * unit * (start.abs() + o["lr"] * grad.abs())


def adamw(p: Param, o: dict, start: Tensor, g: Tensor, dg: Tensor, unit: float) -> tuple[Tensor, Tensor]:
    """torch.optim.AdamW, as `sgd`."""
    beta1, beta2 = o["betas"]
    m, v = (p.moments.get(name, torch.zeros_like(g)) for name in ("exp_avg", "exp_avg_sq"))
    dm = (1 - beta1) * dg + 3 * unit * (m.abs() + g.abs())
    m = m + (1 - beta1) * (g - m)
    dv = (1 - beta2) * (2 * g.abs() * dg + dg * dg) + 4 * unit * (beta2 * v + (1 - beta2) * g * g)
    dv = dv + rounding(torch.zeros_like(v), p.dtype)
    v = beta2 * v + (1 - beta2) * g * g
    p.moments, p.moment_errors = {"exp_avg": m, "exp_avg_sq": v}, {"exp_avg": dm, "exp_avg_sq": dv}
    correct1, correct2 = 1 - beta1**p.count, math.sqrt(1 - beta2**p.count)
    below = v.sqrt() / correct2 + o["eps"]
    d_below = torch.minimum(dv / v.sqrt(), dv.sqrt()) / correct2 + 3 * unit * below
    rate = o["lr"] / correct1
    change = rate * m / below
    error = rate * (dm / below + m.abs() * d_below / below**2) + 4 * unit * change.abs() + 3 * unit * start.abs()
    return start - o["lr"] * o["weight_decay"] * start - change, error


class Model:
    """One wrapped optimizer: parameters, parameter groups, the open window, and what was counted.

    rule: `sgd` or `adamw`. groups: hyper-parameters. options: reduction, max_norm, nonfinite, update, master_weights,
    state_dtype, rounding, amp_scaling, as the wrapper has them.
    """

    def __init__(self, rule, params: list[Param], groups: list[dict], steps: int, options: dict) -> None:
        self.rule, self.params, self.groups = rule, params, groups
        self.wrap(steps, options)

    def wrap(self, steps: int, options: dict) -> None:
        """A new wrapper around the same optimizer."""
        self.steps, self.options = steps, options
        self.updates = self.skipped_windows = self.skipped_micro_batches = 0
        self.norm, self.norm_error = None, 0.0
        self.seen = 0  # updates that the schedule has followed
        self.base, self.loaded = 0, False  # updates when they were last loaded; whether that was behind its back
        self.drawn = 0, 0  # for how many updates random numbers may have been drawn: at least, at most
        for p in self.params:
            p.master = p.rounded = None
        self.reset()

    def reset(self) -> None:
        self.calls, self.left_out, self.items, self.weighted, self.offered = 0, 0, 0.0, None, False
        self.length = None
        self.announced = self.begun = None
        self.passes = 0
        self.updated = False
        for p in self.params:
            p.sum, p.size = None, 0.0

    # One micro-batch

    def begin(self) -> None:
        """Gradients of a micro-batch are folded before its step(): begun is what was said of it by then."""
        if self.begun is None:
            self.length = self.length_now
            self.begun = self.announced or NO_COUNT

    def fold_now(self, p: Param, grad: Tensor) -> None:
        """A gradient that a backward has folded, of the micro-batch that is begun."""
        self.offered = True
        if not self.begun.drops:
            p.add(self.begun.scale * grad)

    @property
    def said(self) -> Count | None:
        """The count that the coming step() must not give again."""
        return self.begun if self.begun is not None and self.begun.word else self.announced

    @property
    def counts_items(self) -> bool:
        return bool(self.weighted) if self.calls else self.begun is not None and self.begun.word is not None

    def will_raise(self, count: Count) -> bool:
        return self.options["nonfinite"] == "raise" and not count.drops and not self.is_finite()

    def is_finite(self) -> bool:
        return all(bool(p.grad.isfinite().all()) for p in self.params if p.grad is not None)

    def fold(self, count: Count, overflowed: bool = False) -> None:
        """overflowed: as a GradScaler says, which scaled the loss."""
        self.length = self.length_now
        self.calls += 1
        self.weighted = count.word is not None
        self.updated, self.announced, self.begun = False, None, None
        looks = self.options["nonfinite"] == "skip_micro"
        self.offered |= any(p.grad is not None for p in self.params)
        if not count.drops and (overflowed or (looks and not self.is_finite())):
            self.left_out += 1
            self.skipped_micro_batches += 1
        else:
            self.items += count.items
            for p in self.params if not count.drops else ():
                if p.grad is not None:
                    p.add(count.scale * p.grad)
        for p in self.params:
            p.grad = None

    @property
    def full(self) -> bool:
        return self.calls >= self.length

    @property
    def length_now(self) -> int:
        """Of the open window, or of the one to come, which `steps` may say as a function of the coming update."""
        if self.calls or self.begun is not None:
            return self.length
        return self.steps(self.updates) if callable(self.steps) else self.steps

    @property
    def will_update(self) -> bool:
        return self.calls + 1 >= self.length_now

    def held(self, p: Param) -> tuple[Tensor, Tensor]:
        """What `master_grad` shows inside a window, and its error."""
        whole = self.counts_items or self.options["reduction"] == "sum"
        share = 1.0 if whole else 1.0 / self.length_now
        return self._shared(p, share)

    def mean(self, p: Param) -> tuple[Tensor, Tensor]:
        """What `master_grad` shows in a step pre-hook."""
        divisor = self.divisor()
        return self._shared(p, 1.0 / divisor if divisor else 0.0)

    def _shared(self, p: Param, share: float) -> tuple[Tensor, Tensor]:
        if p.sum is None or share == 0.0:
            return torch.zeros_like(p.value), torch.zeros_like(p.value)
        return p.sum * share, FLOAT32 * (2 * (self.calls + self.passes) + 4) * p.size * share

    # The boundary

    def divisor(self) -> float:
        kept = self.calls - self.left_out
        if self.weighted:
            return self.items
        return kept if self.options["reduction"] == "mean" else float(kept > 0)

    def close(self, edit: tuple[Param, float] | None = None) -> None:
        """The window ends. edit: a step pre-hook multiplies the mean of a parameter by a number.

        fired: how often step hooks were called, None where nothing is promised.
        """
        touched = [p for p in self.params if p.sum is not None]
        self.fired = 0
        before = self.updates
        if touched and self.divisor() > 0:
            self._update(touched, edit)
        else:
            skipped = self.offered or (self.weighted and self.items == 0)
            self.reset()
            self.norm, self.norm_error = 0.0, 0.0
            if skipped:  # else it held no gradient, and is neither an update nor left out
                self.skipped_windows += 1
                self.fired = None
        self.drawn = self.drawn[0] + self.updates - before, self.drawn[1] + 1

    def _update(self, touched: list[Param], edit: tuple[Param, float] | None) -> None:
        means = {p: self.mean(p) for p in touched}
        finite = all(bool(g.isfinite().all()) for g, _ in means.values())
        skipped = not finite and self.options["nonfinite"] in ("skip_window", "skip_micro")
        self.fired = int(not skipped or self.options["update"] == "fused")
        if self.fired and edit is not None and edit[0] in means:
            g, dg = means[edit[0]]
            means[edit[0]] = (g * edit[1], dg * abs(edit[1]) + FLOAT32 * (g * edit[1]).abs())
        self.norm = math.sqrt(sum(float((g * g).sum()) for g, _ in means.values()))
        self.norm_error = math.sqrt(sum(float((d * d).sum()) for _, d in means.values())) + 4 * FLOAT32 * self.norm
        clip, clip_error = self._clip()
        if not skipped:
            for p, (g, dg) in means.items():
                self._apply(p, g * clip, dg * clip + g.abs() * clip * clip_error)
        self.reset()
        self.updated = not skipped
        self.updates += not skipped
        self.skipped_windows += skipped

    def _clip(self) -> tuple[float, float]:
        """The factor of torch.nn.utils.clip_grad_norm_, and its relative error."""
        if self.options["max_norm"] is None:
            return 1.0, 4 * FLOAT32
        factor = self.options["max_norm"] / (self.norm + 1e-6)
        error = self.norm_error / self.norm if 0 < self.norm < math.inf else 0.0
        return (1.0 if factor > 1 else factor), 4 * FLOAT32 + error  # a norm that is not a number stays one

    def _apply(self, p: Param, g: Tensor, dg: Tensor) -> None:
        fused = self.options["update"] == "fused"
        unit = FLOAT32 if fused else torch.finfo(p.dtype).eps / 2
        if not fused:
            dg = dg + rounding(g, p.dtype)
        masters = self.options["master_weights"] and p.dtype != torch.float32
        if masters:
            p.follow()
        start, off = (p.master, p.master_error) if masters else (p.value, 0.0)
        p.count += 1
        options = self.groups[p.group]
        value, error = self.rule(p, options, start, g, dg, unit)
        error = error + off * (1 + options["lr"] * options["weight_decay"])
        for name, moment in p.moments.items():
            p.moment_errors[name] = p.moment_errors[name] + rounding(moment, self.options["state_dtype"] or p.dtype)
        if masters:
            p.master, p.master_error, p.rounded = value, error, None
        stochastic = self.options["rounding"] == "stochastic" and p.dtype == torch.bfloat16
        p.value = value
        p.error = error + (gap(value.abs() + error, p.dtype) if stochastic else rounding(value, p.dtype))

    # State

    COUNTS = (
        "calls",
        "left_out",
        "items",
        "weighted",
        "offered",
        "updates",
        "skipped_windows",
        "skipped_micro_batches",
        "drawn",
        "begun",
        "passes",
    )
    OF_STATE = ("moments", "count")
    OF_WINDOW = ("sum", "size", "master", "master_error", "rounded")

    def save(self) -> dict:
        for p in self.params:
            if p.master is not None:
                p.follow()
        per_param = [{name: getattr(p, name) for name in (*self.OF_STATE, *self.OF_WINDOW)} for p in self.params]
        return copy.deepcopy(
            {
                "counts": {name: getattr(self, name) for name in self.COUNTS},
                "params": per_param,
                "groups": self.groups,
                "length": self.length_now,
            }
        )

    def has_news(self) -> bool:
        """Whether there are updates that the schedule has not followed. Loading is none, whatever count it brings."""
        seen = self.seen
        if self.updates < seen or self.loaded:
            seen = min(seen, self.base)
        self.seen, self.loaded = self.updates, False
        return self.updates > seen

    def load(self, saved: dict, bare: bool) -> None:
        """bare: only what the optimizer itself would save."""
        saved = copy.deepcopy(saved)
        self.reset()
        self.groups[:] = saved["groups"]
        self.drawn = 0, 0
        for p, entry in zip(self.params, saved["params"], strict=True):
            p.master = p.rounded = None
            for name in self.OF_STATE if bare else (*self.OF_STATE, *self.OF_WINDOW):
                setattr(p, name, entry[name])
        if not bare:
            length = self.steps(saved["counts"]["updates"]) if callable(self.steps) else self.steps
            for name, value in saved["counts"].items():
                setattr(self, name, value)
            self.length = length
            self.base, self.loaded = self.updates, True
        self.norm = UNKNOWN
