"""Update rules: reading a `torch.optim` instance, so that a kernel can do what its `step()` would.

The state of the fused update is the wrapped optimizer's own: `optimizer.state[p]` holds what torch would put there,
under the same keys, and a state that somebody replaced, loaded or cleared is seen at the next update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import SGD, Adam, AdamW, Optimizer

from fusedaccum.flat_buffer import FLOAT_DTYPES, FlatBuffer, to_device
from fusedaccum.local import like, local
from fusedaccum.options import parameters


class AdamRule:
    """`torch.optim.Adam` and `torch.optim.AdamW`."""

    name = "adam"
    slots = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    counts_steps = True

    @staticmethod
    def row(group: dict[str, Any]) -> list[Any]:
        """One row of `hyper`, in the order of `ops.ADAM_COLUMNS`: numbers or tensors of one element."""
        beta1, beta2 = group["betas"]
        flags = (group["decoupled_weight_decay"], group["amsgrad"], group["maximize"])
        return [group["lr"], beta1, beta2, group["eps"], group["weight_decay"], *map(float, flags)]

    @staticmethod
    def slots_of(group: dict[str, Any]) -> tuple[str, ...]:
        """The entries of `state[p]` that hold a tensor of the parameter's shape."""
        return AdamRule.slots if group["amsgrad"] else AdamRule.slots[:2]

    @staticmethod
    def step_count(state: dict[str, Any]) -> float:
        """Updates that a parameter with this state has seen."""
        return float(state["step"]) if "step" in state else 0.0


class SGDRule:
    """`torch.optim.SGD`. It keeps no step count; ours says only whether a momentum buffer has been started."""

    name = "sgd"
    slots = ("momentum_buffer",)
    counts_steps = False

    @staticmethod
    def row(group: dict[str, Any]) -> list[Any]:
        """One row of `hyper`, in the order of `ops.SGD_COLUMNS`."""
        flags = (group["nesterov"], group["maximize"])
        return [group["lr"], group["momentum"], group["dampening"], group["weight_decay"], *map(float, flags)]

    @staticmethod
    def slots_of(group: dict[str, Any]) -> tuple[str, ...]:
        return SGDRule.slots if group["momentum"] != 0 else ()

    @staticmethod
    def step_count(state: dict[str, Any]) -> float:
        return 1.0 if state.get("momentum_buffer") is not None else 0.0


Rule = type[AdamRule] | type[SGDRule]

RULES: dict[type, Rule] = {AdamW: AdamRule, Adam: AdamRule, SGD: SGDRule}


def why_not_fused(optimizer: Optimizer, more: Sequence[Tensor] = ()) -> str | None:
    """The reason why `optimizer`'s update cannot be fused, in words that complete "because"; None if it can.

    more: parameters to judge along with the optimizer's own, of which frozen ones are left alone.

    Exactly AdamW, Adam and SGD are fused: a subclass may override `step`.
    """
    if type(optimizer) not in RULES:
        return f"only exactly AdamW, Adam and SGD are fused and this is {type(optimizer).__name__}"
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return "a parameter group is differentiable=True"
        for value in RULES[type(optimizer)].row(group):
            if isinstance(value, Tensor) and value.requires_grad:
                return "a hyper-parameter tensor requires grad"
    params = [p for p in parameters(optimizer) if p.requires_grad or p.grad is not None]
    judged = set(map(id, params))
    params += [p for p in {id(p): p for p in more}.values() if id(p) not in judged]
    for p in params:
        if p.dtype not in FLOAT_DTYPES:
            return f"a parameter is {p.dtype}, and float32, bfloat16 and float16 are fused"
    if share_storage(params):
        return "two parameters share storage, which torch updates one after the other"
    return None


def share_storage(params: list[Tensor]) -> bool:
    """Whether two of `params` overlap in memory, or one is listed twice. Judged by address ranges."""
    ranges = []
    for p in map(local, params):
        if is_lazy(p) or p.numel() == 0 or p.device.type == "meta":
            continue
        span = sum((size - 1) * abs(stride) for size, stride in zip(p.shape, p.stride(), strict=True)) + 1
        start = p.data_ptr()
        if start != 0:
            ranges.append((str(p.device), start, start + span * p.element_size()))
    ranges.sort()
    return any(a[0] == b[0] and b[1] < a[2] for a, b in pairwise(ranges))


class HyperTable:
    """The hyper-parameters of all groups on one device, float64[G, C], written only where they changed."""

    def __init__(self, rule: Rule, device: torch.device) -> None:
        self.rule = rule
        self.device = device
        self.rows: list[list[float]] = []
        self.tensor = torch.empty(0)

    def read(self, groups: list[dict[str, Any]]) -> Tensor:
        """The table for `groups`. A tensor on a device is copied without a sync, one on the CPU is read."""
        rows, on_device = self._rows(groups)
        if rows != self.rows:
            self.tensor = to_device(torch.tensor(rows, dtype=torch.float64, device="cpu"), self.device)
            self.rows = rows
        for g, c, value in on_device:
            self.tensor[g, c].copy_(value.detach().reshape(()))
        return self.tensor

    def is_current(self, groups: list[dict[str, Any]]) -> bool:
        """Whether the table holds the groups' numbers; tensors on this device are read at every update."""
        return self._rows(groups)[0] == self.rows

    def _rows(self, groups: list[dict[str, Any]]) -> tuple[list[list[float]], list[tuple[int, int, Tensor]]]:
        """The groups' numbers, and (row, column, tensor) of what only the device knows."""
        rows, on_device = [], []
        for g, group in enumerate(groups):
            row = self.rule.row(group)
            for c, value in enumerate(row):
                if isinstance(value, Tensor) and (value.device == self.device or value.device.type != "cpu"):
                    on_device.append((g, c, value))
                    row[c] = 0.0
                else:
                    row[c] = float(value)
            rows.append(row)
        return rows, on_device


class OptimizerState:
    """`optimizer.state` as lists of tensors, one entry a segment, for the parameters of one flat buffer."""

    def __init__(self, rule: Rule, optimizer: Optimizer, buffer: FlatBuffer, dtype: torch.dtype | None) -> None:
        self.rule = rule
        self.optimizer = optimizer
        self.buffer = buffer
        self.dtype = dtype
        # What the kernel gets, and the tensor under the same key in optimizer.state: not the same object where the
        # parameter is not row-major.
        self.lists = {slot: [buffer.absent] * len(buffer.params) for slot in rule.slots}
        self.known: dict[str, list[Tensor | None]] = {slot: [None] * len(buffer.params) for slot in rule.slots}
        self.step_views = list(buffer.steps.unbind()) if rule.counts_steps else []
        self.entries: list[dict[str, Any]] = [{}] * len(buffer.params)
        self.entries_of: list[int] = []  # identities of the state's parameters and entries when `entries` was filled

    def refresh(self, segments: list[int], group_of: list[dict[str, Any]]) -> None:
        """Take up what `optimizer.state` holds now for `segments`; create what is missing, as torch does, with zeros.

        Raises ValueError for an entry of another shape than its parameter; nothing of that segment was changed then.
        """
        slots_of = {id(group): self.rule.slots_of(group) for group in self.optimizer.param_groups}
        for k in self.outdated(segments, group_of):
            self._adopt(k, slots_of[id(group_of[k])])

    def outdated(self, segments: list[int], group_of: list[dict[str, Any]]) -> Iterator[int]:
        """Those of `segments` whose state is not what `optimizer.state` holds now, or is missing there."""
        # Looking a tensor up costs a call of its __hash__. `entries` keeps the dicts alive, and the buffer the
        # parameters: no identity is used again.
        everything = self.optimizer.state
        if (entries_of := [*map(id, everything), *map(id, everything.values())]) != self.entries_of:
            self.entries = [everything.get(p, {}) for p in self.buffer.params]
            self.entries_of = entries_of
        slots_of = {id(group): self.rule.slots_of(group) for group in self.optimizer.param_groups}
        for k in segments:
            state, slots = self.entries[k], slots_of[id(group_of[k])]
            if self.rule.counts_steps and state.get("step") is not self.step_views[k]:
                yield k
                continue
            for slot, known in self.known.items():
                wanted = state.get(slot) if slot in slots else None
                if wanted is not known[k] or (slot in slots and wanted is None):
                    yield k
                    break

    def unstarted(self) -> list[Tensor]:
        """Parameters whose momentum buffer is the zeros it was made with: the device has skipped their every update.

        Dampening alone tells such a buffer from a started one; only where there is some, this waits for the device.
        """
        if self.rule.counts_steps or not any(group["dampening"] for group in self.optimizer.param_groups):
            return []
        made = zip(self.buffer.params, self.known["momentum_buffer"], self.buffer.steps.tolist(), strict=True)
        return [
            p
            for p, momentum, count in made
            if momentum is not None
            and count == 0
            and self.optimizer.state.get(p, {}).get("momentum_buffer") is momentum
        ]

    def listed(self, slot: str) -> list[Tensor]:
        """The kernel's list for `slot`: empty where no segment has it, which spares the operator a look at each."""
        return self.lists[slot] if any([value is not None for value in self.known[slot]]) else []

    def _adopt(self, k: int, slots: tuple[str, ...]) -> None:
        """Make segment k's entries what `optimizer.state` says; what it has for other slots stays there."""
        param, buffer = self.buffer.params[k], self.buffer
        state = self.optimizer.state.get(param, {})
        values = {slot: self._conform(k, slot, state.get(slot)) for slot in slots}
        self._take_count(k, state)
        if not slots:  # SGD without momentum leaves the state empty
            entries = state
        else:
            entries = self.optimizer.state[param]
        if self.rule.counts_steps:
            entries["step"] = self.step_views[k]
        for slot in self.rule.slots:
            if slot in slots:
                entries[slot] = values[slot]
                self.known[slot][k] = values[slot]
                self.lists[slot][k] = self._as_listed(k, values[slot])
            else:
                self.known[slot][k] = None
                self.lists[slot][k] = buffer.absent

    def _take_count(self, k: int, state: dict[str, Any]) -> None:
        """The updates that segment k has seen, as the state says: without a wait where the count is on the device."""
        step = state.get("step") if self.rule.counts_steps else None
        if isinstance(step, Tensor) and step.device == self.buffer.device:
            self.buffer.steps[k].copy_(step)
        else:
            self.buffer.steps[k] = self.rule.step_count(state)

    def _conform(self, k: int, slot: str, value: Tensor | None) -> Tensor:
        """`value` in the order, device and dtype the kernel takes; a new tensor only where it has to be one."""
        param, data, stride = self.buffer.params[k], self.buffer.data(k), self.buffer.strides[k]
        if value is None:
            dtype = self.dtype or data.dtype
            return like(param, torch.empty_strided(data.shape, stride, dtype=dtype, device=data.device).zero_())
        if value.shape != (shape := self.buffer.state_shape(k)):
            raise ValueError(
                f"FusedAccumOptimizer: state[p][{slot!r}] has shape {tuple(value.shape)} and its parameter "
                f"{tuple(shape)}; they must be equal: load a state that belongs to these parameters"
            )
        dtype = self.dtype or (value.dtype if value.dtype in FLOAT_DTYPES else data.dtype)
        here = local(value)
        as_it_is = (k not in self.buffer.special and here.is_contiguous()) or here.stride() == stride
        if as_it_is and here.dtype == dtype and here.device == data.device:
            return value
        return like(param, torch.empty_strided(data.shape, stride, dtype=dtype, device=data.device).copy_(here))

    def _as_listed(self, k: int, value: Tensor) -> Tensor:
        here = local(value)
        return here.as_strided((here.numel(),), (1,)) if k in self.buffer.special else here
