"""The wrapper on a GPU: what the tables of operator cases, which run there too, do not show."""

from __future__ import annotations

import contextlib

import pytest
import torch
from conftest import backend_module
from test_trajectories import SHAPES, STEPS, build, halve_lr_once, start_values, stock_run
from torch.autograd import DeviceType
from torch.nn import Parameter
from torch.optim import SGD, AdamW
from torch.profiler import ProfilerActivity, profile
from wrapper_helpers import (
    DTYPES,
    LOW_PRECISION,
    adam_or_sgd_states,
    assert_within_budget,
    bits,
    make_params,
    make_windows,
    params_of,
    set_grads,
    tidy,  # noqa: F401
    train_stock,
    train_wrapped,
    wrap,
)

pytestmark = [pytest.mark.gpu, LOW_PRECISION]

DEVICE = torch.device("cuda")


@pytest.fixture(params=["compiled", "triton"])
def kernels(request):
    """The name of a backend that serves the GPU."""
    backend_module(request.param, DEVICE)
    return request.param


def moved(nest, device):
    """Any nest of lists of tensors, on `device`."""
    return [moved(entry, device) for entry in nest] if isinstance(nest, list) else nest.to(device)


def params_on(device, start, dtype):
    return [Parameter(p.detach().to(device)) for p in make_params(start, dtype)]


def draw(sizes, dtype=torch.float32, seed=0):
    """Normal values on the GPU, the same for the same seed."""
    random = torch.Generator().manual_seed(seed)
    whole = torch.randn(sum(sizes), generator=random).to(dtype).to(DEVICE)
    return [part.clone() for part in whole.split(list(sizes))]


def fold_all(wrapper, params, grads):
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad
    wrapper.step()


# Values


def tensors_of(optimizer):
    """Parameters and moments on the CPU, by name."""
    found = {("p", k): p for k, p in enumerate(params_of(optimizer))}
    found |= {(k, name): moment for k, name, moment in adam_or_sgd_states(optimizer)}
    return {key: tensor.detach().cpu() for key, tensor in found.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", ["adamw-amsgrad", "adamw-maximize", "adam-l2", "sgd-nesterov"])
def test_twenty_windows(rule, dtype, kernels):
    windows = make_windows(SHAPES, 20, STEPS, dtype)
    ours = {}
    for device, backend in ((DEVICE, kernels), (torch.device("cpu"), "auto")):
        ours[device] = build(rule, "groups", params_on(device, start_values(), dtype))
        wrapper = wrap(ours[device], STEPS, update="fused", backend=backend)
        train_wrapped(wrapper, moved(windows, device), halve_lr_once)
        assert wrapper.updates == 20
    stock = build(rule, "groups", params_on(DEVICE, start_values(), dtype))
    train_stock(stock, moved(windows, DEVICE), halve_lr_once)

    mine, theirs = tensors_of(ours[DEVICE]), tensors_of(stock)
    for other in (stock_run(rule, "groups", torch.float64, dtype), ours[torch.device("cpu")]):
        right = tensors_of(other)
        assert mine.keys() == theirs.keys() == right.keys()
        for key in mine:
            assert_within_budget(mine[key], theirs[key], right[key].double())


def test_masters_and_fp32_moments(kernels):
    """The parameters are the rounding of what FP32 parameters would be, which start as they do."""
    windows = make_windows(SHAPES, 20, STEPS, torch.bfloat16)
    ours = build("adamw", "groups", params_on(DEVICE, start_values(), torch.bfloat16))
    wrapper = wrap(ours, STEPS, master_weights=True, state_dtype=torch.float32, backend=kernels)
    train_wrapped(wrapper, moved(windows, DEVICE), halve_lr_once)
    stock = build("adamw", "groups", params_on(DEVICE, start_values(), torch.float32))
    train_stock(stock, moved(windows, DEVICE), halve_lr_once)
    truth = tensors_of(stock_run("adamw", "groups", torch.float64, torch.bfloat16))
    mine, theirs = tensors_of(ours), tensors_of(stock)
    assert mine.keys() == theirs.keys() == truth.keys()
    for key in mine:
        assert_within_budget(mine[key], theirs[key], truth[key])


def test_the_norm_has_the_same_bits_in_every_run(kernels):
    sizes = (1_000_003, 4097, 64_000, 1)
    seen = set()
    for _ in range(2):
        params = [Parameter(p) for p in draw(sizes, seed=1)]
        wrapper = wrap(AdamW(params), 2, max_norm=1.0, backend=kernels)
        for seed in (2, 3):
            fold_all(wrapper, params, draw(sizes, seed=seed))
        seen.add((wrapper.grad_norm.hex(), *map(bits, params)))
    assert len(seen) == 1
    first, second = (torch.cat(draw(sizes, seed=seed)).double() for seed in (2, 3))
    assert wrapper.grad_norm == pytest.approx(float(((first + second) / 2).norm()), rel=1e-6)


# Streams, devices, waiting


@contextlib.contextmanager
def waiting_refused():
    """What waits for the device raises, as long as the block runs."""
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_the_guard_sees_waiting():
    one = torch.ones(1, device=DEVICE)
    with waiting_refused(), pytest.raises(RuntimeError, match="synchroniz"):
        one.item()


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("masters", [False, True], ids=["plain", "masters"])
def test_nothing_waits_between_construction_and_state_dict(weighted, masters, kernels):
    dtype = torch.bfloat16 if masters else torch.float32
    params = params_on(DEVICE, start_values(), dtype)
    windows = moved(make_windows(SHAPES, 3, STEPS, dtype), DEVICE)
    counts = list(torch.tensor([3.0, 1.0, 2.0, 5.0]).to(DEVICE).unbind())
    with waiting_refused():
        wrapper = wrap(AdamW(params, lr=0.05), STEPS, max_norm=0.5, master_weights=masters, backend=kernels)
        for window in windows:
            for grads, count in zip(window, counts, strict=True):
                set_grads(params, grads)
                wrapper.step(mean_of=count if weighted else None)
                wrapper.zero_grad()
            for group in wrapper.param_groups:
                group["lr"] *= 0.9
    assert wrapper.updates == 3
    assert wrapper.state_dict()["state"][0]["step"] == 3
    assert torch.isfinite(torch.cat([p.detach().flatten() for p in params])).all()


def test_a_stream_that_is_not_the_default_one(kernels):
    """The gradient is written late, on a side stream: work on another stream would find the NaNs that were there."""
    p = Parameter(torch.zeros(100_000, device=DEVICE))
    wrapper = wrap(SGD([p], lr=1.0), 2, backend=kernels)
    grads = [torch.full_like(p, float("nan")) for _ in range(4)]
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for value, grad in enumerate(grads):
            torch.cuda._sleep(20_000_000)
            grad.fill_(float(value))
            fold_all(wrapper, [p], [grad])
    side.synchronize()
    assert torch.equal(p.detach(), torch.full_like(p, -(0.5 + 2.5)))
    assert wrapper.grad_norm == pytest.approx(2.5 * 100_000**0.5)


def test_a_device_that_is_not_current(kernels):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with torch.cuda.device(0):
        p = Parameter(torch.zeros(5000, device="cuda:1"))
        wrapper = wrap(AdamW([p], lr=0.1), 2, max_norm=1.0, backend=kernels)
        for _ in range(4):
            fold_all(wrapper, [p], [torch.ones_like(p)])
        assert wrapper.updates == 2
        assert torch.cuda.current_device() == 0
    q = Parameter(torch.zeros(5000, device="cuda:0"))
    twin = wrap(AdamW([q], lr=0.1), 2, max_norm=1.0, backend=kernels)
    for _ in range(4):
        fold_all(twin, [q], [torch.ones_like(q)])
    assert torch.equal(p.detach().cpu(), q.detach().cpu())


# Sizes, launches, memory


def assert_sums(wrapper, params, *folded):
    """The open window of 4 holds these micro-batches: multiplying by a power of two is exact, so is the comparison."""
    got = torch.cat([wrapper.master_grad(p).flatten() for p in params])
    right = torch.zeros_like(got)
    for grads in folded:
        right += torch.cat([grad.float().flatten() for grad in grads]) * 0.25
    assert torch.equal(got, right)


@pytest.mark.parametrize("count", [4001, 10_000])
def test_thousands_of_tensors(count, kernels):
    sizes = [k % 70 for k in range(count)]
    params = [Parameter(p) for p in draw(sizes)]
    wrapper = wrap(SGD(params, lr=1.0), 4, backend=kernels)
    folded = [draw(sizes, seed=seed) for seed in (1, 2)]
    for grads in folded:
        fold_all(wrapper, params, grads)
    assert_sums(wrapper, params, *folded)
    before = torch.cat([p.detach() for p in params])
    for _ in range(2):
        fold_all(wrapper, params, folded[0])
    mean = torch.cat([(3 * a.double() + b.double()) / 4 for a, b in zip(*folded, strict=True)])
    moved_by = before.double() - torch.cat([p.detach() for p in params]).double()
    assert torch.allclose(moved_by, mean, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_at_any_address(dtype, kernels):
    sizes = (1, 7, 4096, 4097, 9001)
    for offset in (1, 2, 3, 5):
        params = [Parameter(p) for p in draw(sizes, dtype)]
        wrapper = wrap(SGD(params, lr=1.0), 4, backend=kernels)
        folded = [[g[offset:] for g in draw([n + offset for n in sizes], dtype, seed)] for seed in (1, 2)]
        for grads in folded:
            fold_all(wrapper, params, grads)
        assert_sums(wrapper, params, *folded)


def launches(work):
    """How many kernels `work` starts, as the profiler sees it."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    on_device = [event.name for event in profiler.events() if event.device_type == DeviceType.CUDA]
    return sum(not name.startswith(("Mem", "Stream ", "Context ", "Event ")) for name in on_device)  # copies, waits


@pytest.mark.parametrize("count", [148, 4000])
def test_a_fold_is_one_launch(count, kernels):
    one = torch.ones(1, device=DEVICE)
    if launches(lambda: one.add_(1)) != 1:
        pytest.skip("torch's profiler does not see the kernels of this machine")
    sizes = [k % 70 + 1 for k in range(count)]
    grads = [g.to(DTYPES[k % 3]) for k, g in enumerate(draw(sizes))]
    params = [Parameter(torch.zeros_like(g)) for g in grads]
    wrapper = wrap(SGD(params, lr=1.0), 8, update="fused", backend=kernels)
    fold_all(wrapper, params, grads)
    assert launches(lambda: fold_all(wrapper, params, grads)) == 1
    for _ in range(6):
        fold_all(wrapper, params, grads)
    assert wrapper.updates == 1
    assert launches(lambda: fold_all(wrapper, params, grads)) == 1, "a first touch"


def test_more_than_two_to_the_31_elements(kernels):
    numel = 2**31 + 5
    need, (free, _) = (2 + 2 + 4) * numel + (2 << 30), torch.cuda.mem_get_info()
    if free < need:
        pytest.skip(f"needs {need / 1e9:.0f} GB of GPU memory, and {free / 1e9:.0f} are free")
    p = Parameter(torch.zeros(numel, dtype=torch.bfloat16, device=DEVICE))
    grad = torch.empty_like(p, requires_grad=False).uniform_(0.5, 1.5)
    wrapper = wrap(SGD([p], lr=1.0), 2, backend=kernels)
    fold_all(wrapper, [p], [grad])
    sums = wrapper.master_grad(p)
    assert all(torch.equal(a, b.float() * 0.5) for a, b in zip(sums.split(1 << 28), grad.split(1 << 28), strict=True))
    fold_all(wrapper, [p], [grad])
    assert all(torch.equal(a, -b) for a, b in zip(p.detach().split(1 << 28), grad.split(1 << 28), strict=True))


def test_four_bytes_a_parameter_and_no_more(kernels):
    sizes = (5_000_000, 3_000_000, 100)
    params = [Parameter(p) for p in draw(sizes, torch.bfloat16)]
    grads = draw(sizes, torch.bfloat16, seed=1)
    wrapper = wrap(SGD(params, lr=0.1), 3, max_norm=1.0, backend=kernels)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(6):
        fold_all(wrapper, params, grads)
    torch.cuda.synchronize()
    assert wrapper.updates == 2
    assert 4 <= (torch.cuda.max_memory_allocated() - before) / sum(sizes) <= 4.05
