"""Lightning's Fabric wraps optimizers in a proxy whose methods run with the proxy as self."""

from __future__ import annotations

import pytest
import torch
from framework_cases import (
    BATCHES,
    EPOCHS,
    KINDS,
    MANY,
    ROWS,
    UPDATES,
    WINDOW,
    TinyLM,
    assert_near_run,
    assert_nearer,
    assert_same_run,
    falling,
    optimizer_for,
    texts,
    watch,
)
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from torch.optim import SGD
from torch.utils.data import DataLoader
from wrapper_helpers import LOW_PRECISION, bits, both_updates, snapshot, tidy, wrap  # noqa: F401


@both_updates
def test_99_fabric(update):
    fabric = Fabric(accelerator="cpu", devices=1)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    w = wrap(SGD(model.parameters(), lr=1.0), 2, update=update)
    proxied, fo = fabric.setup(model, w)
    seen = []
    for g in (1.0, 3.0, 5.0):
        fabric.backward(proxied(torch.tensor([[g]])).sum())
        fo.step()
        fo.zero_grad()
        state = fo.state_dict()
        assert (fo.pending, fo.updates, fo.updated) == (w.pending, w.updates, w.updated)
        assert (state["fusedaccum"]["pending"], state["fusedaccum"]["updates"]) == (w.pending, w.updates)
        seen.append((w.pending, w.updates, model.weight.item()))
    assert seen == [(1, 0, 0), (0, 1, -2), (1, 1, -2)]
    again = wrap(SGD([torch.nn.Parameter(torch.zeros(1, 1))], lr=1.0), 2, update=update)
    again.load_state_dict(state)
    assert (again.pending, again.updates) == (1, 1)


@pytest.mark.parametrize("set_through_proxy", [True, False])
def test_what_is_set_is_set_on_both(set_through_proxy):
    fabric = Fabric(accelerator="cpu", devices=1)
    model = torch.nn.Linear(1, 1, bias=False)
    w = wrap(SGD(model.parameters(), lr=1.0), 2)
    _, fo = fabric.setup(model, w)
    (w if not set_through_proxy else fo.optimizer).steps = 3
    fo.param_groups[0]["lr"] = 0.5
    assert (w.steps, fo.steps, w.param_groups[0]["lr"], w.optimizer.param_groups[0]["lr"]) == (3, 3, 0.5, 0.5)


# steps=None, in a loop that accumulates by itself


def precision_of(name):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20) if name == "16-mixed" else None
    if name.endswith("mixed"):
        return {"plugins": [MixedPrecision(name, "cpu", scaler)]}
    return {"precision": name}


class Training:
    """Fabric leaves accumulation to the loop: its steps come once a window."""

    def __init__(
        self,
        kind,
        precision="32-true",
        clip=None,
        dtype=torch.float32,
        window=WINDOW,
        batches=BATCHES,
        every_batch=False,
        **options,
    ):
        self.fabric = Fabric(accelerator="cpu", devices=1, **precision_of(precision))
        model = TinyLM(dtype)
        self.opt, self.clip = optimizer_for(model, kind, **options), clip
        self.run = watch(self.opt, model)
        self.model, self.optimizer = self.fabric.setup(model, self.opt)
        self.schedule = falling(self.opt)
        self.batches, self.window = list(DataLoader(texts(batches * ROWS), batch_size=ROWS)), window
        self.every_batch = every_batch

    def train(self, epochs=EPOCHS):
        for _ in range(epochs):
            self.epoch()
        return self.run.finish(self.opt)

    def epoch(self):
        for index, batch in enumerate(self.batches):
            last = (index + 1) % self.window == 0 or index + 1 == len(self.batches)
            self.fabric.backward(self.model(batch)["loss"] / self.window)
            if not (last or self.every_batch):
                continue
            if self.clip:
                norm = self.fabric.clip_gradients(
                    self.model, self.optimizer, max_norm=self.clip, error_if_nonfinite=False
                )
                self.run.norms.append(float(norm))
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
# The schedule goes on where the scaler leaves a step out.
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")
def test_steps_none_is_native_accumulation(precision, clip):
    native, wrapped, fused = (Training(kind, precision, clip).train() for kind in KINDS)
    assert native.updates == (4 if precision == "16-mixed" else UPDATES)
    assert_same_run(wrapped, native)
    assert (fused.updates, fused.rates, fused.steps) == (native.updates, native.rates, native.steps)
    if precision == "32-true":
        assert_near_run(fused, native, Training("native", "64-true", clip).train())


@LOW_PRECISION
@pytest.mark.parametrize("kind", ["wrapped", "fused"])
def test_a_model_that_fabric_converts(kind):
    """bf16-true converts parameters that the optimizer has already: as if they had been bf16 from the start."""
    options = {"master_weights": True, "state_dtype": torch.float32} if kind == "fused" else {}
    converted = Training(kind, "bf16-true", 0.3, **options).train()
    begun = Training(kind, "32-true", 0.3, dtype=torch.bfloat16, **options).train()
    assert converted.params[0].dtype == torch.bfloat16
    assert_same_run(converted, begun)


@LOW_PRECISION
def test_a_bf16_model_is_nearer_to_the_truth():
    def after(kind, precision="bf16-true", **options):
        return Training(kind, precision, 1.0, window=MANY, batches=MANY, **options).train()

    ours = after("fused", master_weights=True, state_dtype=torch.float32)
    assert_nearer(ours, after("native"), after("native", "64-true"))


@pytest.mark.parametrize("kind", KINDS)
def test_save_and_load(tmp_path, kind):
    options = {"master_weights": True} if kind == "fused" else {}
    through, resumed = Training(kind, **options), Training(kind, **options)
    through.epoch()
    state = {"model": through.model, "optimizer": through.optimizer, "schedule": through.schedule}
    through.fabric.save(tmp_path / "state.ckpt", state)
    through.epoch()
    state = {"model": resumed.model, "optimizer": resumed.optimizer, "schedule": resumed.schedule}
    resumed.fabric.load(tmp_path / "state.ckpt", state)
    resumed.epoch()
    assert snapshot(resumed.opt, norm=False) == snapshot(through.opt, norm=False)
    assert resumed.run.rates == through.run.rates[UPDATES // EPOCHS :]


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_fold_backward(precision):
    """The same as fold="step"; a scaler finds no gradients and is refused, with the way out."""
    ours, other = (Training("fused", precision, steps=WINDOW, fold=f, every_batch=True) for f in ("backward", "step"))
    if precision == "16-mixed":
        with pytest.raises(RuntimeError, match="fold='step'"):
            ours.train()
    else:
        run, want = ours.train(), other.train()
        assert (run.updates, ours.opt.pending) == (want.updates, other.opt.pending) == (4, 2)
        assert [bits(p) for p in run.params] == [bits(p) for p in want.params]
    ours.opt.reset()
    other.opt.reset()
