"""One run: a model, a loop, and what was measured on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor

from fusedaccum import FusedAccumOptimizer

from .data import Corpus, training_windows, validation_rows
from .loops import Loop
from .measure import GradientMeter, activation_bytes
from .model import GPT
from .results import Run
from .settings import Settings

OBSERVED_WINDOWS = 16
PROMPT = "The function"
SAMPLE_TOKENS = 48
# Of the side-by-side sums, in windows.
LONGEST = 16


def build_model(corpus: Corpus, settings: Settings, dtype: torch.dtype) -> GPT:
    """Whatever the dtype, the initial values are the same: those of the bf16 model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = GPT(len(corpus.vocabulary), settings.width, settings.layers, settings.context)
    return model.to(torch.bfloat16).to(dtype)


def observed_windows(updates: int) -> set[int]:
    """The updates whose gradient sums are checked: evenly spread, the first and the last among them, at most half."""
    count = max(1, min(updates // 2, OBSERVED_WINDOWS))
    return {round(index * (updates - 1) / max(1, count - 1)) for index in range(count)}


def train_run(corpus: Corpus, settings: Settings, loop: Loop, progress: Callable[[int, float], None]) -> Run:
    """Train `loop` on the common data, then try it on the held-out text. Calls progress(updates done, last loss)."""
    losses: list[float] = []
    laps: list[dict[str, float]] = []
    distances: list[tuple[int, float]] = []
    observed = observed_windows(settings.updates)
    for update, rows in enumerate(training_windows(corpus.train, settings)):
        loop.expect(observed=update in observed)
        losses.append(loop.window(rows).item())
        if loop.observed:
            distances.append((update, loop.distance))
        else:
            laps.append(loop.clock.seconds)
        progress(update + 1, losses[-1])

    seconds = {phase: median(lap[phase] for lap in laps) for phase in laps[0]}
    batch = rows.flatten(0, 1) if loop.one_batch else rows[0]
    activations = activation_bytes(lambda: loop.model.loss(batch), loop.parameters)
    held = {moment: {**loop.lasting(), **kinds} for moment, kinds in loop.held.items()}
    held["backward"]["activations"] = activations
    with torch.no_grad():
        validation = loop.model.loss(validation_rows(corpus.validation, settings.context)).item()
    prompt = corpus.vocabulary.encode(PROMPT)
    sample = corpus.vocabulary.decode(loop.model.generate(prompt, SAMPLE_TOKENS, settings.seed))
    return Run(losses, validation, distances, seconds, held, sample)


def distances_by_length(model: GPT, settings: Settings, text: Tensor) -> dict[str, list[tuple[int, float]]]:
    """What windows longer than the demo's would cost: "fused" | "bf16" -> [(micro-batches in the sum, distance)].

    The gradients of up to LONGEST windows, at the parameters as they are, are summed in three ways side by side: by
    FusedAccumOptimizer, in bf16 the way autograd does, and in float64. The optimizer wrapped here never updates.
    """
    longest = 1 << (LONGEST * settings.steps).bit_length() - 1
    parameters = list(model.parameters())
    fused = FusedAccumOptimizer(
        settings.adamw(parameters), steps=2 * longest, master_weights=True, backend=settings.backend
    )
    bf16 = [torch.zeros_like(parameter) for parameter in parameters]
    meter = GradientMeter(parameters)
    meter.open()
    found: dict[str, list[tuple[int, float]]] = {"fused": [], "bf16": []}
    micro_batches = training_windows(text, replace(settings, updates=1, steps=longest))[0]
    for count, rows in enumerate(micro_batches, start=1):
        model.loss(rows).backward()
        for total, parameter in zip(bf16, parameters, strict=True):
            total.add_(parameter.grad)
        fused.step()
        if count & (count - 1) == 0:
            # master_grad is the sum divided by steps, here a power of two: nothing is rounded on the way back.
            ours = meter.distance(map(fused.master_grad, parameters), scale=1 / fused.steps)
            found["fused"].append((count, ours))
            found["bf16"].append((count, meter.distance(bf16, scale=1.0)))
    meter.close()
    fused.reset()
    fused.close()
    return found
