"""The two ways to update at a boundary: our kernel on the flat buffer, or the wrapped optimizer's own `step()`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from fusedaccum.flat_buffer import FlatBuffer, dense_stride, in_memory_order, to_device
from fusedaccum.local import is_distributed, like, local, trace
from fusedaccum.options import NAME, Options, parameters
from fusedaccum.rounding import RandomTable, Rounding, check_rounded
from fusedaccum.rules import RULES, AdamRule, HyperTable, OptimizerState, why_not_fused
from fusedaccum.wrapped_update import WrappedUpdate


def _take_up(master: Tensor, values: Tensor) -> None:
    """Derive `master` again where it does not round to `values`, those of its parameter."""
    master.copy_(torch.where(master.to(values.dtype) == values, master, values.float()))


class Masters:
    """FP32 copies of the bf16 and fp16 parameters of one flat buffer, which the fused update reads and writes."""

    def __init__(self, buffer: FlatBuffer) -> None:
        self.buffer = buffer
        self.tensors: list[Tensor] = [buffer.absent] * len(buffer.params)
        self.seen: list[tuple[int, ...] | None] = [None] * len(buffer.params)

    def refresh(self, segments: list[int]) -> None:
        """Make a master where there is none, and derive it again where its parameter was changed from outside.

        A change shows in the parameter's version counter or address. Elements that still equal the master's rounding
        keep the master's value, so that a write that changed nothing costs no precision.
        """
        for k in segments:
            param, data = self.buffer.params[k], self.buffer.data(k)
            if data.dtype == torch.float32:
                self.tensors[k], self.seen[k] = self.buffer.absent, None
                continue
            if self.is_current(k):
                continue
            state = trace(param, data)
            values = in_memory_order(data, self.buffer.strides[k])
            if self.tensors[k] is self.buffer.absent:
                self.tensors[k] = values.float() if data.numel() else self.buffer.absent
            else:
                _take_up(self.tensors[k], values)
            self.seen[k] = state

    def is_current(self, k: int) -> bool:
        """Whether segment k has a master that holds its parameter's value, or needs none."""
        data = self.buffer.data(k)
        return data.dtype == torch.float32 or self.seen[k] == trace(self.buffer.params[k], data)

    def written(self, segments: list[int]) -> None:
        """Note that parameters and masters were written together."""
        for k in segments:
            if self.tensors[k] is not self.buffer.absent:
                self.seen[k] = trace(self.buffer.params[k], self.buffer.data(k))


class FusedUpdate:
    """AdamW, Adam or SGD as one operator call per device, on the wrapped optimizer's own state and groups."""

    name = "fused"

    def __init__(self, optimizer: Optimizer, options: Options) -> None:
        self.optimizer = optimizer
        self.rule = RULES[type(optimizer)]
        self.state_dtype = options.state_dtype
        self.master_weights = options.master_weights
        stochastic = options.rounding == "stochastic"
        self.rounding = Rounding(optimizer, options.rounding_seed) if stochastic else None
        self.sides: dict[FlatBuffer, _FusedSide] = {}
        # Masters of parameters that have no segment for now, because they are frozen or out of the groups: (master,
        # strides, `Masters.seen`).
        self.parked = WeakTensorKeyDictionary()
        self._applied = 0  # buffers that the last call of `apply` has updated

    def side(self, buffer: FlatBuffer) -> _FusedSide:
        """What belongs to one flat buffer: state lists, masters, tables."""
        if buffer not in self.sides:
            self.sides[buffer] = _FusedSide(self, buffer)
        return self.sides[buffer]

    def replace(self, old: list[FlatBuffer], new: list[FlatBuffer]) -> None:
        """The flat buffers were rebuilt: masters go with their parameters, state is found again by parameter."""
        masters = dict(self.parked)
        for buffer in old:
            side = self.sides.pop(buffer, None)
            for p in side.state.unstarted() if side is not None else ():
                del self.optimizer.state[p]["momentum_buffer"]
            if side is not None and side.masters is not None:
                for k, p in enumerate(buffer.params):
                    if side.masters.tensors[k].numel():
                        masters[p] = (side.masters.tensors[k], buffer.strides[k], side.masters.seen[k])
        for buffer in new if masters else []:
            for k, p in enumerate(buffer.params):
                if p in masters:
                    tensor, stride, seen = masters.pop(p)
                    if tensor.numel() == buffer.data(k).numel() and stride == buffer.strides[k]:
                        side = self.side(buffer)
                        side.masters.tensors[k] = tensor.to(buffer.device)
                        side.masters.seen[k] = seen
        self.parked = WeakTensorKeyDictionary(masters)

    def retype(self, param: Tensor, was: torch.dtype) -> None:
        """`param` is of another dtype than it `was`: its moments follow, unless they have a dtype of their own."""
        entries = self.optimizer.state.get(param, {}) if self.state_dtype is None else {}
        for slot in self.rule.slots:
            if isinstance(value := entries.get(slot), Tensor) and value.dtype == was:
                entries[slot] = value.to(param.dtype)

    def master(self, buffer: FlatBuffer, k: int) -> Tensor | None:
        """The FP32 master of segment k in its parameter's shape, brought up to date; None where there is none."""
        masters = self.side(buffer).masters
        if masters is None or masters.tensors[k] is buffer.absent:
            return None
        masters.refresh([k])
        return like(buffer.params[k], masters.tensors[k].as_strided(buffer.shapes[k], buffer.strides[k]))

    def made_master(self, buffer: FlatBuffer, k: int) -> Tensor | None:
        """`master`, which is made where there is none yet."""
        masters = self.side(buffer).masters
        if masters is None or buffer.data(k).dtype == torch.float32:
            return None
        masters.refresh([k])
        if not buffer.numels[k]:  # a shard without elements
            return like(buffer.params[k], torch.empty(buffer.shapes[k], dtype=torch.float32, device=buffer.device))
        return self.master(buffer, k)

    def parked_master(self, param: Tensor) -> Tensor | None:
        """The master of a parameter without a segment, in its shape, brought up to date; None where there is none."""
        master, stride, seen = self.parked.get(param, (None, (), None))
        data = local(param)
        if master is None or data.dtype == torch.float32 or data.numel() != master.numel():
            return None
        if dense_stride(data) != stride:
            return None
        # One that was loaded, and then given up with its segment, was never seen with its parameter.
        if seen != (state := trace(param, data)):
            master = master.to(data.device)
            _take_up(master, in_memory_order(data, stride))
            self.parked[param] = (master, stride, state)
        return like(param, master.as_strided(data.shape, stride))

    def put_master(self, buffer: FlatBuffer, k: int, master: Tensor) -> None:
        """Take a saved master: float32, 1-D, in memory order. `Masters.refresh` says what becomes of it."""
        masters = self.side(buffer).masters
        if masters is not None and buffer.data(k).dtype != torch.float32 and master.numel():
            masters.tensors[k], masters.seen[k] = master, None

    def forget_masters(self) -> None:
        """Derive every master again at the next update."""
        self.parked.clear()
        for side in self.sides.values():
            if side.masters is not None:
                side.masters = Masters(side.buffer)

    def prepare(self, buffers: list[FlatBuffer]) -> None:
        """Bring state and masters up to date. Raises before any parameter, moment or count is changed."""
        if self.rounding is not None and buffers:
            self.rounding.move(buffers[0].device)
        for buffer in buffers:
            self.side(buffer).prepare()

    def stuck_moments(self) -> int:
        """Parameters whose second moment is kept in bfloat16 and cannot decay there.

        beta2 * v rounds back to v where 1 - beta2 is less than half of the spacing of bfloat16 numbers, which is 2^-8
        of the smaller ones and 2^-9 of the larger ones.
        """
        if self.rule is not AdamRule or self.state_dtype is not None:
            return 0
        count = 0
        for group in self.optimizer.param_groups:
            beta2 = group["betas"][1]
            if not isinstance(beta2, Tensor) and 1 - beta2 < 2.0**-8:
                count += sum(p.requires_grad and p.dtype == torch.bfloat16 for p in group["params"])
        return count

    def tables(self, buffer: FlatBuffer) -> list[Tensor]:
        """What a captured update reads beside the buffer and the optimizer's state."""
        side = self.side(buffer)
        tables = [side.groups, side.hyper]
        if self.rounding is not None:
            tables += [self.rounding.state, side.random.tensor]
        return [t for t in tables if t is not None]

    def obstacle_to_capture(self, buffer: FlatBuffer, segments: list[int]) -> str | None:
        """Why an update of `segments` would do more than launch kernels, in words that complete "because"."""
        side = self.side(buffer)
        groups = self.optimizer.param_groups
        index = side.group_of_each_param()
        known = side.hyper is not None and side.group_index == index
        if not known or (side.random is not None and not side.random.is_current()):
            return "no update has run with these parameter groups yet; run one whole window before the capture"
        if not side.table.is_current(groups):
            return "a hyper-parameter has changed since the last update; run one whole window before the capture"
        for k in side.state.outdated(segments, [groups[g] for g in index]):
            return (
                f"the state of a parameter of shape {tuple(buffer.shapes[k])} does not exist or was replaced; run "
                "one whole window in which it gets a gradient before the capture"
            )
        if side.masters is not None and not all(map(side.masters.is_current, segments)):
            return "a parameter was changed since its FP32 master was derived; run one whole window before the capture"
        return None

    def apply(self, buffers: list[FlatBuffer]) -> None:
        """Update every touched parameter. Reads `buffer.scalars` on the device, waits for nothing."""
        self._applied = 0
        for buffer in buffers:
            self.side(buffer).apply()
            self._applied += 1
        if self.rounding is not None:
            self.rounding.advance()

    def take_back(self, buffers: list[FlatBuffer]) -> bool:
        """After `apply` raised: whether nothing was updated. The update is not counted then."""
        if self._applied:
            return False
        for buffer in buffers:
            buffer.uncount()
        return True


class _FusedSide:
    def __init__(self, update: FusedUpdate, buffer: FlatBuffer) -> None:
        # Not `update` itself, which holds this: a wrapper that is dropped gives its memory back at once.
        self.rule, self.optimizer = update.rule, update.optimizer
        self.buffer = buffer
        self.state = OptimizerState(update.rule, update.optimizer, buffer, update.state_dtype)
        self.masters = Masters(buffer) if update.master_weights else None
        self.random = RandomTable(update.rounding, buffer) if update.rounding is not None else None
        self.table = HyperTable(update.rule, buffer.device)
        self.groups: Tensor | None = None
        self.hyper: Tensor | None = None
        self.group_index: list[int] = []
        self.segments: list[int] = []

    def group_of_each_param(self) -> list[int]:
        """The parameter group of each segment, as an index."""
        groups = self.optimizer.param_groups
        position = {id(p): g for g, group in enumerate(groups) for p in group["params"]}
        return [position[id(p)] for p in self.buffer.params]

    def prepare(self) -> None:
        buffer, groups = self.buffer, self.optimizer.param_groups
        if self.random is not None:
            self.random.prepare()
        index = self.group_of_each_param()
        if self.groups is None or index != self.group_index:
            self.groups = to_device(torch.tensor(index, dtype=torch.int64, device="cpu"), buffer.device)
            self.group_index = index
        self.segments = buffer.touched_segments()
        self.hyper = self.table.read(groups)
        self.state.refresh(self.segments, [groups[g] for g in index])
        if self.masters is not None:
            self.masters.refresh(self.segments)

    def apply(self) -> None:
        buffer, rule = self.buffer, self.rule
        params: list[Tensor] = [buffer.absent] * len(buffer.params)
        copies = []
        memory = buffer.memory()
        for k in self.segments:
            param = memory[k]
            if k not in buffer.special and param.is_contiguous() and not param.is_neg():
                params[k] = param
            else:
                params[k] = in_memory_order(param, buffer.strides[k])
                if param.numel() and params[k].data_ptr() != param.data_ptr():
                    copies.append(k)
        getattr(buffer.backend, rule.name)(
            buffer.flat,
            buffer.marks,
            buffer.live,
            buffer.segments,
            buffer.tiles,
            buffer.scalars,
            buffer.steps,
            self.groups,
            self.hyper,
            params,
            *(self.state.listed(slot) for slot in rule.slots),
            self.masters.tensors if self.masters is not None else [],
            self.random.read() if self.random is not None else None,
            buffer.zero_in_pass,
        )
        if buffer.spread is not None:  # the operator has told autograd of the local tensors alone
            torch.autograd.graph.increment_version([buffer.params[k] for k in self.segments])
        buffer.was_zeroed = buffer.zero_in_pass
        for k in copies:
            memory[k].copy_(params[k].as_strided(buffer.shapes[k], buffer.strides[k]))
        if self.masters is not None:
            self.masters.written(self.segments)


Update = FusedUpdate | WrappedUpdate

# Options that only the fused update has a use for, and the values that ask for nothing.
FUSED_ONLY = {"state_dtype": None, "master_weights": False, "rounding": "nearest", "shard": None}


def choose(optimizer: Optimizer, options: Options, more: Sequence[Tensor] = (), live: bool = False) -> Update:
    """The update that options and parameters ask for, `more` parameters that are about to come included.

    live: whether `p.grad` is a view of the sums (steps=None).

    Raises ValueError for DTensors beside a process_group, with the reason where an option needs the fused update and it
    is not possible, and for parameters that cannot be rounded as was asked for.
    """
    if options.process_group is not None and any(map(is_distributed, [*parameters(optimizer), *more])):
        raise ValueError(
            f"{NAME}: process_group={options.process_group} is given and a parameter is a DTensor, whose gradients "
            "fully_shard() or tensor parallelism reduce over its own mesh; leave process_group out"
        )
    reason = why_not_fused(optimizer, more)
    if options.update == "fused" and reason is not None:
        raise ValueError(f"{NAME}: update='fused' is not possible because {reason}; use update='auto' or 'wrapped'")
    if options.update != "wrapped" and reason is None:
        if options.shard is not None and any(map(is_distributed, [*parameters(optimizer), *more])):
            raise ValueError(
                f"{NAME}: shard={options.shard!r} shares plain parameters out among ranks, and a DTensor is shared out "
                "already, with its optimizer state; leave shard out"
            )
        if options.rounding == "stochastic":
            check_rounded([*parameters(optimizer), *more])
        return FusedUpdate(optimizer, options)
    for name, default in FUSED_ONLY.items():
        if (value := getattr(options, name)) != default:
            why = "update='wrapped' was asked for" if options.update == "wrapped" else reason
            raise ValueError(
                f"{NAME}: {name}={value!r} needs the fused update, which is not possible because {why}; leave "
                f"{name} out, or give an optimizer and parameters that can be fused"
            )
    return WrappedUpdate(optimizer, live, clips=options.max_norm is not None)
