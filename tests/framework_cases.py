"""What the tests of frameworks share: a small language model, its data, optimizers, and what runs leave to compare."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from wrapper_helpers import assert_within_budget, bits

from fusedaccum import FusedAccumOptimizer

TOKENS, LENGTH, ROWS = 19, 7, 2
BATCHES, WINDOW, EPOCHS = 7, 3, 2  # windows of 3, 3 and 1 in every epoch
UPDATES = 2 * 3
MANY = 32  # micro-batches of one window, where low precision shows


class TinyLM(nn.Module):
    """Predicts tokens from those before them, in the dtype that its parameters have.

    The head is the embedding's weight, one parameter is frozen, and the first that an optimizer sees is never used.
    """

    def __init__(self, dtype: torch.dtype = torch.float32, width: int = 8) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))
        self.embedding = nn.Embedding(TOKENS, width)
        self.mix = nn.GRU(width, width, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.frozen = nn.Parameter(torch.ones(width), requires_grad=False)
        random = torch.Generator().manual_seed(7)
        for p in self.embedding.weight, *self.mix.parameters():
            # Values that bfloat16 holds, so that every dtype begins at the same place.
            p.data = (torch.randn(p.shape, generator=random) * 0.4).bfloat16().float()
        self.to(dtype)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """The loss, a mean over tokens, as the Trainer wants it: labels of -100 are not counted."""
        logits, targets = self.predict(ids, ids if labels is None else labels)
        return {"loss": F.cross_entropy(logits, targets), "logits": logits}

    def predict(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x, _ = self.mix(self.embedding(ids))
        logits = F.linear(self.norm(x) * self.frozen, self.embedding.weight)
        return logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()


def texts(count: int = BATCHES * ROWS, seed: int = 3) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return list(torch.randint(TOKENS, (count, LENGTH), generator=random))


MAKERS = {
    # An eps that no second moment falls below: an Adam quotient of nearly nothing is anything.
    "adamw": lambda params: AdamW(params, lr=0.02, weight_decay=0.1, eps=1e-3),
    "sgd": lambda params: SGD(params, lr=0.2, momentum=0.9),
}
KINDS = ("native", "wrapped", "fused")


def optimizer_for(model: nn.Module, kind: str, make: str = "adamw", steps: int | None = None, **options) -> Optimizer:
    """The bare optimizer ("native"), or a wrapper with that update."""
    inner = MAKERS[make](model.parameters())
    return inner if kind == "native" else FusedAccumOptimizer(inner, steps, update=kind, **options)


def falling(optimizer: Optimizer) -> LambdaLR:
    """A schedule in which every call shows."""
    return LambdaLR(optimizer, lambda n: 0.8**n)


@dataclass
class Run:
    """What training leaves. rates: of the updates, as they were made. norms: as the framework reports them."""

    params: list[Tensor]
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    updates: int = 0
    steps: list[float] = field(default_factory=list)  # of each parameter that has a state
    hooks: int = 0
    grads: list[Tensor] = field(default_factory=list)  # what the first update was made with

    def finish(self, optimizer: Optimizer) -> Run:
        """Take down what the optimizer knows."""
        state = optimizer.state_dict()["state"]
        self.steps = [float(entry["step"]) for entry in state.values() if "step" in entry]
        self.updates = optimizer.updates if isinstance(optimizer, FusedAccumOptimizer) else self.hooks
        self.params = [p.detach().clone() for p in self.params]
        return self


def watch(optimizer: Optimizer, model: nn.Module) -> Run:
    """A run that counts the updates of `optimizer`, and notes their learning rates."""
    run = Run(list(model.parameters()))

    def note(seen: Optimizer, args: tuple, kwargs: dict) -> None:
        run.hooks += 1
        run.rates.append(seen.param_groups[0]["lr"])

    def keep(seen: Optimizer, args: tuple, kwargs: dict) -> None:
        if not run.hooks:
            run.grads = [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]

    optimizer.register_step_pre_hook(keep)
    optimizer.register_step_post_hook(note)
    return run


def assert_same_run(ours: Run, native: Run) -> None:
    """Nothing differs, not a bit."""
    assert (ours.updates, ours.hooks, ours.rates, ours.steps) == (
        native.updates,
        native.hooks,
        native.rates,
        native.steps,
    )
    assert [*map(repr, ours.norms)] == [*map(repr, native.norms)], "NaN is NaN"
    assert ours.losses == native.losses
    assert [bits(p) for p in ours.params] == [bits(p) for p in native.params]


def assert_near_run(ours: Run, native: Run, truth: Run) -> None:
    """Counts and rates are native's; numbers err at most twice as much as native's do, plus one rounding."""
    assert (ours.updates, ours.hooks, ours.rates, ours.steps) == (
        native.updates,
        native.hooks,
        native.rates,
        native.steps,
    )
    assert len(truth.norms) == len(native.norms) == len(ours.norms)
    assert_within_budget(*(torch.cat([p.flatten() for p in run.params]) for run in (ours, native, truth)))
    if ours.norms:
        norms = [torch.tensor(run.norms, dtype=torch.float64) for run in (ours, native, truth)]
        assert_within_budget(norms[0].float(), norms[1].float(), norms[2])


def distance(ours: list[Tensor], truth: list[Tensor]) -> float:
    """The root mean square of what tensors are off by."""
    off = [(p.double() - t.double()).flatten() for p, t in zip(ours, truth, strict=True)]
    return torch.cat(off).square().mean().sqrt().item()


def assert_nearer(ours: Run, native: Run, truth: Run) -> None:
    """What a bf16 model adds up is nearer to the truth than native's, by a half at least; parameters and norms too."""
    sums = [distance(run.grads, truth.grads) for run in (ours, native)]
    assert 1.5 * sums[0] < sums[1], sums
    params = [distance(run.params, truth.params) for run in (ours, native)]
    assert params[0] < params[1], params
    norms = [sum(abs(a / b - 1) for a, b in zip(run.norms, truth.norms, strict=True)) for run in (ours, native)]
    assert norms[0] < norms[1], norms


class nesting_warnings:
    """`with nesting_warnings() as said:` collects the texts of warnings about two accumulations."""

    def __enter__(self) -> list[str]:
        self._catch = warnings.catch_warnings(record=True)
        self._caught = self._catch.__enter__()
        warnings.simplefilter("always")
        self.said: list[str] = []
        return self.said

    def __exit__(self, *error) -> None:
        self._catch.__exit__(*error)
        self.said += [str(w.message) for w in self._caught if "micro-batches up" in str(w.message)]
