"""A machine that calls everything there is to call, in any order, and compares with the float64 model each time.

Rules draw what they do from hypothesis; `agree` reads everything that can be read. tests/stateful_life.py adds rules,
tests/test_stateful.py runs them all, and plants mistakes that they must find.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from stateful_drawn import (
    BUCKETS,
    COUNTS,
    EDITS,
    IN_BACKWARD,
    LOW,
    POLICIES,
    PRECISION,
    SIZES,
    as_arguments,
    bad_drawn,
    calls_drawn,
    close,
    event,
    grads_drawn,
    pattern,
    read,
    sparse_drawn,
    sparse_loss,
    steps_drawn,
    which,
)
from stateful_model import NO_COUNT, UNKNOWN, Model, Param, adamw, sgd
from torch.optim.lr_scheduler import StepLR

from fusedaccum import FusedAccumOptimizer, GatedScheduler

RULES = {
    "sgd": (torch.optim.SGD, sgd, {"momentum": 0.0, "dampening": 0.0}),
    "momentum": (torch.optim.SGD, sgd, {"momentum": 0.5, "dampening": 0.25}),
    "adamw": (torch.optim.AdamW, adamw, {"betas": (0.75, 0.875), "eps": 0.125}),
}


class Machine(RuleBasedStateMachine):
    """Micro-batches and windows. backend: of the wrapper. chosen: what is not drawn of how it begins."""

    backend = "compiled"
    chosen: ClassVar[dict] = {}

    # Beginning

    @initialize(
        name=st.sampled_from(["sgd", "momentum", "momentum", "adamw", "adamw"]),
        precision=st.sampled_from(PRECISION),
        policy=st.sampled_from(POLICIES),
        reduction=st.sampled_from(["mean", "mean", "sum"]),
        max_norm=st.sampled_from([None, None, 1.0, 8.0]),
        steps=steps_drawn,
        poison=st.integers(0, 3),
        scaling=st.sampled_from([None, None, "amp_scaling", "without it"]),
        bucket=st.sampled_from(BUCKETS),
    )
    def initialize(self, **drawn):
        self.begin(**(drawn | self.chosen))

    def begin(self, name, precision, policy, reduction, max_norm, steps, poison, scaling, bucket):
        """bucket: MiB of gradients that are folded together in a backward; None where step() folds them."""
        update, low = precision
        if bucket is not None:
            scaling, policy = None, policy if policy in IN_BACKWARD else "skip_window"
        self.kind, self.rule_of, self.extra = RULES[name]
        options = {"update": update, "nonfinite": policy, "reduction": reduction, "max_norm": max_norm}
        options["amp_scaling"] = scaling == "amp_scaling" and policy != "raise"
        options |= {"master_weights": low == "masters", "state_dtype": torch.float32 if low == "state" else None}
        options["rounding"] = "stochastic" if low == "stochastic" else "nearest"
        options |= {"fold": "step"} if bucket is None else {"fold": "backward", "bucket_mb": bucket}
        self.options = options
        self.scaler = None
        if scaling:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
            self.scaler.scale(torch.ones(1))  # it is ready from then on
        # NaN in the parameters hides what comes after: without a policy against it, let it be rare.
        self.poison = policy != "propagate" or poison == 0
        self.dtypes = LOW[low]
        if scaling and not options["amp_scaling"]:  # the scaler unscales no float16
            self.dtypes = tuple(torch.bfloat16 if d == torch.float16 else d for d in self.dtypes)
        self.params, self.serial = [], 0
        groups = [self.new_group(SIZES[:2], 0.25), self.new_group(SIZES[2:], 0.125)]
        self.inner = self.kind(groups)
        self.model = Model(self.rule_of, [], [], steps, self.options)
        self.note_groups(groups)
        self.w = FusedAccumOptimizer(self.inner, steps=steps, backend=self.backend, **self.options)
        self.shelf = []
        self.edit, self.look = None, False
        self.attach()

    def new_group(self, sizes, lr):
        params = []
        for n in sizes:
            dtype = self.dtypes[len(self.params) % len(self.dtypes)]
            params.append(torch.nn.Parameter((pattern(n) * (1 + len(self.params))).to(dtype)))
            self.params.append(params[-1])
        return {"params": params, "lr": lr, "weight_decay": 0.25, **self.extra}

    def note_groups(self, groups):
        """Tell the model of parameters that the optimizer has been given."""
        for group in groups:
            for p in group["params"]:
                self.model.params.append(Param(read(p), p.dtype, len(self.model.groups)))
            self.model.groups.append({k: v for k, v in group.items() if k != "params"})

    def attach(self, gate=None):
        """What belongs to a wrapper and does not come along when it is made anew."""
        self.fired = [0, 0]
        self.w.register_step_pre_hook(self.pre_hook)
        self.w.register_step_post_hook(self.post_hook)
        if gate is None:
            gate = GatedScheduler(StepLR(self.inner, 1, gamma=0.5), self.w)
            self.model.seen, self.model.loaded = self.model.updates, False
        self.gate = gate

    # Hooks

    def pre_hook(self, *_):
        self.fired[0] += 1
        if not self.look:
            return
        for p, m in zip(self.params, self.model.params, strict=True):
            close(self.w.master_grad(p), *self.model.mean(m), "the mean in a pre-hook")
        if self.edit is not None and self.edit[0] < len(self.params):
            k, factor = self.edit
            self.w.master_grad(self.params[k]).mul_(factor)

    def post_hook(self, *_):
        self.fired[1] += 1

    @event(edit=st.sampled_from(EDITS), look=st.booleans())
    def set_hook(self, look, edit):
        """From now on step pre-hooks look at the means, and multiply one by a number."""
        self.look, self.edit = look or edit is not None, edit

    def close_model(self):
        edit = None
        if self.edit is not None and self.edit[0] < len(self.params):
            edit = self.model.params[self.edit[0]], self.edit[1]
        self.model.close(edit)
        assert self.fired[0] == self.fired[1]
        if self.model.fired is not None:
            assert self.fired[0] == self.model.fired, f"step hooks fired {self.fired[0]} times"
        self.fired = [0, 0]

    # Micro-batches

    def backward(self, grads, bad, sparse=(), scaled=False):
        """What a backward leaves: gradients add up in the parameter's dtype."""
        scale = self.scaler.scale if scaled else lambda loss: loss
        for k, (p, m) in enumerate(zip(self.params, self.model.params, strict=True)):
            if grads[k] is None or not p.requires_grad:
                continue
            values = pattern(p.numel()) * grads[k] / 4
            if bad is not None and bad[0] == k and (self.poison or scaled):
                values[-1] = bad[1]
            # torch adds no sparse gradients up in 16 bits.
            is_sparse = k in sparse and (p.grad is None or p.dtype == torch.float32)
            by_torch = is_sparse or (p.grad is not None and p.grad.is_sparse)
            scale(sparse_loss(p, values) if is_sparse else (p * values.to(p.dtype)).sum()).backward()
            if by_torch:
                m.grad = read(p.grad)
                continue
            values = values.double() * (self.scaler.get_scale() if scaled else 1.0)
            m.grad = values if m.grad is None else (m.grad + values).to(m.dtype).double()

    @event(grads=grads_drawn, bad=bad_drawn, sparse=sparse_drawn, count=st.sampled_from([*COUNTS, *[NO_COUNT] * 20]))
    def only_backward(self, grads, bad, sparse, count):
        self.announce_early(count)
        self.backward(grads, bad, sparse)

    @rule(calls=st.lists(calls_drawn, min_size=2, max_size=6))
    def micro_batches(self, calls):
        self.make_calls(calls)

    @event()
    def flush(self):
        self.flush_window()

    @rule(calls=st.lists(calls_drawn, min_size=1, max_size=3), waiting=grads_drawn, sparse=sparse_drawn)
    def short_window(self, calls, waiting, sparse):
        """waiting: gradients that flush() finds, and that belong to the next step()."""
        self.make_calls(calls)
        self.backward(waiting, None, sparse)
        self.flush_window()

    def make_calls(self, calls):
        for call in calls:
            self.one_call(call)
            self.agree()

    def counted(self, call):
        """The item count that the call has to give, and where."""
        if self.model.said is not None:
            return self.model.said, "already"
        counts = self.model.weighted if self.model.calls else call.counted
        return (call.count if counts and self.options["reduction"] == "mean" else NO_COUNT), call.said

    def one_call(self, call):
        """One whole micro-batch."""
        count, said = self.counted(call)
        if said == "before":
            self.announce(count)

        def closure():
            if said == "closure":
                self.announce(count)
            self.backward(call.grads, call.bad, call.sparse)
            self.must_raise = self.model.will_raise(count)
            if not self.must_raise:
                self.model.fold(count)
            return 3.5

        given = as_arguments(count) if said == "step" else {}
        if call.inside or said == "closure":
            self.take_step((closure,), given)
        else:
            closure()
            self.take_step((), given)

    @rule(count=st.sampled_from(COUNTS))
    def announce_early(self, count):
        takes_counts = self.model.weighted if self.model.calls else self.options["reduction"] == "mean"
        if takes_counts and count.word and self.model.begun is None:
            self.announce(count)

    def announce(self, count):
        self.w.micro_batch(**as_arguments(count))
        self.model.announced = count if count.word else None

    def take_step(self, closure, given):
        try:
            result = self.w.step(*closure, **given)
        except FloatingPointError:
            assert self.must_raise, "step() raised at finite gradients"
            return
        assert not self.must_raise, "step() took gradients that are not finite"
        assert result == (3.5 if closure else None)
        if self.model.full:
            self.close_model()

    # Windows

    def flush_window(self):
        if self.model.begun is not None:  # its backward was a whole micro-batch
            self.model.fold(self.model.begun)
        was_open = self.model.calls > 0
        flushed = self.w.flush()
        if was_open:
            self.close_model()
        self.model.updated = self.model.updated and was_open
        assert flushed is self.model.updated, f"flush() returned {flushed}"

    @event()
    def reset(self):
        self.w.reset()
        self.model.reset()

    @event(steps=steps_drawn)
    def set_steps(self, steps):
        self.w.steps = steps
        self.model.steps = steps

    @event(to_none=st.booleans(), whose=st.sampled_from(["wrapper", "optimizer"]))
    def zero_grad(self, to_none, whose):
        self.forget_gradients(self.w if whose == "wrapper" else self.inner, to_none)

    def forget_gradients(self, owner, to_none=True):
        owner.zero_grad(set_to_none=to_none)
        for m in self.model.params:
            m.grad = None if to_none or m.grad is None else torch.zeros_like(m.grad)

    @event(factor=st.sampled_from([0.5, 2.0]), k=which)
    def set_lr(self, factor, k):
        k %= len(self.inner.param_groups)
        if 2.0**-6 < self.model.groups[k]["lr"] * factor <= 0.25:
            self.w.param_groups[k]["lr"] *= factor
            self.model.groups[k]["lr"] *= factor

    @event()
    def schedule(self):
        """Advances once per new value of `updates`, however often it is called."""
        self.gate.step()
        if self.model.has_news():
            for group in self.model.groups:
                group["lr"] *= 0.5

    # What must hold after every call

    @invariant()
    def agree(self):
        w, model = self.w, self.model
        seen = (w.pending, w.updates, w.updated, w.will_update, w.skipped_windows, w.skipped_micro_batches, w.steps)
        want = (model.calls, model.updates, model.updated, model.will_update, model.skipped_windows)
        want += (model.skipped_micro_batches, model.steps)
        assert seen == want, f"pending, updates, updated, will_update, skipped 2x, steps: {seen}, not {want}"
        self.agree_on_norm()
        assert [g["lr"] for g in w.param_groups] == [g["lr"] for g in model.groups]
        for k, (p, m) in enumerate(zip(self.params, model.params, strict=True)):
            close(w.master_grad(p), *model.held(m), f"master_grad of parameter {k}")
            assert (p.grad is None) == (m.grad is None), f"the gradient of parameter {k}"
            if p.grad is not None:
                close(p.grad, m.grad, 0.0, f"the gradient of parameter {k}")
            value = read(p)
            close(value, m.value, m.error, f"parameter {k}")
            m.adopt(value, self.agree_on_state(k, w.state.get(p, {}), m))

    def agree_on_norm(self):
        norm = self.w.grad_norm
        if self.model.norm is None:
            assert norm is None, f"grad_norm is {norm}"
        elif self.model.norm is not UNKNOWN:
            want = torch.tensor([self.model.norm], dtype=torch.float64)
            close(torch.tensor([norm]), want, self.model.norm_error, "grad_norm")

    def agree_on_state(self, k, state, m):
        """The moments of parameter k as they are read; the state of one that was never updated may be zeros."""
        if m.count == 0:
            assert not any(bool(torch.as_tensor(v).any()) for v in state.values() if v is not None)
            return {}
        if "exp_avg" in m.moments:
            assert float(state["step"]) == m.count, f"step count of parameter {k}: {state['step']}, not {m.count}"
        moments = {}
        for name, moment in m.moments.items():
            moments[name] = read(state[name])
            close(moments[name], moment, m.moment_errors.get(name, 0.0), f"{name} of parameter {k}")
        return moments

    def teardown(self):
        if hasattr(self, "w"):
            self.w.reset()
