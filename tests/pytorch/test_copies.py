"""Copies to and from a device: their order, and what is pinned; on one that is late, or real."""

import mmap
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from late_device import LateDevice  # noqa: E402

from mpips.torch import copies, model  # noqa: E402
from mpips.torch.copies import PAGE, Pins  # noqa: E402
from mpips.torch.model import Bound, Initial, make_model  # noqa: E402


class Net(torch.nn.Module):  # type: ignore[name-defined, misc]
    """Two layers, one of which is used twice, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.unused = (torch.nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Any) -> Any:
        return self.twice(torch.tanh(self.twice(self.first(x)))).square().sum()


LOOPS = ["plain", "added up", "clipped", "begun anew", "dropped", "replaced"]


def step(net: Any, x: Any, loop: str) -> None:
    """Leave the gradients of a step, made in one of these ways."""
    net(x).backward()
    if loop in ("begun anew", "dropped"):
        net.zero_grad()
    if loop in ("added up", "begun anew"):
        net(2 * x).backward()
    if loop == "clipped":
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    if loop == "replaced":
        net.first.bias.grad = torch.ones(3)


def memory(net: Any, count: int) -> list[dict[str, np.ndarray]]:
    """Return vectors of NaN side by side, on one page, as views by name."""
    arrays = dict(Initial(net))
    ends = np.cumsum([array.size for array in arrays.values()])
    page = np.frombuffer(mmap.mmap(-1, PAGE), "f4")
    page[:] = np.nan
    vectors = page[: count * ends[-1]].reshape(count, ends[-1])
    return [
        {name: part.reshape(arrays[name].shape) for name, part in zip(arrays, parts, strict=True)}
        for parts in (np.split(flat, ends[:-1]) for flat in vectors)
    ]


def follow(bound: Bound, loop: str, early: bool) -> None:
    """Make steps by two buffers, from a replica that changes as soon as it may."""
    other = make_model(Net, 1)
    (params, *outs), first = memory(bound.model, 3), dict(Initial(make_model(Net, 2)))
    for k in range(4):
        for name, parameter in other.named_parameters():
            params[name][...] = first[name] + k
            parameter.data.copy_(torch.from_numpy(params[name]))
        other.zero_grad()
        x, out = torch.full((2, 3), 0.1 * k + 0.1), outs[k % 2]
        bound.move_to(params)
        bound.collect_into(out)
        step(bound.model, x, loop)
        step(other, x, loop)
        assert all(bool(made.late) == early for made in LateDevice.made)
        bound.complete()
        bound.model(x).backward()
        assert not any(made.late for made in LateDevice.made), "what is pushed is left alone"
        bound.drop()
        for name, parameter in other.named_parameters():
            grad = torch.zeros(parameter.shape) if parameter.grad is None else parameter.grad
            np.testing.assert_allclose(out[name], grad.numpy(), rtol=1e-6, err_msg=name)
            params[name][...] = np.nan


@pytest.mark.parametrize("way", ["views", "late", "early"])
@pytest.mark.parametrize("loop", LOOPS)
def test_gradients_are_those_of_torch(loop: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of parameters that are all on a late device."""
    LateDevice.made.clear()
    monkeypatch.setattr(copies, "device_for", LateDevice)
    monkeypatch.setattr(model, "needs_copy", lambda tensor: way != "views")
    bound = Bound(make_model(Net, 0), early=way == "early")
    follow(bound, loop, way == "early")
    (made,) = LateDevice.made
    assert len(made.pinned) == made.pins == (way != "views"), "vectors that share a page"
    assert (made.changed > 0) == (way == "early" and loop in ("added up", "clipped"))
    bound.copies.unpin()
    bound.move_to(dict(Initial(make_model(Net, 3))))  # as at the end of a run
    bound.forget()
    assert made.pins == (way != "views")
    assert not made.pinned
    assert not made.late


ROOM = np.zeros(16 * PAGE, "u1")


def at(begin: int, size: int) -> dict[str, Any]:
    """Return two views of bytes, so far behind the first page that is whole."""
    begin += -ROOM.ctypes.data % PAGE
    return {"a": ROOM[begin : begin + size // 2], "b": ROOM[begin + size // 2 : begin + size]}


def test_what_shares_a_page_is_pinned_as_one() -> None:
    late, base = LateDevice(), at(0, 2)["a"].ctypes.data
    pins = Pins(late)
    near, remote, held = at(10, PAGE), at(8 * PAGE, PAGE), at(8 * PAGE + 9, 20)
    for arrays in (near, remote, near, held):
        pins.hold(arrays)
    assert late.pinned == {base: 2 * PAGE, base + 8 * PAGE: PAGE}
    assert late.pins == 2
    pins.hold(at(PAGE + 10, PAGE))  # begins where the first ends
    assert late.pinned == {base: 3 * PAGE, base + 8 * PAGE: PAGE}
    pins.hold(at(2 * PAGE + 20, 6 * PAGE))
    assert late.pinned == {base: 9 * PAGE}
    pins.free()
    assert not late.pinned


@pytest.mark.gpu
def test_a_device_copies_from_pinned_memory_on_a_stream_of_its_own() -> None:
    there = copies.device_for(torch.device("cuda", 0))
    host = torch.from_numpy(at(0, 4 * PAGE)["b"].view("f4"))
    begin = host.data_ptr() // PAGE * PAGE
    there.pin(begin, 4 * PAGE)
    assert host.is_pinned()
    target = torch.empty(host.shape, dtype=torch.bfloat16, device="cuda:0")
    for value in (2.0, 3.0):
        host.fill_(value)
        there.copy(target, host)
        there.join()
        made = target * 2
        host_copy = torch.empty_like(host)
        there.copy(host_copy, made)
        there.settle()
        assert host_copy.eq(2 * value).all()
    there.unpin(begin)
    assert not host.is_pinned()
