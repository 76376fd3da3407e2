"""CUDA streams: the backward of a side stream's forward runs on that stream, and one fold follows another."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fusedaccum.local import is_distributed


class Streams:
    """Orders what hooks launch. On a CPU there is nothing to order."""

    def __init__(self) -> None:
        self._of: dict[Tensor, tuple[torch.cuda.Stream, Tensor]] = {}  # where the gradient of a parameter was made
        self._left: dict[Tensor, torch.cuda.Stream] = {}  # likewise, where `note` is called later
        self._last: dict[torch.device, torch.cuda.Stream] = {}  # where a buffer was written last

    def leave(self, p: Tensor) -> None:
        """The gradient of `p` is being made by what the current stream holds, and will be noted later."""
        if p.device.type == "cuda":
            self._left[p] = torch.cuda.current_stream(p.device)

    def note(self, p: Tensor, grad: Tensor) -> None:
        """`grad`, that of `p`, is being made by what the current stream holds, or the one that it was left on."""
        if p.device.type == "cuda":
            self._of[p] = self._left.pop(p, None) or torch.cuda.current_stream(p.device), grad

    def forget(self) -> None:
        """Gradients that were noted will not be read."""
        self._of, self._left = {}, {}

    def join(self, params: Iterable[Tensor]) -> None:
        """What is launched next reads the gradients of `params`, and writes to the buffer."""
        for device in {p.device for p in params if p in self._of}:
            here = torch.cuda.current_stream(device)
            before = {self._last[device]} if device in self._last else set()
            for p in [p for p in params if p.device == device]:
                stream, grad = self._of.pop(p)
                if stream != here:
                    before.add(stream)
                # FSDP2 makes gradients on one of its streams and may end them on another.
                if stream != here or is_distributed(p):
                    for memory in (grad._indices(), grad._values()) if grad.is_sparse else (grad,):
                        memory.record_stream(here)  # it is not given to anybody else before that
            for stream in before - {here}:
                here.wait_stream(stream)
            self._last[device] = here

    def end(self) -> None:
        """What the caller of a backward launches next sees what was written to the buffers.

        The engine has its streams wait for those of the parameters. But a bucket is folded by the thread of one device,
        on whatever stream of the others is current there.
        """
        for device, last in self._last.items():
            here = torch.cuda.current_stream(device)
            if last != here:
                here.wait_stream(last)
                self._last[device] = here
