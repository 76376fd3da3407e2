"""Reads a listing of cuobjdump: what a thread moves on the paths that full tiles take.

A kernel has a path for every mixture of dtypes, and others for tails and unaligned tensors. In its basic blocks:

1. An access moves elements if its address depends on the thread's index; the same address for all threads is a look-up
   (a table's entry, a hyper-parameter) and costs next to nothing.
2. A block that moves elements in vectors only (8 bytes or more at a time) belongs to a full tile. One that also moves
   them one by one belongs to a tail or an unaligned tensor.
3. Blocks of full tiles that reach each other through blocks that move no elements are one path. If one of them also
   reaches a block that moves elements one by one, the path is a tail's, which has vectors where it can.
4. A thread stores each element of an output once. So the elements that it handles in a path are the bytes stored there
   over the bytes that the operator stores for an element, and the bytes read for each follow. Where an operator stores
   nothing, each element of `flat` is read once.
5. A load under a predicate is made or left out for a whole tile: both ways are counted, a first touch and a later one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);", re.MULTILINE)
REGISTER = re.compile(r"\bU?R\d+")
ACCESS = re.compile(r"(LDG?|STG?)\.E\b")
WIDTH = re.compile(r"\.[US]?(8|16|64|128|256)\b")
VECTOR = 8  # bytes: 4 elements of a 16-bit format
PER_THREAD = (4, 8, 16)  # elements that a path may hold: of a tile's 4,096, 256 threads have 16 each


@dataclass(frozen=True)
class Instruction:
    address: int
    guard: str | None
    op: str
    operands: tuple[str, ...]

    @property
    def width(self) -> int:
        """Bytes that a load or store moves, for each thread."""
        found = WIDTH.search(self.op)
        return int(found[1]) // 8 if found else 4

    @property
    def target(self) -> int | None:
        """Where a branch goes."""
        found = re.fullmatch(r"0x([0-9a-f]+)", self.operands[-1]) if self.operands else None
        return int(found[1], 16) if found else None


@dataclass
class Block:
    code: list[Instruction]
    next: list[int] = field(default_factory=list)  # addresses of the blocks that may follow
    moves: list[Instruction] = field(default_factory=list)  # the accesses that move elements


@dataclass(frozen=True)
class FullTile:
    """Bytes that a thread moves on one path of full tiles."""

    loaded: int
    loaded_on_condition: int  # part of `loaded`
    stored: int

    def of_element(self, writes: int) -> Iterator[tuple[int, float]]:
        """(elements, bytes moved for each), for an operator that writes so many bytes for an element."""
        for loaded in sorted({self.loaded, self.loaded - self.loaded_on_condition}):
            elements = self.stored / writes if writes else loaded / 4
            if elements in PER_THREAD:
                yield int(elements), (loaded + self.stored) / elements


def instructions(text: str) -> list[Instruction]:
    """The instructions of one kernel, in the order of the listing."""
    return [
        Instruction(int(m[1], 16), m[2], m[3], tuple(part.strip() for part in m[4].split(",") if part.strip()))
        for m in INSTRUCTION.finditer(text)
    ]


def _blocks(code: list[Instruction]) -> dict[int, Block]:
    """The basic blocks, by address. Where BSSY names the place at which threads meet, BSYNC goes there.

    BRX goes to a place from a table that the listing does not show: to any that nothing else goes to.
    """
    starts, meeting, goes_to = {code[0].address}, {}, {}
    for here, after in zip(code, [*code[1:], None], strict=True):
        op = here.op.split(".")[0]
        follows = [after.address] if after is not None else []
        if op == "BSSY":
            meeting[here.operands[0]] = here.target
            continue
        if op == "BRA":
            always = here.guard is None and len(here.operands) == 1
            follows = [here.target] if always else [here.target, *follows]
        elif op == "BSYNC":
            follows = [meeting[here.operands[0]]]
        elif op in ("EXIT", "RET"):
            follows = follows if here.guard else []
        elif op == "BRX":
            follows = []
        else:
            continue
        goes_to[here.address] = follows
        starts |= {*follows, *([after.address] if after is not None else [])}
    blocks: dict[int, Block] = {}
    for instruction in code:
        if instruction.address in starts:
            block = blocks[instruction.address] = Block([])
        block.code.append(instruction)
    order = sorted(blocks)
    for start, following in zip(order, [*order[1:], None], strict=True):
        last = blocks[start].code[-1].address
        blocks[start].next = goes_to.get(last, [following] if following is not None else [])
    called = {instruction.target for instruction in code if instruction.op.startswith("CALL")}
    known = {order[0], *called, *(place for block in blocks.values() for place in block.next)}
    for block in blocks.values():
        if block.code[-1].op.startswith("BRX"):
            block.next = [start for start in order if start not in known]
    return blocks


def _written(instruction: Instruction) -> list[str]:
    """The registers that an instruction writes."""
    found = re.fullmatch(r"(U?R)(\d+)", instruction.operands[0]) if instruction.operands else None
    if not found:
        return []
    if ".128" in instruction.op:
        count = 4
    else:
        count = 2 if re.search(r"\.(?:64|WIDE)\b", instruction.op) else 1
    return [f"{found[1]}{int(found[2]) + i}" for i in range(count)]


def _follow_threads(block: Block, dependent: frozenset[str]) -> frozenset[str]:
    """Registers that depend on the thread's index after a block, given those before it. Fills `block.moves`."""
    now = set(dependent)
    block.moves = []
    for instruction in block.code:
        written = _written(instruction)
        sources = {name for part in instruction.operands[1 if written else 0 :] for name in REGISTER.findall(part)}
        depends = bool(sources & now) or "SR_TID.X" in instruction.operands
        if ACCESS.match(instruction.op):
            place = next(part for part in instruction.operands if "[" in part and "]" in part)
            if now & set(REGISTER.findall(re.sub(r"desc\[\w+\]", "", place))):
                block.moves.append(instruction)
        if depends:
            now.update(written)
        elif instruction.guard is None:
            now.difference_update(written)
    return frozenset(now)


def _mark_moves(blocks: dict[int, Block]) -> None:
    """Find the accesses whose address depends on the thread's index, along every way through the blocks."""
    before: dict[int, frozenset[str]] = {min(blocks): frozenset()}
    waiting = [min(blocks)]
    while waiting:
        start = waiting.pop()
        after = _follow_threads(blocks[start], before[start])
        for place in blocks[start].next:
            merged = before.get(place, frozenset()) | after
            if place not in before or merged != before[place]:
                before[place] = merged
                waiting.append(place)


def _reached(blocks: dict[int, Block], start: int) -> set[int]:
    """Blocks that move elements and come next after `start`, whatever lies between."""
    found, seen, waiting = set(), set(), list(blocks[start].next)
    while waiting:
        place = waiting.pop()
        if place in seen:
            continue
        seen.add(place)
        if blocks[place].moves:
            found.add(place)
        else:
            waiting += blocks[place].next
    return found


def full_tiles(code: list[Instruction]) -> list[FullTile]:
    """The paths of full tiles: see the module's docstring."""
    blocks = _blocks(code)
    _mark_moves(blocks)
    full = {start for start, b in blocks.items() if b.moves and min(access.width for access in b.moves) >= VECTOR}
    next_moves = {start: _reached(blocks, start) for start in full}
    path_of = {start: {start} for start in full}
    for start in full:
        for other in next_moves[start] & full:
            path_of[start] |= path_of[other]
            for member in path_of[start]:
                path_of[member] = path_of[start]
    paths = []
    for members in {min(members): members for members in path_of.values()}.values():
        if any(next_moves[start] - full for start in members):
            continue
        moves = [access for start in members for access in blocks[start].moves]
        loads = [access for access in moves if access.op.startswith("LD")]
        paths.append(
            FullTile(
                loaded=sum(access.width for access in loads),
                loaded_on_condition=sum(access.width for access in loads if access.guard),
                stored=sum(access.width for access in moves if access.op.startswith("ST")),
            )
        )
    return paths
