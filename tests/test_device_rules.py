"""What may be done to a device: nothing that waits for it between construction and `state_dict()`.

The meta device stands for one whose memory the host cannot read: an operator that would wait for a value raises there.
The backend does what ours do on the host, and nothing else.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils._python_dispatch import TorchDispatchMode
from wrapper_helpers import LOW_PRECISION, tidy, wrap  # noqa: F401

from fusedaccum import GatedScheduler, checkpoint, folding
from fusedaccum.ops import FRESH, TOUCHED

META = torch.device("meta")
calls: list[str] = []


def fold(flat, partials, marks, live, segments, tiles, grads, scale, norm):
    calls.append("fold")
    for k, grad in enumerate(grads):
        if grad is not None:
            marks[k] = TOUCHED | FRESH if norm else TOUCHED


def square_total(flat, partials, marks, segments, tiles, total):
    calls.append("square_total")
    marks[(marks & TOUCHED) != 0] = TOUCHED | FRESH


def nothing(name):
    return lambda *arguments: calls.append(name)


BACKEND = SimpleNamespace(
    __name__="device",
    fold=fold,
    square_total=square_total,
    **{name: nothing(name) for name in ("found_inf", "close_window", "rescale", "emit", "adam", "sgd")},
)


@pytest.fixture(autouse=True)
def _meta_backend(monkeypatch):
    calls.clear()
    monkeypatch.setattr(folding.backends, "select", lambda device, name: BACKEND)


class Copies(TorchDispatchMode):
    """Lists the copies from the host to the device: each must be one that nothing waits for."""

    def __init__(self):
        super().__init__()
        self.blocking = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name
        if name == "aten::_to_copy" and args[0].device.type == "cpu" and kwargs.get("device") == META:
            self.blocking += [name] * (not kwargs.get("non_blocking", False))
        if name == "aten::copy_" and args[0].is_meta and not args[1].is_meta and args[1].numel() > 0:
            self.blocking.append(name)
        return func(*args, **kwargs)


MAKERS = {
    "adamw": (AdamW, {"weight_decay": 0.1}, "adam"),
    "amsgrad": (Adam, {"amsgrad": True}, "adam"),
    "tensor lr": (AdamW, {}, "adam"),
    "momentum": (SGD, {"lr": 0.1, "momentum": 0.9}, "sgd"),
    "sgd": (SGD, {"lr": 0.1}, "sgd"),
}
OPTIONS = {
    "plain": {},
    "clipped": {"max_norm": 1.0},
    "masters": {"master_weights": True},
    "bf16 moments": {"state_dtype": torch.bfloat16},
    "stochastic": {"rounding": "stochastic"},
    "sum": {"reduction": "sum"},
    "skip_window": {"nonfinite": "skip_window", "max_norm": 1.0},
    "skip_micro": {"nonfinite": "skip_micro", "max_norm": 1.0},
}
ITEMS = {
    "no counts": lambda: {},
    "numbers": lambda: {"mean_of": 3},
    "device counts": lambda: {"mean_of": torch.empty((), device=META)},
    "device sums": lambda: {"sum_of": torch.empty((), device=META)},
    "counts on the CPU": lambda: {"mean_of": torch.tensor(3)},
}


def run(make, options, items, dtype, steps=3, windows=2, as_function=False):
    kind, arguments, _ = MAKERS[make]
    shapes = [(17, 5), (), (0,), (4, 3, 2, 2)]
    params = [torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=META)) for shape in shapes]
    params[3].data = params[3].data.to(memory_format=torch.channels_last)
    optimizer = wrap(kind(params, **arguments), (lambda update: steps) if as_function else steps, **options)
    scheduler = CosineAnnealingLR(optimizer.optimizer, 10)
    if make == "tensor lr":  # torch's constructors and schedulers look at a learning rate, and would wait for it
        scheduler = None
        optimizer.param_groups[0]["lr"] = torch.empty((), device=META)
    for index in range(steps * windows):
        for p in params[index % 2 :]:
            p.grad = torch.empty_like(p)
        optimizer.step(**items())
        optimizer.zero_grad()
        if scheduler is not None and (index + 1) % steps == 0:
            scheduler.step()
    return optimizer, params


@LOW_PRECISION
@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("items", ITEMS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("make", MAKERS)
def test_a_window_waits_for_nothing(make, options, items):
    if options == "sum" and items != "no counts":
        return  # refused, whatever the device
    dtype = torch.bfloat16 if options in ("masters", "bf16 moments", "stochastic") else torch.float32
    with Copies() as copies:
        run(make, OPTIONS[options], ITEMS[items], dtype)
    assert copies.blocking == []
    update = MAKERS[make][2]
    micro_batch = ["found_inf", "fold"] if options == "skip_micro" else ["fold"]
    assert calls == (micro_batch * 3 + ["square_total", "close_window", update]) * 2


def test_a_scaler_is_not_waited_for():
    params = [torch.nn.Parameter(torch.empty(5, device=META))]
    optimizer = wrap(AdamW(params, lr=0.1), 2, amp_scaling=True, max_norm=1.0)
    with Copies() as copies:
        for _ in range(4):
            params[0].grad = torch.empty(5, device=META)
            optimizer.grad_scale = torch.empty(1, device=META)
            optimizer.found_inf = torch.empty((), device=META)
            optimizer.step()
    assert copies.blocking == []
    assert calls.count("adam") == 2


def test_steps_as_a_function_waits_for_nothing_under_propagate():
    optimizer, _ = run("adamw", {"max_norm": 1.0}, ITEMS["no counts"], torch.float32, as_function=True)
    assert optimizer.updates == 2


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_a_gated_schedule_waits_for_nothing_without_device_counts(tensor_lr):
    params = [torch.nn.Parameter(torch.empty(5, device=META))]
    optimizer = wrap(AdamW(params, lr=0.1), 2)
    scheduler = GatedScheduler(CosineAnnealingLR(optimizer, 10), optimizer)
    if tensor_lr:
        optimizer.param_groups[0]["lr"] = torch.empty((), device=META)
        scheduler.scheduler = SimpleNamespace(step=lambda: None)  # torch's own would look at the rate
    for _ in range(6):
        params[0].grad = torch.empty(5, device=META)
        optimizer.step()
        scheduler.step()
    assert optimizer.updates == 3


def test_flush_reset_and_added_groups_wait_for_nothing():
    optimizer, params = run("adamw", {"max_norm": 1.0}, ITEMS["no counts"], torch.float32)
    params[0].grad = torch.empty_like(params[0])
    optimizer.step()
    assert optimizer.flush()
    extra = torch.nn.Parameter(torch.empty(3, device=META))
    params[0].grad = torch.empty_like(params[0])
    optimizer.step()
    optimizer.add_param_group({"params": [extra]})
    extra.grad = torch.empty(3, device=META)
    optimizer.step()
    optimizer.master_grad(extra)
    params[0].grad = torch.empty_like(params[0])
    optimizer.step()  # the boundary, in a buffer that was built anew
    assert optimizer.updates == 4
    params[0].grad = torch.empty_like(params[0])
    optimizer.step()
    optimizer.reset()
    assert optimizer.pending == 0


class OnDevice(torch.Tensor):
    """A tensor that says it is on a GPU, and can be brought home."""

    device = torch.device("cuda")

    def cpu(self):
        return self.as_subclass(torch.Tensor)


@pytest.mark.parametrize("flag", [None, "capturable", "fused"])
def test_step_counts_are_saved_where_torch_has_them(flag):
    step = torch.tensor(3.0).as_subclass(OnDevice)
    group = {"params": [0, 1], "lr": 0.1, "capturable": flag == "capturable", "fused": flag == "fused"}
    state = {"state": {0: {"step": step, "exp_avg": step}, 1: {}}, "param_groups": [group]}
    checkpoint.bring_steps_home(state)
    assert (type(state["state"][0]["step"]) is torch.Tensor) == (flag is None)
    assert state["state"][0]["exp_avg"] is step


def test_reading_the_norm_is_what_waits():
    optimizer, _ = run("adamw", {}, ITEMS["no counts"], torch.float32)
    with pytest.raises(RuntimeError, match="meta"):
        print(optimizer.grad_norm)


@pytest.mark.parametrize("options", [{"nonfinite": "skip_micro"}, {"amp_scaling": True}, {}], ids=str)
def test_parameters_added_inside_a_window_are_not_waited_for(options):
    p, q = (torch.nn.Parameter(torch.empty(5, device=META)) for _ in range(2))
    optimizer = wrap(AdamW([p], lr=0.1), 3, **options)
    count = {} if options else {"mean_of": torch.empty((), device=META)}
    with Copies() as copies:
        p.grad = torch.empty(5, device=META)
        optimizer.step(**count)
        optimizer.add_param_group({"params": [q]})
        for _ in range(2):
            p.grad, q.grad = torch.empty(5, device=META), torch.empty(5, device=META)
            optimizer.step(**count)
    assert copies.blocking == []
    assert calls.count("adam") == 1
    assert optimizer._window.buffers[0].live is not None
