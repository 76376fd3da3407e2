"""The demo: a small GPT trained on real text in three ways, and what sets them apart, measured on the spot."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TextIO

import torch

import fusedaccum
from fusedaccum.backends import select

from .data import Corpus, load_corpus
from .loops import FusedLoop, Loop, NativeLoop
from .model import GPT, HEAD_SIZE
from .plot import draw
from .progress import Progress
from .report import findings, introduction, table
from .results import LABELS, Results
from .settings import Settings
from .train import build_model, distances_by_length, train_run

__all__ = ["HEAD_SIZE", "Results", "Settings", "run_demo"]

# Name -> (dtype of the model, its loop); the names are those of LABELS.
LOOPS: dict[str, tuple[torch.dtype, Callable[[GPT, Settings], Loop]]] = {
    "fused": (torch.bfloat16, FusedLoop),
    "bf16": (torch.bfloat16, partial(NativeLoop, one_batch=False, masters=True)),
    "fp32": (torch.float32, partial(NativeLoop, one_batch=True, masters=False)),
}


def run_demo(settings: Settings, out: Path, stream: TextIO = sys.stdout) -> Results:
    """Train, print, and write demo.json and demo.png into `out` (the picture where matplotlib is installed).

    The same settings on the same machine give the same losses. Raises, before anything is trained: OSError where `out`
    cannot be written, RuntimeError where the backend cannot serve the CPU, ModuleNotFoundError where Python comes
    without `pydoc_data`.
    """
    began = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    (out / "demo.json").touch()
    results, corpus = prepare(settings)
    print(introduction(results), file=stream, flush=True)
    for name, (dtype, loop) in LOOPS.items():
        contender = loop(build_model(corpus, settings, dtype), settings)
        progress = Progress(f"{LABELS[name]:<10}", settings.updates, stream)
        results.runs[name] = train_run(corpus, settings, contender, progress)
        if name == "fused":
            results.by_length = distances_by_length(contender.model, settings, corpus.train)
    results.seconds = time.perf_counter() - began
    print(f"\n{table(results)}\n\n{findings(results)}\n", file=stream)
    print(f"The model writes: {results.runs['fused'].sample!r}\n", file=stream)
    print(
        f"{results.seconds:.0f} s. Written: {', '.join(map(str, write(results, out, stream)))}", file=stream, flush=True
    )
    return results


def prepare(settings: Settings) -> tuple[Results, Corpus]:
    """The text, and results that hold what is known before training."""
    backend = select(torch.device("cpu"), settings.backend)
    corpus = load_corpus()
    environment = {
        "fusedaccum": fusedaccum.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "backend": backend.__name__.rpartition(".")[2],
    }
    text = {
        "characters": corpus.characters,
        "train_tokens": len(corpus.train),
        "validation_tokens": len(corpus.validation),
    }
    parameters = sum(parameter.numel() for parameter in build_model(corpus, settings, torch.bfloat16).parameters())
    return Results(settings, environment, text, parameters), corpus


def write(results: Results, out: Path, stream: TextIO) -> list[Path]:
    written = [out / "demo.json"]
    written[0].write_text(json.dumps(results.as_json(), indent=1) + "\n")
    try:
        draw(results, out / "demo.png")
    except ImportError as error:
        print(f"No picture: {error}. To get one: pip install matplotlib", file=stream)
    else:
        written.append(out / "demo.png")
    return written
