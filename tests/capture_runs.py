"""What the tests of CUDA graphs share: a small model with a static input, and a wrapper that may be captured."""

from __future__ import annotations

import pytest
import torch
from graph_model import rates_are_tensors
from torch.nn import Linear, Sequential, Tanh
from torch.optim import SGD, AdamW
from wrapper_helpers import wrap

from fusedaccum import capture

N = 4
ROWS = 6


@pytest.fixture(autouse=True)
def cpu_as_device(monkeypatch):
    monkeypatch.setattr(capture, "rates_on_device", rates_are_tensors)


def lr(value=0.05):
    return torch.tensor(value)


MAKERS = {
    "adamw": lambda params: AdamW(params, lr=lr(), weight_decay=0.1, capturable=True),
    "amsgrad": lambda params: AdamW(params, lr=lr(), amsgrad=True, capturable=True),
    "momentum": lambda params: SGD(params, lr=lr(), momentum=0.9),
    "sgd": lambda params: SGD(params, lr=lr()),
}
every_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


class Run:
    """A small model with a static input, and a wrapper around its optimizer. Two of one seed are equal."""

    def __init__(self, make=MAKERS["adamw"], dtype=torch.float32, **options):
        torch.manual_seed(1)
        self.model = Sequential(Linear(5, 7), Tanh(), Linear(7, 3)).to(dtype)
        self.w = wrap(make(self.model.parameters()), N, **options)
        self.x = torch.zeros(ROWS, 5, dtype=dtype)

    def micro(self, **weight):
        self.model(self.x).square().mean().backward()
        self.w.step(**weight)

    def window(self, inputs):
        for x in inputs:
            self.x.copy_(x)
            self.micro()

    def window_of_two(self, inputs):
        """Gradients for two parameters alone."""
        for _ in inputs:
            for p in list(self.model.parameters())[:2]:
                p.grad = torch.ones_like(p)
            self.w.step()

    def same_as(self, other):
        state = [v for s in self.w.state.values() for v in s.values()]
        theirs = [v for s in other.w.state.values() for v in s.values()]
        mine = [*self.model.parameters(), *state]
        return all(map(torch.equal, mine, [*other.model.parameters(), *theirs]))


def data(seed, count=N):
    torch.manual_seed(seed)
    return [torch.randn(ROWS, 5) for _ in range(count)]


def pair(make=MAKERS["adamw"], **options):
    """A run to be captured and its eager twin, one window old: buffer and state exist."""
    run, twin = Run(make, **options), Run(make, **options)
    for each in (run, twin):
        each.window(data(0))
    return run, twin


def used(**options):
    run = Run(**options)
    run.window(data(0))
    return run
