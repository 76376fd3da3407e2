"""The machine's rules beyond the window: parameters that change, saving, loading, copies, calls to be refused."""

from __future__ import annotations

import contextlib
import copy
import pickle

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition
from stateful_backward import InBackward
from stateful_drawn import (
    BUCKETS,
    COUNTS,
    IN_BACKWARD,
    MOST,
    POLICIES,
    close,
    event,
    few_calls,
    grads_drawn,
    pattern,
    read,
    steps_drawn,
    which,
)
from stateful_model import NO_COUNT
from wrapper_helpers import refused

from fusedaccum import FusedAccumOptimizer

KEY = "fusedaccum"


@contextlib.contextmanager
def asserted():
    """What pytest finds missing is an AssertionError, which hypothesis can make a short sequence of."""
    try:
        yield
    except pytest.fail.Exception as missing:
        raise AssertionError(str(missing)) from missing


@contextlib.contextmanager
def must_refuse(optimizer, *words):
    with asserted(), refused(optimizer, *words):
        yield


@contextlib.contextmanager
def must_warn(words, expected):
    with asserted(), pytest.warns(UserWarning, match=words) if expected else contextlib.nullcontext():
        yield


class Life(InBackward):
    # Parameters

    @precondition(lambda self: len(self.params) < MOST)
    @event(n=st.sampled_from([1, 2, 65]), on=st.sampled_from(["wrapper", "optimizer"]))
    def add_param_group(self, n, on):
        group = self.new_group((n,), 0.125)
        self.note_groups([group])
        (self.w if on == "wrapper" else self.inner).add_param_group(group)

    @event(k=which, frozen=st.booleans())
    def freeze(self, k, frozen):
        self.params[k % len(self.params)].requires_grad_(not frozen)

    @event(k=which, how=st.sampled_from(["fill_", "add_", "same", "data", "moved", "through data"]))
    def change_parameter(self, k, how):
        """From outside. Values never come back, so that it does not matter when a master takes them up."""
        k %= len(self.params)
        p, m = self.params[k], self.model.params[k]
        self.serial += 1
        value = (pattern(p.numel()) * (8 + self.serial % 64) / 8).to(p.dtype)
        if how == "through data" and not (self.options["master_weights"] and p.dtype != torch.float32):
            p.data.copy_(value)  # which a master does not see
        elif how == "data":
            p.data = value
        elif how == "moved":
            p.data = p.data.clone()
        else:
            with torch.no_grad():
                p.add_(0.0) if how == "same" else p.fill_(self.serial / 8) if how == "fill_" else p.copy_(value)
        m.value = read(p)

    # Saving and loading

    @event()
    def save(self):
        self.put_on_shelf()

    def saved(self):
        """What the wrapper saves, and what the model does."""
        saved = self.w.state_dict()
        self.agree_on_rounding(saved[KEY]["rounding"])
        model = self.model.save()
        for k, (entry, master) in enumerate(zip(model["params"], saved[KEY]["masters"], strict=True)):
            self.agree_on_master(k, entry, master)
        return saved, model

    def put_on_shelf(self):
        saved, model = copy.deepcopy(self.saved())
        self.shelf = [*self.shelf[-1:], (saved, model, self.gate.state_dict(), self.model.seen)]

    def agree_on_rounding(self, state):
        """Seed and number of the next update: a skipped one may have its number, an applied one has."""
        if self.options["rounding"] == "nearest":
            assert state == ()
            return
        (seed, number), (least, most) = state, self.model.drawn
        assert seed == 0
        assert least <= number <= most, f"random numbers were drawn for {number} updates, not {least} to {most}"
        self.model.drawn = number, number

    def agree_on_master(self, k, entry, master):
        if master is None:
            assert entry["master"] is None, f"the master of parameter {k} is not saved"
        elif entry["master"] is None:  # made by an update that was skipped
            close(master, read(self.params[k]), 0.0, f"the master of parameter {k}")
        else:
            close(master, entry["master"], entry["master_error"], f"the master of parameter {k}")

    def teardown(self):
        """What was saved, and loaded maybe, is as it was."""
        for saved, model, *_ in getattr(self, "shelf", ()):
            for k, entry in enumerate(model["params"]):
                for name, moment in entry["moments"].items():
                    close(saved["state"][k][name], moment, 0.0, f"saved {name} of parameter {k}")
        super().teardown()

    @event(between=few_calls, pick=st.integers(0, 1), bare=st.booleans(), gate=st.booleans())
    def load(self, between, pick, bare, gate):
        """What was saved some time ago. bare: without the open window, as a bare optimizer saves."""
        if not self.shelf:
            self.put_on_shelf()
        self.make_calls(between)
        saved, model, gate_state, seen = self.shelf[pick % len(self.shelf)]
        if bare:
            saved = {key: value for key, value in saved.items() if key != KEY}
        counts = model["counts"]
        weighted = counts["weighted"] if counts["calls"] else counts["begun"] is not None and counts["begun"].word
        no_use = not bare and weighted and self.options["reduction"] == "sum"
        if no_use or len(model["params"]) != len(self.params):
            with must_refuse(self.w, "parameter|reduction='sum'"):
                self.w.load_state_dict(saved)
            return
        self.load_dict(saved, model, bare)
        if gate:
            self.gate.load_state_dict(gate_state)
            self.model.seen = seen

    def load_dict(self, saved, model, bare=False):
        steps, counts = self.model.steps, model["counts"]
        length = steps(counts["updates"]) if callable(steps) else steps
        is_open = counts["calls"] > 0 or counts["begun"] is not None
        warns = not bare and is_open and model["length"] != length
        with must_warn("steps=", warns):
            self.w.load_state_dict(saved)
        self.model.load(model, bare)

    @event()
    def load_itself(self):
        """The live dict, as accelerate does it."""
        self.load_dict(*self.saved())

    @event(count=st.sampled_from([*COUNTS, *[NO_COUNT] * 10]), grads=grads_drawn)
    def stop_behind_a_backward(self, count, grads):
        """And go on from what is saved between it and its step()."""
        self.announce_early(count)
        self.backward(grads, None)
        self.load_dict(*copy.deepcopy(self.saved()))
        for p, m in zip(self.params, self.model.params, strict=True):
            p.grad = m.grad = None

    @event(how=st.sampled_from(["deepcopy", "pickle"]), count=st.sampled_from([*COUNTS, *[NO_COUNT] * 10]))
    def copy(self, how, count):
        """Go on with a copy; nothing that happens to the original reaches it. An announced count comes along."""
        self.announce_early(count)
        everything = self.params, self.inner, self.w, self.gate
        copied = copy.deepcopy(everything) if how == "deepcopy" else pickle.loads(pickle.dumps(everything))
        original, originals = self.w, self.params
        self.params, self.inner, self.w, gate = copied
        self.model.save()  # masters are brought up to date
        for m in self.model.params:
            m.grad = None  # torch copies no gradients
        self.attach(gate)
        original.reset()
        with torch.no_grad():
            for p in originals:
                p.zero_()

    # Closing, and wrapping again

    @event(
        steps=steps_drawn,
        changed=st.fixed_dictionaries(
            {
                "reduction": st.sampled_from(["mean", "mean", "sum"]),
                "nonfinite": st.sampled_from(POLICIES),
                "max_norm": st.sampled_from([None, 1.0]),
                "amp_scaling": st.booleans(),
                "bucket": st.sampled_from(BUCKETS),
            }
        ),
        how=st.sampled_from(["after a restart", "and load", "only"]),
    )
    def wrap_again(self, steps, changed, how):
        """And load what the old wrapper saved, around new objects after a restart."""
        fresh, load = how == "after a restart", how != "only"
        saved, model = copy.deepcopy(self.saved())
        self.close()
        if load and self.model.counts_items:
            changed["reduction"] = "mean"
        self.change_options(**changed)
        if fresh:
            self.make_anew()
        self.w = FusedAccumOptimizer(self.inner, steps=steps, backend=self.backend, **self.options)
        self.model.wrap(steps, self.options)
        if load:
            self.load_dict(saved, model)
        self.attach()

    def change_options(self, nonfinite, amp_scaling, bucket, **others):
        options = {k: v for k, v in self.options.items() if k not in ("fold", "bucket_mb")} | others
        in_backward = bucket is not None and self.scaler is None
        options |= {"fold": "backward", "bucket_mb": bucket} if in_backward else {"fold": "step"}
        if in_backward and options["nonfinite"] not in IN_BACKWARD:
            options["nonfinite"] = "skip_window"
        if in_backward and nonfinite not in IN_BACKWARD:
            nonfinite = "skip_window"
        if self.scaler is not None and torch.float16 not in self.dtypes:
            options["amp_scaling"] = amp_scaling
        if not (nonfinite == "propagate" and self.poison) and not (nonfinite == "raise" and options["amp_scaling"]):
            options["nonfinite"] = nonfinite
        if options["nonfinite"] == "raise":
            options["amp_scaling"] = False
        self.options = options

    def close(self):
        with must_warn("open window", self.model.calls > 0 or self.model.begun is not None):
            self.w.close()
        for call in (self.w.step, self.w.flush, self.w.micro_batch, lambda: self.w.load_state_dict({})):
            with asserted(), pytest.raises(RuntimeError, match="close"):
                call()
        self.w.close()  # once more is nothing

    def make_anew(self):
        old = self.params
        self.params = [torch.nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for p in old]
        new = dict(zip(old, self.params, strict=True))
        groups = [{**group, "params": [new[p] for p in group["params"]]} for group in self.inner.param_groups]
        self.inner = self.kind(groups)
        for m in self.model.params:
            m.grad, m.count, m.moments = None, 0, {}

    # Calls to be refused

    @event(grads=grads_drawn, what=st.sampled_from(["mixed", "negative", "true", "both", "twice", "last"]))
    def refuse_counts(self, grads, what):
        self.backward(grads, None)
        model, w = self.model, self.w
        sums = self.options["reduction"] == "sum"
        if what == "mixed" and model.calls and model.said is None:
            with must_refuse(w, "reduction|without it" if sums else "plain|weighted|without it"):
                w.step(**({} if model.weighted else {"mean_of": 2}))
        elif what == "mixed" and sums and model.said is None:
            with must_refuse(w, "reduction"):
                w.step(sum_of=2)
        elif what == "twice" and model.announced is not None:
            with must_refuse(w, "micro_batch"):
                w.step(mean_of=2)
        elif what in ("negative", "true", "both"):
            given = {"negative": {"mean_of": -1}, "true": {"sum_of": True}, "both": {"mean_of": 1, "sum_of": 1}}[what]
            for call in (w.step, w.micro_batch):
                with must_refuse(w, "mean_of|sum_of"):
                    call(**given)
        elif what == "last":
            with must_refuse(w, "last"):
                w.micro_batch(last=True)

    @event(what=st.sampled_from(["steps", "stranger", "wrapped", "updates", "version"]))
    def refuse_others(self, what):
        w = self.w
        with must_refuse(
            w, {"wrapped": "wrapped already"}.get(what, what if what != "stranger" else "not a parameter")
        ):
            if what == "steps":
                w.steps = 0
            elif what == "stranger":
                w.master_grad(torch.zeros(1))
            elif what == "wrapped":
                FusedAccumOptimizer(self.inner, steps=2)
            else:
                saved = w.state_dict()
                saved[KEY] = saved[KEY] | ({"version": 0} if what == "version" else {"updates": -1})
                w.load_state_dict(saved)
