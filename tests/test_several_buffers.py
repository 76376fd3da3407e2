"""Parameters on several devices have a flat buffer on each: one window, one norm, one refusal. Two on the CPU here."""

from __future__ import annotations

import pytest
import torch
from torch.optim import AdamW
from wrapper_helpers import tidy, use_two_buffers, wrap  # noqa: F401

SHAPES = [(5,), (7, 3), (4097,), (2,)]


def train(windows=3, **options):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    wrapper = wrap(AdamW(params, lr=0.05), 3, **options)
    norms = []
    for index in range(3 * windows):
        for k, p in enumerate(params):
            if (index + k) % 4:  # also parameters whose last gradient came earlier
                p.grad = torch.randn_like(p)
        wrapper.step()
        if wrapper.updated:
            norms.append(wrapper.grad_norm)
    return params, norms, wrapper


@pytest.mark.parametrize("options", [{}, {"max_norm": 0.1}, {"reduction": "sum", "max_norm": 3.0}], ids=str)
def test_one_norm_over_all(monkeypatch, options):
    want, want_norms, _ = train(**options)
    use_two_buffers(monkeypatch)
    got, norms, wrapper = train(**options)
    assert len(wrapper._window.buffers) == 2
    assert norms == pytest.approx(want_norms, rel=1e-12)
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() <= 2.0**-20 * (1 + b.abs().max())  # the clip factor may differ in its last bit


@pytest.mark.parametrize("bad", [0, 1], ids=["on the first", "on the second"])
def test_a_refused_gradient_folds_none(monkeypatch, bad):
    use_two_buffers(monkeypatch)
    params, _, wrapper = train(windows=1)
    for p in params:
        p.grad = torch.ones_like(p)
    params[bad].grad_dtype = None
    params[bad].grad = torch.ones_like(params[bad], dtype=torch.float64)
    with pytest.raises(TypeError, match="float64"):
        wrapper.step()
    assert wrapper.pending == 0
    assert not any(wrapper.master_grad(p).any() for p in params)
    assert not any(buffer.touched for buffer in wrapper._window.buffers)
