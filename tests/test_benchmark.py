"""The benchmark's parts: what is asked of contenders, who they are, how they are counted.

The judge has its tests in bench/test_refusal.py.
"""

from __future__ import annotations

import io
import math
import sys
import time
import weakref
from types import SimpleNamespace

import pytest
import torch

from fusedaccum.benchmark import harness, kernels, quiet, report, rivals, sections, window
from fusedaccum.benchmark.cases import KINDS, SHAPE_LISTS, Case, fitting, numel
from fusedaccum.benchmark.clock import CpuClock, Sample, operators_in
from fusedaccum.benchmark.progress import Progress
from fusedaccum.benchmark.run import Options, Run

SHAPES = [(3, 50), (1_025,), (64,)]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_run(**options):
    return Run(Options(rounds=2, threads=1, quick=True, **options), Progress(1, io.StringIO()))


# What is asked for


@pytest.mark.parametrize(
    ("kind", "fold_every", "clip", "micro_batches", "least"),
    [
        ("masters", 1, True, 8, 104),
        ("masters", 1, False, 8, 98),
        ("masters", 2, True, 8, 74),
        ("masters", 2, False, 8, 66),
        ("masters", 3, True, 8, 66),
        ("masters", 3, False, 8, 58),
        ("bf16", 2, True, 8, 60),
        ("fp32", 1, True, 8, 120),
        ("fp32", 2, True, 8, 88),
        # All of the window in the update: 16 of gradients, no sum, and with clipping the gradients once more.
        ("masters", 8, False, 8, 16 + 30 - 4),
        ("masters", 1, True, 1, 2 + 2 + 30 - 4),
        # The sum written and read is cheaper than reading FP32 gradients twice.
        ("fp32", 4, True, 4, 16 + 4 + 28),
    ],
)
def test_least_bytes_of_a_window(kind, fold_every, clip, micro_batches, least):
    assert KINDS[kind].least_window_bytes(fold_every, clip, micro_batches) == least
    case = Case(SHAPES, KINDS[kind], "toy", clip=clip, micro_batches=micro_batches)
    assert case.least_window_bytes(fold_every) == least


def test_shape_lists_are_the_models_they_are_named_after():
    sizes = {name: (len(listed.shapes()), numel(listed.shapes())) for name, listed in SHAPE_LISTS.items()}
    assert sizes["gpt2"] == (148, 124_439_808)
    assert sizes["8b"] == (291, 8_030_261_248)
    assert sizes["1.3b"][1] == pytest.approx(1.3e9, rel=0.02)
    assert sizes["10000x64"] == (10_000, 640_000)
    assert sizes["400x10486"] == (400, 4_194_400)
    assert sizes["odd"][0] == 96
    assert all(size % 2 for (size,) in SHAPE_LISTS["odd"].shapes())
    assert all(numel(listed.quick()) < 200_000 for listed in SHAPE_LISTS.values())


def test_a_model_is_cut_to_the_memory_or_left_out_by_name(capsys):
    title, shapes = fitting(SHAPE_LISTS["1.3b"], 58, 12e9)
    assert title == "1.3B, cut to 1 of 24 layers: there are 12 GB for it"
    assert 11e9 - 58 * 51e6 < 58 * numel(shapes) <= 12e9
    run = make_run(memory_gb=0.001)
    run.options.quick = False
    assert list(run.case("10000x64", "masters", 58, sets=None)) == []
    assert "absent: 10,000 x 64 (it needs 0 GB of 0; see --memory-gb)" in capsys.readouterr().out
    assert "10,000 x 64; masters; 10,000 x 64" in run.absent


def owners(param):
    """References to a gradient: as an object, as a tensor, to its storage; and what it is a view of."""
    grad = param.grad
    storage = torch._C._storage_Use_Count(grad.untyped_storage()._cdata)
    return sys.getrefcount(grad), grad._use_count(), storage, grad._base


@pytest.mark.parametrize("kept", [True, False])
def test_gradients_are_handed_over_to_be_owned_by_the_window_alone(kept):
    case = Case(SHAPES, KINDS["bf16"], "toy", kept=kept)
    contender, ours_alone = window.Window(case), window.parameters(case)[0]
    (ours_alone * 2).sum().backward()
    contender.give(1, first=False)
    assert owners(contender.params[0]) == owners(ours_alone)
    grad, expected = contender.params[0].grad, case.gradients[1][0]
    assert torch.equal(grad, expected)
    assert (grad.data_ptr() == expected.data_ptr()) == kept
    assert grad.data_ptr() % 64 == 0
    owner = weakref.ref(expected)
    case.forget()
    del expected
    assert (owner() is not None) == kept, "memory that is handed over stays as long as a gradient lies over it"
    del grad, contender
    assert owner() is None


# Who runs


def test_every_absent_contender_is_named_with_its_reason(monkeypatch):
    monkeypatch.setattr(rivals, "installed", lambda name: None)
    case = Case(SHAPES, KINDS["masters"], "toy")
    present, absent = rivals.contenders("masters", case, compiled=False)
    assert [cls.name for cls in present if not cls.name.startswith("fusedaccum")] == [
        "autograd into FP32 views",
        "main_grad.add_ per parameter",
        "_foreach_add_",
    ]
    assert absent["torch.compile, sums"] == "left out by --no-compile"
    assert absent["main_grad.add_ + DeepSpeedCPUAdam"] == "deepspeed is not installed"
    assert absent["main_grad.add_ + Apex FusedAdam"] == "it runs on a GPU alone"
    assert absent["main_grad.add_ + TransformerEngine FusedAdam"] == "it runs on a GPU alone"
    assert "add_ per parameter" in absent["Megatron"]


def test_reasons_depend_on_the_case(monkeypatch):
    def broken(name):
        raise OSError("libfast.so: cannot open")

    monkeypatch.setattr(rivals, "installed", broken)
    many = Case([(1,)] * 501, KINDS["bf16"], "toy")
    assert "more than 500 tensors" in rivals.why_not(window.CompiledSums, many, compiled=True)
    assert rivals.why_not(window.CompiledSums, Case(SHAPES, KINDS["bf16"], "toy"), compiled=True) is None
    assert rivals.why_not(rivals.DeepSpeedWindow, many, compiled=True) == "its moments are FP32"
    reason = rivals.why_not(rivals.DeepSpeedWindow, Case(SHAPES, KINDS["fp32"], "toy"), compiled=True)
    assert reason == "deepspeed cannot be imported: libfast.so: cannot open"
    on_gpu = Case(SHAPES, KINDS["fp32"], "toy", device=torch.device("cuda")) if torch.cuda.is_available() else None
    if on_gpu is not None:
        assert rivals.why_not(rivals.DeepSpeedWindow, on_gpu, compiled=True) == "it runs on a CPU alone"


def test_deepspeed_runs_where_it_is_installed(monkeypatch):
    """Through a stand-in with its signature: what is compared is that our side asks for AdamW with our numbers."""

    def make(params, lr, betas, eps, weight_decay, adamw_mode):
        assert adamw_mode
        return torch.optim.AdamW(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    module = SimpleNamespace(DeepSpeedCPUAdam=make)
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "deepspeed.ops", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "deepspeed.ops.adam", module)
    case = Case(SHAPES, KINDS["masters"], "toy")
    present, _ = rivals.contenders("masters", case, compiled=False)
    assert rivals.DeepSpeedWindow in present
    checked = sections.build_and_check(case, [window.Ours, rivals.DeepSpeedWindow])
    assert checked.refused == {}


def test_fold_every_is_asked_for_and_left_out_by_name(monkeypatch):
    asked = []

    def wrapper(optimizer, **options):
        asked.append(options.get("fold_every"))
        if options.get("fold_every") == 3:
            raise ValueError("FusedAccumOptimizer: fold_every=3\nis not supported")
        return optimizer

    monkeypatch.setattr(window, "FusedAccumOptimizer", wrapper)
    case = Case(SHAPES, KINDS["masters"], "toy")
    present, absent = rivals.contenders("masters", case, compiled=False, fold_every=(2, 3))
    assert present[0].name == "fusedaccum, fold_every=2"
    assert absent["fusedaccum, fold_every=3"] == "FusedAccumOptimizer: fold_every=3 is not supported"
    present[0](case)
    window.Ours(case)
    assert asked == [2, 3, 2, None]


# How they are counted


class Holding(window.AddSums):
    """Keeps a micro-batch's gradients until the next one comes, and takes a millisecond for each later one."""

    name = "holding"

    def __init__(self, case):
        super().__init__(case)
        self.held, self.calls = [], 0

    def add(self):
        self.held = [param.grad for param in self.params]
        if self.calls % self.case.micro_batches not in (0, self.case.micro_batches - 1):
            time.sleep(1e-3)
        self.calls += 1
        super().add()


def test_gradients_that_are_held_back_count_as_memory():
    case = Case([(20_000,), (30_000,)], KINDS["fp32"], "toy")
    checked = sections.build_and_check(case, [window.Ours, window.AddSums, Holding])
    assert case.kept
    assert checked.extra["holding"] - checked.extra[window.AddSums.name] == pytest.approx(4, abs=0.1)
    assert checked.extra["fusedaccum"] == pytest.approx(4, abs=0.1)


def test_host_time_is_that_of_later_micro_batches_by_tensor():
    case = Case([(10, 10)] * 20, KINDS["fp32"], "toy")
    assert 1_000 / 20 < sections.host_us(case, Holding) < 10_000 / 20
    assert sections.host_us(case, window.CompiledSums) is None


def test_operator_calls_are_counted_once_whatever_they_call():
    def event(name, start, length, thread=1):
        times = {"start_ns": lambda: start, "duration_ns": lambda: length, "start_thread_id": lambda: thread}
        return SimpleNamespace(name=lambda: name, **times)

    events = [event("aten::copy_", 12, 3), event("aten::to", 11, 8), event("aten::add_", 10, 20)]
    events += [event("[memory]", 50, 0), event("Optimizer.step#AdamW.step", 40, 100), event("aten::mul", 60, 5)]
    events += [event("aten::add_", 61, 2, thread=2), event("aten::add_", 70, 0), event("aten::add_", 70, 1)]
    assert operators_in(events) == 4

    tensors = [torch.ones(3) for _ in range(7)]
    grads = [torch.ones(3, dtype=torch.bfloat16) for _ in range(7)]
    part = (lambda: torch.ones(3), lambda: [a.add_(b) for a, b in zip(tensors, grads, strict=True)])
    assert CpuClock().launches(part) == 7
    counts = []
    for tensors in (3, 30):
        contender = window.Ours(Case([(5,)] * tensors, KINDS["masters"], "toy"))
        sections.run_windows(contender)
        counts.append(make_run().launches(contender))
    assert counts[0] == counts[1] <= 24
    rival = window.ForeachSums(Case(SHAPES, KINDS["masters"], "toy"))
    sections.run_windows(rival)
    assert sections.launches(make_run(), rival) == make_run().launches(rival)


def test_a_race_takes_turns_and_says_who_is_next():
    order, ticks = [], []
    three = [SimpleNamespace(name=name, parts=lambda: []) for name in "abc"]
    taken = harness.race(three, 3, lambda each: order.append(each.name) or len(order), lambda *tick: ticks.append(tick))
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"
    assert taken == {"a": [4, 9, 11], "b": [5, 7, 12], "c": [6, 8, 10]}
    assert ticks[:2] == [(0, "a"), (1, "b")]
    assert ticks[-1] == (11, "b")


# How they are shown


def sample(seconds):
    return Sample(seconds, 2 * seconds, [seconds])


def made_rows():
    case = Case([(1_000, 1_000)], KINDS["masters"], "toy")
    samples = {
        "fusedaccum": [sample(2e-3), sample(4e-3), sample(3e-3)],
        "rival": [sample(6e-3), sample(4e-3), sample(6e-3)],
        harness.InPlaceAdd.name: [sample(1e-3), sample(1.5e-3), sample(1e-3)],
    }
    return report.rows(report.Work("window", "masters", 104), case, "fusedaccum", samples)


def test_rows_are_over_the_least_bytes_and_the_reference():
    ours, rival = made_rows()
    assert (ours.minimum, ours.median, ours.wall_minimum) == (2e-3, 3e-3, 4e-3)
    assert ours.gb_per_s == pytest.approx(104e6 / 2e-3 * 1e-9)
    assert ours.share_of_add == pytest.approx(52 / 12)
    assert rival.gb_per_s == pytest.approx(26)
    assert rival.ratio_of_minima == 2
    assert rival.ratio_of_rounds == 2  # of 3, 1, 2
    ours.least_bytes = 74
    ours.rate()
    assert ours.share_of_add == pytest.approx(37 / 12)
    rival.launches, rival.error = 1_234, 2.5e-2
    text = report.table([ours, rival], torch.device("cpu"))
    assert "GB/s over 74 or 104 B per parameter" in text
    assert "| rival | 4.00 | 6.00 | 26.0 | 217% | 2.00 | 2.00 | 1,234 | - | - | 2.5e-02 |" in text


def test_the_summary_compares_each_of_ours_with_the_best_rival():
    ours, rival = made_rows()
    second, worse = made_rows()
    second.contender, second.ratio_of_minima = "fusedaccum, fold_every=2", 0.5
    worse.contender, worse.ratio_of_minima = "worse rival", 3.0
    lines = report.summary([ours, second, worse, rival]).splitlines()[2:]
    assert [line.split(" | ")[2] for line in lines] == ["fusedaccum", "fusedaccum, fold_every=2"]
    assert [line.rsplit(" | ", 2)[1:] for line in lines] == [["rival", "2.00 |"], ["rival", "4.00 |"]]
    assert report.summary([ours]).endswith("| - | - |")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_a_bar_on_a_terminal_and_plain_lines_elsewhere(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    outputs = []
    for stream in (io.StringIO(), Terminal()):
        progress = Progress(2, stream)
        progress.begin("fold: toy")
        progress.expect(10)
        progress.tick(5, "fusedaccum")
        progress.clear()
        progress.begin("window: toy")
        outputs.append(stream.getvalue())
    assert outputs[0] == "[1/2] fold: toy\n[2/2] window: toy\n"
    assert "[############............] 5/10" in outputs[1]
    assert all(len(line) < 60 + 4 for line in outputs[1].split("\r"))
    assert "\n" not in outputs[1]


# The machine


def test_the_machine_is_described(tmp_path):
    machine = quiet.machine(3, "fusedaccum bench")
    assert machine["threads"] == 3
    assert machine["torch"] == torch.__version__
    assert machine["backend"] == "compiled"
    assert machine["command"].startswith("python -m fusedaccum bench")
    assert quiet.commit(tmp_path) == "not a checkout"
    for index, (level, kind, size) in enumerate(
        [("1", "Data", "32K"), ("1", "Instruction", "64K"), ("3", "Unified", "2M")]
    ):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        for name, value in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(value + "\n")
    assert quiet.caches(tmp_path) == {"L1": 32 << 10, "L3": 2 << 20}
    assert quiet.caches(tmp_path / "none") == {}


@pytest.mark.parametrize("stage", kernels.STAGES)
def test_folds_and_steps_say_how_far_they_are_from_float64(stage):
    case = Case(SHAPES, KINDS["masters"], "toy", sets=1)
    for kernel in kernels.folds(case, stage):
        assert 0 <= kernel.error < 2**-23
    assert all(0 < kernel.error < 0.1 for kernel in kernels.steps(case))
    assert math.isclose(*(kernel.error for kernel in kernels.steps(case)), rel_tol=0.2)
