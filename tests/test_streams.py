"""Which stream waits for which where gradients come on several. The streams are made up: any machine can run this."""

from __future__ import annotations

import pytest
import torch
from backward_runs import BYTE, sgd_pair
from wrapper_helpers import tidy  # noqa: F401

from fusedaccum import folding
from fusedaccum.streams import Streams

DEVICES = torch.device("cuda", 0), torch.device("cuda", 1)


class Stream:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


class Gradient:
    is_sparse = False

    def __init__(self, name, log):
        self.name, self.log = name, log

    def record_stream(self, stream):
        self.log.append(f"{self.name} is in use on {stream.name}")


class Sparse(Gradient):
    is_sparse = True

    def _indices(self):
        return Gradient(f"indices of {self.name}", self.log)

    def _values(self):
        return Gradient(f"values of {self.name}", self.log)

    def record_stream(self, stream):
        raise NotImplementedError("aten::record_stream of a sparse tensor")


class Param:
    def __init__(self, device):
        self.device = device


class Machine:
    """Streams by name, one current on each device, and what was asked of them."""

    def __init__(self, monkeypatch):
        self.log = []
        self.current = {}
        self.streams = Streams()
        monkeypatch.setattr(torch.cuda, "current_stream", self.current.__getitem__)
        self.stream = {name: Stream(name, self.log) for name in ("main", "side", "third", "other")}
        self.on("main")
        self.on("other", DEVICES[1])

    def on(self, name, device=DEVICES[0]):
        self.current[device] = self.stream[name]

    def comes(self, name, device=DEVICES[0], kind=Gradient):
        p = Param(device)
        self.streams.note(p, kind(name, self.log))
        return p

    def fold(self, *params):
        self.log.clear()
        self.streams.join(params)
        return sorted(self.log)


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def test_one_stream_waits_for_nothing(machine):
    for _ in range(3):
        assert machine.fold(machine.comes("a"), machine.comes("b")) == []


def test_a_fold_waits_for_the_streams_of_its_gradients(machine):
    machine.on("side")
    a, b = machine.comes("a"), machine.comes("b")
    machine.on("third")
    c = machine.comes("c")
    machine.on("main")
    d = machine.comes("d")
    assert machine.fold(a, b, c, d) == [
        "a is in use on main",
        "b is in use on main",
        "c is in use on main",
        "main waits for side",
        "main waits for third",
    ]


def test_a_fold_waits_for_the_one_before(machine):
    """Both write to the buffer; also where the gradients in between came on the later one's stream."""
    machine.fold(machine.comes("a"))
    machine.on("side")
    assert machine.fold(machine.comes("b")) == ["side waits for main"]
    assert machine.fold(machine.comes("c")) == []
    machine.on("main")
    assert machine.fold(machine.comes("d")) == ["main waits for side"]


def test_both_at_once(machine):
    machine.on("third")
    machine.fold(machine.comes("a"))
    machine.on("side")
    b = machine.comes("b")
    machine.on("main")
    assert machine.fold(b) == ["b is in use on main", "main waits for side", "main waits for third"]


def test_devices_are_apart(machine):
    """Each buffer is ordered on its own device."""
    machine.on("side")
    a = machine.comes("a")
    machine.on("main")
    b = machine.comes("b", DEVICES[1])
    assert machine.fold(b) == []
    assert machine.fold(a) == ["a is in use on main", "main waits for side"]
    c = machine.comes("c")
    machine.on("third", DEVICES[1])
    assert machine.fold(c, machine.comes("d", DEVICES[1])) == ["third waits for other"]


def test_sparse_gradients_are_two_tensors(machine):
    machine.on("side")
    a = machine.comes("a", kind=Sparse)
    machine.on("main")
    assert machine.fold(a) == ["indices of a is in use on main", "main waits for side", "values of a is in use on main"]


def test_a_gradient_that_is_left_to_hooks_of_others(machine):
    """They may replace it, on the stream that they run on; the next hook, which takes it, may run on another."""
    machine.on("side")
    p = Param(DEVICES[0])
    machine.streams.leave(p)
    machine.on("main")
    machine.streams.note(p, Gradient("a", machine.log))
    b = machine.comes("b")
    assert machine.fold(p, b) == ["a is in use on main", "main waits for side"]
    machine.streams.note(p, Gradient("c", machine.log))
    assert machine.fold(p) == []


def test_the_caller_waits_for_the_last_fold(machine):
    """The thread of one device folds what came on the other as well."""
    machine.fold(machine.comes("a"), machine.comes("b", DEVICES[1]))
    machine.on("third", DEVICES[1])
    machine.log.clear()
    machine.streams.end()
    assert machine.log == ["third waits for other"]
    assert machine.fold(machine.comes("c", DEVICES[1])) == []
    machine.streams.end()
    assert machine.log == []


def test_what_is_forgotten_is_not_kept(machine):
    """Gradients of a backward that failed, or of a window that was dropped."""
    machine.on("side")
    a = machine.comes("a")
    machine.streams.leave(Param(DEVICES[0]))
    machine.streams.forget()
    assert not machine.streams._of
    assert not machine.streams._left
    machine.on("main")
    b = machine.comes("b")
    assert machine.fold(b) == []
    assert not machine.streams._of
    del a


def test_gradients_on_the_cpu_need_no_stream(monkeypatch):
    def no_stream(device):
        raise AssertionError("there is no stream on a CPU")

    monkeypatch.setattr(torch.cuda, "current_stream", no_stream)
    streams, p = Streams(), torch.nn.Parameter(torch.zeros(2))
    streams.leave(p)
    streams.note(p, torch.zeros(2))
    streams.join([p])
    streams.end()


@pytest.mark.parametrize("bucket", [BYTE, 25])
def test_every_gradient_is_noted_and_joined_before_its_fold(monkeypatch, bucket):
    """One that has to be copied first, too: the copy is made behind the wait."""
    params, w = sgd_pair(bucket_mb=bucket)
    params[0].data = torch.zeros(2, 3)
    params[0].register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", torch.ones(3, 2).t()))
    sum(p.sum() for p in params).backward()
    w.step()
    noted, log = {}, []
    streams = w._window.in_backward._streams
    (buffer,) = w._window.buffers
    fold, acceptable = buffer.fold, folding.acceptable

    def note(p, grad):
        noted[id(p)] = grad

    def join(given):
        log.extend(("join", id(p)) for p in given)

    def copied(window, buffer, p, grad):
        log.append(("copy", id(p)))
        return acceptable(window, buffer, p, grad)

    def folded(grads, scale, norm, part):
        fold(grads, scale, norm, part)
        for p, grad in zip(buffer.params[part.first : part.last], grads, strict=True):
            if grad is not None:
                log.append(("fold", id(p)))
                assert (grad is noted[id(p)]) == noted[id(p)].is_contiguous()

    monkeypatch.setattr(streams, "note", note)
    monkeypatch.setattr(streams, "join", join)
    monkeypatch.setattr(folding, "acceptable", copied)
    monkeypatch.setattr(buffer, "fold", folded)
    sum(p.sum() for p in params).backward()
    first, second = map(id, params)
    assert not noted[first].is_contiguous()
    assert log.index(("join", first)) < log.index(("copy", first)) < log.index(("fold", first))
    assert log.index(("join", second)) < log.index(("fold", second))
    w.step()


def test_gradients_of_a_window_that_is_dropped_are_forgotten(monkeypatch):
    params, w = sgd_pair()
    forgotten = []
    monkeypatch.setattr(w._window.in_backward._streams, "forget", lambda: forgotten.append(True))
    h = params[0] * 1
    h.register_hook(lambda grad: w.reset())
    (h * params[1]).sum().backward()
    assert forgotten


def test_hooks_of_others_and_the_end(monkeypatch):
    """The wrapper leaves a gradient in its own hook, takes it in a later one, and ends behind the last fold."""
    params, w = sgd_pair()
    for p in params:
        p.register_post_accumulate_grad_hook(lambda p: log.append("theirs"))
    log = []
    streams, names = w._window.in_backward._streams, {id(p): k for k, p in enumerate(params)}
    monkeypatch.setattr(streams, "leave", lambda p: log.append(f"left {names[id(p)]}"))
    monkeypatch.setattr(streams, "note", lambda p, grad: log.append(f"noted {names[id(p)]}"))
    monkeypatch.setattr(streams, "join", lambda given: log.append("fold"))
    monkeypatch.setattr(streams, "end", lambda: log.append("end"))
    (params[0].sum() + params[1].sum()).backward()
    first, second = (int(entry[-1]) for entry in log if entry.startswith("noted"))
    wanted = [f"left {first}", "theirs", f"noted {first}", f"left {second}", "theirs", f"noted {second}", "fold", "end"]
    assert log == wanted
