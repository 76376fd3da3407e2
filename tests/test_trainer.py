"""The Hugging Face Trainer: parity with its accumulation, both ways to give it an optimizer, resuming, nesting."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState, GradientState
from framework_cases import (
    EPOCHS,
    KINDS,
    MAKERS,
    MANY,
    ROWS,
    TOKENS,
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
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from wrapper_helpers import LOW_PRECISION, bits, snapshot, tidy, wrap  # noqa: F401

import fusedaccum
from fusedaccum import GatedScheduler

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory")


@pytest.fixture(autouse=True)
def _fresh():
    """The Trainer builds an Accelerator, which keeps its settings for the whole process."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def gpt2():
    """Two layers, made from a config. It takes loss kwargs."""
    torch.manual_seed(5)
    sizes = {"n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": TOKENS, "n_positions": 8}
    plain = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(**sizes, **plain, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0))


class Counting(TinyLM):
    """A model that takes loss kwargs: the Trainer then gives it the window's tokens, to divide its sums by."""

    def forward(self, ids, labels=None, num_items_in_batch=None, **more):
        logits, targets = self.predict(ids, labels)
        if num_items_in_batch is None:
            return super().forward(ids, labels)
        loss = F.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch
        return {"loss": loss, "logits": logits}


def data_for(model, count=None):
    """Rows with labels left out, so that micro-batches weigh unequally."""
    made, name = [], "input_ids" if isinstance(model, GPT2LMHeadModel) else "ids"
    for index, ids in enumerate(texts() if count is None else texts(count)):
        labels = ids.clone()
        labels[: index % 5] = -100
        made.append({name: ids, "labels": labels})
    return made


class Plain(Trainer):
    """Batches in the order of the data, so that other loops see the same."""

    def _get_train_sampler(self, dataset=None):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def trainer_of(model, folder, window=WINDOW, clip=0.0, count=None, cls=Plain, optimizers=(None, None), **more):
    """A Trainer over small data. more: TrainingArguments, and the Trainer's optimizer_cls_and_kwargs."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    given = {"optimizer_cls_and_kwargs": more.pop("optimizer_cls_and_kwargs", None), "optimizers": optimizers}
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": window,
        "num_train_epochs": EPOCHS,
        "max_grad_norm": clip,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "log_level": "error",
        **more,
    }
    trainer = cls(model=model, args=TrainingArguments(**settings), train_dataset=data_for(model, count), **given)
    trainer.remove_callback(PrinterCallback)
    return trainer


def logged(trainer, run):
    """Norms, losses and learning rates as the Trainer's log has them."""
    log = [line for line in trainer.state.log_history if "grad_norm" in line]
    run.norms = [line["grad_norm"] for line in log]
    run.losses = [(line["loss"], line["learning_rate"]) for line in log]


def train(kind, folder, model, make="adamw", options=None, **more):
    opt = optimizer_for(model, kind, make, **(options or {}))
    run = watch(opt, model)
    trainer = trainer_of(model, folder, optimizers=(opt, None), **more)
    trainer.train()
    logged(trainer, run)
    assert trainer.model_accepts_loss_kwargs == (type(model) is not TinyLM)
    return run.finish(opt)


@pytest.mark.parametrize(
    ("model", "make", "clip"),
    [(TinyLM, "adamw", 0.3), (TinyLM, "sgd", 0.0), (Counting, "adamw", 0.0), (Counting, "sgd", 0.3)],
)
def test_steps_none_is_native_accumulation(tmp_path, model, make, clip):
    native, wrapped, fused = (train(kind, tmp_path, model(), make, clip=clip) for kind in KINDS)
    truth = train("native", tmp_path, model(torch.float64), make, clip=clip)
    assert native.updates == len(native.norms) == UPDATES
    assert len(set(native.rates)) == UPDATES
    assert_same_run(wrapped, native)
    assert_near_run(fused, native, truth)


@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_gpt2(tmp_path, clip):
    native, wrapped = (train(kind, tmp_path, gpt2(), clip=clip) for kind in ("native", "wrapped"))
    assert native.updates == len(native.norms) == UPDATES
    assert_same_run(wrapped, native)


@LOW_PRECISION
def test_a_bf16_model_is_nearer_to_the_truth(tmp_path):
    def after(kind, dtype=torch.bfloat16, **options):
        return train(kind, tmp_path, Counting(dtype), window=MANY, count=MANY * ROWS, options=options)

    ours = after("fused", master_weights=True, state_dtype=torch.float32)
    assert_nearer(ours, after("native"), after("native", torch.float64))


@pytest.mark.parametrize("settings", [{"bf16": True}, {"label_smoothing_factor": 0.1}], ids=str)
def test_what_else_there_is_in_the_trainer(tmp_path, settings):
    native, wrapped = (train(kind, tmp_path, gpt2(), clip=0.3, **settings) for kind in ("native", "wrapped"))
    assert_same_run(wrapped, native)
    assert native.updates == UPDATES


# Its new name is not in every version.
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(tmp_path, reentrant):
    runs = []
    for kind in ("native", "wrapped"):
        model = gpt2()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        runs.append(train(kind, tmp_path, model, clip=0.3))
    assert_same_run(runs[1], runs[0])


@pytest.mark.parametrize("again", ["the same", "a new one"])
def test_training_on(tmp_path, again):
    """With the Trainer that there is, and with a second one while the first is still there."""
    models = []
    for kind in ("native", "wrapped"):
        model = gpt2()
        first = trainer_of(model, tmp_path, clip=0.3, optimizers=(optimizer_for(model, kind), None))
        first.train()
        second = first
        if again == "a new one":
            second = trainer_of(model, tmp_path, clip=0.3, optimizers=(optimizer_for(model, kind, "sgd"), None))
        second.train()
        assert first.state.global_step == UPDATES
        models.append(model)
    native, wrapped = ([bits(p) for p in model.parameters()] for model in models)
    assert wrapped == native


class Watch(TrainerCallback):
    """Watches an optimizer that the Trainer has built."""

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **more):
        self.opt = optimizer.optimizer
        self.run = watch(self.opt, model)


@pytest.mark.parametrize("model", [Counting, gpt2])
def test_an_optimizer_class(tmp_path, model):
    """The Trainer makes two groups of parameters, and an optimizer of them by itself."""
    runs = []
    for cls in (torch.optim.AdamW, fusedaccum.wrapping(torch.optim.AdamW, update="wrapped")):
        kwargs = {"lr": 0.02, "eps": 1e-3}
        trainer = trainer_of(
            model(), tmp_path, clip=0.3, optimizer_cls_and_kwargs=(cls, kwargs), weight_decay=0.1, learning_rate=0.02
        )
        trainer.add_callback(seen := Watch())
        trainer.train()
        logged(trainer, seen.run)
        runs.append(seen.run.finish(seen.opt))
        assert isinstance(seen.opt, cls)
        assert [group["weight_decay"] for group in seen.opt.param_groups] == [0.1, 0.0]
    assert_same_run(runs[1], runs[0])
    assert runs[0].updates == UPDATES


def resumable(kind, folder, steps=None, window=WINDOW, save_steps=2, **options):
    """A trainer that saves, and its optimizer."""
    model = Counting()
    opt = optimizer_for(model, kind, steps=steps, **options)
    schedule = GatedScheduler(falling(opt), opt) if steps else falling(opt)
    saving = {"save_strategy": "steps", "save_steps": save_steps, "save_total_limit": None}
    return trainer_of(model, folder, window=window, optimizers=(opt, schedule), clip=0.3, **saving), opt


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [2, 4])
def test_resume_from_checkpoint(tmp_path, kind, at):
    """Inside the first epoch and inside the second: new objects go on as if nothing had been."""
    options = {"master_weights": True} if kind == "fused" else {}
    through, opt = resumable(kind, tmp_path, **options)
    through.train()
    resumed, again = resumable(kind, tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{at}"))
    assert snapshot(again, norm=False) == snapshot(opt, norm=False)
    assert resumed.state.global_step == through.state.global_step == UPDATES


@pytest.mark.parametrize("fold", ["step", "backward"])
def test_steps_n_resumes_inside_a_window(tmp_path, fold):
    """Where the Trainer does not accumulate, every call reaches the wrapper; the checkpoint carries the open window."""
    runs = []
    for folder, resume in (("a", None), ("b", tmp_path / "a" / "checkpoint-5")):
        trainer, opt = resumable("fused", tmp_path / folder, WINDOW, window=1, save_steps=5, fold=fold)
        with nesting_warnings() as said:
            trainer.train(resume_from_checkpoint=resume and str(resume))
        assert not said
        assert (opt.updates, opt.pending) == (4, 2)
        runs.append(snapshot(opt, norm=False))
        rate = trainer.lr_scheduler.get_last_lr()[0]
        assert rate == pytest.approx(0.02 * 0.8**4), "the gate lets one call in three through"
        opt.reset()
    assert runs[0] == runs[1]


@pytest.mark.parametrize("fold", ["step", "backward"])
def test_steps_n_where_the_trainer_does_not_accumulate(tmp_path, fold):
    """The same as in a loop without the Trainer."""
    model, plain = TinyLM(), TinyLM()
    opt, other = (wrap(MAKERS["adamw"](m.parameters()), WINDOW, fold=f) for m, f in ((model, fold), (plain, "step")))
    trainer = trainer_of(model, tmp_path, window=1, optimizers=(opt, GatedScheduler(falling(opt), opt)))
    trainer.train()
    schedule = GatedScheduler(falling(other), other)
    for _ in range(EPOCHS):
        for batch in torch.utils.data.DataLoader(data_for(plain), batch_size=ROWS):
            plain(**batch)["loss"].backward()
            other.step()
            schedule.step()
            other.zero_grad()
    assert opt.updates == other.updates == 4
    assert [bits(p) for p in model.parameters()] == [bits(p) for p in plain.parameters()]


# Two accumulations


class Mine(Plain):
    """As people write them."""

    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


def said_by(folder, window, steps, cls=Plain, **options):
    model = TinyLM()
    opt = wrap(torch.optim.SGD(model.parameters(), lr=0.1), steps, **options)
    with nesting_warnings() as said:
        trainer_of(model, folder, window=window, cls=cls, optimizers=(opt, None), clip=1.0, num_train_epochs=6).train()
    return said


@pytest.mark.parametrize("fold", ["step", "backward"])
@pytest.mark.parametrize("cls", [Plain, Mine])
def test_65_nested_accumulation_warns_once(tmp_path, cls, fold):
    said = said_by(tmp_path, 3, 5, cls, fold=fold)
    assert len(said) == 1
    for words in ("the Trainer", "3 micro-batches", "steps=5", "15 micro-batches", "steps=None", "=1 there"):
        assert words in said[0]


def test_65_an_optimizer_class_that_is_nested(tmp_path):
    cls = fusedaccum.wrapping(torch.optim.SGD, steps=5)
    trainer = trainer_of(TinyLM(), tmp_path, optimizer_cls_and_kwargs=(cls, {"lr": 0.1}), clip=1.0)
    with nesting_warnings() as said:
        trainer.train()
    assert len(said) == 1
    trainer.optimizer.optimizer.reset()


@pytest.mark.parametrize(("window", "steps"), [(1, 3), (3, 1), (3, None)])
def test_what_is_not_nested(tmp_path, window, steps):
    assert not said_by(tmp_path, window, steps)
