"""The GPU benchmark where there is no GPU: a simulated device, contenders on the CPU, made-up results to judge."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from bench import kernels
from bench.cases import KINDS, Case
from bench.gpu import clock as clocks
from bench.gpu import goals, rivals, sections
from bench.gpu import race as races
from bench.gpu.__main__ import main
from bench.gpu.cases import MODELS, RESERVE, fitting, fold_bytes, numel, step_bytes
from bench.gpu.table import Facts, Row, Work, cells


@pytest.fixture(autouse=True)
def threads():
    """One, in place of the benchmark's two: nothing is timed here, and threads that wait for a core take long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# The clock, on a device that is simulated: one queue, and a host whose time is virtual


class Device:
    def __init__(self):
        self.host = self.busy_until = 0.0

    def launch(self, seconds, host=0.0):
        """The host takes its time to launch; the work begins when the device is free."""
        self.host += host
        self.busy_until = max(self.host, self.busy_until) + seconds

    def wait(self):
        self.host = max(self.host, self.busy_until)

    def event(self, **_):
        made = SimpleNamespace(time=None)
        made.record = lambda: setattr(made, "time", max(self.host, self.busy_until))
        made.elapsed_time = lambda other: (other.time - made.time) * 1e3
        return made


@pytest.fixture
def device(monkeypatch):
    simulated = Device()
    properties = SimpleNamespace(L2_cache_size=50 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "synchronize", simulated.wait)
    monkeypatch.setattr(torch.cuda, "Event", simulated.event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda n: simulated.launch(n / clocks.CudaClock.HERTZ))
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: simulated.host)
    return simulated


def contender(parts, name="contender"):
    return SimpleNamespace(name=name, parts=lambda: iter(parts))


def test_gpu_time_leaves_out_the_host_and_wall_time_does_not(device):
    clock = clocks.CudaClock(torch.device("cpu"))
    assert clock._other.numel() == 100 << 20
    flushed = []
    clock._cold = lambda: flushed.append(len(flushed))

    def five_launches():
        for _ in range(5):
            device.launch(0.2e-3, host=1e-3)

    prepare = lambda: device.launch(7e-3)  # noqa: E731
    sample = clock.sample(contender([(prepare, five_launches), (prepare, lambda: device.launch(3e-3, host=0.5e-3))]))
    assert sample.device == pytest.approx(5 * 0.2e-3 + 3e-3)
    assert sample.hosts == pytest.approx([5e-3, 0.5e-3])
    assert sample.wall == pytest.approx(5e-3 + 0.2e-3 + 3.5e-3)
    assert len(flushed) == 4, "cold before each part of both runs"


def test_only_kernels_count_as_launches():
    def event(name, kind):
        return SimpleNamespace(name=name, device_type=kind)

    on_device = ("fold_kernel", "Memcpy HtoD (Pinned -> Device)", "Memset (Device)", "Context Sync")
    events = [event(name, DeviceType.CUDA) for name in on_device] + [event("cudaLaunchKernel", DeviceType.CPU)]
    assert clocks.kernels_in(events) == 1


class Ticking:
    """A clock that counts who ran."""

    dry = False
    title = "ticking"

    def __init__(self):
        self.order = []

    def sample(self, contender):
        self.order.append(contender.name)
        return clocks.Sample(1e-3, 2e-3, [1e-4])

    def launches(self, part):
        part[0](), part[1]()
        return 1

    def peak(self, work):
        work()
        return 0


def test_contenders_take_turns_and_stop_when_their_time_is_up():
    ticking, three = Ticking(), [contender([], name) for name in "abc"]
    samples = races.race(ticking, three, box=0.0)
    assert {name: len(taken) for name, taken in samples.items()} == dict.fromkeys("abc", races.LEAST_ROUNDS)
    assert "".join(ticking.order) == "abc" + "abc" + "bca" + "cab"
    samples = races.race(ticking, three, box=60.0)
    assert {len(taken) for taken in samples.values()} == {races.MOST_ROUNDS}


# What is raced


def make_run(clock=None, **more):
    chosen = {"models": ["gpt2"], "backend": "auto", "box": 0.0, "deadline": math.inf, "save": lambda _: None}
    return sections.Run(device=torch.device("cpu"), clock=clock or Ticking(), **(chosen | more))


@pytest.mark.parametrize("stage", kernels.STAGES)
def test_a_rival_that_is_wrong_or_cannot_run_is_left_out_by_name(stage, capsys):
    case = Case([(3, 50), (1025,), (64,)], KINDS["bf16"], "toy", sets=1)

    def halved(stage, grads, sums):
        return kernels.each_fold(stage, [grad * 0.5 for grad in grads], sums)

    def broken(stage, grads, sums):
        raise OSError("libfast.so: cannot open")

    views = lambda stage, grads, sums: rivals.views_fold(stage, case.scale(0), sums)  # noqa: E731
    makers = {"wrong": halved, "broken": broken, "views": views, "foreach": kernels.foreach_fold}
    run = make_run()
    made = sections.fold_stage(run, Work(f"fold {stage}", "toy", "bf16 gradients", 10), case, stage, makers)
    assert [row.contender for row in made] == ["fusedaccum", "autograd into FP32 views", "_foreach_add_"]
    assert "not timed" in run.absent["wrong"]
    assert "libfast.so" in run.absent["broken"]
    assert "absent: broken" in capsys.readouterr().out


def test_ours_must_not_be_wrong(monkeypatch):
    case = Case([(3, 50)], KINDS["bf16"], "toy", sets=1)
    monkeypatch.setattr(
        kernels,
        "our_fold",
        lambda stage, grads, buffer: kernels.each_fold(stage, [g * 2 for g in grads], kernels.views(buffer)),
    )
    with pytest.raises(RuntimeError, match="not timed"):
        sections.fold_stage(make_run(), Work("fold later", "toy", "", 10), case, "later", {})


@pytest.mark.parametrize("kind", KINDS)
def test_every_window_of_a_gpu_agrees_with_float64(kind):
    case = Case([(3, 50), (1025,), (64,)], KINDS[kind], "toy")
    run = make_run()
    contenders, facts = sections.checked_windows(run, case, [sections.window.Ours, *rivals.WINDOWS[kind]])
    assert run.absent == {}
    assert len(contenders) == 4
    assert all(facts[each.name].launches == 1 for each in contenders)


def test_what_has_no_time_left_is_named():
    run = make_run(deadline=0.0)
    for section in sections.SECTIONS.values():
        section(run)
    assert run.rows == []
    kinds = ("masters", "bf16", "fp32")
    cut = ["fold gpt2 bf16", "fold gpt2 fp32", *(f"step gpt2 {kind}" for kind in kinds)]
    assert run.cut == [*cut, *(f"window gpt2 {kind}" for kind in kinds), "torch.compile"]


def test_whole_models_fit_into_139_gib_and_are_cut_where_they_do_not():
    available = 139 * 2**30 - 1e9 - RESERVE  # what a context and libraries take
    plans = [fold_bytes(KINDS["bf16"]), fold_bytes(KINDS["fp32"])]
    plans += [step_bytes(KINDS[kind]) for kind in MODELS["8b"].steps]
    for plan in plans:
        title, shapes = fitting(MODELS["8b"], plan, available)
        assert (title, len(shapes), numel(shapes)) == ("8B", 291, 8_030_261_248)
    title, shapes = fitting(MODELS["8b"], plans[0], 80e9 - RESERVE)
    assert "cut to" in title
    assert 60e9 < numel(shapes) * plans[0] <= 80e9 - RESERVE
    with pytest.raises(MemoryError, match="one layer needs 15 GB of 14"):
        fitting(MODELS["8b"], plans[0], 24e9 - RESERVE)
    assert len(MODELS["gpt2"].build(12)) == 148
    assert numel(MODELS["1.3b"].build(24)) == pytest.approx(1.3e9, rel=0.02)


# The goals


def row(section="fold later", model="gpt2", kind="bf16 gradients", contender="fusedaccum", **changed):
    values = {"device_min": 1e-3, "device_median": 1e-3, "wall_min": 1e-3, "wall_median": 1e-3, "host_min": 5e-5}
    values |= {"host_median": 6e-5, "gb_per_s": 95.0, "add_gb_per_s": 100.0, "facts": Facts(launches=1), "tensors": 148}
    values |= {"title": model, "numel": 10, "least_bytes": 10} | changed
    return Row(section=section, model=model, kind=kind, contender=contender, **values)


def a_good_run():
    made = []
    for model in MODELS:
        tensors = 10_000 if model == "10000x64" else 148
        facts = Facts(launches=3 if tensors > goals.ONE_LAUNCH else 1)
        for kind in ("bf16 gradients", "FP32 gradients"):
            for stage in kernels.STAGES:
                made.append(row(f"fold {stage}", model, kind, tensors=tensors, facts=facts))
                made.append(row(f"fold {stage}", model, kind, goals.ADD, wall_min=3.5e-3, facts=Facts()))
        made += [row("step AdamW", model, kind) for kind in MODELS[model].steps]
        made += [row("window of 8", model, kind) for kind in MODELS[model].windows]
    return made


def changed(rows, what, **values):
    for each in rows:
        if what(each):
            for name, value in values.items():
                setattr(each, name, value)
    return rows


def test_a_good_run_reaches_every_goal_within_a_screen():
    lines, passed = goals.summary(a_good_run(), {"Apex": "apex is not installed"}, [], dry=False)
    assert passed
    assert sum(line.startswith("pass") for line in lines) == 8
    assert len(lines) < 45, "15 more lines belong to the script"


BROKEN = {
    "fold: at least": lambda r: (r.section, r.model) == ("fold first", "8b") and setattr(r, "gb_per_s", 89.0),
    "step: at least": lambda r: (r.section, r.kind) == ("step AdamW", "bf16") and setattr(r, "gb_per_s", 89.0),
    "fold 10000x64": lambda r: r.model == "10000x64" and r.contender == goals.ADD and setattr(r, "wall_min", 2.9e-3),
    "fold gpt2": lambda r: r.model == "gpt2" and r.contender == goals.ADD and setattr(r, "wall_min", 1.4e-3),
    "fold 1.3b": lambda r: (r.model, r.section) == ("1.3b", "fold last") and setattr(r, "wall_min", 9e-3 - r.wall_min),
    "one launch": lambda r: (r.model, r.section) == ("odd", "fold later") and setattr(r, "facts", Facts(launches=2)),
    "under 120 us": lambda r: (r.model, r.section) == ("gpt2", "window of 8") and setattr(r, "host_median", 121e-6),
}


@pytest.mark.parametrize("goal", BROKEN)
def test_each_goal_can_be_missed(goal):
    made = a_good_run()
    for each in made:
        BROKEN[goal](each)
    missed = [verdict for verdict in goals.judge(made) if not verdict.passed]
    assert len(missed) == 1
    assert missed[0].goal.startswith(goal)
    lines, passed = goals.summary(made, {}, [], dry=False)
    assert not passed
    assert sum(line.startswith("FAIL") for line in lines) == 1


def test_what_was_not_measured_is_no_goal_reached():
    for verdict in goals.judge([]):
        assert verdict.passed is None
    without_8b = [each for each in a_good_run() if each.model != "8b"]
    lines, passed = goals.summary(without_8b, {}, ["fold 8b bf16"], dry=False)
    assert not passed
    assert any("not measured: 8b" in line for line in lines)
    assert "no time left for: fold 8b bf16" in lines


def test_a_dry_run_shows_no_number_as_measured():
    assert set(cells(row(), clocks.DryClock())) == {"dry"}
    lines, passed = goals.summary(a_good_run(), {}, [], dry=True)
    assert passed
    assert not any(re.search(r"\bms\b|GB/s|\bus\b", line) for line in lines)


def test_the_command_runs_dry(tmp_path, capsys):
    summary, samples = tmp_path / "summary", tmp_path / "new" / "bench.json"
    arguments = ["--device", "cpu", "--models", "gpt2", "--only", "fold", "step", "window", "--box", "0"]
    assert main([*arguments, "--summary", str(summary), "--json", str(samples)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("CPU DRY RUN")
    assert printed.count("### ") == 6 + 3 + 3
    assert printed.endswith(summary.read_text())
    assert '"clock": "CPU DRY RUN' in samples.read_text()


def test_without_a_gpu_the_command_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err
