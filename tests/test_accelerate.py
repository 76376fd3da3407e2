"""Accelerate, which holds steps back while it accumulates: parity with that, checkpoints, fp16, nesting."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from framework_cases import (
    BATCHES,
    EPOCHS,
    KINDS,
    MAKERS,
    MANY,
    ROWS,
    UPDATES,
    WINDOW,
    TinyLM,
    assert_near_run,
    assert_nearer,
    assert_same_run,
    falling,
    nesting_warnings,
    optimizer_for,
    texts,
    watch,
)
from torch.utils.data import DataLoader
from wrapper_helpers import LOW_PRECISION, bits, snapshot, tidy, wrap  # noqa: F401

import fusedaccum
from fusedaccum import GatedScheduler


@pytest.fixture(autouse=True)
def _fresh():
    """Accelerate keeps its settings for the whole process."""
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def accelerator_of(window, scale=None):
    """An Accelerator on the CPU. scale: with a GradScaler that begins there, and autocast to float16.

    Accelerate refuses mixed_precision="fp16" on a CPU, where torch has all that it takes; so its settings are made by
    hand here.
    """
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=window)
    if scale is not None:
        accelerator.state._mixed_precision = "fp16"
        accelerator.native_amp = True
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
    return accelerator


class Training:
    """A loop as Accelerate's documentation has it."""

    def __init__(
        self,
        kind,
        dtype=torch.float32,
        clip=None,
        make="adamw",
        window=WINDOW,
        batches=BATCHES,
        scale=None,
        gate=False,
        **options,
    ):
        self.accelerator = accelerator_of(window, scale)
        self.clip = clip or math.inf
        self.bare_model = TinyLM(dtype)
        self.opt = optimizer_for(self.bare_model, kind, make, **options)
        self.run = watch(self.opt, self.bare_model)
        self.skipped = []
        self.leave_out = []  # whether to, of the windows to come
        schedule = falling(self.opt)
        if gate or options.get("steps"):
            schedule = GatedScheduler(schedule, self.opt)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            self.bare_model, self.opt, schedule, DataLoader(texts(batches * ROWS), batch_size=ROWS)
        )

    def epoch(self, first=0, save_at=None, to=None):
        loader = self.accelerator.skip_first_batches(self.loader, first) if first else self.loader
        for index, batch in enumerate(loader, start=first):
            if index == save_at:
                self.accelerator.save_state(to)
                self.run.losses.clear()
            with self.accelerator.accumulate(self.model):
                loss = self.model(batch)["loss"]
                self.accelerator.backward(loss)
                self.run.losses.append(loss.item())
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
                    self.run.norms.append(float(norm))
                if self.accelerator.sync_gradients and self.leave_out and self.leave_out.pop(0):
                    self.optimizer.zero_grad()
                    continue
                self.optimizer.step()
                if self.accelerator.sync_gradients:
                    self.skipped.append(self.optimizer.step_was_skipped)
                self.scheduler.step()
                self.optimizer.zero_grad()
        return self

    def train(self):
        for _ in range(EPOCHS):
            self.epoch()
        return self.done()

    def done(self):
        return self.run.finish(self.opt)


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("make", MAKERS)
def test_steps_none_is_native_accumulation(make, clip):
    native, wrapped, fused = (Training(kind, clip=clip, make=make).train() for kind in KINDS)
    truth = Training("native", torch.float64, clip, make).train()
    assert native.updates == len(native.norms) == UPDATES
    assert len(set(native.rates)) == UPDATES
    assert_same_run(wrapped, native)
    assert_near_run(fused, native, truth)


@LOW_PRECISION
def test_a_bf16_model_is_nearer_to_the_truth():

    def after(kind, dtype=torch.bfloat16, **options):
        return Training(kind, dtype, window=MANY, batches=MANY, **options).train()

    ours = after("fused", master_weights=True, state_dtype=torch.float32)
    assert_nearer(ours, after("native"), after("native", torch.float64))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [0, WINDOW])
def test_save_and_load_state(tmp_path, kind, first):
    """Saved in the second epoch, after so many batches of it; new objects go on as if nothing had been."""
    options = {"master_weights": True} if kind == "fused" else {}
    through = Training(kind, clip=0.3, **options)
    through.epoch()
    through.epoch(save_at=first, to=str(tmp_path))
    want = snapshot(through.opt, norm=False)

    resumed = Training(kind, clip=0.3, **options)
    resumed.accelerator.load_state(str(tmp_path))
    resumed.epoch(first)
    assert snapshot(resumed.opt, norm=False) == want
    assert resumed.run.losses == through.run.losses
    assert resumed.scheduler.get_last_lr() == through.scheduler.get_last_lr()


@pytest.mark.parametrize("gate", [False, True])
def test_windows_that_are_left_out(gate):
    """nonfinite="skip_window" leaves a window with a NaN out, and a gated schedule with it."""
    training = Training("fused", gate=gate, nonfinite="skip_window")
    weight = training.bare_model.norm.weight
    hooked = weight.register_hook(lambda grad: grad * float("nan"))
    training.epoch()
    assert (training.opt.updates, training.opt.skipped_windows) == (0, 3)
    assert [bits(p) for p in training.run.params] == [bits(p) for p in TinyLM().parameters()]
    hooked.remove()
    training.epoch()
    assert training.opt.updates == 3
    assert training.scheduler.get_last_lr() == pytest.approx([0.02 * 0.8 ** (3 if gate else 6)])


@pytest.mark.parametrize("clip", [None, 0.3])
def test_fp16_with_a_scaler(clip):
    """It begins too high: steps are skipped, and the schedule with them, until scale and gradients fit."""
    native, wrapped, fused = (Training(kind, clip=clip, scale=2.0**20) for kind in KINDS)
    for training in (native, wrapped, fused):
        training.train()
        assert training.skipped == native.skipped
        assert training.accelerator.scaler.get_scale() == native.accelerator.scaler.get_scale()
    assert True in native.skipped[:3]
    assert native.run.updates == native.skipped.count(False) >= 3
    assert_same_run(wrapped.run, native.run)
    truth = Training("native", torch.float64, clip)
    truth.leave_out = list(native.skipped)
    truth.train()
    for run in (fused.run, native.run):
        run.norms = [norm for norm in run.norms if math.isfinite(norm)]
    truth.run.norms = truth.run.norms[-len(native.run.norms) :]
    assert_near_run(fused.run, native.run, truth.run)


@pytest.mark.parametrize("fold", ["step", "backward"])
def test_steps_n_where_accelerate_does_not_accumulate(fold):
    """Every call reaches the wrapper: the same as in a loop without Accelerate, the gated schedule too."""
    ours = Training("fused", window=1, steps=WINDOW, fold=fold, max_norm=0.3)
    with nesting_warnings() as said:
        ours.train()
    assert not said
    model = TinyLM()
    plain = optimizer_for(model, "fused", steps=WINDOW, max_norm=0.3)
    run, schedule = watch(plain, model), GatedScheduler(falling(plain), plain)
    for _ in range(EPOCHS):
        for batch in DataLoader(texts(), batch_size=ROWS):
            model(batch)["loss"].backward()
            plain.step()
            schedule.step()
            plain.zero_grad()
    run.finish(plain)
    assert (run.updates, plain.pending, ours.opt.pending) == (4, 2, 2)
    assert [bits(p) for p in ours.run.params] == [bits(p) for p in run.params]
    assert ours.run.rates == run.rates == pytest.approx([0.02 * 0.8**n for n in range(4)])
    ours.opt.reset()
    plain.reset()


def test_steps_n_with_a_scaler():
    """Micro-batches that overflow never reach the wrapper and are not counted; Accelerate sees them left out."""
    ours = Training("fused", window=1, steps=WINDOW, scale=2.0**19, max_norm=0.3)
    ours.train()
    model = TinyLM()
    plain = optimizer_for(model, "fused", steps=WINDOW, max_norm=0.3)
    run, scaler = watch(plain, model), torch.amp.GradScaler("cpu", init_scale=2.0**19, growth_interval=3)
    schedule = GatedScheduler(falling(plain), plain)
    for batch in [*DataLoader(texts(), batch_size=ROWS)] * EPOCHS:
        with torch.autocast("cpu", torch.float16):
            loss = model(batch)["loss"]
        scaler.scale(loss.float()).backward()
        scaler.step(plain)
        scaler.update()
        schedule.step()
        plain.zero_grad()
    left_out = ours.skipped.count(True)
    assert 0 < left_out < 6
    assert (plain.updates, plain.pending) == divmod(EPOCHS * BATCHES - left_out, WINDOW)
    assert (ours.opt.updates, ours.opt.pending) == (plain.updates, plain.pending)
    assert ours.run.rates == run.rates
    assert [bits(p) for p in model.parameters()] == [bits(p) for p in ours.bare_model.parameters()]
    ours.opt.reset()
    plain.reset()


# Two accumulations


def loop(things, accumulate, backwards=1, clip=False, batches=4):
    """things: a function that returns accelerator, model and optimizer, none of which is a variable here."""
    text = torch.stack(texts(2))
    for _ in range(batches):
        with things()[0].accumulate(things()[1]) if accumulate else contextlib.nullcontext():
            for _ in range(backwards):
                things()[0].backward(things()[1](text)["loss"])
            if clip and things()[0].sync_gradients:
                things()[0].clip_grad_norm_(things()[1].parameters(), 0.1)
            things()[2].step()
            things()[2].zero_grad()


class Program:
    def run(self, things, **how):
        self.accelerator = things()[0]
        loop(things, **how)


def run_from(where, things, **how):
    """Run the loop where the Accelerator is somebody's variable, a global one, an attribute, or nowhere."""
    if where == "self":
        Program().run(things, **how)
    elif where == "local":
        accelerator = things()[0]
        loop(things, **how)
        assert accelerator
    elif where == "global":
        globals()["accelerator_of_the_module"] = things()[0]
        try:
            loop(things, **how)
        finally:
            del globals()["accelerator_of_the_module"]
    else:
        loop(things, **how)


def prepared(accelerate, steps, **options):
    accelerator, model = accelerator_of(accelerate), TinyLM()
    opt = wrap(torch.optim.SGD(model.parameters(), lr=0.1), steps, **options)
    things = (accelerator, *accelerator.prepare(model, opt))
    return lambda: things


@pytest.mark.parametrize("where", ["self", "local", "global", "nowhere"])
@pytest.mark.parametrize("fold", ["step", "backward"])
@pytest.mark.parametrize("clip", [False, True])
def test_65_nested_accumulation_warns_once(fold, clip, where):
    with nesting_warnings() as said:
        run_from(where, prepared(3, 5, fold=fold), accumulate=True, clip=clip, batches=40)
    assert len(said) == 1
    for words in ("Accelerate", "3 micro-batches", "steps=5", "15 micro-batches", "steps=None", "=1 there"):
        assert words in said[0]


@pytest.mark.parametrize("fold", ["step", "backward"])
def test_65_nested_where_every_step_ends_a_data_loader(fold):
    """The Accelerator counts accumulate() from 0 again there."""
    training = Training("fused", batches=WINDOW, steps=5, fold=fold)
    with nesting_warnings() as said:
        training.epoch().epoch()
    assert len(said) == 1
    training.opt.reset()


@pytest.mark.parametrize("where", ["self", "local", "global"])
@pytest.mark.parametrize(
    ("accelerate", "steps", "how"),
    [
        (1, 3, {"accumulate": True}),
        (3, 1, {"accumulate": True}),
        (3, None, {"accumulate": True}),
        (2, 3, {"accumulate": False}),
        (2, 3, {"accumulate": False, "clip": True}),
        (2, 3, {"accumulate": False, "backwards": 3}),
        (2, 3, {"accumulate": False, "backwards": 3, "fold": "backward"}),
    ],
    ids=str,
)
def test_what_is_not_nested(accelerate, steps, how, where):
    """Clipping in place and several backwards change a gradient as often as accumulating does."""
    how = dict(how)
    fold = {"fold": how.pop("fold")} if "fold" in how else {}
    with nesting_warnings() as said:
        run_from(where, prepared(accelerate, steps, **fold), batches=8, **how)
    assert not said


@pytest.mark.parametrize("fold", ["step", "backward"])
def test_what_is_not_nested_with_an_accelerator_nowhere(fold):
    """A tied weight's gradient is a sum in every backward."""
    with nesting_warnings() as said:
        loop(prepared(2, 3, fold=fold), accumulate=False, batches=8)
    assert not said


def test_wrapping_builds_what_accelerate_prepares():
    cls = fusedaccum.wrapping(torch.optim.SGD, steps=2)
    accelerator, model = accelerator_of(3), TinyLM()
    opt = cls(model.parameters(), lr=0.1)
    things = (accelerator, *accelerator.prepare(model, opt))
    with nesting_warnings() as said:
        loop(lambda: things, accumulate=True)
    assert len(said) == 1
    opt.reset()
