"""Frameworks that accumulate by themselves and call `step()` once for several micro-batches."""

from __future__ import annotations

import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

from fusedaccum.notices import warn
from fusedaccum.options import NAME, parameters

if TYPE_CHECKING:
    from fusedaccum.window import Window

# Modules from which a framework calls `step()`: its name, where its number of micro-batches stands, and its option.
FRAMEWORKS = {
    "accelerate.optimizer": ("Accelerate", "gradient_state.num_steps", "gradient_accumulation_steps"),
    "transformers.trainer": ("the Trainer", "args.gradient_accumulation_steps", "gradient_accumulation_steps"),
    "lightning.pytorch.loops.optimization.automatic": (
        "Lightning",
        "trainer.accumulate_grad_batches",
        "accumulate_grad_batches",
    ),
}
FRAMEWORKS["pytorch_lightning.loops.optimization.automatic"] = FRAMEWORKS[
    "lightning.pytorch.loops.optimization.automatic"
]


class Nesting:
    """Warns once where a wrapper's windows are made of another's."""

    def __init__(self) -> None:
        self.warned = False

    def look(self, window: Window) -> None:
        """To be called in `step()`, before gradients are read. At a window's first call it looks who is calling."""
        if self.warned or window.pending or window.live is not None or FRAMEWORKS.keys().isdisjoint(sys.modules):
            return
        if (length := window.length_now()) == 1:
            return
        for name, count, option in _callers(sys._getframe(1)):
            if count > 1 and (name != "Accelerate" or _accumulates(window, count, sys._getframe(1))):
                self.warned = True
                warn(
                    f"{NAME}: {name} adds {count} micro-batches up before it calls step(), and steps={length} of these "
                    f"calls make a window here: an update takes {count * length} micro-batches, and schedules and "
                    f"clipping run {length} times for each; pass steps=None, which leaves the boundary to {name}, "
                    f"or {option}=1 there"
                )
                return


def _callers(frame: FrameType | None) -> list[tuple[str, int, str]]:
    """The frameworks among the callers, the innermost first: name, micro-batches for each of its steps, option."""
    found = []
    while frame is not None:
        entry = FRAMEWORKS.get(frame.f_globals.get("__name__", ""))
        if entry is not None and "self" in frame.f_code.co_varnames:
            count: Any = frame.f_locals.get("self")
            for attribute in entry[1].split("."):
                count = getattr(count, attribute, None)
            if isinstance(count, int):
                found.append((entry[0], count, entry[2]))
        frame = frame.f_back
    return found


def _accumulates(window: Window, count: int, frame: FrameType | None) -> bool:
    """Whether Accelerate holds steps back: it has `count` also where nobody calls accumulate().

    The Accelerator counts these calls, from 0 again at the end of a data loader. There, and where it is not to be
    found, the gradients have to say, which is a guess: several backwards for one step look the same.
    """
    found = _at_hand(frame, sys.modules["accelerate.accelerator"].Accelerator)
    if found and not found[0].gradient_state.end_of_dataloader:
        return any(accelerator.step for accelerator in found)
    if window.in_backward is not None:
        return window.in_backward.backwards >= count
    grads = [p.grad for p in parameters(window.optimizer) if p.grad is not None]
    # Autograd adds in place, which a gradient's version counts; clipping and tied weights add one to it.
    return bool(grads) and all(grad._version >= count - 1 for grad in grads)


def _at_hand(frame: FrameType | None, kind: type) -> list[Any]:
    """What there is of a class among the variables of the callers, and among the attributes of their `self`."""
    places: dict[int, dict[str, Any]] = {}
    while frame is not None:
        for variables in (frame.f_locals, frame.f_globals, getattr(frame.f_locals.get("self"), "__dict__", {})):
            places[id(variables)] = variables
        frame = frame.f_back
    # Copies, because another thread may add a variable meanwhile.
    at_hand = [thing for variables in places.values() for thing in list(variables.values())]
    return [thing for thing in at_hand if issubclass(type(thing), kind)]
