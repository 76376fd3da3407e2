"""Lightning, automatic and manual: parity with its accumulation, checkpoints, fp16, nesting."""

from __future__ import annotations

import importlib

import lightning.pytorch as lightning
import pytest
import torch
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

from fusedaccum import GatedScheduler

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:(?s).*{text}")
    for text in (
        "does not have many workers",
        "isinstance.*LeafSpec",
        "ended before the epoch ended",  # batches go by index here
        "callbacks used to create the checkpoint",
        "no pre-optimization state was saved",  # what comes after the step is what is wanted
        "not empty",
    )
]


def total_norm(parameters):
    return float(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))


def lit(base=lightning.LightningModule):
    """A LightningModule over a TinyLM and an optimizer for it."""

    class Lit(base):
        def __init__(
            self, kind="native", dtype=torch.float32, make="adamw", count=BATCHES, manual=None, gate=False, **options
        ):
            super().__init__()
            self.model = TinyLM(dtype)
            self.opt = optimizer_for(self.model, kind, make, **options)
            self.own_steps = options.get("steps") is not None
            self.gate = gate or self.own_steps
            self.watched = watch(self.opt, self.model)
            # By index: after resuming inside an epoch Lightning begins the data anew, and goes on counting.
            self.batches = list(DataLoader(texts(count * ROWS), batch_size=ROWS))
            self.manual = manual  # micro-batches for each step, where the loop is our own
            self.automatic_optimization = manual is None

        def training_step(self, batch, index):
            loss = self.model(self.batches[index])["loss"]
            self.watched.losses.append(loss.item())
            if self.manual is not None:
                self.own_loop(loss, index)
            return loss

        def own_loop(self, loss, index):
            opt, schedule = self.optimizers(), self.lr_schedulers()
            self.manual_backward(loss / self.manual)
            if (index + 1) % self.manual == 0 or index + 1 == len(self.batches):
                if not self.own_steps:  # else it would clip each micro-batch
                    self.clip_gradients(opt, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
                opt.step()
                schedule.step()
                opt.zero_grad()

        def on_before_optimizer_step(self, optimizer):
            if not self.own_steps:
                self.watched.norms.append(total_norm(self.model.parameters()))
            if len(self.watched.norms) == 1:  # a bare optimizer's pre-hook is called before Lightning's closure
                self.watched.grads = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]

        def configure_optimizers(self):
            schedule = falling(self.opt)
            schedule = GatedScheduler(schedule, self.opt) if self.gate else schedule
            return {"optimizer": self.opt, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        def finish(self):
            return self.watched.finish(self.opt)

    return Lit


Lit = lit()


def trainer_of(package=lightning, **more):
    settings = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": EPOCHS,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **more,
    }
    return package.Trainer(**settings)


def fit(module, package=lightning, ckpt_path=None, **settings):
    trainer = trainer_of(package, **settings)
    trainer.fit(module, DataLoader(module.batches, batch_size=None), ckpt_path=ckpt_path)
    return trainer


def trained(kind, dtype=torch.float32, make="adamw", clip=None, window=WINDOW, **options):
    module = Lit(kind, dtype, make, **options)
    fit(module, accumulate_grad_batches=window, gradient_clip_val=clip)
    return module.finish()


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("make", MAKERS)
def test_steps_none_is_native_accumulation(make, clip):
    native, wrapped, fused = (trained(kind, make=make, clip=clip) for kind in KINDS)
    truth = trained("native", torch.float64, make, clip)
    assert native.updates == len(native.norms) == UPDATES
    assert len(set(native.rates)) == UPDATES
    assert_same_run(wrapped, native)
    assert_near_run(fused, native, truth)


@pytest.mark.parametrize("make", MAKERS)
def test_manual_optimization(make):
    native, wrapped, fused = (trained(kind, make=make, window=1, manual=WINDOW) for kind in KINDS)
    truth = trained("native", torch.float64, make, window=1, manual=WINDOW)
    assert native.updates == UPDATES
    assert_same_run(wrapped, native)
    assert_near_run(fused, native, truth)


@LOW_PRECISION
def test_a_bf16_model_is_nearer_to_the_truth():
    def after(kind, dtype=torch.bfloat16, **options):
        return trained(kind, dtype, window=MANY, count=MANY, **options)

    ours = after("fused", master_weights=True, state_dtype=torch.float32)
    assert_nearer(ours, after("native"), after("native", torch.float64))


# Lightning's own schedule goes on where the scaler leaves a step out; a GatedScheduler would not.
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")
@pytest.mark.parametrize("clip", [None, 0.3])
def test_fp16_with_a_scaler(clip):
    """It begins too high: steps are left out until scale and gradients fit."""

    native, wrapped, fused = (trained_in_fp16(Lit(kind), clip) for kind in KINDS)
    assert 3 <= native.updates < UPDATES
    assert_same_run(wrapped, native)
    assert (fused.updates, fused.rates, fused.steps) == (native.updates, native.rates, native.steps)
    assert [*map(repr, fused.norms[:3])] == [*map(repr, native.norms[:3])]
    gated = trained_in_fp16(Lit("wrapped", gate=True), clip)
    assert gated.rates == pytest.approx([0.02 * 0.8**n for n in range(native.updates)])
    assert native.rates != gated.rates


def trained_in_fp16(module, clip):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    precision = lightning.plugins.MixedPrecision("16-mixed", "cpu", scaler)
    fit(module, accumulate_grad_batches=WINDOW, gradient_clip_val=clip, plugins=[precision])
    return module.finish()


@pytest.mark.parametrize("what", ["autocast", "value", "averaging"])
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_what_else_there_is_in_lightning(what):
    native, wrapped = Lit("native"), Lit("wrapped")
    for module in (native, wrapped):
        settings = {
            "autocast": {"precision": "bf16-mixed", "gradient_clip_val": 0.3},
            "value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value", "detect_anomaly": True},
            "averaging": {"callbacks": [lightning.callbacks.EMAWeightAveraging()]},
        }[what]
        fit(module, accumulate_grad_batches=WINDOW, **settings)
    assert_same_run(wrapped.finish(), native.finish())
    assert native.watched.updates == UPDATES


@pytest.mark.filterwarnings("ignore:.*training_step. returned .None")
def test_batches_that_training_step_leaves_out():
    """A whole window of them holds nothing to update with; the schedule goes on, as it does natively."""

    class Leaving(Lit):
        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            return None if index in (2, 3, 4, 5) else loss

        def on_before_optimizer_step(self, optimizer):
            pass

    native, wrapped, gated = Leaving(), Leaving("wrapped"), Leaving("wrapped", gate=True)
    for module in (native, wrapped, gated):
        fit(module, accumulate_grad_batches=WINDOW, gradient_clip_val=0.3)
    assert [bits(p) for p in wrapped.model.parameters()] == [bits(p) for p in native.model.parameters()]
    assert wrapped.finish().updates == gated.finish().updates == UPDATES - EPOCHS
    assert wrapped.watched.rates == [rate for k, rate in enumerate(native.watched.rates) if k % 3 != 1]
    assert gated.watched.rates == native.watched.rates[: UPDATES - EPOCHS]


class Two(lightning.LightningModule):
    """Two models with an optimizer each, which take turns; the other one's parameters are frozen meanwhile."""

    def __init__(self, kind):
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = TinyLM(), TinyLM()
        self.made = [optimizer_for(self.first, kind), optimizer_for(self.second, kind, "sgd")]
        self.batches = list(DataLoader(texts(), batch_size=ROWS))

    def training_step(self, batch, index):
        last = (index + 1) % WINDOW == 0 or index + 1 == len(self.batches)
        for opt, mine, other in zip(
            self.optimizers(), (self.first, self.second), (self.second, self.first), strict=True
        ):
            self.toggle_optimizer(opt)
            ours, theirs = mine(batch), other(batch)
            apart = (ours["logits"] - theirs["logits"]).square().mean()
            self.manual_backward((ours["loss"] + 0.1 * apart) / WINDOW)
            if last:
                opt.step()
                opt.zero_grad()
            self.untoggle_optimizer(opt)

    def configure_optimizers(self):
        return self.made


def test_optimizers_that_take_turns():
    native, wrapped = Two("native"), Two("wrapped")
    fit(native)
    fit(wrapped)
    assert [opt.updates for opt in wrapped.made] == [UPDATES, UPDATES]
    assert [bits(p) for p in wrapped.parameters()] == [bits(p) for p in native.parameters()]


def saving(folder, every):
    saved = lightning.callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=every, save_top_k=-1)
    return {"enable_checkpointing": True, "callbacks": [saved]}


@pytest.mark.parametrize("manual", [None, WINDOW])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [2, 4])
def test_checkpoints(tmp_path, kind, at, manual):
    """Inside the first epoch and inside the second: new objects go on as if nothing had been."""
    options = {"master_weights": True} if kind == "fused" else {}
    settings = {} if manual else {"accumulate_grad_batches": WINDOW, "gradient_clip_val": 0.3}
    through, resumed = (Lit(kind, manual=manual, **options) for _ in range(2))
    fit(through, **settings, **saving(tmp_path, 2))
    fit(resumed, **settings, ckpt_path=tmp_path / f"step={at}.ckpt")
    assert snapshot(resumed.opt, norm=False) == snapshot(through.opt, norm=False)
    assert resumed.watched.rates == through.watched.rates[at:]
    assert through.finish().updates == UPDATES


@pytest.mark.parametrize("manual", [None, 1])
@pytest.mark.parametrize("fold", ["step", "backward"])
def test_steps_n_where_lightning_does_not_accumulate(tmp_path, fold, manual):
    """The same as in a loop without Lightning; a checkpoint carries the open window."""
    options = {"steps": WINDOW, "fold": fold, "max_norm": 0.3, "manual": manual}
    ours, resumed = Lit("fused", **options), Lit("fused", **options)
    with nesting_warnings() as said:
        fit(ours, **saving(tmp_path, 5))
        fit(resumed, ckpt_path=tmp_path / "step=5.ckpt")
    assert not said
    plain = Lit("fused", steps=WINDOW, max_norm=0.3)
    opt, schedule = plain.opt, GatedScheduler(falling(plain.opt), plain.opt)
    for batch in plain.batches * EPOCHS:
        plain.model(batch)["loss"].backward()
        opt.step()
        schedule.step()
        opt.zero_grad()
    assert (opt.updates, opt.pending) == (ours.opt.updates, ours.opt.pending) == (4, 2)
    assert [bits(p) for p in ours.model.parameters()] == [bits(p) for p in plain.model.parameters()]
    assert ours.watched.rates == plain.watched.rates
    assert len(set(plain.watched.rates)) == 4
    assert snapshot(resumed.opt, norm=False) == snapshot(ours.opt, norm=False)
    for module in (ours, resumed, plain):
        module.opt.reset()


# Two accumulations


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def package(request):
    """The same code under two names."""
    return importlib.import_module(request.param)


def said_by(package, window, steps, **options):
    module = lit(package.LightningModule)("fused", steps=steps, **options)
    with nesting_warnings() as said:
        fit(module, package, max_epochs=6, accumulate_grad_batches=window)
    if steps is not None:
        module.opt.reset()
    return said


@pytest.mark.parametrize("fold", ["step", "backward"])
def test_65_nested_accumulation_warns_once(package, fold):
    said = said_by(package, 3, 5, fold=fold)
    assert len(said) == 1
    for words in ("Lightning", "3 micro-batches", "steps=5", "15 micro-batches", "steps=None", "=1 there"):
        assert words in said[0]


@pytest.mark.parametrize(("window", "steps"), [(1, 3), (3, 1), (3, None)])
def test_what_is_not_nested(package, window, steps):
    assert not said_by(package, window, steps)
