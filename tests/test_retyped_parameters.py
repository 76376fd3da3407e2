"""Parameters that are converted to another dtype, and their moments, sums, masters and checkpoints."""

from __future__ import annotations

import copy

import pytest
import torch
from change_runs import SHAPES, SPARE, STEPS, VARIANTS, compare, every_moment, train_in_windows, twin
from torch.optim import SGD, AdamW
from wrapper_helpers import (
    LOW_PRECISION,
    both_updates,
    every_maker,
    make_windows,
    set_grads,
    state_bits,
    tidy,  # noqa: F401
    uniform,
    wrap,
)

from fusedaccum import FusedAccumOptimizer

pytestmark = LOW_PRECISION


def retype(dtype):
    """`model.to(dtype)`. Bare torch needs its moments converted by hand, as its loader does; float64 keeps all bits."""

    def change(optimizer, params):
        exact = params[0].dtype == torch.float64
        for p in params:
            p.data = p.data.to(dtype).to(torch.float64 if exact else dtype)
            for key, value in optimizer.state.get(p, {}).items():
                if key != "step" and not exact and not isinstance(optimizer, FusedAccumOptimizer):
                    optimizer.state[p][key] = value.to(dtype)

    return change


RETYPED = {name: variant for name, variant in VARIANTS.items() if name != "fused-bf16-masters"} | {
    # Masters are derived again from what the conversion has rounded, so that the measure is bf16 as well.
    "fused-bf16-masters": (VARIANTS["fused-bf16-masters"][0], torch.bfloat16, torch.bfloat16)
}


@pytest.mark.parametrize("variant", RETYPED.values(), ids=RETYPED)
@every_maker
@every_moment
@pytest.mark.parametrize("there", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_retyped_there_and_back(there, moment, make, variant):
    """Moments follow the parameter, unless `state_dtype` says otherwise: Adam raises, with some counts advanced."""
    options, dtype, _ = variant
    w = compare(make, variant, {moment: retype(there), (4, 1): retype(dtype)}, lambda k, i, m: k == SPARE)
    for p in w.param_groups[0]["params"]:
        moments = {value.dtype for key, value in w.state[p].items() if key != "step"}
        assert moments == {options.get("state_dtype", dtype)}


def test_moments_with_a_dtype_of_their_own_keep_it_and_their_bits():
    """Those that `state_dtype` asks for, and those that were there when the optimizer was wrapped."""
    p, q = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    w = wrap(SGD([p], lr=1.0, momentum=1.0), 1, state_dtype=torch.float32)
    inner = SGD([q], lr=1.0, momentum=1.0)
    inner.state[q]["momentum_buffer"] = torch.full((3,), 1 / 3)
    used = wrap(inner, 1)
    for wrapper, r, first, dtype in ((w, p, 1 / 3, torch.bfloat16), (used, q, 0.0, torch.float16)):
        set_grads([r], [torch.full((3,), first)])
        wrapper.step()
        r.data = r.data.to(dtype)
        set_grads([r], [torch.zeros(3)])
        wrapper.step()
        assert torch.equal(wrapper.state[r]["momentum_buffer"], torch.full((3,), 1 / 3))


OPTIMIZERS = (
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
)


@pytest.mark.parametrize("name", [*OPTIMIZERS, "Rprop", "SGD"])
@pytest.mark.parametrize("change", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_every_wrapped_optimizer(change, name):
    """Bit-equal to the bare one, whose state is converted by hand: Adafactor's rows and columns too."""

    def train(wrapped):
        params = [torch.nn.Parameter(uniform(*s, seed=n, dtype=change[0])) for n, s in enumerate(((4, 4), (6, 5)))]
        optimizer = getattr(torch.optim, name)(params, lr=0.1, **({"momentum": 0.9} if name == "SGD" else {}))
        stepper = wrap(optimizer, 1, update="wrapped") if wrapped else optimizer
        for k in range(4):
            if k == 2:
                for p in params:
                    p.data = p.data.to(change[1])
                    for key, value in optimizer.state[p].items() if not wrapped else ():
                        if isinstance(value, torch.Tensor) and value.dim() > 0:
                            optimizer.state[p][key] = value.to(change[1])
            set_grads(params, [uniform(*p.shape, seed=10 + k) for p in params])
            stepper.step()
        return state_bits(params), state_bits([dict(optimizer.state[p]) for p in params])

    assert train(True) == train(False)


@both_updates
def test_a_scalar_parameter_is_retyped(update):
    """Its step count has its shape, and stays float32."""
    p = torch.nn.Parameter(torch.ones(()))
    w = wrap(AdamW([p], lr=0.5), 1, update=update)
    for dtype in (torch.float32, torch.bfloat16):
        p.data = p.data.to(dtype)
        set_grads([p], [torch.ones(())])
        w.step()
    entries = w.state[p]
    assert (entries["step"].dtype, entries["step"].item()) == (torch.float32, 2)
    assert entries["exp_avg"].dtype == torch.bfloat16


@both_updates
@every_maker
def test_a_checkpoint_from_before_a_retyping(make, update):
    """Sums come back in FP32, moments in the dtype that the parameters have now, as in torch."""
    start = [uniform(*s, seed=n, dtype=torch.bfloat16) for n, s in enumerate(SHAPES)]
    windows = make_windows(SHAPES, 3, STEPS, torch.bfloat16)
    results = []
    for early in (True, False):
        inner, params = twin(make, start, torch.float32)
        w = wrap(inner, STEPS, update=update)
        train_in_windows(w, params, windows[:2], {})
        set_grads(params, windows[2][0])
        w.step()
        saved = copy.deepcopy(w.state_dict())
        if early:
            retype(torch.bfloat16)(w, params)
            w.load_state_dict(saved)
        else:
            w.load_state_dict(saved)
            retype(torch.bfloat16)(w, params)
        for grads in windows[2][1:]:
            set_grads(params, grads)
            w.step()
        assert w.updates == 3
        results.append([state_bits(params), state_bits([dict(w.state[p]) for p in params if p in w.state])])
    assert results[0] == results[1]
