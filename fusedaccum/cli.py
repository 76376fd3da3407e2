"""The command line: python -m fusedaccum info | demo."""

from __future__ import annotations

import argparse
import platform
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

import torch

import fusedaccum
from fusedaccum import backends
from fusedaccum.demo import HEAD_SIZE, Settings, run_demo

DESCRIPTION = "FP32 sums of micro-batch gradients, and one fused update per window."
EXIT_CODES = "exit codes: 0 done, 1 failed (the reason is the last line), 2 wrong usage"
INFO_EXAMPLES = f"""\
example:
  python -m fusedaccum info

{EXIT_CODES}"""
DEMO = """\
Train a small GPT on the text of pydoc_data.topics three times: in bf16 with gradients summed in FP32 by this package,
in bf16 with gradients summed in bf16, and in FP32 with each window as one large batch. Print and plot what sets them
apart. Takes about a minute on 2 cores with the defaults."""
DEMO_EXAMPLES = f"""\
examples:
  python -m fusedaccum demo
  python -m fusedaccum demo --updates 60 --out demo-out
  python -m fusedaccum demo --steps 64 --updates 60

{EXIT_CODES}"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code. Wrong usage, --help and --version raise argparse's SystemExit."""
    options = build_parser().parse_args(arguments)
    try:
        options.run(options)
    except (ImportError, OSError, RuntimeError) as error:
        print(f"fusedaccum: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nfusedaccum: interrupted", file=sys.stderr)
        return 1
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fusedaccum", description=DESCRIPTION, epilog=EXIT_CODES)
    parser.add_argument("--version", action="version", version=f"fusedaccum {fusedaccum.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    raw = argparse.RawDescriptionHelpFormatter

    text = "Show versions, and which backend serves which device, or why not."
    info = commands.add_parser("info", help=text, description=text, epilog=INFO_EXAMPLES, formatter_class=raw)
    info.set_defaults(run=show_info)

    text = "Train a small GPT three times, and print and plot what FP32 sums change."
    demo = commands.add_parser("demo", help=text, description=DEMO, epilog=DEMO_EXAMPLES, formatter_class=raw)
    demo.set_defaults(run=start_demo)
    default = Settings()
    for name, smallest, multiple_of, what in (
        ("updates", 2, 1, "updates of each run"),
        ("steps", 1, 1, "micro-batches per update"),
        ("rows", 1, 1, f"sequences of {default.context} tokens in a micro-batch"),
        ("layers", 1, 1, "layers of the model"),
        ("width", HEAD_SIZE, HEAD_SIZE, f"width of the model, a multiple of {HEAD_SIZE}"),
        ("seed", 0, 1, "seed of weights and data; the same seed gives the same losses"),
    ):
        value = getattr(default, name)
        kind = integer(smallest, multiple_of)
        demo.add_argument(f"--{name}", type=kind, default=value, metavar="N", help=f"{what} (default {value})")
    demo.add_argument(
        "--backend", choices=("auto", *backends.NAMES), default="auto", help="what folds and updates (default auto)"
    )
    demo.add_argument(
        "--out", type=Path, default=Path("out"), metavar="DIR", help="where demo.png and demo.json go (default out)"
    )
    return parser


def integer(smallest: int, multiple_of: int = 1) -> Callable[[str], int]:
    """An argparse type: integers of at least `smallest`."""
    rule = f"an integer of at least {smallest}" + (f", a multiple of {multiple_of}" if multiple_of > 1 else "")

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < smallest or int(text) % multiple_of:
            raise argparse.ArgumentTypeError(f"{text!r} must be {rule}")
        return int(text)

    return parse


def start_demo(options: argparse.Namespace) -> None:
    names = ("updates", "steps", "rows", "layers", "width", "seed", "backend")
    run_demo(Settings(**{name: getattr(options, name) for name in names}), options.out, sys.stdout)


def show_info(options: argparse.Namespace) -> None:
    print("\n".join(info_lines()))


def info_lines() -> Iterator[str]:
    yield f"fusedaccum {fusedaccum.__version__}"
    yield f"torch      {torch.__version__}" + (f", CUDA {torch.version.cuda}" if torch.version.cuda else ", no CUDA")
    yield f"triton     {version_of('triton')}"
    yield f"python     {platform.python_version()} on {platform.system()} {platform.machine()}"
    yield f"threads    {torch.get_num_threads()}"
    for device in devices():
        yield f"\nbackends on {describe(device)}"
        yield from backend_lines(device)
    yield "\nC++ build"
    yield from build_lines()


def version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def devices() -> list[torch.device]:
    """The CPU and every CUDA device; "cuda" alone where there is none, to say what would serve one."""
    there = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [torch.device("cpu"), *(there or [torch.device("cuda")])]


def describe(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    if device.index is None:
        return "cuda (no device found)"
    major, minor = torch.cuda.get_device_capability(device)
    driver = torch._C._cuda_getDriverVersion()
    name = torch.cuda.get_device_name(device)
    return f"{device} ({name}, sm_{major}{minor}, driver for CUDA {driver // 1000}.{driver // 10 % 100})"


def backend_lines(device: torch.device) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the lines say themselves where only the slow backend is there
        chosen = backends.select(device).__name__.rpartition(".")[2]
    for name in backends.NAMES:
        reason = backends.why_not(name, device)
        yield f"  {name:<11}" + (f"no: {reason}" if reason else "yes" + ", the automatic choice" * (name == chosen))


def build_lines() -> Iterator[str]:
    try:
        from fusedaccum.backends import compiled

        facts = compiled.build_info()
    except (ImportError, RuntimeError) as error:
        yield f"  none: {error}"
        return
    for name, value in facts.items():
        yield f"  {name:<13}" + (", ".join(value) if isinstance(value, list) else str(value))
