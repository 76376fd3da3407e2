"""The machine with fold="backward": gradients that are folded before their step(), and backwards that fail."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from backward_runs import Boom
from hypothesis import strategies as st
from hypothesis.stateful import precondition
from stateful_drawn import BYTE, event, grads_drawn, pattern, read, sparse_loss
from stateful_model import NO_COUNT, Count
from stateful_scaler import Scaled
from wrapper_helpers import refused


class Leaves(torch.autograd.Function):
    """The identity of x; its backward makes `grad` the gradient of p."""

    @staticmethod
    def forward(ctx, x, p, grad):
        ctx.grad = grad
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, ctx.grad.clone(), None


class InBackward(Scaled):
    @property
    def folds_in_backward(self):
        return self.options["fold"] == "backward"

    def counted(self, call):
        """As the machine says, but a mean's count has to be there before its gradients are."""
        count, said = super().counted(call)
        if said == "already":
            return count, said
        if self.model.begun is not None:  # too late, but for a sum's count, which only divides
            return replace(count, word="sum_of", items=count.items or 1) if count.word else count, "step"
        if self.folds_in_backward and count.word and said == "step":
            count = replace(count, word="sum_of", items=count.items or 1) if call.inside else count
            said = "step" if call.inside else "before"
        return count, said

    # Backwards

    def backward(self, grads, bad, sparse=(), scaled=False):
        """One for all parameters, and no gradient left where a hook has heard of it."""
        if not self.folds_in_backward:
            super().backward(grads, bad, sparse, scaled)
            return
        losses, expected = [], {}
        for k, (p, m) in enumerate(zip(self.params, self.model.params, strict=True)):
            if grads[k] is None or not p.requires_grad:
                continue
            values = self.values_of(k, grads, bad)
            is_sparse = k in sparse and p.grad is None
            losses.append((sparse_loss(p, values) if is_sparse else (p * values.to(p.dtype)).sum()).float())
            expected[k] = sparse_gradient(p, values) if is_sparse else values.double()
            if m.grad is not None:
                expected[k] = (m.grad + expected[k]).to(m.dtype).double()
        if losses:
            hooked = {k for k in expected if self.params[k]._post_accumulate_grad_hooks}
            sum(losses).backward()
            self.note_gradients(expected, hooked)

    def values_of(self, k, grads, bad=None):
        values = pattern(self.params[k].numel()) * grads[k] / 4
        if bad is not None and bad[0] == k and self.poison:
            values[-1] = bad[1]
        return values

    def note_gradients(self, expected, hooked):
        """Tell the model what became of gradients. hooked: parameters that had a hook when the backward began."""
        left = {k for k in expected if self.params[k].grad is not None}
        assert not left & hooked, f"gradients are left after a backward: {sorted(left & hooked)}"
        if left != set(expected):
            self.model.begin()
            self.model.passes += 1
        for k, values in expected.items():
            m = self.model.params[k]
            if k in left:
                m.grad = read(self.params[k].grad) if self.params[k].grad.is_sparse else values
            else:
                m.grad = None
                self.model.fold_now(m, values)

    def flush_window(self):
        """Where only a count is missing, the window is refused as it is, and is whole with one."""
        model = self.model
        if model.begun == NO_COUNT and model.calls and model.weighted:
            with refused(self.w, "plain|weighted"):
                self.w.flush()
            model.fold(Count("sum_of", 2, on_device=False))
            self.take_step((), {"sum_of": 2})
        super().flush_window()

    # Backwards that fail

    @precondition(lambda self: self.folds_in_backward)
    @event(grads=grads_drawn, behind=st.integers(0, 4), clear=st.booleans())
    def failed_backward(self, grads, behind, clear):
        """It raises behind so many gradients. clear: zero_grad() before anything else."""
        said = self.model.begun or self.model.announced
        if said is not None and said.drops:  # gradients that count nothing are gone at once
            return
        there = [k for k, p in enumerate(self.params) if grads[k] is not None and p.requires_grad]
        x = torch.zeros((), requires_grad=True)
        for n, k in enumerate(there):  # the last one comes first
            x = Boom.apply(x) if n == len(there) - behind else x
            p = self.params[k]
            x = Leaves.apply(x, p, self.values_of(k, grads).to(p.dtype))
        x = Boom.apply(x) if behind == 0 else x
        came = there[len(there) - behind :] if 0 < behind <= len(there) else []
        hooked = [k for k in came if self.params[k]._post_accumulate_grad_hooks]
        Boom.armed = ValueError("half-way")
        try:
            if behind <= len(there):
                with pytest.raises(ValueError, match="half-way"):
                    x.backward()
        finally:
            Boom.armed = None
        self.after_failure(came, hooked, grads, clear)

    def after_failure(self, came, hooked, grads, clear):
        if self.w._window.in_backward.passes.failed:
            assert hooked or came
            assert self.options["bucket_mb"] < 25, "one bucket holds all of them, and nothing was folded"
            with pytest.raises(RuntimeError, match="left by an exception"):
                self.w.step()
            self.w.reset()
            self.model.reset()
            self.forget_all()
            return
        assert not hooked or self.options["bucket_mb"] > BYTE, "each was folded at once"
        for k in came:
            m, values = self.model.params[k], self.values_of(k, grads).double()
            m.grad = values if m.grad is None else (m.grad + values).to(m.dtype).double()
        if clear:
            self.forget_gradients(self.w)

    def forget_all(self):
        for p, m in zip(self.params, self.model.params, strict=True):
            p.grad = m.grad = None


def sparse_gradient(p, values):
    """What `sparse_loss` leaves, its entries added up."""
    half = (p.numel() + 1) // 2
    total = values.to(p.dtype).double()
    total[:half] += (values[:half] / 512).to(p.dtype).double()
    return total
