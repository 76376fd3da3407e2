"""Several ranks: a process group that only says so, in one process."""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.testing._internal.distributed.fake_pg import FakeStore
from wrapper_helpers import tidy, wrap  # noqa: F401


@pytest.fixture(params=[1, 2])
def ranks(request):
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield request.param
    torch.distributed.destroy_process_group()


def reduced(state, bucket):
    """What the other ranks would give: nothing else."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@pytest.mark.parametrize("fold", ["step", "backward"])
def test_gradients_that_ddp_has_not_reduced_are_not_folded(fold, ranks):
    inner = torch.nn.Linear(2, 1)
    model = DistributedDataParallel(inner)
    model.register_comm_hook(None, reduced)
    w = wrap(SGD(inner.parameters(), lr=1.0), 2, fold=fold)
    loss = model(torch.ones(1, 2)).sum()
    if ranks == 1 or fold == "step":
        loss.backward()
        w.step()
        assert w.pending == 1
        return
    with pytest.raises(RuntimeError, match=r"reduced.*2 ranks.*fold='step'"):
        loss.backward()
    assert w.pending == 0
    assert all(torch.count_nonzero(w.master_grad(p)) == 0 for p in inner.parameters())


@pytest.mark.usefixtures("ranks")
def test_a_model_that_no_ddp_holds_is_folded():
    other = DistributedDataParallel(torch.nn.Linear(2, 1))
    p = torch.nn.Parameter(torch.zeros(2))
    w = wrap(SGD([p], lr=1.0), 1, fold="backward")
    (p * 3).sum().backward()
    w.step()
    assert p.tolist() == [-3.0, -3.0]
    assert other is not None
