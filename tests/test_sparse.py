"""Sparse gradients, as `nn.Embedding(sparse=True)` gives them: folded like the dense ones that they stand for."""

from __future__ import annotations

import pytest
import torch
from torch.optim import SGD, AdamW
from wrapper_helpers import (
    LOW_PRECISION,
    both_updates,
    state_bits,
    tidy,  # noqa: F401
    use_two_buffers,
    wrap,
)

pytestmark = LOW_PRECISION
BACKENDS = ["compiled", "reference", "triton"]
MAKERS = {
    "sgd": lambda params: SGD(params, lr=0.5, momentum=0.5),
    "adamw": lambda params: AdamW(params, lr=0.1, weight_decay=0.1),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
}


class Model(torch.nn.Module):
    """An embedding between two dense layers' worth of parameters."""

    def __init__(self, sparse, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.before = torch.nn.Parameter(torch.ones(3, dtype=dtype))
        self.table = torch.nn.Embedding(40, 3, sparse=sparse, dtype=dtype)
        self.after = torch.nn.Parameter(torch.ones(2, dtype=dtype))
        with torch.no_grad():
            self.table.weight.copy_(torch.randint(-8, 9, (40, 3), generator=generator) / 8)

    def forward(self, words):
        return (self.table(words) * self.before).sum() + self.after.sum()


def words_of(k):
    return torch.tensor([[1, 2, 2, 7], [7, 7, 39, k]])  # some of them several times


def train(sparse, make, windows=2, steps=3, dtype=torch.float32, **options):
    model = Model(sparse, dtype)
    w = wrap(MAKERS[make](model.parameters()), steps, **options)
    for k in range(windows * steps):
        model(words_of(k)).backward()
        assert model.table.weight.grad.is_sparse == sparse
        w.step()
        assert model.table.weight.grad is None
    return model, w


@both_updates
@pytest.mark.parametrize("make", ["sgd", "adamw"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_113_equal_to_dense(make, update, backend):
    """Every number is a small multiple of a power of 2: no sum is rounded, in whatever order it is made."""
    (dense, a), (sparse, b) = (train(s, make, update=update, backend=backend, max_norm=100.0) for s in (False, True))
    assert state_bits(dense.state_dict()) == state_bits(sparse.state_dict())
    assert state_bits(a.state_dict()["state"]) == state_bits(b.state_dict()["state"])
    assert a.grad_norm == b.grad_norm


def test_an_optimizer_that_is_not_fused():
    (dense, _), (sparse, _) = (train(s, "adagrad") for s in (False, True))
    assert state_bits(dense.state_dict()) == state_bits(sparse.state_dict())


@both_updates
def test_two_buffers(monkeypatch, update):
    use_two_buffers(monkeypatch)
    (dense, _), (sparse, _) = (train(s, "adamw", update=update) for s in (False, True))
    assert state_bits(dense.state_dict()) == state_bits(sparse.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_entries_that_stand_there_twice_are_added_in_fp32(dtype):
    """256 + 1 is 256 in bfloat16, 2048 + 1 is 2048 in float16."""
    p = torch.nn.Parameter(torch.zeros(4, 1, dtype=dtype))
    w = wrap(SGD([p], lr=1.0), 2)
    large = 256.0 if dtype == torch.bfloat16 else 2048.0
    indices, values = torch.tensor([[2] * 9]), torch.tensor([[large]] + [[1.0]] * 8, dtype=dtype)
    p.grad = torch.sparse_coo_tensor(indices, values, (4, 1), check_invariants=True)
    w.step()
    assert w.master_grad(p).tolist() == [[0], [0], [(large + 8) / 2], [0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_without_an_entry_are_updated_too(dtype):
    """They have a gradient of zero, so that AdamW decays them, as in torch with a dense gradient."""
    model, w = train(True, "adamw", windows=1, dtype=dtype)
    before = Model(True, dtype).table.weight
    assert not torch.equal(model.table.weight[20], before[20])
    assert torch.equal(model.table.weight[20].float(), (before[20].float() * (1 - 0.1 * 0.1)).to(dtype).float())
    assert w.updates == 1


@pytest.mark.parametrize(
    "layout",
    [
        torch.Tensor.to_sparse,
        lambda t: t.to_sparse(1),
        lambda t: torch.zeros_like(t).to_sparse(),  # no entry at all
    ],
    ids=["coo", "hybrid", "empty"],
)
@both_updates
@pytest.mark.parametrize("transposed", [False, True])
def test_kinds_of_sparse_and_a_dense_one_after_it(layout, update, transposed):
    dense = torch.arange(24.0).reshape(4, 6) * (torch.arange(24).reshape(4, 6) % 3 == 0)
    start = torch.zeros(6, 4).t() if transposed else torch.zeros(4, 6)
    p = torch.nn.Parameter(start)
    w = wrap(SGD([p], lr=1.0), 2, update=update)
    p.grad = layout(dense)
    want = p.grad.to_dense()
    w.step()
    p.grad = dense.clone()
    w.step()
    assert torch.equal(p.detach(), -(want + dense) / 2)


def test_complex():
    p = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    w = wrap(SGD([p], lr=1.0), 1)
    p.grad = torch.tensor([0, 1 + 2j, 0]).to_sparse()
    w.step()
    assert p.tolist() == [0, -1 - 2j, 0]


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite(bad):
    p = torch.nn.Parameter(torch.zeros(3))
    spoilt = torch.tensor([0, bad, 0]).to_sparse()
    good = torch.tensor([0.0, 1, 0]).to_sparse()
    raising = wrap(SGD([p], lr=1.0), 2, nonfinite="raise")
    p.grad = spoilt
    with pytest.raises(FloatingPointError, match=r"param_groups\[0\]\['params'\]\[0\]"):
        raising.step()
    assert p.grad is spoilt
    raising.close()
    skipping = wrap(SGD([p], lr=1.0), 2, nonfinite="skip_micro")
    for grad in (good, spoilt):
        p.grad = grad
        skipping.step()
    assert p.tolist() == [0, -1, 0]


@pytest.mark.parametrize("amp_scaling", [False, True])
def test_grad_scaler(amp_scaling):
    model, plain = Model(True), Model(True)
    w = wrap(SGD(model.parameters(), lr=0.5), 2, amp_scaling=amp_scaling)
    twin = wrap(SGD(plain.parameters(), lr=0.5), 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for k in range(4):
        scaler.scale(model(words_of(k))).backward()
        scaler.step(w)
        scaler.update()
        plain(words_of(k)).backward()
        twin.step()
    assert state_bits(model.state_dict()) == state_bits(plain.state_dict())


def test_a_buffer_that_is_built_anew():
    model = Model(True)
    w = wrap(SGD(model.parameters(), lr=0.5), 2)
    extra = torch.nn.Parameter(torch.zeros(2))
    model(words_of(1)).backward()
    w.step()
    w.add_param_group({"params": [extra]})
    (model(words_of(1)) + extra.sum()).backward()
    w.step()
    want = Model(False)
    want(words_of(1)).backward()
    for p, q in zip(model.parameters(), want.parameters(), strict=True):
        assert torch.equal(p, q - 0.5 * q.grad)


def test_a_gradient_of_another_shape_is_refused():
    p = torch.nn.Parameter(torch.zeros(3))
    w = wrap(SGD([p], lr=1.0), 2)
    p.grad = torch.ones(3).to_sparse()
    p.data = torch.zeros(4)
    with pytest.raises(ValueError, match=r"\(3,\).*\(4,\)"):
        w.step()
    assert w.pending == 0
