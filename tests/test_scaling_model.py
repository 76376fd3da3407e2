"""The model of the time on many GPUs: it sends what was counted, and calculates what it says."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from bench.scaling_model import PLANS, REDUCE, Machine, Plan, Send, Work, latency, main, together, transfer, window

LINES = json.loads((Path(__file__).parent.parent / "bench" / "results" / "traffic.json").read_text())["lines"]
COUNTED = {
    "DDP, every micro-batch": ("DDP, every micro-batch", "fp32"),
    "DDP, `no_sync` but for the last": ("DDP, `no_sync` but for the last", "fp32"),
    "DDP, the same, bf16 gradients": ("DDP, `no_sync` but for the last", "bf16"),
    "`process_group`": ("`process_group`", "bf16"),
    "`process_group`, `last=True`": ("`process_group`, `last=True`", "bf16"),
    "`process_group`, `wire_dtype=bfloat16`": ("`process_group`, `wire_dtype=bfloat16`", "bf16"),
    '`shard="zero1"`': ('`shard="zero1"`', "bf16"),
    '`shard="zero1"`, `wire_dtype=bfloat16`': ('`shard="zero1"`, `wire_dtype=bfloat16`', "bf16"),
}
MACHINE, WORK = Machine(), Work()
COMPUTING = 6 * 1e9 * 8192 / (989e12 * 0.4)  # seconds of a micro-batch
UPDATE = 32 * 1e9 / 3.35e12


@pytest.mark.parametrize("title", COUNTED)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_plan_sends_what_was_counted(title, ranks):
    setup, model = COUNTED[title]
    (line,) = [n for n in LINES if (n["setup"], n["model"], n["ranks"]) == (setup, model, ranks)]
    assert PLANS[title].sent(ranks, 8) == pytest.approx(line["sent"] / line["parameters"], rel=2e-3)


def test_fsdp_sends_at_most_what_a_plan_has_for_every_layer():
    """The outermost group is not gathered again in the backward. It is large in the small model that is counted."""
    for title in ("FSDP2, every micro-batch", "FSDP2, last micro-batch"):
        (line,) = [n for n in LINES if (n["setup"], n["model"], n["ranks"]) == (title, "bf16", 4)]
        plan = PLANS[title]
        in_bf16 = {s: tuple(replace(send, width=2) for send in getattr(plan, s)) for s in ("backward", "last")}
        sent = replace(plan, **in_bf16).sent(4, 8)
        assert 0.8 * sent < line["sent"] / line["parameters"] < sent


def test_a_window_that_sends_nothing():
    assert window(MACHINE, WORK, 8, Plan()) == pytest.approx(8 * COMPUTING + UPDATE)


def test_a_reduction_behind_the_last_backward_is_added():
    inside = 2 * 7 / 8 * 4e9 / (450e9 * 0.8) + 14 * 3.4e-6
    between = 2 * 63 / 64 * 4e9 / (400e9 * 0.8) + 14 * 3.4e-6 + 2 * 3 * 14e-6
    for gpus, sent in ((8, inside), (64, between)):
        assert window(MACHINE, WORK, gpus, Plan(end=(REDUCE,))) == pytest.approx(8 * COMPUTING + UPDATE + sent)


def test_an_all_to_all_leaves_the_node_by_one_port():
    send = Send("all-to-all", 2)
    assert transfer(MACHINE, 8, send, 1e9) == pytest.approx(2e9 * 7 / 8 / (450e9 * 0.8))
    assert transfer(MACHINE, 64, send, 1e9) == pytest.approx(2e9 * 56 / 64 / (50e9 * 0.8))
    assert latency(MACHINE, 64, send) == pytest.approx(7 * 3.4e-6 + 7 * 14e-6)


def test_what_overlaps_costs_its_last_piece_or_the_first_of_the_work():
    still = replace(MACHINE, hop_inside=0.0)
    sent = transfer(still, 8, REDUCE, 1e9)
    assert together(still, WORK, 8, 2 * sent, (REDUCE,), 10) == pytest.approx(2.1 * sent)
    assert together(still, WORK, 8, sent / 2, (REDUCE,), 10) == pytest.approx(1.05 * sent)


def test_shards_are_updated_by_their_ranks():
    """zero1 then writes the parameters that it has received: 4 bytes of each."""
    alone = 8 * COMPUTING
    ends = PLANS['`shard="zero1"`'].end
    sent = sum(transfer(MACHINE, 8, s, 1e9) + latency(MACHINE, 8, s) for s in ends)
    assert window(MACHINE, WORK, 8, PLANS['`shard="zero1"`']) == pytest.approx(
        alone + sent + UPDATE / 8 + 4e9 / 3.35e12
    )


def test_what_the_page_says_of_it():
    """Once a window is worth little with a fast network and much with a slow one; bf16 pays inside a node only."""
    slow = replace(MACHINE, port=100e9 / 8 / 8)
    many, once, late, bf16 = (
        PLANS[title]
        for title in (
            "DDP, every micro-batch",
            "DDP, `no_sync` but for the last",
            "`process_group`",
            "`process_group`, `wire_dtype=bfloat16`",
        )
    )
    assert window(MACHINE, WORK, 1024, many) < 1.01 * window(MACHINE, WORK, 1024, Plan())
    assert 1.015 < window(MACHINE, WORK, 64, late) / window(MACHINE, WORK, 64, Plan()) < 1.025
    assert window(slow, WORK, 64, many) > 3.5 * window(slow, WORK, 64, once)
    assert window(slow, WORK, 64, once) == window(slow, WORK, 64, PLANS["`process_group`, `last=True`"])
    assert window(MACHINE, WORK, 8, bf16) < window(MACHINE, WORK, 8, late)
    assert window(MACHINE, WORK, 64, bf16) > window(MACHINE, WORK, 64, late)
    zero1 = PLANS['`shard="zero1"`']
    assert all(window(m, WORK, g, zero1) < window(m, WORK, g, late) for m in (MACHINE, slow) for g in (8, 64, 1024))
    apart = replace(slow, node=1)
    assert window(apart, WORK, 64, bf16) < window(apart, WORK, 64, late)
    assert math.isclose(PLANS["`process_group`"].sent(64, 8), once.sent(64, 8))


def test_every_number_is_an_argument(capsys):
    main(["--parameters", "2e9", "--node", "4", "--port", "25e9", "--micro-batches", "4"])
    printed = capsys.readouterr().out
    assert "A port of 200 Gb/s for each GPU" in printed
    assert "each node of 4 GPUs" in printed
    main([])
    assert printed != capsys.readouterr().out
