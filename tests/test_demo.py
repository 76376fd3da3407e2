"""The demo and the command line."""

from __future__ import annotations

import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fusedaccum
from fusedaccum import backends
from fusedaccum.cli import main
from fusedaccum.demo import LOOPS, data
from fusedaccum.demo.loops import FusedLoop, NativeLoop
from fusedaccum.demo.measure import Clock, GradientMeter, activation_bytes, bytes_of
from fusedaccum.demo.model import GPT
from fusedaccum.demo.progress import Progress
from fusedaccum.demo.results import LABELS
from fusedaccum.demo.settings import Settings
from fusedaccum.demo.train import build_model, observed_windows

TINY = ["demo", "--updates", "6", "--steps", "4", "--rows", "1", "--layers", "1", "--width", "64"]


@pytest.fixture(scope="module")
def corpus() -> data.Corpus:
    return data.load_corpus()


# Text


def test_text_is_all_of_pydoc_topics_that_holds_words_each_paragraph_once():
    from pydoc_data.topics import topics

    paragraphs = data.read_paragraphs()
    source = "\n".join(topics.values()).split("\n")
    assert sum(map(len, paragraphs)) > 300_000
    assert len(set(paragraphs)) == len(paragraphs)
    assert set("\n".join(paragraphs).split("\n")) == {line for line in source if re.search(r"\w", line)}


def test_held_out_text_is_a_tenth_and_apart():
    paragraphs = data.read_paragraphs()
    train, validation = (set(text.split("\n\n")) for text in data.split(paragraphs))
    assert not train & validation
    assert train | validation == set("\n\n".join(paragraphs).split("\n\n"))
    assert 0.07 < len(validation) / len(paragraphs) < 0.13


def test_vocabulary_encodes_without_loss(corpus):
    train, validation = data.split(data.read_paragraphs())
    vocabulary = corpus.vocabulary
    assert len(vocabulary) == data.VOCABULARY
    assert vocabulary.decode(corpus.train) == train
    assert vocabulary.decode(corpus.validation) == validation
    assert len(corpus.train) < len(train) / 2
    with pytest.raises(KeyError):
        vocabulary.encode("\N{SNOWMAN}")


def test_training_windows_are_cuts_of_the_text_and_follow_the_seed():
    text = torch.arange(1000)
    settings = Settings(updates=3, steps=2, rows=4, context=16, seed=5)
    windows = data.training_windows(text, settings)
    assert windows.shape == (3, 2, 4, 17)
    assert bool((windows.diff(dim=-1) == 1).all())
    assert windows[..., 0].unique().numel() > 20
    assert torch.equal(windows, data.training_windows(text, settings))
    assert not torch.equal(windows, data.training_windows(text, Settings(3, 2, 4, 16, seed=6)))


def test_validation_predicts_each_token_once():
    rows = data.validation_rows(torch.arange(100), context=16)
    assert torch.equal(rows[:, 1:].flatten(), torch.arange(1, 97))
    assert torch.equal(rows[:, :-1].flatten(), torch.arange(96))


# Model


def test_model_starts_at_chance_and_overfits_one_batch():
    torch.manual_seed(0)
    model = GPT(tokens=50, width=64, layers=2, context=32)
    rows = torch.randint(50, (2, 33))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    assert model.loss(rows).item() == pytest.approx(math.log(50), abs=0.2)
    for _ in range(60):
        optimizer.zero_grad()
        model.loss(rows).backward()
        optimizer.step()
    assert model.loss(rows).item() < 0.3


def test_model_does_not_see_the_future():
    torch.manual_seed(0)
    model = GPT(tokens=50, width=64, layers=2, context=32)
    rows = torch.randint(50, (1, 32))
    changed = rows.clone()
    changed[0, 20] = (changed[0, 20] + 1) % 50
    before, after = model(rows), model(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20])
    assert not torch.allclose(before[:, 20:], after[:, 20:], atol=1e-3)


def test_width_must_hold_whole_heads():
    with pytest.raises(ValueError, match="width=100"):
        GPT(tokens=50, width=100, layers=1, context=32)


# Loops


def test_loops_train_alike_where_precision_is_out_of_the_way(corpus):
    """In FP32 the three ways of summing are the same training, scale, clipping and schedule included.

    max_norm lies amid the windows' norms: AdamW alone would not see a wrong scale, nor would clipping everywhere.
    """
    settings = Settings(updates=6, steps=4, rows=1, context=64, width=64, layers=1, max_norm=2.3)
    windows = data.training_windows(corpus.train, settings)
    losses = {}
    for name, make in {
        "fused": FusedLoop,
        "micro": lambda model, settings: NativeLoop(model, settings, one_batch=False, masters=True),
        "batch": lambda model, settings: NativeLoop(model, settings, one_batch=True, masters=False),
    }.items():
        loop = make(build_model(corpus, settings, torch.float32), settings)
        losses[name] = torch.stack([loop.window(rows) for rows in windows])
    assert losses["batch"][0] - losses["batch"][-1] > 0.1
    torch.testing.assert_close(losses["micro"], losses["batch"], atol=5e-5, rtol=0)
    torch.testing.assert_close(losses["fused"], losses["batch"], atol=5e-5, rtol=0)


def test_runs_start_from_the_same_values(corpus):
    settings = Settings(width=64, layers=1)
    low, high = (build_model(corpus, settings, dtype) for dtype in (torch.bfloat16, torch.float32))
    for p, q in zip(low.parameters(), high.parameters(), strict=True):
        assert torch.equal(p.float(), q)
    assert set(LOOPS) == set(LABELS)


# Measures


def test_meter_gives_the_distance_and_leaves_gradients_alone():
    p = nn.Parameter(torch.tensor([3.0, 4.0]))
    meter = GradientMeter([p])
    meter.open()
    for _ in range(2):
        p.sum().backward()
    assert torch.equal(p.grad, torch.tensor([2.0, 2.0]))
    assert meter.distance([p.grad], scale=1.0) == 0
    assert meter.distance([torch.tensor([2.0, 2.2])], scale=1.0) == pytest.approx(0.2 / math.sqrt(8))
    assert meter.distance([p.grad], scale=0.5) == pytest.approx(1.0)
    meter.close()
    p.sum().backward()
    assert not meter.sums
    assert not p._backward_hooks


def test_bytes_count_a_storage_once_and_parameters_not_as_activations():
    flat = torch.zeros(10)
    assert bytes_of([flat, flat[2:], torch.zeros(3, dtype=torch.bfloat16)]) == 40 + 6
    layer = nn.Linear(4, 5)
    rows = torch.randn(7, 4)
    assert activation_bytes(lambda: layer(rows).sum(), layer.parameters()) == rows.numel() * 4


def test_clock_adds_up_phases():
    clock = Clock()
    for _ in range(2):
        clock.start("a")
        clock.start("b")
    clock.stop()
    assert list(clock.seconds) == ["a", "b"]
    assert all(spent > 0 for spent in clock.seconds.values())


@pytest.mark.parametrize("updates", [2, 3, 31, 160])
def test_observed_windows_reach_from_first_to_last(updates):
    observed = observed_windows(updates)
    assert 0 in observed
    assert len(observed) <= updates // 2
    assert updates < 4 or updates - 1 in observed


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere():
    terminal, plain = Terminal(), io.StringIO()
    for stream in (terminal, plain):
        progress = Progress("run", 50, stream)
        for done in range(1, 51):
            progress(done, 1.25)
    assert terminal.getvalue().count("\r") == 50
    assert terminal.getvalue().endswith("left\n")
    assert "#" * 30 in terminal.getvalue()
    assert "\r" not in plain.getvalue()
    assert len(plain.getvalue().splitlines()) == 5
    assert "50/50  loss 1.250" in plain.getvalue()


# Command line


def test_demo_measures_prints_and_plots(tmp_path, capsys):
    assert main([*TINY, "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    results = json.loads((tmp_path / "demo.json").read_text())
    runs = results["runs"]
    n, settings = results["parameters"], results["settings"]
    assert list(runs) == list(LABELS)
    for run in runs.values():
        assert len(run["losses"]) == 6
        assert run["losses"][0] > run["losses"][-1] > 0
        assert f"{run['validation']:.4f}" in shown
        assert run["held"]["update"]["moments"] == 8 * n
        assert min(run["seconds"].values()) > 0
    # The first window meets the same weights and the same data; what follows does not.
    assert runs["fused"]["losses"][0] == runs["bf16"]["losses"][0]
    assert runs["fused"]["losses"] != runs["bf16"]["losses"]
    assert runs["fp32"]["losses"][0] == pytest.approx(runs["bf16"]["losses"][0], abs=0.01)
    for fused, bf16 in (
        (runs["fused"]["distances"], runs["bf16"]["distances"]),
        (results["by_length"]["fused"][2:], results["by_length"]["bf16"][2:]),
    ):
        assert fused
        for (at, ours), (same, theirs) in zip(fused, bf16, strict=True):
            assert at == same
            assert 0 < ours < 1e-6
            assert 1e-4 < theirs < 0.1
    backward, update = ({name: runs[name]["held"][moment] for name in LABELS} for moment in ("backward", "update"))
    assert [backward[name]["parameters"] for name in LABELS] == [2 * n, 2 * n, 4 * n]
    assert [backward[name]["gradients"] for name in LABELS] == [2 * n, 2 * n, 4 * n]
    assert [update[name]["gradients"] for name in LABELS] == [0, 2 * n, 4 * n]
    assert [update[name]["masters"] for name in LABELS] == [4 * n, 4 * n, 0]
    assert 4 * n <= backward["fused"]["FP32 gradients"] == update["fused"]["FP32 gradients"] < 4.1 * n
    assert update["bf16"]["FP32 gradients"] == 4 * n
    assert backward["fused"]["activations"] < backward["fp32"]["activations"] / settings["steps"]
    assert list(runs["fused"]["seconds"]) == ["forward, backward", "fold", "step"]
    assert "\r" not in shown
    check_picture(tmp_path / "demo.png")


def check_picture(path: Path) -> None:
    """A PNG of some size in which the colours of all three runs are."""
    from matplotlib import image
    from matplotlib.colors import to_rgb

    from fusedaccum.demo.plot import COLOURS

    pixels = torch.from_numpy(image.imread(path)[..., :3])
    assert pixels.shape[0] > 500
    assert pixels.shape[1] > 1000
    for colour in COLOURS.values():
        assert ((pixels - torch.tensor(to_rgb(colour))).abs().amax(-1) < 0.01).sum() > 50


def test_demo_without_matplotlib_still_gives_the_numbers_and_the_same_ones(tmp_path, capsys, monkeypatch):
    for folder in ("first", "second"):
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        assert main([*TINY, "--out", str(tmp_path / folder)]) == 0
        shown = capsys.readouterr().out
        assert "held-out text" in shown
        assert "pip install matplotlib" in shown
        assert [path.name for path in (tmp_path / folder).iterdir()] == ["demo.json"]
    first, second = (json.loads((tmp_path / folder / "demo.json").read_text()) for folder in ("first", "second"))
    for name in LABELS:
        for key in ("losses", "validation", "distances", "held", "sample"):
            assert first["runs"][name][key] == second["runs"][name][key]


def test_demo_that_cannot_write_fails_before_training(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main([*TINY, "--out", str(tmp_path / "file")]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1
    assert "file" in shown.err


def test_info_names_versions_and_the_state_of_each_backend(capsys):
    assert main(["info"]) == 0
    shown = capsys.readouterr().out
    for word in (fusedaccum.__version__, torch.__version__, *backends.NAMES):
        assert word in shown
    chosen = backends.select(torch.device("cpu")).__name__.rpartition(".")[2]
    assert re.search(rf"{chosen} +yes, the automatic choice", shown)
    assert re.search(r"isa +\w+", shown)
    assert re.search(r"triton +\d+\.", shown)
    if not torch.version.cuda:
        assert "backends on cuda (no device found)" in shown
        assert shown.count("not built: this torch was built without CUDA") == 2


def test_info_says_why_a_backend_is_missing(capsys, monkeypatch):
    monkeypatch.setattr(backends, "why_not", lambda name, device: None if name == "reference" else "for a reason")
    monkeypatch.setitem(sys.modules, "fusedaccum._C", None)
    monkeypatch.delattr(fusedaccum, "_C", raising=False)
    monkeypatch.delitem(sys.modules, "fusedaccum.backends.compiled")  # to be imported again, and to fail
    monkeypatch.delattr(backends, "compiled")
    assert main(["info"]) == 0
    shown = capsys.readouterr().out
    devices = 1 + max(1, torch.cuda.device_count())
    assert shown.count("no: for a reason") == 2 * devices
    assert len(re.findall(r"reference +yes, the automatic choice", shown)) == devices
    assert re.search(r"C\+\+ build\n  none: .*_C", shown)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "COMMAND"),
        (["nope"], "nope"),
        (["info", "--nope"], "--nope"),
        (["demo", "--updates", "1"], "at least 2"),
        (["demo", "--steps", "-8"], "--steps"),
        (["demo", "--rows", "two"], "'two'"),
        (["demo", "--width", "100"], "multiple of 64"),
        (["demo", "--backend", "nope"], "reference"),
    ],
)
def test_wrong_usage_exits_with_2_and_names_what_is_wrong(arguments, word, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert word in capsys.readouterr().err


def test_module_runs_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "fusedaccum", "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"fusedaccum {fusedaccum.__version__}\n")
