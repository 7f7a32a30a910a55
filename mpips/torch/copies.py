"""Copies of parameters and gradients, between devices or in 16 bits.

Those of a model on a device, and those in 16 bits. All copies of a step are begun in one order:
parameters behind the pull, gradients behind the backward pass, or within it. Before the step is
pushed they are all waited for: so the replica is read, and the gradient written, when others use
that memory again.

What only runs where there is a device is in `Cuda`.
"""

import mmap
from collections.abc import Mapping

import torch

from mpips.errors import UserError
from mpips.problems.base import Arrays

PAGE = mmap.PAGESIZE


class Device:
    """Copies between the host's memory and a device, in the order in which they are begun.

    This one is the host itself, or a device that is no CUDA device: each copy is done when it is
    begun.
    """

    def pin(self, address: int, nbytes: int) -> None:
        """Have the device reach this memory by itself; it overlaps with no other that is pinned.

        Raises:
            UserError: If it cannot be.
        """

    def unpin(self, address: int) -> None:
        """Undo `pin` of what begins there; no copy is under way."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin a copy, of what `source` holds when the model's stream comes here. Blocks: no.

        Neither may be freed before `settle`.
        """
        with torch.no_grad():
            target.copy_(source)

    def join(self) -> None:
        """Have what the model computes from here on wait for all copies. Blocks: no."""

    def settle(self) -> None:
        """Wait for all copies. Blocks: until they are done; gives the core away."""


class Cuda(Device):
    """A CUDA device, with a stream of its own for copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)

    def pin(self, address: int, nbytes: int) -> None:
        """See `Device.pin`."""
        with torch.cuda.device(self._device):
            code = torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)
        try:
            torch.cuda.check_error(code)
        except RuntimeError as problem:
            got = f"{nbytes} bytes of the host's memory that CUDA does not pin ({problem})"
            raise UserError(got, "memory that it can read and write by itself") from None

    def unpin(self, address: int) -> None:
        """See `Device.unpin`."""
        with torch.cuda.device(self._device):
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `Device.copy`."""
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.no_grad(), torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)

    def join(self) -> None:
        """See `Device.join`."""
        torch.cuda.current_stream(self._device).wait_event(self._side.record_event())

    def settle(self) -> None:
        """See `Device.settle`."""
        event = torch.cuda.Event(blocking=True)
        event.record(self._side)
        event.synchronize()


def device_for(device: torch.device) -> Device:
    """Return what copies to and from this device."""
    return Cuda(device) if device.type == "cuda" else Device()


class Copies:
    """Copies of parameters, and of their gradients.

    Args:
        parameters: By a number of each; on one device. There may be none.
    """

    def __init__(self, parameters: Mapping[int, torch.nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        devices = {parameter.device for parameter in self._parameters.values()}
        self._device: Device = device_for(next(iter(devices), torch.device("cpu")))
        self._pins: Pins | None = Pins(self._device)
        self._outs: dict[int, torch.Tensor] = {}  # where gradients go
        self._begun: dict[int, tuple[torch.Tensor, int]] = {}  # gradients, and how often changed

    def __contains__(self, k: object) -> bool:
        return k in self._parameters

    def load(self, arrays: Arrays, tensors: list[torch.Tensor]) -> None:
        """Copy parameters; what the model computes from now on is of them.

        Args:
            arrays: All parameters, by name: what is pinned.
            tensors: The same, by number.

        Blocks: no.
        """
        if not self._parameters:
            return
        self._pin(arrays)
        for k, parameter in self._parameters.items():
            self._device.copy(parameter.data, tensors[k])
        self._device.join()

    def collect_into(self, arrays: Arrays, tensors: list[torch.Tensor]) -> None:
        """Have the gradients of the next backward passes go there; see `load`."""
        if self._parameters:
            self._pin(arrays)
        self._outs = {k: tensors[k] for k in self._parameters}
        self._begun.clear()

    def begin(self, k: int) -> None:
        """Begin to copy a gradient that is complete, unless there is nowhere for it to go."""
        grad = self._parameters[k].grad
        if k in self._outs and grad is not None:
            self._device.copy(self._outs[k], grad)
            self._begun[k] = grad, grad._version

    def finish(self) -> None:
        """Have all gradients where they go, and no more there. Blocks: until copies are done."""
        if not self._parameters:
            return
        for k, parameter in self._parameters.items():
            grad = parameter.grad
            begun, changes = self._begun.get(k, (None, 0))
            if grad is not None and (begun is not grad or changes != grad._version):
                self.begin(k)
        self._device.settle()
        self._begun.clear()
        self._outs = {}

    def unpin(self) -> None:
        """Wait for all copies, and pin no memory any more: it is about to be freed."""
        if self._pins is not None:
            self._device.settle()
            self._pins.free()
            self._pins = None

    def forget(self) -> None:
        """Leave the gradients as they come, and unpin."""
        self.unpin()
        self._device.settle()  # what a run ends with
        self._outs = {}

    def _pin(self, arrays: Arrays) -> None:
        if self._pins is not None:
            self._pins.hold(arrays)


class Pins:
    """Memory that is pinned: the vectors that hold parameters and gradients, each once.

    Vectors that share a page are pinned as one: neither can a page be pinned twice, nor may a copy
    go beyond what was pinned at once.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._known: dict[int, Arrays] = {}  # by their id
        self._ranges: list[tuple[int, int]] = []  # of whole pages, by address

    def hold(self, arrays: Arrays) -> None:
        """Pin the vector that these arrays are views of, unless it is pinned.

        Raises:
            UserError: If it cannot be.
        """
        if id(arrays) in self._known:
            return
        self._known[id(arrays)] = arrays
        begins = [array.ctypes.data for array in arrays.values()]
        ends = [array.ctypes.data + array.nbytes for array in arrays.values()]
        begin, end = min(begins) // PAGE * PAGE, -(-max(ends) // PAGE) * PAGE
        met = [one for one in self._ranges if one[0] < end and begin < one[1]]
        if any(b <= begin and end <= e for b, e in met):
            return
        if met:
            self._device.settle()
        for one in met:
            self._device.unpin(one[0])
            self._ranges.remove(one)
        begin, end = min([begin, *(b for b, _ in met)]), max([end, *(e for _, e in met)])
        self._device.pin(begin, end - begin)
        self._ranges.append((begin, end))

    def free(self) -> None:
        """Unpin all of it; no copy is under way."""
        for begin, _ in self._ranges:
            self._device.unpin(begin)
        self._ranges.clear()
        self._known.clear()
