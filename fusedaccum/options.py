"""The options of `FusedAccumOptimizer`: checked once, before anything is built or changed."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from fusedaccum.backends import NAMES
from fusedaccum.flat_buffer import FLOAT_DTYPES
from fusedaccum.local import is_distributed, why_not_taken

NAME = "FusedAccumOptimizer"
PLAIN, WEIGHTED = "plain", "weighted"  # micro-batches without and with item counts
NONFINITE = ("propagate", "skip_window", "skip_micro", "raise")

# Options whose only value in this version is the default: (default, what the others would do).
NOT_YET = {
    "fold_every": (1, "folding several micro-batches in one pass"),
}


@dataclass(frozen=True)
class Options:
    """What the constructor was asked for, checked."""

    reduction: str = "mean"
    max_norm: float | None = None
    nonfinite: str = "propagate"
    update: str = "auto"
    state_dtype: torch.dtype | None = None
    master_weights: bool = False
    rounding: str = "nearest"
    rounding_seed: int = 0
    amp_scaling: bool = False
    backend: str = "auto"
    fold: str = "step"
    bucket_mb: float = 25
    process_group: dist.ProcessGroup | None = None
    wire_dtype: torch.dtype = torch.float32
    shard: str | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Options:
        """Itself: it never changes, and a process group has no copy."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None:
            raise TypeError(
                f"{NAME}: a wrapper with a process_group cannot be pickled, as the group belongs to this process; save "
                "its state_dict(), and load that into a new wrapper"
            )
        return dict(self.__dict__)


def check_options(**options: Any) -> Options:
    """Options from keyword arguments. Raises TypeError for an unknown name, ValueError or TypeError for a bad value."""
    for name, (default, what) in NOT_YET.items():
        value = options.pop(name, default)
        if type(value) is not type(default) or value != default:
            raise ValueError(f"{NAME}: {name}={value!r} is not supported ({what}); only {name}={default!r} is")
    known = Options.__dataclass_fields__
    for name in options:
        if name not in known:
            raise TypeError(f"{NAME}: unknown option {name!r}; the options are {sorted([*known, *NOT_YET])}")
    checked = Options(**options)
    _one_of("reduction", checked.reduction, ("mean", "sum"))
    _one_of("nonfinite", checked.nonfinite, NONFINITE)
    _one_of("update", checked.update, ("auto", "fused", "wrapped"))
    _one_of("rounding", checked.rounding, ("nearest", "stochastic"))
    _one_of("backend", checked.backend, ("auto", *NAMES))
    _one_of("fold", checked.fold, ("step", "backward"))
    _one_of("state_dtype", checked.state_dtype, (None, *FLOAT_DTYPES))
    for name in ("master_weights", "amp_scaling"):
        if not isinstance(value := getattr(checked, name), bool):
            raise TypeError(f"{NAME}: {name}={value!r} must be True or False")
    if checked.amp_scaling and checked.nonfinite == "raise":
        raise ValueError(
            f"{NAME}: nonfinite='raise' with amp_scaling=True would never raise: a GradScaler leaves out what is not "
            "finite and lowers its scale; use another policy, or amp_scaling=False"
        )
    _check_rounding(checked)
    _check_fold(checked)
    _check_group(checked)
    _check_shard(checked)
    if checked.max_norm is not None:
        if isinstance(checked.max_norm, bool) or not isinstance(checked.max_norm, numbers.Real):
            raise TypeError(f"{NAME}: max_norm={checked.max_norm!r} must be a positive number, or None not to clip")
        if not 0 < checked.max_norm <= 1e300 and checked.max_norm != math.inf:
            raise ValueError(f"{NAME}: max_norm={checked.max_norm!r} must be positive and a float, or None not to clip")
    return checked


def _check_fold(checked: Options) -> None:
    bucket = checked.bucket_mb
    if isinstance(bucket, bool) or not isinstance(bucket, numbers.Real):
        raise TypeError(
            f"{NAME}: bucket_mb={bucket!r} is a {type(bucket).__name__} and must be a number of MiB above 0"
        )
    if not 0 < bucket < math.inf:
        raise ValueError(f"{NAME}: bucket_mb={bucket!r} must be a finite number of MiB above 0")
    if checked.fold == "step":
        if bucket != Options.bucket_mb:
            raise ValueError(f"{NAME}: bucket_mb={bucket!r} needs fold='backward'; leave it out, or ask for that too")
        return
    if checked.nonfinite in ("skip_micro", "raise"):
        raise ValueError(
            f"{NAME}: nonfinite={checked.nonfinite!r} looks at all gradients of a micro-batch before the first is "
            "folded, and fold='backward' folds them as they appear; use nonfinite='skip_window', or fold='step'"
        )
    if checked.amp_scaling:
        raise ValueError(
            f"{NAME}: amp_scaling=True takes the scale from step(), and fold='backward' folds before it; use "
            "fold='step', or bfloat16, which needs no scaling"
        )


def _check_group(checked: Options) -> None:
    """Refuse what ranks cannot agree on without waiting for each other in every micro-batch."""
    group = checked.process_group
    _one_of("wire_dtype", checked.wire_dtype, (torch.float32, torch.bfloat16))
    if group is None:
        if checked.wire_dtype != torch.float32:
            raise ValueError(
                f"{NAME}: wire_dtype={checked.wire_dtype} needs a process_group, over which the window is reduced; "
                "give one, or leave it out"
            )
        return
    if not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        seen = f"a {type(group).__name__}"
        if isinstance(group, int):  # dist.GroupMember.NON_GROUP_MEMBER
            seen = "no group, but what new_group() returns to a rank outside of it,"
        raise TypeError(
            f"{NAME}: process_group={group!r} is {seen} and must be a torch.distributed.ProcessGroup that this rank "
            "belongs to, such as torch.distributed.group.WORLD, or None"
        )
    for name, value in (("nonfinite", "skip_micro"), ("amp_scaling", True)):
        if getattr(checked, name) == value:
            raise ValueError(
                f"{NAME}: {name}={value!r} leaves out micro-batches that one rank alone has seen, and with "
                "process_group ranks hear of each other once a window; use nonfinite='skip_window'"
                + (", and bfloat16, which needs no scaling" if name == "amp_scaling" else "")
            )


def _check_shard(checked: Options) -> None:
    _one_of("shard", checked.shard, (None, "zero1"))
    if checked.shard is None:
        return
    if checked.process_group is None:
        raise ValueError(
            f"{NAME}: shard={checked.shard!r} needs a process_group, over whose ranks the optimizer state is shared "
            "out; give one, or leave it out"
        )
    if checked.rounding == "stochastic":
        raise ValueError(
            f"{NAME}: shard={checked.shard!r} with rounding='stochastic' is not supported: the random numbers are "
            "counted from the start of a parameter, and a rank's share may begin inside of one; use "
            "master_weights=True, which takes 4 bytes a parameter divided by the number of ranks"
        )


def _check_rounding(checked: Options) -> None:
    seed, rule = checked.rounding_seed, "rounding_seed must be an int from 0 to 2**63 - 1"
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
        raise TypeError(f"{NAME}: rounding_seed={seed!r} is a {type(seed).__name__}; {rule}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"{NAME}: rounding_seed={seed!r}; {rule}")
    if checked.rounding == "nearest" and seed != 0:
        raise ValueError(
            f"{NAME}: rounding_seed={seed!r} needs rounding='stochastic'; leave it out, or ask for that too"
        )
    if checked.rounding == "stochastic" and checked.master_weights:
        raise ValueError(
            f"{NAME}: rounding='stochastic' with master_weights=True has nothing to do: the FP32 masters keep what "
            "rounding loses; use one of them"
        )


def check_with_steps(checked: Options, steps: Any) -> None:
    """Refuse options that have no meaning with steps=None. Raises ValueError."""
    if steps is not None:
        return
    for name, why in {
        "reduction": "the caller's loss says whether gradients are averaged",
        "fold": "every backward folds anyway",
        "process_group": "p.grad is the caller's to reduce, as DistributedDataParallel does",
        "amp_scaling": "p.grad is FP32, and scaler.unscale_() and scaler.step() work on it as they are",
    }.items():
        if (value := getattr(checked, name)) != getattr(Options, name):
            raise ValueError(f"{NAME}: {name}={value!r} has no meaning with steps=None ({why}); leave it out")
    if checked.nonfinite in ("skip_micro", "raise"):
        raise ValueError(
            f"{NAME}: nonfinite={checked.nonfinite!r} looks at all gradients of a micro-batch before the first is "
            "folded, and with steps=None they are folded as they appear; use nonfinite='skip_window'"
        )


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        raise ValueError(f"{NAME}: {name}={value!r} must be one of {', '.join(map(repr, allowed))}")


def check_items(name: str, items: Any) -> float | Tensor:
    """The item count of a micro-batch: a number of at least 0, or a tensor of one element (which is not looked at)."""
    rule = (
        f"{name} is the number of items of the micro-batch: a number of at least 0 (1e-30 to 1e30 where it is not 0), "
        "or a tensor that holds one"
    )
    if isinstance(items, Tensor):
        if items.numel() != 1 or items.is_complex():
            raise ValueError(f"{NAME}: {name} is a {items.dtype} tensor of shape {tuple(items.shape)}; {rule}")
        return items.detach()
    if isinstance(items, bool) or not isinstance(items, numbers.Real):
        raise TypeError(f"{NAME}: {name}={items!r} is a {type(items).__name__}; {rule}")
    if items != 0 and not 1e-30 <= items <= 1e30:  # as float32, it and its inverse must be normal numbers
        raise ValueError(f"{NAME}: {name}={items!r}; {rule}")
    return float(items)


def check_optimizer(optimizer: Any) -> None:
    """Refuse what cannot be wrapped, with the reason."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"{NAME}: the first argument is a {type(optimizer).__name__} and must be a torch.optim.Optimizer: "
            "build the optimizer on your parameters, then wrap it"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise TypeError(
            f"{NAME}: SparseAdam is not supported: it takes sparse gradients only, and accumulated ones are dense; "
            "use Adam with sparse=False in the embedding, or leave SparseAdam without the wrapper"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            f"{NAME}: LBFGS is not supported: it evaluates its closure several times per step, and accumulated "
            "gradients belong to one point; use it without the wrapper"
        )
    check_params(parameters(optimizer))


def parameters(optimizer: Optimizer) -> list[Tensor]:
    """All parameters of `optimizer`, group after group; one that is listed twice stands here twice."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def is_plain(tensor: Tensor) -> bool:
    """Whether `tensor` holds its numbers itself: no subclass that answers every operator in its own way."""
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def check_params(params: list[Tensor]) -> None:
    """Refuse parameters whose gradients an FP32 sum would lose bits of, or that hold no numbers of their own. Frozen
    ones are left alone.
    """
    for i, p in enumerate(params):
        if p.layout != torch.strided:
            raise TypeError(
                f"{NAME}: parameter {i} of shape {tuple(p.shape)} is {p.layout} and must be dense; make it dense, or "
                "leave it to another optimizer"
            )
        if not (p.requires_grad or p.grad is not None) or is_lazy(p):
            continue
        if is_distributed(p):
            if (reason := why_not_taken(p)) is not None:
                raise TypeError(f"{NAME}: parameter {i} is a DTensor that is not supported because {reason}")
        elif not is_plain(p):
            raise TypeError(
                f"{NAME}: parameter {i} is a {type(p).__name__}, a tensor subclass with __torch_dispatch__, whose "
                "numbers are where only the class knows; give plain tensors or DTensors, or leave it to another "
                "optimizer"
            )
        if p.is_inference():
            raise TypeError(
                f"{NAME}: parameter {i} of shape {tuple(p.shape)} was made under torch.inference_mode(), which allows "
                "no update of it afterwards; build the model outside that mode, or clone() the parameter there"
            )
        if p.dtype not in (*FLOAT_DTYPES, torch.complex64):
            raise TypeError(
                f"{NAME}: parameter {i} of shape {tuple(p.shape)} is {p.dtype}; gradients are summed in float32, so "
                "parameters must be float32, bfloat16, float16 or complex64: convert it, or leave it to another "
                "optimizer"
            )


def one_count(mean_of: Any, sum_of: Any) -> tuple[Any, Any]:
    """The item counts of a micro-batch, checked: one of them or neither. Raises ValueError or TypeError."""
    if mean_of is not None and sum_of is not None:
        raise ValueError(
            f"{NAME}: mean_of={mean_of!r} and sum_of={sum_of!r} were both given; a loss is a mean or a sum: give one"
        )
    mean_of = None if mean_of is None else check_items("mean_of", mean_of)
    sum_of = None if sum_of is None else check_items("sum_of", sum_of)
    return mean_of, sum_of


def as_float64(items: float | Tensor, total: float | Tensor) -> float | Tensor:
    """An item count in the precision, and on the device, in which they are added up."""
    if not isinstance(items, Tensor):
        return items
    return items.to(device=total.device if isinstance(total, Tensor) else items.device, dtype=torch.float64).reshape(1)
