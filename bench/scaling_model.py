"""How long a window takes on 8 to 1,024 GPUs, calculated: python -m bench.scaling_model [--parameters 1e9] [...].

Nothing here is a measurement. What is sent comes from bench.traffic, which counts it; the rest are these assumptions:

- Computing: a forward of 2 and a backward of 4 operations per parameter and token, at `reached` of the peak. The same
  for all setups: what adding gradients up costs on the GPU is left out.
- Ring collectives (all-reduce, reduce-scatter, all-gather) move their bytes at the slower of a GPU's NVLink and all
  network ports of its node together: a ring enters and leaves a node once, and there is one ring for each port. An
  all-to-all knows no nodes: a GPU's bytes for other nodes go through its own port, or its part of the node's. Of
  either, `efficiency` is reached.
- Latency: an all-reduce takes a tree between nodes, 2 log2(nodes) hops, and 2 (GPUs of a node - 1) inside; a
  reduce-scatter and an all-gather take one hop for each GPU of the ring, an all-to-all one for each node.
- Overlap: work and transfer are cut into equally many pieces, of `bucket` bytes (with FSDP2, of a layer); a piece is
  sent while the next is made, without slowing it down. So a backward of time b with transfers of time c in k pieces
  takes max(b + c / k, b / k + c). What is sent after the last backward overlaps nothing.
- Updating moves 32 bytes per parameter: FP32 sum, bf16 parameter, FP32 master and two moments. With shards each GPU
  updates its own; zero1 then writes the parameters that it has received.
- No GPU waits for a slower one, and nothing else uses the network.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass, fields, replace

from fusedaccum.demo.comms import SENT


@dataclass(frozen=True)
class Machine:
    """Defaults: H100 SXM, 8 in a node. Bytes a second in one direction; seconds.

    NVIDIA's data sheet has NVLink at 900 GB/s both ways, memory at 3.35 TB/s and 989 TFLOPS in dense bf16; DGX H100 has
    a port of 400 Gb/s for each GPU. The hops are NCCL's own estimates (src/graph/tuning.cc, protocol Simple). What is
    reached of the peaks is a guess.
    """

    node: int = 8  # GPUs
    nvlink: float = 450e9
    port: float = 50e9
    efficiency: float = 0.8
    hop_inside: float = 3.4e-6
    hop_outside: float = 14e-6
    memory: float = 3.35e12
    peak: float = 989e12
    reached: float = 0.4


@dataclass(frozen=True)
class Work:
    """A window on each GPU."""

    parameters: float = 1e9
    micro_batches: int = 8
    tokens: int = 8192
    layers: int = 24
    bucket: float = 25 * 2**20


@dataclass(frozen=True)
class Send:
    """A collective over all parameters, of so many bytes each."""

    kind: str
    width: int


@dataclass(frozen=True)
class Plan:
    """What is sent when: during each forward, each backward but the last, the last backward, and behind it."""

    forward: tuple[Send, ...] = ()
    backward: tuple[Send, ...] = ()
    last: tuple[Send, ...] = ()
    end: tuple[Send, ...] = ()
    shares: bool = False  # each GPU updates its own

    def sent(self, gpus: int, micro_batches: int) -> float:
        """Bytes per parameter and window that a GPU sends."""
        each = [*self.forward * micro_batches, *self.backward * (micro_batches - 1), *self.last, *self.end]
        return sum(SENT[send.kind](gpus) * send.width for send in each)


REDUCE, REDUCE_BF16 = Send("all-reduce", 4), Send("all-reduce", 2)
SCATTER, GATHER, EXCHANGE = Send("reduce-scatter", 4), Send("all-gather", 2), Send("all-to-all", 2)
PLANS = {
    "DDP, every micro-batch": Plan(backward=(REDUCE,), last=(REDUCE,)),
    "DDP, `no_sync` but for the last": Plan(last=(REDUCE,)),
    "DDP, the same, bf16 gradients": Plan(last=(REDUCE_BF16,)),
    "`process_group`": Plan(end=(REDUCE,)),
    "`process_group`, `last=True`": Plan(last=(REDUCE,)),
    "`process_group`, `wire_dtype=bfloat16`": Plan(end=(EXCHANGE, GATHER)),
    "the same, `last=True`": Plan(last=(EXCHANGE,), end=(GATHER,)),
    '`shard="zero1"`': Plan(end=(SCATTER, GATHER), shares=True),
    '`shard="zero1"`, `wire_dtype=bfloat16`': Plan(end=(EXCHANGE, GATHER), shares=True),
    "FSDP2, every micro-batch": Plan((GATHER,), (GATHER, SCATTER), (GATHER, SCATTER), shares=True),
    "FSDP2, last micro-batch": Plan((GATHER,), (GATHER,), (GATHER, SCATTER), shares=True),
}


def transfer(machine: Machine, gpus: int, send: Send, parameters: float) -> float:
    """Seconds of one collective, its latency left out."""
    size = send.width * parameters
    if send.kind == "all-to-all":
        inside, outside = (min(gpus, machine.node) - 1) / gpus, max(0, gpus - machine.node) / gpus
        return max(size * inside / machine.nvlink, size * outside / machine.port) / machine.efficiency
    slowest = machine.nvlink if gpus <= machine.node else min(machine.nvlink, machine.port * machine.node)
    return SENT[send.kind](gpus) * size / slowest / machine.efficiency


def latency(machine: Machine, gpus: int, send: Send) -> float:
    nodes = math.ceil(gpus / machine.node)
    inside = min(gpus, machine.node) - 1
    if send.kind == "all-reduce":
        return 2 * (inside * machine.hop_inside + math.log2(nodes) * machine.hop_outside)
    if send.kind == "all-to-all":
        return inside * machine.hop_inside + (nodes - 1) * machine.hop_outside
    return nodes * inside * machine.hop_inside + (nodes - 1) * machine.hop_outside


def together(machine: Machine, work: Work, gpus: int, seconds: float, sends: tuple[Send, ...], pieces: int) -> float:
    """Seconds of computing for `seconds` with `sends` under way."""
    if not sends:
        return seconds
    each = sum(transfer(machine, gpus, s, work.parameters) / pieces + latency(machine, gpus, s) for s in sends)
    return max(seconds + each, seconds / pieces + each * pieces)


def window(machine: Machine, work: Work, gpus: int, plan: Plan) -> float:
    """Seconds from one update to the next."""
    forward = 2 * work.parameters * work.tokens / (machine.peak * machine.reached)
    backward = 2 * forward
    overlapped = sum(send.width for send in plan.last) * work.parameters
    pieces = work.layers if plan.forward else max(1, math.ceil(overlapped / work.bucket))
    total = work.micro_batches * together(machine, work, gpus, forward, plan.forward, pieces)
    total += (work.micro_batches - 1) * together(machine, work, gpus, backward, plan.backward, pieces)
    total += together(machine, work, gpus, backward, plan.last, pieces)
    total += sum(transfer(machine, gpus, send, work.parameters) + latency(machine, gpus, send) for send in plan.end)
    update = 32 / gpus if plan.shares else 32
    if plan.shares and not plan.forward:
        update += 4
    return total + update * work.parameters / machine.memory


GPUS = (8, 16, 64, 256, 1024)


def table(machine: Machine, work: Work) -> str:
    """Markdown: milliseconds per window."""
    alone = window(machine, work, 1, Plan()) * 1e3
    lines = [
        "| ms per window | " + " | ".join(f"{gpus:,} GPUs" for gpus in GPUS) + " |",
        "|---|" + "---:|" * len(GPUS),
        "| one GPU, nothing sent | " + " | ".join([f"{alone:,.0f}"] * len(GPUS)) + " |",
    ]
    for title, plan in PLANS.items():
        cells = [f"{window(machine, work, gpus, plan) * 1e3:,.0f}" for gpus in GPUS]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def report(machine: Machine, work: Work) -> str:
    """What the page shows: a network port for each GPU, and one slow one for each node."""
    slow = replace(machine, port=100e9 / 8 / machine.node)
    return (
        f"A port of {machine.port * 8e-9:,.0f} Gb/s for each GPU:\n\n{table(machine, work)}\n\n"
        f"One port of 100 Gb/s for each node of {machine.node} GPUs:\n\n{table(slow, work)}"
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.scaling_model", description="Calculated time per window.")
    for kind in (Machine, Work):
        for field in fields(kind):
            to = int if field.type == "int" else float
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=to, default=field.default)
    given = vars(parser.parse_args(argv))
    machine, work = (kind(**{field.name: given[field.name] for field in fields(kind)}) for kind in (Machine, Work))
    print(report(machine, work))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
