"""Life with a captured graph: eager steps beside it, loading, changed parameters, what must outlive it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from capture_runs import MAKERS, N, Run, cpu_as_device, data, every_maker, lr, pair, used  # noqa: F401
from graph_model import capturing
from wrapper_helpers import LOW_PRECISION, tidy  # noqa: F401

pytestmark = LOW_PRECISION


def test_eager_micro_batches_beside_replays(monkeypatch):
    """They add up in one window, which a full count of eager ones closes, or flush(): a capture locks nobody in."""
    run, twin = pair()
    with capturing(monkeypatch) as graph:
        run.micro()
    for each in (run, twin):
        each.window(data(1))  # eager alone, as after a capture that was given up
    assert run.same_as(twin)
    for values in data(2, 2):
        run.x.copy_(values)
        graph.replay()
    run.window(data(3, 1))
    assert (run.w.pending, run.w.will_update) == (3, False)
    assert run.w.flush()
    twin.window([*data(2, 2), *data(3, 1)])
    twin.w.flush()
    assert run.same_as(twin)
    assert run.w.updates == twin.w.updates == 3
    with pytest.raises(ValueError, match="mean_of or sum_of with every micro-batch"):
        run.micro(mean_of=3)


def test_loading_forgets_the_graph_and_keeps_what_was_replayed(monkeypatch):
    run, twin = pair()
    with capturing(monkeypatch) as graph:
        run.micro()
    for values in data(1, 3):
        run.x.copy_(values)
        graph.replay()
    twin.window(data(1, 3))
    run.w.load_state_dict(run.w.state_dict())
    assert run.w.pending == 3
    for each in (run, twin):
        each.window(data(2, 1))
    assert run.same_as(twin)
    assert run.w.updates == twin.w.updates == 2


@every_maker
def test_a_window_loaded_from_itself_with_rates_on_the_device(make):
    """The boundary zeroes such buffers, and loading begins with one: what it loads must not be what it zeroes."""
    run, twin = pair(make)
    for each in (run, twin):
        each.window(data(1, 2))
    saved = run.w.state_dict()
    run.w.load_state_dict(saved)
    assert run.w.pending == 2
    run.w.reset()
    run.w.load_state_dict(saved)
    for each in (run, twin):
        each.window(data(2, 2))
    assert run.same_as(twin)


def test_a_refused_gradient_leaves_no_mark(monkeypatch):
    run, twin = pair()
    for p in run.model.parameters():
        p.grad = torch.ones_like(p)
    p.grad = torch.ones_like(p).to_sparse()
    with capturing(monkeypatch), pytest.raises(RuntimeError, match="sparse"):
        run.w.step()
    run.w.zero_grad()
    for each in (run, twin):
        for _ in range(N):
            next(each.model.parameters()).grad = torch.ones(7, 5)
            each.w.step()
    assert run.same_as(twin)


def test_changed_parameters_are_not_flushed_as_if_nothing_had_happened(monkeypatch):
    run, twin = pair()
    with capturing(monkeypatch) as graph:
        run.micro()
    run.x.copy_(data(1, 1)[0])
    graph.replay()
    twin.window(data(1, 1))
    extra = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    for each, p in zip((run, twin), extra, strict=True):
        each.w.add_param_group({"params": [p], "lr": lr()})
    with pytest.raises(RuntimeError, match="since step\\(\\) was captured"):
        run.w.flush()
    run.w.load_state_dict(run.w.state_dict())  # the way out
    for each, p in zip((run, twin), extra, strict=True):
        p.grad = torch.ones(3)
        each.window(data(2, N - 1))
    assert run.same_as(twin)


@pytest.mark.parametrize("options", [{}, {"rounding": "stochastic", "dtype": torch.bfloat16}])
def test_what_a_graph_reads_outlives_it(monkeypatch, options):
    """Tables, buffer and scale are replaced by later windows; a replay would read memory that is somebody else's."""
    run = used(**options)
    buffer = run.w._window.buffers[0]
    side = run.w._window.update.side(buffer)
    alive = [weakref.ref(x) for x in (buffer.flat, buffer._scale, side.hyper, side.groups, buffer.tiles)]
    if options:
        alive += [weakref.ref(x) for x in (side.random.tensor, run.w._window.update.rounding.state)]
    with capturing(monkeypatch):
        for _ in range(N):
            run.micro()
    del buffer, side
    run.w.param_groups[0]["weight_decay"] = 0.25
    run.w.steps = 2
    run.w.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], "lr": lr()})
    run.window(data(1))
    gc.collect()
    assert all(ref() is not None for ref in alive)


def test_scales_that_no_graph_reads_are_not_kept():
    run = used()
    scale = run.w._window.buffers[0]._scale
    for count in range(1, 9):
        run.micro(mean_of=count)
    assert run.w._window.buffers[0]._scale is scale


@pytest.mark.parametrize("drops", [1, 2])
def test_dropped_windows_leave_no_values_behind(monkeypatch, drops):
    """A captured fold adds to what is there: dropped windows, before and after the first boundary, must not be."""

    def make():
        run = Run()
        for _ in range(drops):
            run.micro()
            run.w.reset()
        run.window(data(0))
        for _ in range(drops):
            run.micro()
            run.w.reset()
        return run

    run, twin = make(), make()
    with capturing(monkeypatch) as graph:
        for _ in range(N):
            run.micro()
    assert not run.w._window.buffers[0].flat.any()
    run.x.copy_(data(1, 1)[0])
    graph.replay()
    twin.window(data(1, 1) * N)
    assert run.same_as(twin)
    assert not run.w._window.buffers[0].flat.any()


def test_segments_that_the_first_window_left_untouched_hold_no_values(monkeypatch):
    def make():
        run = Run()
        run.micro()
        run.w.reset()  # stale in every segment
        run.window_of_two(data(0))
        return run

    run, twin = make(), make()
    with capturing(monkeypatch) as graph:
        run.window_of_two(data(1))
    graph.replay()
    twin.window_of_two(data(1))
    assert run.same_as(twin)
    assert not run.w._window.buffers[0].flat.any()


def test_counts_begin_anew_after_loading(monkeypatch):
    run, twin = pair()
    with capturing(monkeypatch) as graph:
        run.micro()
    graph.replay()
    run.w.load_state_dict(twin.w.state_dict())
    for each in (run, twin):
        each.window(data(1))
    with capturing(monkeypatch) as graph:
        run.micro()
    assert run.w.pending == 0
    for values in data(2):
        run.x.copy_(values)
        graph.replay()
    run.w.flush()
    twin.window(data(2))
    assert run.same_as(twin)
    assert run.w.updates == twin.w.updates


@pytest.mark.parametrize("captured", [1, N], ids=["folds alone", "whole windows"])
def test_a_graph_keeps_its_steps(monkeypatch, captured):
    """Another `steps`, set later, is of eager windows: 1/steps, and the count of micro-batches, are the graph's own."""
    run, twin = pair()
    with capturing(monkeypatch) as graph:
        for _ in range(captured):
            run.micro()
    run.w.steps = 2
    for _ in range(2):
        if captured == N:
            run.window(data(9, 2))  # an eager one of 2
            twin.w.steps = 2
            twin.window(data(9, 2))
            twin.w.steps = N
        run.x.copy_(data(1, 1)[0])
        for _ in range(N // captured):
            graph.replay()
        if captured < N:
            run.w.flush()
        twin.window(data(1, 1) * N)
        assert run.same_as(twin)
    assert run.w.updates == twin.w.updates


def test_eager_windows_between_replays_of_whole_windows(monkeypatch):
    run, twin = pair()
    with capturing(monkeypatch) as graph:
        for _ in range(N):
            run.micro()
    for seed in (1, 2):
        run.x.copy_(data(seed, 1)[0])
        graph.replay()
        twin.window(data(seed, 1) * N)
        for each in (run, twin):
            each.window(data(seed + 10))
        assert run.same_as(twin)
    assert run.w.updates == 5
