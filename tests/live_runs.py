"""What tests/test_steps_none*.py share: one script, run on a bare optimizer and on one wrapped with steps=None."""

from __future__ import annotations

import torch
from wrapper_helpers import MAKERS, bits, state_bits, wrap

SHAPES = [(5,), (7, 3), (4097,), (2,)]


def coefficients(k, index, shape):
    """Exact in every dtype: the gradient is the same number in each, and only sums are rounded. Nothing cancels."""
    random = torch.Generator().manual_seed(1000 * k + index)
    return ((torch.rand(shape, generator=random) + 0.5) * 2.0 ** (3 * (k % 3))).bfloat16()


class Run:
    """Parameters, an optimizer over them, and what a script logs. bare: the optimizer without a wrapper."""

    def __init__(self, dtype=torch.float32, make=MAKERS["adamw"], shapes=SHAPES, bare=False, **options):
        start = [coefficients(k, 77, shape) for k, shape in enumerate(shapes)]
        self.params = [torch.nn.Parameter(t.to(dtype)) for t in start]
        self.module = torch.nn.ParameterList(self.params)
        self.inner = make(self.params)
        self.opt = self.inner if bare else wrap(self.inner, None, **options)
        self.log = []

    def loss(self, k, only=None):
        """Linear in the parameters: gradients do not depend on how the ones before were rounded."""
        chosen = range(len(self.params)) if only is None else only
        return sum((self.params[i] * coefficients(k, i, self.params[i].shape).to(self.params[i])).sum() for i in chosen)

    def backward(self, *ks, only=None):
        for k in ks:
            self.loss(k, only).backward()

    def note(self, value):
        """Log a number or tensor."""
        self.log.append(torch.as_tensor(value).detach().double().clone())

    def note_grads(self):
        for p in self.params:
            self.note(torch.tensor([]) if p.grad is None else p.grad.to_dense())

    def window(self, *ks, only=None):
        """Backwards, a step, a look at `p.grad` as it is then, and zero_grad()."""
        self.backward(*ks, only=only)
        self.note_grads()
        self.opt.step()
        self.note_grads()
        self.opt.zero_grad()

    def outcome(self):
        return {
            "parameters": [state_bits(p) for p in self.params],
            "gradients": [None if p.grad is None else state_bits(p.grad.to_dense()) for p in self.params],
            "state": [state_bits(dict(self.inner.state[p])) if p in self.inner.state else None for p in self.params],
            "log": [state_bits(value) for value in self.log],
        }


def run(script, *args, **kwargs):
    done = Run(*args, **kwargs)
    script(done)
    return done


def assert_same(ours, native):
    """Bit by bit: parameters, gradients, state and what was logged."""
    one, other = ours.outcome(), native.outcome()
    for what in one:
        assert one[what] == other[what], f"{what} differ"


def ours_are_views(done):
    """Whether every p.grad lies in a flat buffer."""
    flats = [buffer.flat for buffer in done.opt._window.buffers]
    return all(p.grad is None or any(torch._C._is_alias_of(p.grad, flat) for flat in flats) for p in done.params)


__all__ = ["SHAPES", "Run", "assert_same", "bits", "coefficients", "ours_are_views", "run"]
