"""Scripts for tests/test_steps_none.py: what training loops do to `p.grad`, each right with a bare optimizer.

A script takes a `Run` and uses nothing but its `opt`, `params`, `module`, `loss` and `backward`.
"""

from __future__ import annotations

import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

SCRIPTS = {}
ROUNDS = set()  # scripts that hold a loss or gradient of their own in the parameters' dtype, which rounds it


def script(function):
    SCRIPTS[function.__name__] = function
    return function


def rounding_script(function):
    ROUNDS.add(function.__name__)
    return script(function)


# Zeroing


@script
def three_windows(run):
    for k in range(0, 9, 3):
        run.window(k, k + 1, k + 2)


@script
def one_backward_a_window(run):
    for k in range(3):
        run.window(k)


@script
def never_zeroed(run):
    for k in range(4):
        run.backward(k)
        run.opt.step()
        run.note_grads()


@script
def zeroed_in_place(run):
    for k in range(0, 6, 2):
        run.opt.zero_grad(set_to_none=False)
        run.backward(k, k + 1)
        run.opt.step()
    run.opt.zero_grad(set_to_none=False)
    run.note_grads()
    run.backward(6, 7)


@script
def zeroed_by_the_model(run):
    for k in range(0, 6, 2):
        run.backward(k, k + 1)
        run.opt.step()
        run.module.zero_grad(set_to_none=k == 2)


@script
def zeroed_ahead_of_the_backward(run):
    for k in range(3):
        run.opt.zero_grad()
        run.backward(k)
        run.opt.step()


@script
def given_up_in_mid_window(run):
    run.window(0, 1)
    run.backward(2, 3)
    run.opt.zero_grad()
    run.window(4)
    run.backward(5)
    run.opt.zero_grad(set_to_none=False)
    run.window(6)


@script
def some_set_to_none_by_hand(run):
    run.backward(0, 1)
    run.params[0].grad = run.params[2].grad = None
    run.window(2)
    run.backward(3)
    run.params[1].grad = None
    run.opt.step()
    run.backward(4)
    run.note_grads()


@script
def some_zeroed_by_hand(run):
    run.backward(0, 1)
    run.params[0].grad.zero_()
    run.params[1].grad.detach_().zero_()
    run.params[2].grad.detach().zero_()
    run.params[3].grad.data.zero_()
    run.window(2)


# Steps


@script
def steps_without_a_gradient(run):
    run.opt.step()
    run.window(0)
    run.opt.step()
    run.window(1)


@script
def two_steps_on_one_gradient(run):
    run.backward(0, 1)
    run.opt.step()
    run.opt.step()
    run.window(2)


@script
def parameters_take_turns(run):
    run.window(0, 1, only=[0, 2])
    run.backward(2, only=[1])
    run.window(3, only=[0])
    run.window(4, 5, only=[3])


@rounding_script
def a_closure(run):
    def closure():
        run.opt.zero_grad()
        loss = run.loss(3)
        loss.backward()
        return loss

    run.note(run.opt.step(closure))
    run.note(run.opt.step(closure))


@script
def a_schedule(run):
    schedule = torch.optim.lr_scheduler.StepLR(run.opt, step_size=1, gamma=0.5)
    for k in range(3):
        run.window(k)
        schedule.step()
        run.note(schedule.get_last_lr()[0])


# Gradients edited and replaced


@script
def edited(run):
    run.backward(0, 1)
    for p in run.params:
        p.grad.mul_(0.5)
        p.grad += 0.25
        p.grad.data.mul_(2)
    run.window(2)


@script
def data_replaced(run):
    run.backward(0, 1)
    for p in run.params:
        p.grad.data = p.grad.data * 0.5
    run.backward(2)
    run.note_grads()
    for p in run.params:
        p.grad.data = p.grad.data.clamp(-8, 8)
    run.opt.step()
    run.backward(3)
    run.note_grads()


@script
def replaced(run):
    run.backward(0)
    run.params[0].grad = torch.full_like(run.params[0].grad, 0.5)
    run.params[1].grad = run.params[1].grad * 2
    run.params[2].grad = run.params[2].grad.clone()
    run.params[3].grad = run.params[3].grad.detach()
    run.window(1, 2)


@rounding_script
def set_where_there_was_none(run):
    for k in range(3):
        for p in run.params[1:]:
            p.grad = torch.full_like(p, 0.25 * k)
        run.backward(k, only=[0, 1])
        run.note_grads()
        run.opt.step()
        run.opt.zero_grad(set_to_none=k == 1)


@rounding_script
def tensors_of_their_own(run):
    """One flat tensor of the user's, which p.grad are views of, zeroed and scaled there."""
    flat = torch.zeros(sum(p.numel() for p in run.params), dtype=run.params[0].dtype)
    for p, grad in zip(run.params, flat.split([p.numel() for p in run.params]), strict=True):
        p.grad = grad.view_as(p)
    for k in range(3):
        flat.zero_()
        run.backward(k)
        flat.mul_(0.5)
        run.note_grads()
        run.opt.step()


@rounding_script
def not_contiguous(run):
    run.backward(0)
    run.params[1].grad = torch.arange(21.0).view(3, 7).t().to(run.params[1].dtype)
    run.params[2].grad = torch.arange(8194.0).to(run.params[2].dtype)[::2]
    run.params[0].grad = run.params[0].grad[:1].expand(5).clone()
    run.window(1)


@script
def exchanged(run):
    """Also between parameters whose sums lie in the same buffer, in a circle."""
    p, q = torch.nn.Parameter(run.params[0].detach().clone()), run.params[0]
    run.opt.add_param_group({"params": [p]})
    run.params.append(p)
    run.backward(0, 1)
    p.grad, q.grad = q.grad, p.grad
    run.window(2)
    run.backward(3)
    p.grad = q.grad
    run.opt.step()
    run.note_grads()
    run.opt.zero_grad()


@script
def flipped_within_its_memory(run):
    run.backward(0)
    p = run.params[1]
    p.grad = p.grad.flip(0)
    run.params[2].grad = run.params[2].grad.as_strided((4097,), (1,))
    run.window(1)


@script
def kept_without_a_copy(run):
    """What `p.grad` was stays what it was once p.grad is another."""
    run.backward(0)
    kept = [p.grad for p in run.params]
    run.opt.zero_grad()
    run.backward(1)
    run.note(kept[1])
    kept[2].mul_(0.5)
    for p, g in zip(run.params, kept, strict=True):
        p.grad.add_(g)
    run.opt.step()
    run.params[0].grad = torch.ones_like(kept[0])
    kept = [p.grad for p in run.params[1:]]
    run.opt.zero_grad()
    run.window(2)
    run.params[1].grad = kept[0]
    run.window(3)


@script
def handed_from_one_to_the_next(run):
    p, q = run.params[0], torch.nn.Parameter(run.params[0].detach().clone())
    run.opt.add_param_group({"params": [q]})
    run.params.append(q)
    run.backward(0)
    q.grad, p.grad = p.grad, None
    run.backward(1)
    run.opt.step()
    q.grad, p.grad = p.grad, None
    run.window(2)


@script
def stashed_and_put_back(run):
    """As gradient surgery does."""
    run.backward(0)
    kept = [p.grad.clone() for p in run.params]
    run.opt.zero_grad()
    run.backward(1)
    for p, g in zip(run.params, kept, strict=True):
        p.grad.copy_((p.grad + g) / 2)
    run.window(2)


# Clipping and norms


@script
def clipped(run):
    for k, foreach in enumerate((None, True, False)):
        run.backward(2 * k, 2 * k + 1)
        run.note(clip_grad_norm_(run.params, 1.0, foreach=foreach))
        run.window()


@script
def clipped_by_value(run):
    for k, foreach in enumerate((None, True, False)):
        run.backward(2 * k, 2 * k + 1)
        clip_grad_value_(run.params, 4.0, foreach=foreach)
        run.window()


@script
def clipped_and_never_zeroed(run):
    for k in range(3):
        run.backward(k)
        run.note(clip_grad_norm_(run.params, 0.5, norm_type=float("inf") if k == 1 else 2.0))
        run.opt.step()


@script
def norms_logged(run):
    run.backward(0, 1)
    run.note(torch.nn.utils.get_total_norm([p.grad for p in run.params]))
    run.note(max(p.grad.abs().max() for p in run.params))
    run.window(2)
