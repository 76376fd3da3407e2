"""Calls with bad input: the error names value, rule and way out, and nothing has changed."""

from __future__ import annotations

import pytest
import torch
from torch.optim import SGD, AdamW
from wrapper_helpers import (
    Toy,
    refused,
    set_grads,
    snapshot,
    tidy,  # noqa: F401
    wrap,
)

from fusedaccum import GatedScheduler


def sparse_gradient_of_double_precision(p):
    p.grad_dtype = None
    p.grad = torch.ones(5, dtype=torch.float64).to_sparse()
    return "float64"


def gradient_of_another_shape(p):
    p.data = torch.ones(6)
    return r"\b5\b.*\b6\b|\b6\b.*\b5\b"


def gradient_of_double_precision(p):
    p.grad_dtype = None
    p.grad = torch.ones(5, dtype=torch.float64)
    return "float64"


def gradient_of_integers(p):
    p.grad_dtype = None
    p.grad = torch.ones(5, dtype=torch.int32)
    return "int32"


# Swapping the data of a touched parameter for another shape spoils its sum, not its gradient: not inside a window.
BAD_GRADIENTS = [(gradient_of_another_shape, 0)] + [
    (spoil, micro)
    for spoil in (sparse_gradient_of_double_precision, gradient_of_double_precision, gradient_of_integers)
    for micro in (0, 1, 2)
]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(("spoil", "micro"), BAD_GRADIENTS)
@pytest.mark.parametrize("update", ["fused", "wrapped"])
def test_gradients(spoil, micro, update):
    p, q = torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(3))
    w = wrap(AdamW([q, p], lr=0.1), steps=3, update=update)
    for _ in range(micro):
        set_grads([p, q], [torch.ones(5), torch.ones(3)])
        w.step()
    set_grads([p, q], [torch.ones(5), torch.ones(3)])
    word = spoil(p)
    with refused(w, word, "gradient"):
        w.step()
    assert p.grad is not None
    assert q.grad is not None


def test_113_sparse_adam():
    p = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(TypeError, match=r"SparseAdam.*dense.*use Adam"):
        wrap(torch.optim.SparseAdam([p]), steps=2)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_a_sparse_parameter(layout):
    p = torch.nn.Parameter(layout(torch.ones(3, 2)))
    with pytest.raises(TypeError, match=r"parameter 0 of shape \(3, 2\) is torch.sparse\w+ and must be dense"):
        wrap(SGD([p], lr=0.1), steps=2)


def test_another_shape_inside_a_window():
    """What was summed for the old shape fits no gradient of the new one: it is dropped, aloud; other sums stay."""
    p, q = torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(3))
    w = wrap(SGD([p, q], lr=1.0), steps=2)
    set_grads([p, q], [torch.ones(5), torch.ones(3)])
    w.step()
    p.data, p.grad = torch.ones(6), None
    set_grads([p, q], [torch.ones(6), torch.ones(3)])
    with pytest.warns(UserWarning, match=r"(?s)window.*(reset|flush)"):
        w.step()
    assert p.tolist() == [0.5] * 6
    assert not q.any()


# Weights

WEIGHTS = {
    "negative mean_of": ({"mean_of": -1}, ["mean_of", "-1", "negative|at least 0|not below"]),
    "negative sum_of": ({"sum_of": -0.5}, ["sum_of", r"-0\.5", "negative|at least 0|not below"]),
    "both": ({"mean_of": 1, "sum_of": 1}, ["mean_of", "sum_of"]),
    "text": ({"mean_of": "3"}, ["mean_of", "'3'", "number"]),
}


@pytest.mark.parametrize("said", ["step", "micro_batch"])
@pytest.mark.parametrize("pending", [0, 1])
@pytest.mark.parametrize(("weight", "words"), WEIGHTS.values(), ids=WEIGHTS)
def test_weights(weight, words, pending, said):
    toy = Toy(2)
    for _ in range(pending):
        toy.micro(4, mean_of=1)
    toy.backward(2)
    with refused(toy.w, *words):
        if said == "step":
            toy.w.step(**weight)
        else:
            toy.w.micro_batch(**weight)
    toy.w.step(mean_of=1)
    assert toy.w.pending == (pending + 1) % 2


@pytest.mark.parametrize("said", ["step", "micro_batch"])
@pytest.mark.parametrize("first", ["plain", "weighted"])
def test_plain_and_weighted_in_one_window(first, said):
    toy = Toy(3)
    toy.micro(4, **({} if first == "plain" else {"mean_of": 2}))
    toy.backward(2)
    with refused(toy.w, "mean_of|sum_of|weight", "window|every"):
        if first == "weighted":
            toy.w.step()
        elif said == "step":
            toy.w.step(mean_of=2)
        else:
            toy.w.micro_batch(mean_of=2)
            toy.w.step()
    assert toy.p.grad is not None
    assert toy.w.pending == 1


@pytest.mark.parametrize("word", ["mean_of", "sum_of"])
@pytest.mark.parametrize("said", ["step", "micro_batch"])
def test_weights_with_a_sum(said, word):
    toy = Toy(2, reduction="sum").run([1])
    toy.backward(2)
    with refused(toy.w, word + "|weight", "sum", "mean"):
        getattr(toy.w, said)(**{word: 3})
        toy.w.step()
    toy.w.step()
    assert toy.value == -3.0


def test_micro_batch_last_comes_later():
    toy = Toy(2)
    with refused(toy.w, "last", "True", "only|leave|without"):
        toy.w.micro_batch(mean_of=3, last=True)
    assert toy.run([1, 3]).value == -2.0


def test_refused_weights_do_not_run_the_closure():
    toy = Toy(2)
    calls = []
    with refused(toy.w, "mean_of"):
        toy.w.step(lambda: calls.append(1), mean_of=-1)
    assert not calls


# Loading and scheduling


def test_loading_a_dict_of_another_optimizer():
    toy = Toy(2, n=3).run([1])
    other = wrap(SGD([torch.nn.Parameter(torch.zeros(1)) for _ in range(2)], lr=1.0), 2)
    with refused(toy.w, "param"):
        toy.w.load_state_dict(other.state_dict())


def test_loading_a_window_of_other_shapes():
    toy, other = Toy(2, n=3).run([1]), Toy(2, n=200).run([1])
    with refused(toy.w, "3", "200"):
        toy.w.load_state_dict(other.w.state_dict())


def test_gated_scheduler_takes_the_wrapper():
    toy = Toy(2)
    schedule = torch.optim.lr_scheduler.StepLR(toy.inner, step_size=1)
    with refused(toy.w, "FusedAccumOptimizer"):
        GatedScheduler(schedule, toy.inner)
    with refused(toy.w, "scheduler"):
        GatedScheduler(None, toy.w)


def test_snapshots_see_what_a_refusal_must_leave_alone():
    """The comparison behind these tests notices a change of one bit in each of its parts."""
    toy = Toy(2, make=AdamW, lr=0.1).run([1] * 3)
    seen = [snapshot(toy.w)]
    edits = [
        lambda: toy.p.data.add_(1),
        lambda: toy.w.state[toy.p]["exp_avg"].add_(1),
        lambda: toy.w.master_grad(toy.p).add_(1),
        lambda: toy.w.param_groups[0].update(lr=0.2),
        lambda: toy.backward(1),
        lambda: toy.w.step(),
    ]
    for edit in edits:
        edit()
        assert snapshot(toy.w) not in seen
        seen.append(snapshot(toy.w))
