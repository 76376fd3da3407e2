"""More scripts for tests/test_steps_none.py: hooks of all kinds, and backwards that are more than one after another."""

from __future__ import annotations

import contextlib

import torch
from live_scripts import ROUNDS, SCRIPTS, script
from torch.nn.utils import clip_grad_norm_

__all__ = ["ROUNDS", "SCRIPTS"]

# Hooks on the optimizer


@script
def pre_hook_edits(run):
    run.opt.register_step_pre_hook(lambda *_: [p.grad.mul_(0.5) for p in run.params] and None)
    run.window(0, 1)
    run.window(2)


@script
def pre_hook_clips(run):
    def clip(*_):
        run.note(clip_grad_norm_(run.params, 1.0))

    run.opt.register_step_pre_hook(clip)
    run.window(0, 1)
    run.window(2)


@script
def pre_hook_drops(run):
    def drop(*_):
        run.params[0].grad = None

    handle = run.opt.register_step_pre_hook(drop)
    run.window(0, 1)
    handle.remove()
    run.window(2)


@script
def pre_hook_replaces(run):
    def replace(*_):
        run.params[1].grad = torch.ones_like(run.params[1].grad)

    run.opt.register_step_pre_hook(replace)
    run.window(0, 1)
    run.window(2)


@script
def post_hook_zeroes(run):
    run.opt.register_step_post_hook(lambda *_: run.opt.zero_grad())
    run.window(0, 1)
    run.backward(2)
    run.opt.step()
    run.note_grads()
    run.window(3)


@script
def inner_hooks_edit(run):
    run.inner.register_step_pre_hook(lambda *_: [p.grad.mul_(0.5) for p in run.params] and None)
    run.backward(0)
    run.opt.step()
    run.backward(1)
    run.note_grads()


@script
def inner_hooks_drop(run):
    def drop(*_):
        run.params[0].grad = None

    run.inner.register_step_pre_hook(drop)
    run.backward(0)
    run.opt.step()
    run.note_grads()
    run.window(1)


@script
def inner_hooks_zero(run):
    for set_to_none in (True, False):
        handle = run.inner.register_step_post_hook(lambda opt, *_, s=set_to_none: opt.zero_grad(set_to_none=s))
        run.backward(0)
        run.opt.step()
        run.note_grads()
        run.backward(1)
        run.opt.step()
        handle.remove()


# Hooks on parameters


@script
def parameter_hooks(run):
    """They see, and change, what they see and change without us."""
    p, q = run.params[0], run.params[1]
    p.register_hook(lambda grad: grad * 0.5)
    q.register_hook(lambda grad: run.note(0.0 if q.grad is None else q.grad[0, 0]))
    q.register_post_accumulate_grad_hook(lambda q: run.note(q.grad[0, 1]))
    run.params[3].register_post_accumulate_grad_hook(lambda p: (p.grad.clamp_(-4, 4), None)[1])
    run.window(0, 1, 2)
    run.window(3, 4)


@script
def a_hook_takes_gradients(run):
    p = run.params[0]

    def take(p):
        run.note(p.grad)
        p.grad = None

    handle = p.register_post_accumulate_grad_hook(take)
    run.backward(0, 1)
    handle.remove()
    run.window(2)


# Backwards


@script
def gradients_asked_for(run):
    """Case 116: `torch.autograd.grad` fires the hooks of a backward that never comes."""
    for k in range(3):
        run.backward(k)
        run.note(torch.autograd.grad(run.loss(9), run.params)[0])
    run.note_grads()
    torch.autograd.grad(run.loss(9), run.params[1:])
    run.opt.step()
    torch.autograd.grad(run.loss(9), run.params)
    run.opt.zero_grad()
    torch.autograd.grad(run.loss(9), run.params)
    run.window(4)


@script
def a_part_of_the_leaves(run):
    run.backward(0)
    run.loss(1).backward(inputs=run.params[:2])
    run.loss(2).backward(inputs=[run.params[3]])
    run.window(3)


@script
def one_graph_twice(run):
    loss = run.loss(0)
    loss.backward(retain_graph=True)
    run.backward(1)
    loss.backward()
    run.window(2)


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("half-way")


@script
def backwards_that_raise(run):
    """Half-way: those after it in the loss have got their gradients by then. And at once."""
    run.backward(0)
    for loss in (Raises.apply(run.loss(1, only=[0, 1])) + run.loss(1, only=[2, 3]), Raises.apply(run.loss(2))):
        with contextlib.suppress(ArithmeticError):
            loss.backward()
        run.note_grads()
    run.backward(3)
    run.window()
    with contextlib.suppress(ArithmeticError):
        (Raises.apply(run.loss(1, only=[0])) + run.loss(1, only=[1])).backward()
    run.module.zero_grad()
    run.window(4, 5)


@script
def a_hook_that_raises(run):
    def fail(grad):
        raise ArithmeticError

    run.backward(0)
    handle = run.params[1].register_hook(fail)
    with contextlib.suppress(ArithmeticError):
        run.backward(1)
    handle.remove()
    for k in (0, 2, 3):  # which of these got theirs is autograd's affair
        run.params[k].grad = None
    run.window(2)
