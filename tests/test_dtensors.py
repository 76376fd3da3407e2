"""Parameters that are DTensors, whoever has made them: given the same gradients, the same bits as plain ones in one
process, whatever their placements.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from processes import on_ranks
from shards import closing, distributed, mesh_of
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Muon, NAdam
from wrapper_helpers import LOW_PRECISION, bits, make_windows, params_of, uniform

from fusedaccum import FusedAccumOptimizer

pytestmark = LOW_PRECISION

SHAPES = [(8, 6), (5, 3), (1,), (3, 4), (7,), ()]
STEPS = 4
ONE_DIM = [[Shard(0)], [Shard(1)], [Shard(0)], [Shard(0)], [Replicate()], [Replicate()]]
TWO_DIMS = [
    [Replicate(), Shard(0)],
    [Shard(1), Shard(0)],
    [Shard(0), Replicate()],
    [Shard(0), Shard(0)],
    [Replicate(), Shard(0)],
    [Replicate(), Replicate()],
]
STATE = {"master_weights": True, "state_dtype": torch.float32}
CASES = {
    "adamw": (lambda p: AdamW(p, lr=0.05, weight_decay=0.3), torch.float32, {}),
    "amsgrad, wrapped": (lambda p: Adam(p, lr=0.05, amsgrad=True), torch.float32, {"update": "wrapped"}),
    "sgd": (lambda p: SGD(p, lr=0.1, momentum=0.9), torch.float32, {}),
    "sgd, skips": (lambda p: SGD(p, lr=0.1, momentum=0.9), torch.float32, {"nonfinite": "skip_micro"}),
    "wrapped, skips": (lambda p: SGD(p, lr=0.1), torch.float32, {"nonfinite": "skip_micro", "update": "wrapped"}),
    "masters": (lambda p: AdamW(p, lr=0.05), torch.bfloat16, STATE),
    "fp16": (lambda p: AdamW(p, lr=0.05), torch.float16, STATE),
    "bf16 moments": (lambda p: AdamW(p, lr=0.05), torch.float32, {"state_dtype": torch.bfloat16}),
    "complex": (lambda p: SGD(p, lr=0.1, momentum=0.9), torch.complex64, {}),
}


def windows_of(dtype):
    real = torch.float32 if dtype.is_complex else dtype
    windows = make_windows(SHAPES, 2, STEPS, real)
    # One that is not touched in the second window, and one micro-batch that holds a NaN somewhere in the last shard.
    return windows if not dtype.is_complex else [[[g * (1 + 0.5j) for g in m] for m in w] for w in windows]


def start_of(dtype):
    return [uniform(*shape, seed=k).to(dtype) for k, shape in enumerate(SHAPES)]


def feed(params, wrapper, windows, place):
    for number, window in enumerate(windows):
        for k, micro in enumerate(window):
            grads = list(micro)
            if number == 1:
                grads[3] = None
            if wrapper._window.options.nonfinite == "skip_micro" and k == 2:
                grads[0] = grads[0].clone()
                grads[0][-1, -1] = float("nan")  # on the last rank alone
            for i, (p, g) in enumerate(zip(params, grads, strict=True)):
                p.grad = None if g is None else place(i, g.to(p.dtype))
            wrapper.step()


def summary(params, wrapper):
    """Bits of whole parameters and moments, and what the wrapper says."""
    full = lambda t: t.full_tensor() if isinstance(t, DTensor) else t  # noqa: E731
    state = [(k, key) for k, p in enumerate(params) for key in sorted(wrapper.state[p])]
    tensors = [*params, *(wrapper.state[params[k]][key] for k, key in state)]
    return state, [bits(full(t.detach())) for t in tensors], wrapper.grad_norm, wrapper.updates


def plain(make, dtype, options):
    params = [Parameter(t) for t in start_of(dtype)]
    wrapper = FusedAccumOptimizer(make(params), STEPS, **options)
    feed(params, wrapper, windows_of(dtype), lambda i, g: g)
    return summary(params, wrapper), wrapper.skipped_micro_batches


def on_a_mesh(shape, placements):
    mesh, found = mesh_of(*shape), {}
    for name, (make, dtype, options) in CASES.items():
        params = [Parameter(distributed(t, mesh, p)) for t, p in zip(start_of(dtype), placements, strict=True)]
        wrapper = FusedAccumOptimizer(make(params), STEPS, **options)
        feed(params, wrapper, windows_of(dtype), lambda i, g: distributed(g, mesh, placements[i]))
        found[name] = summary(params, wrapper), wrapper.skipped_micro_batches
    return found


@pytest.mark.parametrize(
    ("ranks", "shape", "placements"),
    [(2, (), ONE_DIM), (4, (2, 2), TWO_DIMS), (4, (1, 4), TWO_DIMS)],
    ids=["2", "2 x 2", "1 x 4"],
)
def test_the_same_bits_as_in_one_process(ranks, shape, placements):
    results = on_ranks(ranks, on_a_mesh, shape, placements)
    for name, case in CASES.items():
        (state, tensors, norm, updates), skipped = plain(*case)
        for result in results:
            (its_state, its_tensors, its_norm, its_updates), its_skipped = result[name]
            assert (its_state, its_tensors, its_updates) == (state, tensors, updates), name
            assert its_norm == results[0][name][0][2] == pytest.approx(norm, rel=1e-7), name
            assert its_skipped == skipped == (2 if "skips" in name else 0)


def policies():
    """What a NaN in the last rank's shard leads to on every rank."""
    mesh, said = mesh_of(), {}
    for policy in ("skip_window", "skip_micro", "raise"):
        p = Parameter(distributed(torch.zeros(4), mesh, [Shard(0)]))
        q = Parameter(distributed(torch.zeros(2), mesh, [Replicate()]))
        wrapper = FusedAccumOptimizer(SGD([p, q], lr=1.0), 2, nonfinite=policy, max_norm=100.0)
        with closing(wrapper):
            caught = ""
            for bad in (True, False, False, False):
                g = torch.ones(4)
                g[3] = float("nan") if bad else 1.0
                p.grad, q.grad = distributed(g, mesh, [Shard(0)]), distributed(torch.ones(2), mesh, [Replicate()])
                try:
                    wrapper.step()
                except FloatingPointError as error:
                    caught = str(error)
                    wrapper.zero_grad()
            norm = wrapper.grad_norm
            said[policy] = (
                p.full_tensor().tolist() + q.full_tensor().tolist(),
                (wrapper.updates, wrapper.skipped_windows, wrapper.skipped_micro_batches, wrapper.pending),
                norm,
                caught,
            )
    return said


def overflows():
    """A GradScaler asks the ranks of the first gradient alone, here a replica, and the last rank's shard overflows."""
    mesh = mesh_of()
    q = Parameter(distributed(torch.zeros(2), mesh, [Replicate()]))
    p = Parameter(distributed(torch.zeros(4), mesh, [Shard(0)]))
    wrapper = FusedAccumOptimizer(SGD([q, p], lr=1.0), 2, amp_scaling=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for bad in (True, False):
        factor = float(scaler.scale(torch.ones(1)))
        g = torch.full((4,), factor)
        g[3] = float("inf") if bad else factor
        q.grad = distributed(torch.full((2,), factor), mesh, [Replicate()])
        p.grad = distributed(g, mesh, [Shard(0)])
        scaler.step(wrapper)
        scaler._per_optimizer_states.clear()  # update() would lower the scale on the last rank alone
        wrapper.zero_grad()
    return wrapper.updates, wrapper.skipped_micro_batches, p.full_tensor().tolist() + q.full_tensor().tolist()


def test_what_one_shard_overflows_is_left_out_by_all():
    assert on_ranks(2, overflows) == [(1, 1, [-1.0] * 6)] * 2


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_one_shard_holds_is_decided_for_all(ranks):
    results = on_ranks(ranks, policies)
    norm = pytest.approx(6**0.5, rel=1e-6)
    for result in results:
        assert result["skip_window"] == ([-1.0] * 6, (1, 1, 0, 0), norm, "")
        assert result["skip_micro"] == ([-2.0] * 6, (2, 0, 1, 0), norm, "")
        values, counts, its_norm, caught = result["raise"]
        assert (values, counts, its_norm) == ([-1.0] * 6, (1, 0, 0, 1), norm)
        assert "nonfinite='raise'" in caught
    assert "param_groups[0]['params'][0]" in results[-1]["raise"][3]
    assert "other ranks" in results[0]["raise"][3]


def with_collectives():
    """Optimizers whose update is a collective (torch's own Adafactor takes no shards), one shard being empty, and the
    bare ones, fed the mean.
    """
    mesh, found = mesh_of(), []
    shapes, makers = [(5, 4), (6, 5)], {"Muon": lambda p: Muon(p, lr=0.1), "NAdam": lambda p: NAdam(p, lr=0.1)}
    for nonfinite in ("propagate", "skip_micro", "skip_window"):
        for make in makers.values():
            sets = [[Parameter(distributed(uniform(*s), mesh, [Shard(0)])) for s in shapes] for _ in range(2)]
            bare, wrapper = make(sets[0]), FusedAccumOptimizer(make(sets[1]), 2, nonfinite=nonfinite)
            for seed in range(4):
                for p in sets[1]:
                    p.grad = distributed(uniform(*p.shape, seed=seed // 2), mesh, [Shard(0)])
                wrapper.step()
                if seed % 2:
                    for p in sets[0]:
                        p.grad = distributed(uniform(*p.shape, seed=seed // 2), mesh, [Shard(0)])
                    bare.step()
            found += [bits(a.full_tensor()) == bits(b.full_tensor()) for a, b in zip(*sets, strict=True)]
    return found


def test_wrapped_optimizers_that_communicate():
    for result in on_ranks(4, with_collectives):
        assert result == [True] * 12


def other_gradients():
    """Gradients placed otherwise and of another mesh; parameters, options and calls that are refused."""
    mesh = mesh_of()
    p = Parameter(distributed(torch.zeros(4), mesh, [Shard(0)]))
    q = Parameter(distributed(torch.zeros(4), mesh, [Replicate()]))
    wrapper = FusedAccumOptimizer(SGD([p, q], lr=1.0), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        p.grad = distributed(torch.arange(4.0), mesh, [Replicate()])
        q.grad = DTensor.from_local(torch.full((4,), dist.get_rank() + 1.0), mesh, [Partial()])
    wrapper.step()
    values = p.full_tensor().tolist(), q.full_tensor().tolist()
    held = lambda: (wrapper.pending, wrapper.updates, p.full_tensor().tolist())  # noqa: E731
    before, errors = held(), []

    def fails(call, *errors_of):
        with pytest.raises(errors_of) as caught:
            call()
        errors.append(str(caught.value))
        assert held() == before

    p._grad = None
    strange = torch.nn.Parameter(DTensor.from_local(torch.zeros(4), mesh, [Partial()]))
    fails(lambda: FusedAccumOptimizer(SGD([strange], lr=1.0), 2), TypeError)
    fails(lambda: wrapper.add_param_group({"params": [strange]}), TypeError)
    fails(lambda: FusedAccumOptimizer(SGD([p], lr=1.0), 2, process_group=dist.group.WORLD), ValueError)
    p.grad = distributed(torch.ones(4), mesh, [Shard(0)])
    fails(lambda: wrapper.step(mean_of=3), ValueError)
    fails(lambda: wrapper.micro_batch(sum_of=3), ValueError)
    other = mesh_of(1, 2)
    p.grad = None
    p.grad = distributed(torch.ones(4), other, [Replicate(), Shard(0)])
    fails(wrapper.step, TypeError)
    return values, errors


def test_what_is_redistributed_and_what_is_refused():
    for values, errors in on_ranks(2, other_gradients):
        assert values == ([0.0, -1.0, -2.0, -3.0], [-3.0] * 4)
        placed, added, group, counts, announced, mesh = errors
        for text in (placed, added):
            assert "parameter 0 is a DTensor" in text
            assert "Partial" in text
            assert "redistribute()" in text
        assert "leave process_group out" in group
        for text in (counts, announced):
            assert "n * ranks * steps" in text
        assert "over the same mesh" in mesh


def life():
    """Copies, master_grad, hooks that edit, and a change of dtype."""
    mesh = mesh_of()
    p = Parameter(distributed(torch.zeros(3), mesh, [Shard(0)]))
    p_grad = lambda v: distributed(torch.full((3,), v), mesh, [Shard(0)])  # noqa: E731
    wrapper = FusedAccumOptimizer(SGD([p], lr=1.0), 2)
    said = [wrapper.master_grad(p).full_tensor().tolist()]
    p.grad = p_grad(2.0)
    wrapper.step()
    grad = wrapper.master_grad(p)
    said.append((type(grad) is DTensor, grad.placements == p.placements, grad.full_tensor().tolist()))
    twin = copy.deepcopy(wrapper)
    (q,) = params_of(twin)
    wrapper.register_step_pre_hook(lambda *_: [wrapper.master_grad(p).mul_(10.0), None][1])
    for w, param in ((wrapper, p), (twin, q)):
        param.grad = p_grad(4.0)
        version = param._version
        w.step()
        assert param._version > version  # as autograd has to know
        said.append(param.full_tensor().tolist())
    said.append(grad.full_tensor().tolist())
    return said


def test_sums_are_shown_as_dtensors_and_copied():
    for said in on_ranks(2, life):
        assert said == [[0.0] * 3, (True, True, [1.0] * 3), [-30.0] * 3, [-3.0] * 3, [0.0] * 3]


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise OSError("half-way")


def changes():
    """Masters follow parameters that are written to from outside; a backward that fails leaves its gradients."""
    mesh, said = mesh_of(), []
    p = Parameter(distributed(torch.ones(3, dtype=torch.bfloat16), mesh, [Shard(0)]))
    wrapper = FusedAccumOptimizer(SGD([p], lr=0.25), 1, master_weights=True)
    for write in (lambda: None, lambda: p.mul_(4.0), lambda: p.to_local().add_(8.0)):
        with torch.no_grad():
            write()
        p.grad = distributed(torch.ones(3, dtype=torch.bfloat16), mesh, [Shard(0)])
        wrapper.step()
        said.append(p.full_tensor().tolist())
    first, last = (Parameter(distributed(torch.ones(2), mesh, [Shard(0)])) for _ in range(2))
    failing = FusedAccumOptimizer(SGD([first, last], lr=1.0), 2, fold="backward")
    with pytest.raises(OSError, match="half-way"):
        ((Fails.apply(first) * 2).sum() + (last * 3).sum()).full_tensor().backward()
    said.append((first.grad, last.grad.placements == last.placements, last.grad.full_tensor().tolist()))
    failing.step()
    said.append(failing.master_grad(last).full_tensor().tolist())
    failing.reset()
    return said


def test_changes_from_outside_and_failures():
    for said in on_ranks(2, changes):
        assert said == [[0.75] * 3, [2.75] * 3, [10.5] * 3, (None, True, [3.0] * 2), [1.5] * 2]


def rounds(shape, placements):
    """bf16 parameters that are rounded at random: this rank's elements after each of two updates."""
    mesh, found = mesh_of(*shape), []
    p = Parameter(distributed(torch.ones(4096, dtype=torch.bfloat16), mesh, placements))
    wrapper = FusedAccumOptimizer(SGD([p], lr=2.0**-10), 1, rounding="stochastic", rounding_seed=5)
    for _ in range(2):
        p.grad = distributed(torch.ones(4096, dtype=torch.bfloat16), mesh, placements)
        wrapper.step()
        found.append(p.to_local().detach().float().tolist())
    return found


def test_shards_are_rounded_by_numbers_of_their_own_and_replicas_alike():
    a, b = on_ranks(2, rounds, (), [Shard(0)])
    assert a[0] != b[0]
    mean = sum(a[0] + b[0]) / 4096
    assert abs(mean - (1 - 2.0**-10)) < 6 * 2.0**-8 / 2 / 64
    results = on_ranks(4, rounds, (2, 2), [Replicate(), Shard(0)])
    assert results[0] == results[2] != results[1] == results[3]


def plain_gradients_on_one_rank():
    """A plain parameter beside a DTensor gets a gradient on rank 0 alone: the norm is still taken by all."""
    mesh = mesh_of(2)
    p, q = Parameter(distributed(torch.arange(8.0), mesh, [Shard(0)])), Parameter(torch.zeros(2))
    opt = FusedAccumOptimizer(SGD([p, q], lr=1.0), 1, max_norm=100.0)
    p.grad = distributed(torch.ones(8), mesh, [Shard(0)])
    if dist.get_rank() == 0:
        q.grad = torch.ones(2)
    opt.step()
    return opt.grad_norm, p.full_tensor().tolist()


def test_plain_gradients_on_one_rank_alone():
    for norm, values in on_ranks(2, plain_gradients_on_one_rank):
        assert norm == pytest.approx(10**0.5)  # 8 of the DTensor, and the larger of 2 and 0
        assert values == [v - 1.0 for v in range(8)]
