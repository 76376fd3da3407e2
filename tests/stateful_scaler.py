"""The machine with a `torch.amp.GradScaler`: micro-batches whose loss is scaled, with and without amp_scaling."""

from __future__ import annotations

import torch
from stateful import Machine
from stateful_drawn import as_arguments, read

START = 8.0
RANGE = 0.25, 128.0  # of scales: gradients of float16 stay finite


class Scaled(Machine):
    """scaler: None, or what scales. Scales are powers of two: unscaling rounds nothing."""

    def one_call(self, call):
        if self.scaler is None or call.scaled == "no":
            super().one_call(call)
        else:
            self.scaled_call(call)

    def scaled_call(self, call):
        count, said = self.counted(call)
        if said in ("before", "closure"):  # a scaler takes no closure
            self.announce(count)
        self.backward(call.grads, call.bad, call.sparse, scaled=True)
        if all(p.grad is None for p in self.params):  # at which a scaler raises
            self.must_raise = self.model.will_raise(count)
            self.model.fold(count)
            self.take_step((), as_arguments(count) if said == "step" else {})
            return
        self.unscale(early=call.scaled == "unscaled first")
        overflowed, updates = not self.model.is_finite(), self.w.updates
        reached = self.options["amp_scaling"] or not overflowed
        if reached:
            self.model.fold(count, overflowed)
        self.scaler.step(self.w, **(as_arguments(count) if said == "step" else {}))
        self.scaler.update(call.scale if RANGE[0] < self.scaler.get_scale() < RANGE[1] else START)
        if reached and self.model.full:
            self.close_model()
        elif not reached:
            assert self.w.updates == updates
            self.forget_gradients(self.w)

    def unscale(self, early):
        """In the model, and where it comes `early` by the scaler itself, which else does it in its step()."""
        scale = self.scaler.get_scale()
        for p, m in zip(self.params, self.model.params, strict=True):
            if m.grad is not None:
                if p.dtype == torch.float16 and p.grad.is_sparse:
                    m.grad = read(p.grad.coalesce())  # as the scaler does when it looks for overflows
                m.grad = m.grad / scale
        if early and all(p.grad is None or p.dtype != torch.float16 for p in self.params):
            self.scaler.unscale_(self.w)
            self.agree()
