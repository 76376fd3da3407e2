"""Random sequences of all that can be done with steps=None, against the float64 model of tests/stateful_none.py."""

from __future__ import annotations

import pytest
import test_stateful
from hypothesis import Phase
from stateful_none_life import LiveLife
from stateful_none_mistakes import MISTAKES
from test_stateful import LONG, nothing_left, run  # noqa: F401
from wrapper_helpers import use_two_buffers

EXAMPLES = 100

pytestmark = [
    *test_stateful.pytestmark,
    # What torch says of a gradient in another order than its parameter's, which is set by hand.
    pytest.mark.filterwarnings("ignore:(?s)grad and param do not obey the gradient layout contract"),
]


def test_compiled():
    run(LiveLife, LONG or EXAMPLES)


def test_two_buffers(monkeypatch):
    use_two_buffers(monkeypatch)
    run(LiveLife, LONG or EXAMPLES // 4)


@pytest.mark.parametrize(("plant", "chosen"), MISTAKES.values(), ids=MISTAKES)
def test_a_planted_mistake_is_found(plant, chosen, monkeypatch):
    """With the budget of `test_compiled`, and without the search for a shorter sequence."""
    plant(monkeypatch)
    with pytest.raises((AssertionError, ValueError, RuntimeError)) as found:
        run(type("Chosen", (LiveLife,), {"chosen": chosen}), EXAMPLES, phases=[Phase.generate])
    assert not found.traceback[-1].path.name.startswith("stateful_none_mistakes")
