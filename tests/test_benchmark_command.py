"""python -m fusedaccum bench: the command, the comparison of two files, the scaling section and the picture."""

from __future__ import annotations

import copy
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fusedaccum.benchmark import compare, plot, quiet, scaling, truth, window
from fusedaccum.benchmark.cases import KINDS
from fusedaccum.benchmark.progress import Progress
from fusedaccum.benchmark.run import Options, Run
from fusedaccum.cli import main

ROOT = Path(__file__).parent.parent
QUICK = ["bench", "--quick", "--no-compile", "--threads", "1"]


# The command


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """(exit code, output, the JSON file) of a small run of every section."""
    path = tmp_path_factory.mktemp("bench") / "new" / "bench.json"
    arguments = ["--shapes", "10000x64", "--kinds", "masters", "--json", str(path)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", io.StringIO())
        patch.setattr(scaling, "AXES", {"tensors": scaling.tensors})
        threads = torch.get_num_threads()
        torch.set_num_threads(3)
        code = main([*QUICK, *arguments])
        assert torch.get_num_threads() == 3, "as it was before"
        torch.set_num_threads(threads)
        return code, sys.stdout.getvalue(), path


def test_every_section_runs_and_is_printed(ran):
    code, printed, path = ran
    assert code == 0
    for title in ("fold, first", "fold, later", "fold, last", "step, AdamW", "window of 8", "scaling, tensors"):
        assert f"### {title}" in printed
    assert "NOT QUIET, do not publish: --quick" in printed
    assert f"samples: {path}" in printed
    assert "load average before: " in printed
    assert "\nload_after: " in printed
    assert "absent: torch.compile, sums (left out by --no-compile)" in printed
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_the_file_holds_samples_machine_and_versions(ran):
    content = json.loads(ran[2].read_text())
    assert content["machine"].keys() >= {"cpu", "threads", "torch", "commit", "load_before", "load_after", "packages"}
    assert content["noise"] == ["--quick: nothing here is a measurement"]
    windows = [row for row in content["rows"] if row["section"] == "window of 8 micro-batches"]
    assert windows[0]["contender"] == "fusedaccum"
    assert {"main_grad.add_ per parameter", "_foreach_add_"} <= {row["contender"] for row in windows}
    for row in content["rows"]:
        assert len(row["samples"]) == len(row["add_samples"]) == 2
        assert row["minimum"] == min(row["samples"]) > 0
        assert row["launches"] >= 1
        assert row["error"] >= 0
    for row in windows:
        assert row["host_us"] > 0
    by_name = {row["contender"]: row for row in windows}
    # The quick stand-in has 300 tensors: an addition and what converts is inside it, clip, step, copies, zeroing.
    assert by_name["main_grad.add_ per parameter"]["launches"] > 8 * 300
    assert by_name["fusedaccum"]["launches"] < 30
    assert {f"fusedaccum, fold_every={every}" for every in (2, 3)} <= by_name.keys()
    assert [axis["points"][0]["label"] for axis in content["scaling"]] == ["10 tensors"] * len(content["scaling"])
    assert content["scaling"]


def test_without_matplotlib_the_picture_is_named_as_missing(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = tmp_path / "bench.json"
    assert main([*QUICK, "--only", "step", "--shapes", "400x10486", "--kinds", "fp32", "--json", str(path)]) == 0
    assert "picture: none, " in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [path]


def test_a_busy_machine_is_refused_unless_it_is_allowed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(quiet, "noise", lambda: ["others use 80% of this machine"])
    arguments = [
        "bench",
        "--only",
        "step",
        "--shapes",
        "400x10486",
        "--kinds",
        "fp32",
        "--json",
        str(tmp_path / "b.json"),
    ]
    assert main([*arguments, "--threads", "1"]) == 3
    said = capsys.readouterr()
    assert "NOT QUIET: others use 80%" in said.err
    assert "--allow-noise" in said.err
    assert not (tmp_path / "b.json").exists()
    assert main([*QUICK, *arguments[1:], "--allow-noise"]) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "nothing"], "invalid choice: 'nothing'"),
        (["--shapes", "gpt5"], "invalid choice: 'gpt5'"),
        (["--kinds", "fp8"], "invalid choice: 'fp8'"),
        (["--rounds", "1"], "'1' must be an integer of at least 2"),
        (["--threads", "0"], "'0' must be an integer of at least 1"),
        (["--memory-gb", "-3"], "'-3' must be a number above 0"),
        (["--fail-over", "nan"], "'nan' must be a number above 0"),
        (["--device", "tpu"], "'tpu' must be cpu or cuda"),
        (["--compare", "no.json", "no.json"], "no.json"),
        (["--compare", "README.md", "README.md"], "README.md is no JSON file of the benchmark"),
        (["--compare", "bench/results/traffic.json", "README.md"], "has no machine and rows"),
        (["--compare", "one.json"], "expected 2 arguments"),
        (["surplus"], "unrecognized arguments: surplus"),
    ],
)
def test_wrong_arguments_are_named(arguments, said, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *arguments])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_without_a_gpu_the_device_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "--device", "cuda"])
    assert stopped.value.code == 2
    assert "there is no CUDA device" in capsys.readouterr().err


def test_help_has_examples_lists_and_exit_codes_under_both_names():
    for module in ("fusedaccum bench", "bench"):
        command = [sys.executable, "-m", *module.split(), "--help"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert "python -m fusedaccum bench --compare before.json after.json --fail-over 3" in done.stdout
        assert "GPT-2 124M" in done.stdout
        assert "exit codes: 0 done" in done.stdout
        assert max(map(len, done.stdout.splitlines())) <= 125


# Comparing


def results(seconds=1.0, add=1.0, spread=0.01, contender="fusedaccum", **machine):
    """A file of one row: a minimum of `seconds`, 1 % over it in the median; the reference add the same."""
    row = {"section": "window", "shapes": "toy", "kind": "masters", "contender": contender, "numel": 10**9}
    row |= {"samples": [seconds, seconds * (1 + spread), seconds * (1 + 2 * spread)]}
    row |= {"add_samples": [add, add * 1.01, add * 1.02], "add_gb_per_s": 12 / add}
    return {"machine": {"commit": "abc"} | machine, "rows": [row], "noise": []}


def verdict(before, after, threshold=0.05):
    text, slower = compare.report(before, after, threshold)
    return text.splitlines()[2].rsplit(" | ", 1)[1].removesuffix(" |"), len(slower)


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (results(1.0), ("same", 0)),
        (results(1.04), ("same", 0)),
        (results(1.07), ("slower", 1)),
        (results(0.9), ("faster", 0)),
        (results(1.07, spread=0.1), ("same", 0)),  # its own noise is larger
        (results(1.3, add=1.3), ("same", 0)),  # the whole machine got slower
        (results(1.0, add=0.7), ("slower", 1)),  # the machine got faster, and this did not
        (results(1.0, add=1.005), ("same", 0)),
        (results(1.055, add=1.01), ("slower", 1)),  # a change of the reference within its noise is none
    ],
)
def test_a_change_counts_beyond_the_noise_and_beside_the_reference(after, expected):
    assert verdict(results(), after) == expected


def test_a_threshold_and_rivals():
    assert verdict(results(), results(1.07), threshold=0.1) == ("same", 0)
    rival = {"contender": "_foreach_add_"}
    assert verdict(results(**rival), results(1.5, **rival)) == ("slower", 0)


def test_what_cannot_be_compared_is_said():
    before, after = results(cpu="old", threads=2), results(cpu="new", threads=2)
    after["noise"] = ["others used 30%"]
    before["rows"].append(before["rows"][0] | {"contender": "gone"})
    after["rows"].append(after["rows"][0] | {"contender": "new"})
    text, _ = compare.report(before, after, 0.05)
    assert "OTHER MACHINE: cpu was old, is new" in text
    assert "threads was" not in text
    assert "NOT QUIET, after: others used 30%" in text
    assert "only before: window, toy, masters, gone" in text
    assert "only after: window, toy, masters, new" in text


def test_compared_files_decide_the_exit_code(ran, tmp_path, capsys):
    before = json.loads(ran[2].read_text())
    after, nothing = copy.deepcopy(before), copy.deepcopy(before)
    for row in after["rows"]:
        if row["contender"] == "fusedaccum":
            row["samples"] = [100 * max(row["samples"])] * 2
    nothing["rows"] = nothing["scaling"] = []
    paths = {"same": ran[2]}
    for name, content in (("after", after), ("nothing", nothing), ("cut", {"machine": {}, "rows": [{}]})):
        paths[name] = tmp_path / f"{name}.json"
        paths[name].write_text(json.dumps(content))

    def compared(first, last, *more):
        return main(["bench", "--compare", str(paths[first]), str(paths[last]), *more])

    assert compared("same", "same") == 0
    printed = capsys.readouterr().out
    assert "0 slower, 0 of them ours (a change counts beyond 5.0%" in printed
    assert "scaling, tensors" in printed
    assert compared("same", "after") == 1
    assert compared("after", "same") == 0
    assert compared("same", "after", "--fail-over", "1e9") == 0
    assert compared("same", "nothing") == 1
    assert "nothing in common" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        compared("same", "cut")
    assert stopped.value.code == 2


def test_published_samples_can_be_compared():
    published = ROOT / "bench" / "results" / "cpu-window.json"
    assert main(["bench", "--compare", str(published), str(published)]) == 0


# Scaling


def test_a_straight_line_is_found_and_small_points_count_as_much():
    fixed, slope = scaling.straight_line([1, 10, 1000], [2 + 3 * x for x in (1, 10, 1000)])
    assert (fixed, slope) == (pytest.approx(2), pytest.approx(3))
    ys = [x * bend for x, bend in ((1, 1.1), (10, 0.9), (1000, 1.0), (2000, 1.0))]
    fixed, slope = scaling.straight_line([1, 10, 1000, 2000], ys)
    assert max(abs(y / (fixed + slope * x) - 1) for x, y in zip([1, 10, 1000, 2000], ys, strict=True)) < 0.15
    assert scaling.straight_line([5, 5], [1, 1]) == (1, 0)


def point(at, seconds, cached=None, add=None, samples=None):
    return scaling.Point(at, f"{at:g} M", int(at * 1e6), seconds, samples or [seconds], add or at, cached)


def notes(points, name="parameters", **more):
    axis = scaling.Axis(name, "fusedaccum", "parameter", points, **more)
    scaling.fit(axis)
    return axis, "\n".join(axis.notes)


def test_points_in_a_cache_are_left_out_of_the_line_and_explain_their_bend():
    axis, said = notes([point(1, 0.5, "L3"), point(10, 10), point(100, 100), point(1000, 1000)], bytes_each=104e9)
    assert (axis.fixed, axis.slope) == (pytest.approx(0, abs=1e-9), pytest.approx(1))
    assert "held by a cache, and left out of the line: 1 M (L3)" in said
    assert "1 M: -50% from the line; its 1.0 MiB lie in the L3 cache" in said
    assert "the slope is 104.0 GB/s over the least bytes" in said
    _, said = notes([point(1, 0.5, "L3"), point(10, 10, "L3"), point(100, 100)])
    assert "in the line, as fewer than three points are not: 1 M (L3), 10 M (L3)" in said
    assert "any line fits" in notes([point(1, 1), point(2, 2)])[1]


def test_a_bend_is_explained_by_the_reference_or_by_noise_or_not_at_all():
    straight = [point(10, 10), point(100, 100), point(1000, 1000)]
    assert notes(straight)[1] == ""
    _, said = notes([*straight, point(3000, 6000, add=6000)])
    assert "the machine's memory bends" in said
    _, said = notes([*straight, point(3000, 6000)])
    assert "3000 M: +" in said
    assert "the machine's memory bends" not in said
    assert "not explained: the reference add" in said
    _, said = notes([*straight, point(3000, 6000, samples=[6000, 12000, 12000])])
    assert "no more than noise: its own median is 100% over its minimum" in said
    _, said = notes([*straight, point(3000, 6000)], name="steps")
    assert "not explained: its median is 0% over its minimum" in said


def test_the_smallest_cache_that_has_room_is_named():
    caches = {"L1": 32 << 10, "L2": 1 << 20, "L3": 32 << 20}
    sizes = (16 << 10, (16 << 10) + 1, 1 << 19, 16 << 20, (16 << 20) + 1)
    assert [scaling.cache_for(size, caches) for size in sizes] == ["L1", "L2", "L2", "L3", None]


def make_run(memory_gb=1.0):
    return Run(Options(rounds=2, threads=1, memory_gb=memory_gb, quick=True), Progress(1, io.StringIO()))


@pytest.mark.parametrize("name", scaling.AXES)
def test_each_axis_is_measured_and_drawn(name, capsys, tmp_path):
    run = make_run()
    scaling.one_axis(name, 1, run)
    (axis,) = run.scaling
    ats = [point["at"] for point in axis["points"]]
    assert len(set(ats)) == len(ats) == {"parameters": 5, "tensors": 5, "steps": 7, "threads": 1}[name]
    assert all(point["minimum"] > 0 and point["fitted"] is not None for point in axis["points"])
    printed = capsys.readouterr().out
    assert f"### scaling, {name}: fusedaccum" in printed
    assert "\nline: " in printed
    machine = quiet.machine(1, "test")
    plot.draw([], run.scaling, machine, [], tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").stat().st_size > 5_000
    assert torch.get_num_threads() == 1


def test_points_that_do_not_fit_are_left_out_by_name(capsys):
    run = make_run(memory_gb=0.001)
    scaling.one_axis("parameters", 1, run)
    (axis,) = run.scaling
    assert axis["left_out"].keys() == {"0.075 M"}
    assert "- left out: 0.075 M: needs 0 GB of 0; see --memory-gb" in capsys.readouterr().out
    run = make_run(memory_gb=1e-9)
    scaling.one_axis("parameters", 1, run)
    assert run.scaling == []
    assert any("0.0025 M" in name for name in run.absent)


def test_points_that_fit_together_take_turns(monkeypatch):
    groups = []
    monkeypatch.setattr(scaling, "race_points", lambda run, group, cls: groups.append(len(group)) or [])
    run = make_run()
    made = [(1.0, "x", scaling.make_case(100_000, 1, run), None)] * 5
    run.options.memory_gb = 2.5 * scaling.point_bytes(made[0][2]) * 1e-9
    scaling.measure(run, scaling.Axis("parameters", "fusedaccum", "parameter"), made, window.Ours)
    assert groups == [2, 2, 1]


def test_a_wrong_contender_is_not_measured(monkeypatch):
    monkeypatch.setattr(truth, "errors", lambda case, found: {"fusedaccum": truth.Error(1.0, 7, 100)})
    with pytest.raises(RuntimeError, match="7 of 100 parameters are farther"):
        scaling.one_axis("steps", 1, make_run())


def test_fold_every_that_the_wrapper_refuses_is_named(monkeypatch, capsys):
    monkeypatch.setattr(window, "why_not_folded_together", lambda every: f"no {every}")
    scaling.one_axis("steps", 2, make_run())
    assert "absent: steps, fold_every=2 (no 2)" in capsys.readouterr().out


def test_windows_of_any_length_agree_with_float64():
    for steps in (1, 3, 64):
        case = scaling.make_case(300, 3, make_run(), steps)
        contender = window.Ours(case)
        scaling.sections.run_windows(contender)
        truth.refuse_wrong(truth.errors(case, {contender.name: contender.params}), set())
    assert case.kind is KINDS["masters"]
