"""What cannot go together with DistributedDataParallel, each with its reason and the way out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fusedaccum.notices import warn
from fusedaccum.options import NAME, parameters

if TYPE_CHECKING:
    from fusedaccum.ddp import Held
    from fusedaccum.window import Window

KEEP_OUT = (
    "keep DDP from reducing, by `with opt.no_sync(model):` around the loop, or by "
    "model.register_comm_hook(opt, fusedaccum.ddp_hook)"
)
ONCE = f"pass process_group, with which the window is reduced once, and {KEEP_OUT}"


def _ranks_of(model: DistributedDataParallel) -> str:
    return f"the {model.process_group.size()} ranks of the DistributedDataParallel model"


def check_alone(window: Window, held: Held, reduces: bool) -> None:
    """Without process_group: every micro-batch has to be reduced by DDP, and before it is folded."""
    if held.hooked:
        raise RuntimeError(
            f"{NAME}: fusedaccum.ddp_hook keeps DistributedDataParallel from reducing, and this wrapper has no "
            "process_group to do it over; pass process_group, or leave the hook out"
        )
    if window.in_backward is not None:
        raise RuntimeError(
            f"{NAME}: fold='backward' folds gradients before they are reduced over {_ranks_of(held.model)}; use "
            f"fold='step', which reads them after that, or {ONCE}"
        )
    if not reduces:
        raise RuntimeError(
            f"{NAME}: the gradients of this micro-batch were not reduced over {_ranks_of(held.model)}, because it was "
            "called under no_sync() (or not at all, and its module was), and a window's sum is not reduced later: call "
            f"it outside of no_sync() in every micro-batch, or {ONCE}"
        )


def check_with_group(window: Window, held: Held, reduces: bool, weighted: bool) -> None:
    """With process_group the window is reduced over its ranks, and DDP should not reduce."""
    model = held.model
    if not held.checked:
        _check_model(window, held)
        if held.hooked:
            _check_hook_of(window, held)
        held.checked = True
    if model._join_config.enable:
        raise RuntimeError(
            f"{NAME}: DistributedDataParallel is inside join(), where a rank without data takes part in DDP's own "
            "collectives only, and with process_group there are others; leave join() out: a rank that has run out of "
            "data calls step() without a gradient as often as the others have one"
        )
    if not reduces:
        if held.hooked and window.last and (model.find_unused_parameters or model.static_graph):
            raise RuntimeError(
                f"{NAME}: micro_batch(last=True) sends sums inside the backward, and so does DistributedDataParallel "
                "with find_unused_parameters or static_graph (which parameters were used), in an order that may differ "
                "between ranks; leave last=True out, or use `with opt.no_sync(model):` instead of ddp_hook"
            )
        _check_ranks(window, model)
    elif window.in_backward is not None:
        raise RuntimeError(
            f"{NAME}: fold='backward' folds gradients before they are reduced over {_ranks_of(model)}, which is then "
            f"done in vain, and what DDP leaves in p.grad would be folded too; {KEEP_OUT}"
        )
    elif weighted:
        raise RuntimeError(
            f"{NAME}: a micro-batch with an item count has gradients that DistributedDataParallel has averaged over "
            f"{model.process_group.size()} ranks, whatever each of them counts; {KEEP_OUT}"
        )


def _check_model(window: Window, held: Held) -> None:
    delayed = set(map(id, held.model._delay_all_reduce_params))
    if any(id(p) in delayed for p in parameters(window.optimizer)):
        raise RuntimeError(
            f"{NAME}: a DistributedDataParallel model with delay_all_reduce_named_params reduces those in every "
            "backward, under no_sync() and with a communication hook too; leave that option or process_group out"
        )


def _check_ranks(window: Window, model: DistributedDataParallel) -> None:
    theirs, mine = (set(dist.get_process_group_ranks(g)) for g in (model.process_group, window.ranks.group))
    if not theirs <= mine:
        raise RuntimeError(
            f"{NAME}: the window is reduced over the ranks {sorted(mine)} of process_group, and the "
            f"DistributedDataParallel model is shared by {sorted(theirs)}, which would part; pass a process_group that "
            "holds all of these, or let DDP reduce"
        )


def _check_hook_of(window: Window, held: Held) -> None:
    """That the `ddp_hook` of a model leaves no gradient to nobody, and is one that DDP can live with."""
    model = held.model
    if window_of(model._comm_hooks[0][1]) is not window:
        raise RuntimeError(
            f"{NAME}: the state of a model's ddp_hook is another wrapper than the one that holds its parameters; "
            "register it with that one, or use `with opt.no_sync(model):`"
        )
    mine = set(map(id, held.params))
    reduced = [p for p in reduced_by(model) if p.requires_grad]
    if any(id(p) not in mine for p in reduced):
        raise not_ours(window, reduced)
    if window.in_backward is not None and any(getattr(module, "sparse", False) is True for module in model.modules()):
        raise RuntimeError(
            f"{NAME}: ddp_hook with fold='backward' leaves DistributedDataParallel no gradient to put in its buckets, "
            "and for sparse ones it insists on them; use sparse=False in the embedding, fold='step', or "
            "`with opt.no_sync(model):`"
        )


def reduced_by(model: DistributedDataParallel) -> list[Tensor]:
    """The parameters whose gradients DDP reduces."""
    return [p for name, p in model.module.named_parameters() if name not in model.parameters_to_ignore]


def warn_twice() -> None:
    """Say that gradients are reduced in every micro-batch and then once more."""
    warn(
        f"{NAME}: DistributedDataParallel reduces the gradients of every micro-batch, and process_group reduces their "
        f"sum once more, which is the same mean and sends each gradient for nothing; {KEEP_OUT}"
    )


def refuse_counts(held: Held) -> NoReturn:
    raise ValueError(
        f"{NAME}: item counts (mean_of, sum_of) need the items of all ranks, and without process_group the mean over "
        f"{_ranks_of(held.model)} is DDP's, which weighs every rank alike; {ONCE}"
    )


def check_live(held: Held) -> None:
    """With steps=None `p.grad` is FP32, and DDP has buckets of the parameter's dtype."""
    low = {p.dtype for p in held.params if p.dtype in (torch.bfloat16, torch.float16)}
    if low:
        raise TypeError(
            f"{NAME}: DistributedDataParallel reduces gradients of the parameter's dtype, here {low.pop()}, and with "
            "steps=None p.grad is FP32; keep the model in FP32 and run it under torch.autocast, or use steps=N: with "
            "process_group and fusedaccum.ddp_hook it sums and reduces in FP32"
        )


def window_of(state: Any) -> Window:
    """The window of the wrapper that a hook was registered with, or that a framework has put into its own."""
    for wrapper in (state, getattr(state, "optimizer", None)):
        if (window := getattr(wrapper, "_window", None)) is not None:
            return window
    raise TypeError(
        f"ddp_hook: its state is a {type(state).__name__} and must be the {NAME} that updates the model: "
        "model.register_comm_hook(opt, fusedaccum.ddp_hook)"
    )


def check_hook(window: Window, bucket: Any) -> None:
    """Refuse to keep DDP from reducing where nobody else does."""
    window.check_open()
    if window.ranks is None:
        raise RuntimeError(
            f"{NAME}: ddp_hook keeps DistributedDataParallel from reducing, and its state is a wrapper without "
            "process_group, which does not either; pass process_group (with steps=N), or leave the hook out"
        )
    if not isinstance(bucket, dist.GradBucket):
        raise TypeError(
            f"{NAME}: ddp_hook was given a {type(bucket).__name__} in the place of a bucket, by DDP's Python reducer "
            "(torch._dynamo.config.optimize_ddp='python_reducer'); use another value there"
        )
    if torch._C._current_graph_task_id() == -1:
        raise RuntimeError(
            f"{NAME}: ddp_hook was called outside of a backward, as DistributedDataParallel.join() does for a rank "
            "without data; leave join() out: such a rank calls step() without a gradient as often as the others"
        )


def not_ours(window: Window, params: list[Tensor]) -> RuntimeError:
    mine = set(map(id, parameters(window.optimizer)))
    count = sum(id(p) not in mine for p in params)
    return RuntimeError(
        f"{NAME}: ddp_hook keeps DistributedDataParallel from reducing a model of which this wrapper does not hold "
        f"every parameter ({count} of {len(params)} belong to no or another optimizer), and those would never be "
        "reduced; have one wrapper hold all of them, freeze them before DDP is built, or use `with opt.no_sync(model):`"
    )


def check_no_sync(window: Window, model: Any) -> None:
    """Refuse `opt.no_sync(model)` where it means nothing, or gradients that nobody reduces."""
    if not isinstance(model, DistributedDataParallel):
        other = (
            "; FSDP2 has a way of its own, model.set_requires_gradient_sync(False)"
            if hasattr(model, "set_requires_gradient_sync")
            else ""
        )
        raise TypeError(
            f"{NAME}: no_sync() was given a {type(model).__name__} and needs the DistributedDataParallel model that "
            f"reduces the gradients{other}; a model without DDP needs no no_sync() at all"
        )
    window.check_open()
    if window.ranks is None:
        raise RuntimeError(
            f"{NAME}: no_sync() keeps DistributedDataParallel from reducing, and this wrapper has no process_group to "
            "do it over: pass process_group, or let DDP reduce in every micro-batch (with steps=None: call "
            "model.no_sync() as without us)"
        )
