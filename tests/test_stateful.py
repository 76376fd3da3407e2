"""Random sequences of all public calls against the float64 model of tests/stateful_model.py.

FUSEDACCUM_EXAMPLES=5000 runs that many new sequences, of each machine, instead of the same few at every run.
"""

from __future__ import annotations

import gc
import os
import warnings

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from stateful_life import Life
from stateful_mistakes_backward import MISTAKES
from wrapper_helpers import use_two_buffers

LONG = int(os.environ.get("FUSEDACCUM_EXAMPLES", "0"))
EXAMPLES = 150

pytestmark = [
    pytest.mark.filterwarnings("error"),
    pytest.mark.filterwarnings("ignore:(?s).*(master_weights|state_dtype)"),
    # A sequence that ends in an error leaves its wrappers to the garbage collector.
    pytest.mark.filterwarnings("ignore:(?s).*was dropped with an open window"),
    pytest.mark.filterwarnings("ignore:(?s).*zero_grad\\(\\) came after a backward"),
    # What torch says of any scheduler that was copied, or loaded before the first update.
    pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step"),
    pytest.mark.filterwarnings("ignore:Seems like .optimizer.step"),
]


@pytest.fixture(autouse=True)
def nothing_left():
    """Those wrappers say so here, and not in some later test."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


class OnReference(Life):
    backend = "reference"


def run(machine, examples=EXAMPLES, **chosen):
    budget = settings(
        max_examples=examples,
        stateful_step_count=25,
        database=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    run_state_machine_as_test(machine, settings=settings(budget, **chosen))


def test_compiled():
    run(Life, LONG or EXAMPLES)


def test_reference():
    run(OnReference, LONG or EXAMPLES // 10)


def test_two_buffers(monkeypatch):
    use_two_buffers(monkeypatch)
    run(Life, LONG or EXAMPLES // 5)


@pytest.mark.parametrize(("plant", "chosen"), MISTAKES.values(), ids=MISTAKES)
def test_a_planted_mistake_is_found(plant, chosen, monkeypatch):
    """With the budget of `test_compiled`, and without the search for a shorter sequence."""
    plant(monkeypatch)
    machine = type("Chosen", (Life,), {"chosen": chosen}) if chosen else Life
    with pytest.raises((AssertionError, ValueError, RuntimeError)) as found:
        run(machine, phases=[Phase.generate])
    # What the machine asserts, or what the package raises where nothing should be; not a mistake of the plant itself.
    assert not found.traceback[-1].path.name.startswith("stateful_mistakes")
