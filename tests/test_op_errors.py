"""Arguments that break a rule: every backend says which one, and has written nothing."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

import pytest
import torch
from op_cases import Buffer, same_bits, scalar, total_tensor
from torch import Tensor

from fusedaccum.ops import Backend

SIZES = [17, 4097, 5]
OPERATORS = ("fold", "found_inf", "square_total", "close_window", "rescale", "emit", "adam", "sgd")
LISTS = {
    "fold": ("grads",),
    "found_inf": ("grads",),
    "emit": ("grads",),
    "adam": ("params", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "masters"),
    "sgd": ("params", "momentum_buffers", "masters"),
}


def arguments(op: str) -> dict[str, object]:
    """Arguments that every rule allows, in the operator's order."""
    buffer = Buffer(SIZES)
    buffer.fill([torch.ones(n) for n in SIZES])
    n = len(SIZES)
    fixed = {
        "flat": buffer.flat,
        "partials": buffer.partials,
        "marks": buffer.marks,
        "live": torch.ones(n, dtype=torch.uint8),
        "found_inf": torch.zeros(1),
        "skip_nonfinite": True,
        "segments": buffer.segments,
        "tiles": buffer.tiles,
        "scale": scalar(0.5),
        "factor": scalar(0.5),
        "norm": True,
        "zero": True,
        "max_norm": 1.0,
        "total": total_tensor() if op == "square_total" else scalar(1.0, torch.float64),
        "divisor": scalar(1.0, torch.float64),
        "scalars": torch.tensor([0.5, 0.0, 1.0]),
        "steps": torch.ones(n),
        "groups": torch.zeros(n, dtype=torch.int64),
        "random": torch.arange(n + 2),
        "hyper": torch.full((1, 8 if op == "adam" else 6), 0.5, dtype=torch.float64),
    }
    names = [name for name in inspect.signature(getattr(Backend, op)).parameters if name != "self"]
    return {name: fixed[name] if name in fixed else [torch.ones(size) for size in SIZES] for name in names}


def tensors_in(arguments: dict[str, object]) -> list[Tensor]:
    found = [value for value in arguments.values() if isinstance(value, Tensor)]
    found += [t for value in arguments.values() if isinstance(value, list) for t in value if t is not None]
    return [tensor for tensor in found if tensor.device.type != "meta" and tensor.layout == torch.strided]


def check_refusal(backend, op: str, given: dict[str, object], *words: str) -> None:
    """RuntimeError with the operator and these words, and every tensor as it was, its version too."""
    tensors = tensors_in(given)
    before = [(tensor.clone(), tensor._version) for tensor in tensors]
    with pytest.raises(RuntimeError, match=rf"^{op}: ") as caught:
        getattr(backend, op)(*given.values())
    text = str(caught.value)
    for word in words:
        assert re.search(rf"(?<![\w.]){re.escape(word)}(?!\w)", text), f"{word!r} is not in {text!r}"
    assert "; " in text, f"no way out in {text!r}"
    for tensor, (bits, version) in zip(tensors, before, strict=True):
        assert same_bits(tensor, bits)
        assert tensor._version == version


@pytest.mark.parametrize("op", OPERATORS)
def test_the_arguments_that_the_others_break_are_right(backend, op):
    getattr(backend, op)(*arguments(op).values())


# How an entry breaks a rule, and the value that the message must name.
BAD_ENTRIES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "one element too many": (lambda t: torch.ones(t.numel() + 1), "4098"),
    "one element too few": (lambda t: torch.ones(t.numel() - 1), "4096"),
    "float64": (lambda t: t.double(), "torch.float64"),
    "integers": (lambda t: t.long(), "torch.int64"),
    "another device": (lambda t: t.to("meta"), "meta"),
    "every second element": (lambda t: torch.ones(2 * t.numel())[::2], "contiguous"),
    "transposed": (lambda t: torch.ones(t.numel() // 17, 17).t(), "contiguous"),
    "sparse": (lambda t: t.to_sparse(), "dense"),
}


@pytest.mark.parametrize("bad", BAD_ENTRIES)
@pytest.mark.parametrize(("op", "name"), [(op, name) for op, names in LISTS.items() for name in names])
def test_a_bad_entry_of_a_list(backend, op, name, bad):
    given = arguments(op)
    change, value = BAD_ENTRIES[bad]
    given[name][1] = change(given[name][1])
    check_refusal(backend, op, given, f"{name}[1]", value)


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, names in LISTS.items() for name in names])
def test_a_list_of_another_length(backend, op, name):
    given = arguments(op)
    given[name].pop()
    check_refusal(backend, op, given, name, "3", "2")


@pytest.mark.parametrize(
    ("op", "name"), [("emit", "grads"), ("sgd", "params")] + [("adam", name) for name in LISTS["adam"][:3]]
)
def test_a_touched_segment_without_its_tensor(backend, op, name):
    """An empty entry says that it does not apply; a touched segment cannot do without its gradient or parameter."""
    given = arguments(op)
    given[name][1] = torch.ones(0)
    check_refusal(backend, op, given, f"{name}[1]", "4097", "0")


@pytest.mark.parametrize(("op", "name"), [("adam", "masters"), ("sgd", "masters")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_are_float32(backend, op, name, dtype):
    given = arguments(op)
    given[name][1] = given[name][1].to(dtype)
    check_refusal(backend, op, given, f"{name}[1]", str(dtype), "torch.float32")


FIXED = (
    "flat",
    "partials",
    "marks",
    "live",
    "found_inf",
    "segments",
    "tiles",
    "scale",
    "factor",
    "total",
    "divisor",
    "scalars",
    "steps",
)


@pytest.mark.parametrize(
    ("op", "name"),
    [(op, name) for op in OPERATORS for name in arguments(op) if name in (*FIXED, "groups", "hyper", "random")],
)
def test_a_bad_fixed_argument(backend, op, name):
    """Another dtype, another shape, not contiguous, each by itself."""
    given = arguments(op)
    right = given[name]
    wrong = torch.float64 if right.dtype != torch.float64 else torch.float32
    check_refusal(backend, op, given | {name: right.to(wrong)}, name, str(right.dtype), str(wrong))
    check_refusal(backend, op, given | {name: right.unsqueeze(-1)}, name)
    if right.numel() > 1:
        spread = torch.stack([right, right], dim=-1)[..., 0]
        check_refusal(backend, op, given | {name: spread}, name, "contiguous")


@pytest.mark.parametrize("op", [op for op in OPERATORS if op != "close_window"])
@pytest.mark.parametrize(
    ("k", "offset", "numel"), [(2, 4224, 100), (1, 65, 4097), (1, 0, 4097), (1, 64, -1)], ids=lambda x: str(x)
)
def test_segments_that_cannot_be(backend, op, k, offset, numel):
    """Outside of flat, off the alignment, over another segment, of negative size."""
    given = arguments(op)
    given["segments"] = given["segments"].clone()
    given["segments"][k] = torch.tensor([offset, numel])
    check_refusal(backend, op, given, f"segments[{k}]", str(offset), str(numel))


@pytest.mark.parametrize(("op", "columns"), [("adam", 6), ("sgd", 8)])
def test_hyper_parameters_of_the_other_rule(backend, op, columns):
    given = arguments(op)
    given["hyper"] = torch.zeros(1, columns, dtype=torch.float64)
    check_refusal(backend, op, given, "hyper", str(columns))
