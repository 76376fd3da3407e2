"""The rules of tests/stateful_none.py beyond p.grad: parameters that change, saving, loading, copies, closing."""

from __future__ import annotations

import copy
import pickle

import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition
from stateful_drawn import MOST, close, grads_drawn, pattern, read, which
from stateful_life import KEY, must_refuse, must_warn
from stateful_none import Live
from stateful_none_model import event

from fusedaccum import FusedAccumOptimizer


class LiveLife(Live):
    # Parameters

    @precondition(lambda self: len(self.params) < MOST)
    @event(n=st.sampled_from([1, 2, 65]), on=st.sampled_from(["wrapper", "optimizer"]), grad=st.booleans())
    def add_param_group(self, n, on, grad):
        """grad: it has a gradient already, which stays."""
        group = self.new_group((n,), 0.125)
        self.note_groups([group])
        (self.w if on == "wrapper" else self.inner).add_param_group(group)
        m = self.model.params[-1]
        m.hooked = on == "wrapper"
        if grad:
            (p,) = group["params"]
            p.grad = pattern(n).to(p.dtype)
            m.grad = read(p.grad)

    @event(k=which, frozen=st.booleans())
    def freeze(self, k, frozen):
        """A gradient that is there stays, and is used."""
        p, m = self.pick(k)
        if p.requires_grad == frozen:
            p.requires_grad_(not frozen)
            m.hooked = m.hooked and frozen

    @event(k=which, grads=grads_drawn)
    def take_out_and_put_back(self, k, grads):
        """A parameter leaves its group for a step, and takes along what p.grad holds."""
        p, m = self.pick(k)
        group = next(g for g in self.w.param_groups if any(p is q for q in g["params"]))
        at = next(i for i, q in enumerate(group["params"]) if q is p)
        del group["params"][at]
        self.backward(grads)
        kept = m.grad, m.grad_error
        m.grad = None
        self.w.step()
        self.model.step()
        self.hooks_are_there()
        assert (p.grad is None) == (kept[0] is None)
        group["params"].insert(at, p)
        m.grad, m.grad_error = kept
        m.hooked = False

    @event(k=which, how=st.sampled_from(["fill_", "add_", "data", "moved"]))
    def change_parameter(self, k, how):
        p, m = self.pick(k)
        self.serial += 1
        value = (pattern(p.numel()) * (8 + self.serial % 64) / 8).to(p.dtype)
        if how == "data":
            p.data = value
        elif how == "moved":
            p.data = p.data.clone()
        else:
            with torch.no_grad():
                p.fill_(self.serial / 8) if how == "fill_" else p.copy_(value)
        m.value = read(p)

    # Saving and loading

    def saved(self):
        saved = self.w.state_dict()
        assert (saved[KEY]["pending"], any(t is not None for t in saved[KEY]["sums"])) == (0, False)
        if self.options["rounding"] != "nearest":
            number = saved[KEY]["rounding"][1]
            assert self.model.drawn[0] <= number <= self.model.drawn[1]
            self.model.drawn = number, number
        model = self.model.save()
        for k, (entry, master) in enumerate(zip(model["params"], saved[KEY]["masters"], strict=True)):
            if master is not None and entry["master"] is not None:
                close(master, entry["master"], entry["master_error"], f"the master of parameter {k}")
        return saved, model

    def put_on_shelf(self):
        saved, model = copy.deepcopy(self.saved())
        self.shelf = [*self.shelf[-1:], (saved, model)]

    @event()
    def save(self):
        self.put_on_shelf()

    @event(pick=st.integers(0, 1), bare=st.booleans())
    def load(self, pick, bare):
        """p.grad stays as it is."""
        if not self.shelf:
            self.put_on_shelf()
            return
        saved, model = self.shelf[pick % len(self.shelf)]
        if bare:
            saved = {key: value for key, value in saved.items() if key != KEY}
        if len(model["params"]) != len(self.params):
            with must_refuse(self.w, "parameter"):
                self.w.load_state_dict(saved)
            return
        self.w.load_state_dict(saved)
        self.load_model(model, bare)

    def load_model(self, model, bare=False):
        self.model.load(model, bare)
        if not bare:
            self.model.seen = min(self.model.seen, self.model.updates)  # the schedule begins anew there

    @event()
    def load_itself(self):
        saved, model = self.saved()
        self.w.load_state_dict(saved)
        self.load_model(model)

    @event(how=st.sampled_from(["deepcopy", "pickle"]))
    def copy(self, how):
        """Go on with a copy, which has no gradients, as torch copies none."""
        everything = self.params, self.inner, self.w
        copied = copy.deepcopy(everything) if how == "deepcopy" else pickle.loads(pickle.dumps(everything))
        original, originals = self.w, self.params
        self.params, self.inner, self.w = copied
        self.model.save()  # masters are brought up to date
        for m in self.model.params:
            m.grad, m.grad_error = None, torch.zeros_like(m.value)
            m.hooked = True
        self.attach()
        original.reset()
        with torch.no_grad():
            for p in originals:
                p.zero_()

    # Closing

    @event(load=st.booleans(), gradients=st.booleans())
    def wrap_again(self, load, gradients):
        """gradients: a hand-made one is there, which is not ours to drop."""
        saved, model = copy.deepcopy(self.saved())
        self.w.zero_grad()
        with must_warn("no step", False):
            self.w.close()
        for p, m in self.pairs:
            assert p.grad_dtype == p.dtype
            assert not p._backward_hooks
            m.grad, m.grad_error = None, torch.zeros_like(m.value)
        if gradients:
            p, m = self.pairs[0]
            p.grad = pattern(p.numel()).to(p.dtype)
            m.grad = read(p.grad)
        self.wrap_model()
        if load:
            self.w.load_state_dict(saved)
            self.load_model(model)

    def wrap_model(self):
        self.model.wrap(None, self.model.options)
        self.wrap()
        for m in self.model.params:
            m.hooked = True

    @event(grads=grads_drawn, what=st.sampled_from(["mean_of", "flush", "micro_batch", "steps", "wrapped", "stranger"]))
    def refuse(self, grads, what):
        self.backward(grads)
        w = self.w
        words = {"wrapped": "wrapped already", "stranger": "not a parameter"}.get(what, what)
        with must_refuse(w, words):
            if what == "mean_of":
                w.step(mean_of=2)
            elif what == "flush":
                w.flush()
            elif what == "micro_batch":
                w.micro_batch(mean_of=2)
            elif what == "steps":
                w.steps = 4
            elif what == "wrapped":
                FusedAccumOptimizer(self.inner, steps=2)
            else:
                w.master_grad(torch.zeros(1))
