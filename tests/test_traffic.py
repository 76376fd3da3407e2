"""What is sent between ranks: the counter itself, and the counts that are published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import on_ranks
from torch.distributed.fsdp import fully_shard
from torch.nn import Linear
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from bench.cases import MICRO_BATCHES
from bench.traffic import SMALL, count, reduced, settled, table
from bench.traffic_setups import SETUPS, make
from fusedaccum.demo.comms import Call, Collectives
from fusedaccum.flat_buffer import ALIGN

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results" / "traffic.json"
BIG = 2**18


def counted(work):
    """What `work` calls, and the bytes that leave this rank's sockets meanwhile. Its connections were made before."""
    work()
    before = settled()
    with Collectives() as seen:
        work()
    return seen.calls, settled() - before


def known_collectives():
    size = dist.get_world_size()
    whole, part = torch.ones(BIG), torch.ones(BIG // size)
    into = torch.empty_like(whole)
    works = {
        "all-reduce": lambda: dist.all_reduce(whole),
        "all-gather": lambda: dist.all_gather(list(into.chunk(size)), part),
        "reduce-scatter": lambda: dist.reduce_scatter(part, list(whole.chunk(size))),
        "all-to-all": lambda: dist.all_to_all_single(into, whole),
    }
    return {kind: counted(work) for kind, work in works.items()}


def from_cpp():
    """DDP's collectives come from C++, those of FSDP2 and DTensor from below an operator's dispatch."""
    model = DistributedDataParallel(Linear(16, 16, bias=False))
    twice, _ = counted(lambda: [model(torch.ones(1, 16)).sum().backward() for _ in range(2)])
    sharded = fully_shard(Linear(16, 16, bias=False))
    sharded(torch.ones(1, 16)).sum().backward()  # prepares what is prepared once
    backward, _ = counted(lambda: sharded(torch.ones(1, 16)).sum().backward())
    norm, _ = counted(lambda: clip_grad_norm_(sharded.parameters(), 1.0))
    return twice, backward, norm


def gathers():
    with Collectives():
        dist.gather(torch.ones(1), [torch.empty(1) for _ in range(2)] if dist.get_rank() == 0 else None)


def counts_all():
    torch.manual_seed(0)
    return [count(setup, "fp32") for setup in SETUPS]


def trained(counting):
    model = make(torch.float32)
    window = SETUPS["`process_group`"](model)
    if counting:
        with Collectives():
            window()
    else:
        window()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def both_ways():
    return torch.equal(trained(counting=True), trained(counting=False))


@pytest.mark.parametrize("world", [2, 4])
def test_each_kind_is_counted_and_its_bytes_leave_the_sockets(world):
    """A reduce-scatter of gloo's is an all-reduce inside, and sends twice what it has to."""
    for rank in on_ranks(world, known_collectives):
        for kind, (calls, on_sockets) in rank.items():
            assert calls == [Call(kind, torch.float32, 4 * BIG, world)]
            really = calls[0].sent * (2 if kind == "reduce-scatter" else 1)
            assert really <= on_sockets <= really * 1.02


def test_collectives_that_torch_calls_from_inside_are_counted():
    for twice, backward, norm in on_ranks(2, from_cpp):
        assert twice == [Call("all-reduce", torch.float32, 1024, 2)] * 2
        assert backward == [
            Call("all-gather", torch.float32, 1024, 2),
            Call("reduce-scatter", torch.float32, 1024, 2),
        ]
        assert [call.kind for call in norm] == ["all-reduce"]


def test_a_collective_that_is_not_known_is_refused():
    for failure in on_ranks(2, gathers, errors=True):
        assert failure.type == "NotImplementedError"
        assert "gather_" in failure.message


def test_counting_changes_no_bits():
    assert on_ranks(2, both_ways) == [True, True]


@pytest.fixture(scope="module")
def published():
    return json.loads(RESULTS.read_text())


@pytest.fixture(scope="module")
def lines():
    return on_ranks(2, counts_all)[0]


def test_the_published_counts_are_those_of_today(lines, published):
    """Bytes on sockets are the kernel's: up to 2% apart."""
    there = {(line["setup"], line["model"], line["ranks"]): line for line in published["lines"]}
    assert {setup for setup, _, _ in there} == set(SETUPS)
    for line in lines:
        known = there[line["setup"], "fp32", 2]
        assert line == {**known, "on_sockets": line["on_sockets"]}
        assert line["on_sockets"] == pytest.approx(known["on_sockets"], rel=0.02)


def test_a_window_is_reduced_once(lines):
    """4 bytes a parameter, 2 with a bf16 wire; DDP sends N times as much."""
    by_setup = {line["setup"]: line for line in lines}
    net = make(torch.float32)
    aligned = sum(-(-p.numel() // ALIGN) * ALIGN for p in net.parameters())
    ours, bf16 = by_setup["`process_group`"], by_setup["`process_group`, `wire_dtype=bfloat16`"]
    assert ours["calls"] == {"all-reduce float32": 1}
    assert ours["sent"] == 4 * aligned
    assert bf16["calls"] == {"all-gather bfloat16": 1, "all-to-all bfloat16": 1}
    assert bf16["sent"] == 2 * aligned
    assert reduced(by_setup["DDP, every micro-batch"]) == 4 * MICRO_BATCHES
    assert reduced(by_setup["DDP, `no_sync` but for the last"]) == 4
    assert all(line["identical"] is not False for line in lines)
    assert all(line["small_calls"] <= 4 and line["small_sent"] < SMALL for line in lines)


def test_the_page_shows_the_published_counts(published):
    page = (ROOT / "docs" / "distributed.md").read_text()
    assert table(published["lines"]) in page
