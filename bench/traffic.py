"""What one window sends between ranks, counted: python -m bench.traffic [--ranks 2 4] [--json F].

Real processes train a small GPT over gloo, in each way of bench.traffic_setups. Every collective of one window is
counted where torch takes it in (fusedaccum.demo.comms), with the bytes that the average rank has to send for it, and
the bytes that leave each rank's sockets are read from the kernel before and after. Counts: a busy machine will do.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor

from bench import harness
from bench.cases import MICRO_BATCHES
from bench.traffic_setups import SETUPS, make
from fusedaccum.demo.comms import Call, Collectives, sent_on_sockets

MODELS = {"fp32": torch.float32, "bf16": torch.bfloat16}
SMALL = 1024  # bytes: headers, touched segments, norms. The smallest tensor of sums or parameters here is larger
Line = dict[str, Any]


def count(setup: str, model: str) -> Line:
    """One window of `setup` on this rank of the default group, after two that have built what is built once."""
    net = make(MODELS[model])
    parameters = sum(p.numel() for p in net.parameters())
    window = SETUPS[setup](net)
    for _ in range(2):
        window()
    before = settled()
    with Collectives() as counted:
        window()
    on_sockets = settled() - before
    return {
        "setup": setup,
        "model": model,
        "ranks": dist.get_world_size(),
        "parameters": parameters,
        **summary(counted.calls),
        "on_sockets": on_sockets,
        "identical": _identical(net),
    }


def summary(calls: list[Call]) -> Line:
    """What was called, by kind and dtype, and what the average rank sends: bytes of all, and of the small ones."""
    small = [call for call in calls if call.bytes < SMALL]
    large = Counter(f"{call.kind} {str(call.dtype).removeprefix('torch.')}" for call in calls if call.bytes >= SMALL)
    return {
        "calls": dict(sorted(large.items())),
        "sent": sum(call.sent for call in calls if call.bytes >= SMALL),
        "small_calls": len(small),
        "small_sent": sum(call.sent for call in small),
    }


def settled() -> int:
    """`sent_on_sockets`, once all ranks are here and what they have handed to the kernel is on its way."""
    dist.barrier()
    last = -1
    while last != (last := sent_on_sockets()):
        time.sleep(0.02)
    return last


def _identical(net: torch.nn.Module) -> bool | None:
    """Whether all ranks hold the same bits; None where each holds its shard."""
    params = list(net.parameters())
    if isinstance(params[0], DTensor):
        return None
    mine = torch.cat([p.detach().flatten() for p in params]).view(torch.uint8)
    everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, mine)
    return all(torch.equal(mine, other) for other in everybody)


def reduced(line: Line) -> float:
    """Bytes per parameter of an all-reduce for which a rank would send as much: comparable over numbers of ranks."""
    ranks = line["ranks"]
    return line["sent"] / (2 * (ranks - 1) / ranks) / line["parameters"]


def table(lines: list[Line]) -> str:
    """Markdown; one row a setup."""
    worlds = sorted({line["ranks"] for line in lines})
    at = {(line["setup"], line["model"], line["ranks"]): line for line in lines}
    heads = ["large calls", "small", *MODELS, *(f"fp32, sockets of {world} ranks" for world in worlds)]
    rows = [f"| one window of {MICRO_BATCHES} micro-batches | {' | '.join(heads)} |", "|---|" + "---:|" * len(heads)]
    for setup in dict.fromkeys(line["setup"] for line in lines):
        first = at[setup, "fp32", worlds[0]]
        cells = [str(sum(first["calls"].values())), str(first["small_calls"])]
        cells += [f"{reduced(at[setup, model, worlds[0]]):.2f}" for model in MODELS]
        cells += [f"{line['on_sockets'] / line['parameters']:.2f}" for w in worlds if (line := at[setup, "fp32", w])]
        rows.append(f"| {setup} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _serve(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # bf16 without masters: nothing is learned here
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    lines = []
    for setup in SETUPS:
        for model in MODELS:
            lines.append(count(setup, model))
            if rank == 0:
                print(f"{world} ranks, {model}, {setup}: counted", file=sys.stderr)
    if rank == 0:
        Path(folder, "lines").write_text(json.dumps(lines))
    dist.destroy_process_group()


def measure(worlds: list[int]) -> list[Line]:
    """Rank 0's count of every setup; the ranks do the same."""
    lines: list[Line] = []
    for world in worlds:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_serve, (world, folder), world)
            lines += json.loads(Path(folder, "lines").read_text())
    return lines


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.traffic", description="Bytes that one window sends.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--json", type=Path, help="where the counts go")
    given = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    lines = measure(given.ranks)
    print(table(lines))
    machine = harness.machine(1, "bench.traffic")
    for key, value in machine.items():
        print(f"{key}: {value}")
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps({"machine": machine, "lines": lines}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
