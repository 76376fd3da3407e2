"""Each program in examples/ runs as it stands, on less text, and prints what training looks like."""

from __future__ import annotations

import functools
import re
import runpy
import sys
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState, GradientState

from fusedaccum.demo import data

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
BATCHES, WINDOW = 34, 8
UPDATES = 5  # the last window holds 2

once = functools.cache(data.load_corpus)

pytestmark = [
    pytest.mark.filterwarnings("error:FusedAccum"),
    pytest.mark.filterwarnings("ignore:(?s).*does not have many workers"),
    pytest.mark.filterwarnings("ignore:(?s).*isinstance.*LeafSpec"),
]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    """The text is read once, and Accelerate keeps no settings for the next one."""
    monkeypatch.setattr(data, "load_corpus", once)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.fixture(params=EXAMPLES, ids=lambda path: path.stem)
def printed(request, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(request.param), "--batches", str(BATCHES)])
    runpy.run_path(str(request.param), run_name="__main__")
    return capsys.readouterr().out


def test_an_example_trains(printed):
    """A loss and a learning rate for each update, the short last window's too; the loss falls, the rate ends at 0."""
    losses = [float(x) for x in re.findall(r"\bloss(?:': ')? ?([\d.]+)", printed)]
    rates = [float(x) for x in re.findall(r"(?:lr|learning_rate':) '?([\d.e+-]+)", printed)]
    updates = [int(x) for x in re.findall(r"update +(\d+)", printed)] or [
        *range(1, int(re.search(r"(\d+) updates", printed)[1]) + 1)
    ]
    assert updates == [*range(1, UPDATES + 1)]
    assert len(rates) == UPDATES
    assert losses[UPDATES - 1] < losses[0] - 0.3
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < rates[0] / 5


def test_all_of_them_are_run():
    assert [path.stem for path in EXAMPLES] == ["accelerate_loop", "lightning_loop", "plain_loop", "trainer"]
