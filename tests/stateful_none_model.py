"""What the machine of tests/stateful_none.py holds against, and what it draws."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import rule
from stateful_drawn import bad_drawn, grads_drawn, sparse_drawn
from stateful_model import Model


class LiveModel(Model):
    """The sum is what p.grad holds, and stays. grad_error: of it. hooked: whether autograd hands it to us, in FP32."""

    def reset(self):
        super().reset()
        for p in self.params:
            p.sum_error = 0.0

    def mean(self, p):
        return p.sum, p.sum_error

    def step(self):
        for p in self.params:
            p.sum, p.sum_error = p.grad, p.grad_error
        self.calls, self.length = 1, 1
        self.close()
        self.length = None


@dataclass(frozen=True)
class Window:
    """Backwards, then step() and zero_grad(), or not. scaled: by a GradScaler."""

    backwards: list
    bad: tuple | None
    sparse: tuple
    clip: float | None
    scaled: bool
    zero: str


ZERO = ["wrapper", "optimizer in place", "by hand", "not"]
windows_drawn = st.builds(
    Window,
    backwards=st.lists(grads_drawn, max_size=3),
    bad=bad_drawn,
    sparse=sparse_drawn,
    clip=st.sampled_from([None, None, None, 0.5, 8.0]),
    scaled=st.booleans(),
    zero=st.sampled_from(ZERO),
)
factors = st.sampled_from([0.5, -2.0, 0.0])


def event(**drawn):
    """A rule after which some windows follow: what it has done shows in them."""

    def decorate(function):
        def with_windows(self, then, **given):
            function(self, **given)
            self.agree()
            self.run_windows(then)

        with_windows.__name__ = function.__name__
        return rule(then=st.lists(windows_drawn, max_size=2), **drawn)(with_windows)

    return decorate
