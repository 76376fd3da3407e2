"""Random sequences of all that can be done with steps=None, against the float64 model of tests/stateful_none.py."""

from __future__ import annotations

import pytest
import test_stateful
from stateful_none import Live
from test_stateful import LONG, nothing_left, run  # noqa: F401
from wrapper_helpers import use_two_buffers

EXAMPLES = 100

pytestmark = [
    *test_stateful.pytestmark,
    # What torch says of a gradient in another order than its parameter's, which is set by hand.
    pytest.mark.filterwarnings("ignore:(?s)grad and param do not obey the gradient layout contract"),
]


def test_compiled():
    run(Live, LONG or EXAMPLES)


def test_two_buffers(monkeypatch):
    use_two_buffers(monkeypatch)
    run(Live, LONG or EXAMPLES // 4)
