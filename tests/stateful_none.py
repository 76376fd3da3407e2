"""The machine for steps=None: everything that can be done to `p.grad`, against native semantics in float64.

The model of tests/stateful_model.py updates with a sum; here that is what `p.grad` holds in a loop without a wrapper.
`agree` reads everything that can be read, after every call. tests/stateful_none_life.py adds rules.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from stateful import RULES, Machine
from stateful_drawn import (
    LOW,
    MOST,
    PRECISION,
    SIZES,
    bad_drawn,
    close,
    grads_drawn,
    pattern,
    read,
    sparse_drawn,
    which,
)
from stateful_drawn import sparse_loss as loss_of_sparse
from stateful_model import FLOAT32, rounding
from stateful_none_model import ZERO, LiveModel, event, factors, windows_drawn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import StepLR

from fusedaccum import FusedAccumOptimizer, GatedScheduler


class Live(RuleBasedStateMachine):
    """backend: of the wrapper. chosen: what is not drawn of how it begins."""

    backend = "compiled"
    chosen: ClassVar[dict] = {}
    new_group = Machine.new_group
    agree_on_norm = Machine.agree_on_norm
    agree_on_state = Machine.agree_on_state

    @initialize(
        name=st.sampled_from(["sgd", "momentum", "adamw"]),
        precision=st.sampled_from(PRECISION),
        policy=st.sampled_from(["propagate", "skip_window"]),
        max_norm=st.sampled_from([None, None, 1.0]),
        poison=st.integers(0, 3),
    )
    def initialize(self, **drawn):
        self.begin(**(drawn | self.chosen))

    def begin(self, name, precision, policy, max_norm, poison):
        update, low = precision
        self.kind, self.rule_of, self.extra = RULES[name]
        options = {"update": update, "nonfinite": policy, "max_norm": max_norm}
        options |= {"master_weights": low == "masters", "state_dtype": torch.float32 if low == "state" else None}
        options["rounding"] = "stochastic" if low == "stochastic" else "nearest"
        self.options = options
        self.poison = policy != "propagate" or poison == 0
        self.dtypes = LOW[low]
        self.params, self.serial = [], 0
        groups = [self.new_group(SIZES[:2], 0.25), self.new_group(SIZES[2:], 0.125)]
        self.inner = self.kind(groups)
        self.model = LiveModel(self.rule_of, [], [], None, options | {"reduction": "sum"})
        self.note_groups(groups)
        self.wrap()
        self.shelf, self.kept = [], []
        self.hook = None

    def note_groups(self, groups):
        first = len(self.model.params)
        Machine.note_groups(self, groups)
        for m in self.model.params[first:]:
            m.grad_error, m.hooked = torch.zeros_like(m.value), True

    def wrap(self):
        self.w = FusedAccumOptimizer(self.inner, steps=None, backend=self.backend, **self.options)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        self.scaler.scale(torch.ones(1))
        self.attach()

    def attach(self):
        self.w.register_step_pre_hook(self.pre_hook)
        self.gate = GatedScheduler(StepLR(self.inner, 1, gamma=0.5), self.w)
        self.model.seen = self.model.updates

    @property
    def pairs(self):
        return list(zip(self.params, self.model.params, strict=True))

    def pick(self, k):
        return self.pairs[k % len(self.params)]

    # Backwards

    def values_of(self, p, g, bad, scale=1.0):
        values = pattern(p.numel()) * (g / 4)
        if bad is not None and bad[0] < len(self.params) and self.params[bad[0]] is p and (self.poison or scale != 1.0):
            values[-1] = bad[1]
        return values

    def loss(self, grads, bad=None, sparse=(), scale=1.0):
        """The loss, and what each parameter gets of it."""
        loss, given = torch.zeros(()), {}
        for k, (p, m) in enumerate(self.pairs):
            if grads[k] is None or not p.requires_grad:
                continue
            values = self.values_of(p, grads[k], bad, scale)
            given[k] = values.double() * scale
            if k in sparse and m.hooked:  # else p.grad would be sparse, which cannot be clipped
                given[k][: (p.numel() + 1) // 2] *= 1 + 1 / 512
                loss = loss + loss_of_sparse(p, values).float()
            else:
                loss = loss + (p * values.to(p.dtype)).sum().float()
        return loss * scale, given

    def add(self, k, given):
        m = self.model.params[k]
        m.grad = given if m.grad is None else m.grad + given
        unit = FLOAT32 * m.grad.abs() if m.hooked else rounding(m.grad, m.dtype)
        m.grad_error = torch.nan_to_num(m.grad_error + 2 * unit, nan=0.0, posinf=0.0)

    def backward(self, grads, bad=None, sparse=(), scale=1.0):
        loss, given = self.loss(grads, bad, sparse, scale)
        if given:
            loss.backward()
        for k, values in given.items():
            self.add(k, values)

    @event(grads=grads_drawn, bad=bad_drawn, sparse=sparse_drawn)
    def only_backward(self, grads, bad, sparse):
        self.backward(grads, bad, sparse)

    @event(grads=grads_drawn, of=st.lists(which, min_size=1, max_size=3))
    def ask_for_gradients(self, grads, of):
        """Which is no backward."""
        loss, given = self.loss(grads)
        asked = [p for p in dict.fromkeys(self.params[k % len(self.params)] for k in of) if p.requires_grad]
        if given and asked:
            torch.autograd.grad(loss, asked, allow_unused=True)

    @event(grads=grads_drawn, k=which)
    def break_a_backward(self, grads, k):
        """A hook of another raises: who has got a gradient by then is autograd's affair, but whole ones they are."""
        loss, given = self.loss(grads)
        p = self.params[k % len(self.params)]
        if k % len(self.params) not in given:
            return
        handle = p.register_hook(lambda grad: 1 / 0)
        try:
            loss.backward()
        except ZeroDivisionError:
            pass
        finally:
            handle.remove()
        for j, values in given.items():
            q, m = self.pairs[j]
            if q is not p and q.grad is not None:
                seen, was = read(q.grad), torch.zeros_like(values) if m.grad is None else m.grad
                there = was.isfinite()
                if float((seen - was - values)[there].abs().sum()) <= float((seen - was)[there].abs().sum()):
                    self.add(j, values)

    # What is done to p.grad

    def forget(self, how):
        if how == "not":
            return
        if how == "by hand":
            for p in self.params:
                p.grad = None
        elif how == "wrapper":
            self.w.zero_grad()
        else:
            self.inner.zero_grad(set_to_none=False)
        for m in self.model.params:
            m.grad = torch.zeros_like(m.grad) if how == "optimizer in place" and m.grad is not None else None
            m.grad_error = torch.zeros_like(m.value)

    @event(how=st.sampled_from(ZERO[:3]))
    def zero_grad(self, how):
        self.forget(how)

    @event(k=which, keep=st.booleans())
    def drop_one(self, k, keep):
        """keep: somebody holds on to the tensor, which keeps its values."""
        p, m = self.pick(k)
        if keep and p.grad is not None:
            self.kept.append((p.grad, p.grad.clone()))
        p.grad, m.grad, m.grad_error = None, None, torch.zeros_like(m.value)

    @event(k=which, factor=factors, how=st.sampled_from(["in place", "data in place", "data", "replaced"]))
    def edit(self, k, factor, how):
        p, m = self.pick(k)
        if p.grad is None or m.grad is None or not bool(m.grad.isfinite().all()):
            return
        if how == "in place":
            p.grad.mul_(factor)
        elif how == "data in place":
            p.grad.data.mul_(factor)
        elif how == "data":
            p.grad.data = p.grad.data * factor
        else:
            p.grad = p.grad * factor
        self.scale(m, factor)

    def scale(self, m, factor, error=0.0):
        m.grad = m.grad * factor
        m.grad_error = m.grad_error * abs(factor) + (2 * FLOAT32 + error) * m.grad.abs()

    @event(k=which, own=st.booleans(), strided=st.booleans())
    def set_one(self, k, own, strided):
        """A gradient from elsewhere, of the parameter's dtype or of float32."""
        p, m = self.pick(k)
        self.serial += 1
        values = (pattern(p.numel()) * (1 + self.serial % 8)).to(p.dtype)
        m.grad, m.grad_error = read(values), torch.zeros_like(m.value)
        if not own and p.grad is not None:
            values = values.to(p.grad.dtype)
        p.grad = None
        p.grad = torch.stack([values, values], 1)[:, 0] if strided else values

    def clip(self, limit):
        there = [(p, m) for p, m in self.pairs if m.grad is not None]
        if not there or not all(bool(m.grad.isfinite().all()) for _, m in there):
            return
        norm = math.sqrt(sum(float((m.grad**2).sum()) for _, m in there))
        errors = math.sqrt(sum(float((m.grad_error**2).sum()) for _, m in there))
        seen = clip_grad_norm_([p for p, _ in there], limit)
        low = min(p.grad.dtype.itemsize for p, _ in there) < 4  # one that was set by hand
        unit = 2.0**-7 if low else 4 * FLOAT32
        close(seen.view(1), torch.tensor([norm], dtype=torch.float64), errors + unit * norm, "clip_grad_norm_")
        factor = min(1.0, limit / (norm + 1e-6))
        for _, m in there:
            self.scale(m, factor, error=errors / max(norm, 1e-30) + 2 * unit)

    # Steps

    def pre_hook(self, *_):
        """hook: (what, parameter, factor)."""
        if self.hook is None:
            return
        what, k, factor = self.hook
        p, m = self.pick(k)
        if m.grad is None or not bool(m.grad.isfinite().all()):
            return
        if what == "edit":
            p.grad.mul_(factor)
            self.scale(m, factor)
        elif what == "master_grad":
            close(self.w.master_grad(p), m.grad, m.grad_error, "master_grad in a pre-hook")
        else:
            p.grad, m.grad, m.grad_error = None, None, torch.zeros_like(m.value)

    @event(what=st.sampled_from(["edit", "master_grad", "drop", None]), k=which, factor=factors)
    def set_hook(self, what, k, factor):
        self.hook = None if what is None else (what, k, factor)

    @event(inside=st.booleans(), grads=grads_drawn)
    def step(self, inside, grads):
        """inside: the backward, of a closure."""
        if not inside:
            self.take_step()
            return

        def closure():
            self.backward(grads)
            return 3.5

        self.take_step(closure)

    def take_step(self, *closure):
        result = self.w.step(*closure)
        assert result == (3.5 if closure else None)
        self.model.step()
        self.hooks_are_there()

    def hooks_are_there(self):
        """Of every parameter, after a step."""
        for p, m in self.pairs:
            m.hooked = m.hooked or p.requires_grad

    @rule(windows=st.lists(windows_drawn, min_size=1, max_size=4))
    def windows(self, windows):
        self.run_windows(windows)

    def run_windows(self, windows):
        for window in windows:
            self.one_window(window)
            self.agree()

    def one_window(self, window):
        if window.scaled and all(m.grad is None for m in self.model.params) and self.fits_scaler():
            self.scaled_window(window)
        else:
            for k, grads in enumerate(window.backwards):
                self.backward(grads, window.bad if k == 0 else None, window.sparse)
                self.agree()
            if window.clip is not None:
                self.clip(window.clip)
            self.take_step()
        self.forget(window.zero)

    def fits_scaler(self):
        """A scaler unscales no gradient of float16, which autograd makes where there are no hooks."""
        return all(m.hooked or p.dtype == torch.float32 for p, m in self.pairs)

    def scaled_window(self, window):
        scale = self.scaler.get_scale()
        for k, grads in enumerate(window.backwards):
            self.backward(grads, window.bad if k == 0 else None, window.sparse, scale)
        if all(m.grad is None for m in self.model.params):  # at which a scaler raises
            self.take_step()
            return
        finite = all(m.grad is None or bool(m.grad.isfinite().all()) for m in self.model.params)
        if window.clip is not None:
            self.scaler.unscale_(self.w)
        for m in self.model.params:
            if m.grad is not None:
                m.grad = m.grad / scale
                m.grad_error = m.grad_error / scale
        if window.clip is not None:
            self.agree()
            self.clip(window.clip)
        self.scaler.step(self.w)
        self.scaler.update(8.0)
        if finite:
            self.model.step()

    @event()
    def schedule(self):
        self.gate.step()
        if self.model.seen != self.model.updates:
            self.model.seen = self.model.updates
            for group in self.model.groups:
                group["lr"] *= 0.5

    # What must hold after every call

    @invariant()
    def agree(self):
        w, model = self.w, self.model
        seen = (w.pending, w.updates, w.updated, w.will_update, w.skipped_windows, w.steps)
        want = (0, model.updates, model.updated, True, model.skipped_windows, None)
        assert seen == want, f"pending, updates, updated, will_update, skipped_windows, steps: {seen}, not {want}"
        self.agree_on_norm()
        assert [g["lr"] for g in w.param_groups] == [g["lr"] for g in model.groups]
        for k, (p, m) in enumerate(self.pairs):
            assert (p.grad is None) == (m.grad is None), f"the gradient of parameter {k}"
            held = torch.zeros_like(m.value) if m.grad is None else m.grad
            close(w.master_grad(p), held, m.grad_error, f"master_grad of parameter {k}")
            if p.grad is not None:
                close(p.grad, held, m.grad_error, f"the gradient of parameter {k}")
            value = read(p)
            close(value, m.value, m.error, f"parameter {k}")
            m.adopt(value, self.agree_on_state(k, w.state.get(p, {}), m))
        for tensor, values in self.kept:
            assert torch.equal(tensor, values) or not bool(values.isfinite().all()), "a gradient that somebody keeps"

    def teardown(self):
        for tensor, values in getattr(self, "kept", ()):
            close(tensor, read(values), 0.0, "a gradient that somebody keeps")
        if hasattr(self, "w"):
            self.w.reset()
            assert all(p.grad is None for p in self.params)


assert len(SIZES) <= MOST
