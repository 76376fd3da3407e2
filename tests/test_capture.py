"""CUDA graphs, as tests/graph_model.py models them: both forms against eager windows, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from capture_runs import MAKERS, N, Run, cpu_as_device, data, every_maker, lr, pair, used  # noqa: F401
from graph_model import capturing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import AdamW
from wrapper_helpers import LOW_PRECISION, tidy, wrap  # noqa: F401

pytestmark = LOW_PRECISION

OPTIONS = {
    "plain": {},
    "clipped": {"max_norm": 0.01},
    "masters": {"master_weights": True, "dtype": torch.bfloat16},
    "stochastic": {"rounding": "stochastic", "dtype": torch.bfloat16},
    "sum": {"reduction": "sum"},
}


@every_maker
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_whole_window_as_one_graph(monkeypatch, make, options):
    run, twin = pair(make, **options)
    inputs = [torch.zeros_like(run.x) for _ in range(N)]
    with capturing(monkeypatch) as graph:
        for x in inputs:
            run.x = x
            run.micro()
    assert run.same_as(twin)  # nothing has run yet
    assert (run.w.pending, run.w.updates) == (0, 1)
    for seed in (1, 2, 3):
        for x, values in zip(inputs, data(seed), strict=True):
            x.copy_(values)
        graph.replay()
        twin.window(data(seed))
        assert run.same_as(twin)
        assert run.w.grad_norm == twin.w.grad_norm
    assert (run.w.pending, run.w.updates) == (0, 4)


@every_maker
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("flush_captured", [False, True], ids=["eager flush", "captured flush"])
def test_folds_alone(monkeypatch, make, options, flush_captured):
    run, twin = pair(make, **options)
    with capturing(monkeypatch) as graph:
        run.micro()
    flush = run.w.flush
    if flush_captured:
        with capturing(monkeypatch) as boundary:
            run.w.flush()
        flush = boundary.replay
    for seed, count in ((1, N), (2, N), (3, 1), (4, 3)):  # short windows too
        for values in data(seed, count):
            run.x.copy_(values)
            graph.replay()
        flush()
        twin.window(data(seed, count))
        if count < N:
            twin.w.flush()
        assert run.same_as(twin)
        assert run.w.grad_norm == twin.w.grad_norm
        assert run.w.updates == twin.w.updates


def test_replayed_folds_are_counted_and_saved(monkeypatch):
    run, twin = pair()
    with capturing(monkeypatch) as graph:
        run.micro()
    assert run.w.pending == 0
    for values in data(1, 3):
        run.x.copy_(values)
        graph.replay()
    twin.window(data(1, 3))
    assert run.w.pending == 3
    saved = run.w.state_dict()["fusedaccum"]
    assert (saved["pending"], saved["mode"]) == (3, "plain")
    for index, p in enumerate(twin.model.parameters()):
        assert torch.equal(saved["sums"][index], twin.w.master_grad(p))
    resumed = Run()
    resumed.model.load_state_dict(run.model.state_dict())
    resumed.w.load_state_dict(run.w.state_dict())
    for each in (resumed, twin):
        each.window(data(2, 1))
    assert resumed.same_as(twin)


def test_a_window_without_a_replay_changes_nothing(monkeypatch):
    run, twin = pair()
    with capturing(monkeypatch) as graph:
        run.micro()
    run.w.flush()
    assert run.same_as(twin)
    assert (run.w.updates, run.w.updated) == (1, False)
    run.x.copy_(data(1)[0])
    graph.replay()
    run.w.reset()  # and dropped sums are gone
    run.w.flush()
    assert run.same_as(twin)


def test_the_learning_rate_is_read_at_every_replay(monkeypatch):
    run, twin = pair()
    with capturing(monkeypatch) as graph:
        for _ in range(N):
            run.micro()
    for rate in (0.01, 0.0, 0.3):
        run.x.copy_(data(5, 1)[0])
        for each in (run, twin):
            each.w.param_groups[0]["lr"].fill_(rate)
        graph.replay()
        twin.window(data(5, 1) * N)
        assert run.same_as(twin)


def test_a_captured_step_launches_kernels_and_allocates_nothing(monkeypatch):
    """One of ours a micro-batch; at the boundary norm, scalars, update, and a few numbers of one element."""
    run, _ = pair(master_weights=True, dtype=torch.bfloat16, max_norm=1.0)
    for last in (False, False, False, True):
        run.model(run.x).square().mean().backward()
        with capturing(monkeypatch) as graph:
            run.w.step()
        assert graph.allocated == []
        ours = [name.partition("::")[2] for name in graph.launched if name.startswith("fusedaccum")]
        assert ours == ["fold"] + ["square_total", "close_window", "adam"] * last
        assert len(graph.launched) - len(ours) == (9 if last else 1), graph.launched


LATER = "run one whole window"


def fresh(**options):
    return Run(**options)


def with_eager_micro_batch():
    run = used()
    run.micro()
    return run


def with_float_rate():
    return used(make=lambda params: AdamW(params, lr=0.05, capturable=True))


def with_new_rate_tensor():
    run = used(make=lambda params: AdamW(params, lr=0.05, capturable=True))
    run.w.param_groups[0]["lr"] = lr()
    return run


def with_new_decay():
    run = used()
    run.w.param_groups[0]["weight_decay"] = 0.5
    return run


def with_new_group():
    run = used()
    extra = torch.nn.Parameter(torch.ones(3))
    extra.grad = torch.ones(3)
    run.w.add_param_group({"params": [extra], "lr": lr()})
    return run


def with_cleared_state():
    run = used()
    run.w.state.clear()
    return run


def with_new_weights():
    run = used(master_weights=True, dtype=torch.bfloat16)
    with torch.no_grad():
        run.model[0].weight.mul_(2)
    return run


def with_new_positions():
    """A frozen parameter in front: the others have other random numbers from the next update on."""
    run = used(rounding="stochastic", dtype=torch.bfloat16)
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    run.w.param_groups[0]["params"].insert(0, frozen)
    run.micro()
    run.w.reset()
    return run


def with_new_steps():
    run = used()
    run.w.steps = 2 * N
    return run


REFUSED = {
    "another number of steps": (with_new_steps, "no window of these `steps`"),
    "before any window": (fresh, LATER),
    "capturable=False": (lambda: used(make=lambda params: AdamW(params, lr=lr())), "pass capturable=True"),
    "the wrapped update": (lambda: used(make=MAKERS["sgd"], update="wrapped"), "only the fused update"),
    "another backend": (lambda: used(backend="reference"), "backend='compiled'"),
    "after an eager micro-batch": (with_eager_micro_batch, "holds 1 eager micro-batches; flush"),
    "a number as learning rate": (with_float_rate, "lr=torch.tensor"),
    "a learning rate that was a number": (with_new_rate_tensor, LATER),
    "another weight decay": (with_new_decay, LATER),
    "a new group": (with_new_group, LATER),
    "cleared state": (with_cleared_state, LATER),
    "changed parameters with masters": (with_new_weights, LATER),
    "other positions with random rounding": (with_new_positions, LATER),
}


@LOW_PRECISION
@pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_captured_is_refused(monkeypatch, make, words):
    run = make()
    before = [p.clone() for p in run.model.parameters()]
    pending = run.w.pending
    run.model(run.x).square().mean().backward()
    with (
        capturing(monkeypatch),
        pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph because") as text,
    ):
        run.w.step()
    assert words in str(text.value)
    assert all(map(torch.equal, before, run.model.parameters()))
    assert run.w.pending == pending


def test_the_end_of_an_eager_window_is_refused(monkeypatch):
    run, twin = used(), used()
    for each in (run, twin):
        each.micro()
    with capturing(monkeypatch), pytest.raises(RuntimeError, match=r"flush\(\) cannot be captured"):
        run.w.flush()
    assert run.w.flush()
    assert twin.w.flush()
    assert run.same_as(twin)


def test_dtensors_are_refused(monkeypatch, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        p = torch.nn.Parameter(distribute_tensor(torch.ones(3), mesh, [Shard(0)]))
        w = wrap(MAKERS["adamw"]([p]), 1)
        for _ in range(2):
            p.grad = distribute_tensor(torch.ones(3), mesh, [Shard(0)])
            w.step()
        p.grad = distribute_tensor(torch.ones(3), mesh, [Shard(0)])
        with capturing(monkeypatch), pytest.raises(RuntimeError, match=r"a parameter is a DTensor.*step outside"):
            w.step()
        assert (w.updates, w.pending) == (2, 0)
    finally:
        dist.destroy_process_group()


def test_item_counts_are_refused(monkeypatch):
    run = used()
    run.model(run.x).square().mean().backward()
    with capturing(monkeypatch), pytest.raises(RuntimeError, match="leave mean_of and sum_of out"):
        run.w.step(mean_of=3)
