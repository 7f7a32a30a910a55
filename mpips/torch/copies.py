"""Copies of parameters and gradients, between devices or in 16 bits.

Parameters on a device or in 16 bits are copies of the replica. The copies of a step are started in
order: parameters after the pull, gradients during or after the backward pass. All copies end before
the step is pushed. So no copy uses the replica and the gradient's buffer when others write or read
them again.

All code that needs a CUDA device is in `Cuda`.
"""

import mmap
from collections.abc import Mapping

import torch

from mpips.errors import UserError
from mpips.problems.base import Arrays

PAGE = mmap.PAGESIZE


class Device:
    """Copies between the host's memory and a device, in the order in which they are started.

    This class is for the host itself, and for devices without CUDA: each copy is complete when
    `copy` returns.
    """

    def pin(self, address: int, nbytes: int) -> None:
        """Pin memory, so that the device can access it; it must not overlap pinned memory.

        Raises:
            UserError: If it cannot be pinned.
        """

    def unpin(self, address: int) -> None:
        """Unpin the memory that was pinned at an address; no copy may be in progress."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Start a copy of the values that `source` has after earlier work of the model's stream.

        Neither tensor may be freed before `settle`. Blocks: no.
        """
        with torch.no_grad():
            target.copy_(source)

    def join(self) -> None:
        """Make later work of the model's stream wait for all copies. Blocks: no."""

    def settle(self) -> None:
        """Wait for all copies. Blocks: until they are complete; yields the core meanwhile."""


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
    """Return the copies of a device: `Cuda` for a CUDA device."""
    return Cuda(device) if device.type == "cuda" else Device()


class Copies:
    """Copies of some parameters, and of their gradients.

    Args:
        parameters: Parameters by number; all on the same device. May be empty.
    """

    def __init__(self, parameters: Mapping[int, torch.nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        devices = {parameter.device for parameter in self._parameters.values()}
        self._device: Device = device_for(next(iter(devices), torch.device("cpu")))
        self._pins: Pins | None = Pins(self._device)
        self._outs: dict[int, torch.Tensor] = {}  # buffers of gradients
        self._started: dict[int, tuple[torch.Tensor, int]] = {}  # gradients, and their versions

    def __contains__(self, k: object) -> bool:
        return k in self._parameters

    def load(self, arrays: Arrays, tensors: list[torch.Tensor]) -> None:
        """Copy parameters to the device; later work of the model uses the copies.

        Args:
            arrays: All parameters, by name; their memory is pinned.
            tensors: The same memory as tensors, by number.

        Blocks: no.
        """
        if not self._parameters:
            return
        self._pin(arrays)
        for k, parameter in self._parameters.items():
            self._device.copy(parameter.data, tensors[k])
        self._device.join()

    def collect_into(self, arrays: Arrays, tensors: list[torch.Tensor]) -> None:
        """Set the buffers for the gradients of the next backward passes; see `load`."""
        if self._parameters:
            self._pin(arrays)
        self._outs = {k: tensors[k] for k in self._parameters}
        self._started.clear()

    def begin(self, k: int) -> None:
        """Start the copy of a complete gradient, if it has a buffer."""
        grad = self._parameters[k].grad
        if k in self._outs and grad is not None:
            self._device.copy(self._outs[k], grad)
            self._started[k] = grad, grad._version

    def finish(self) -> None:
        """Copy all gradients, and forget the buffers. Blocks: until the copies are complete."""
        if not self._parameters:
            return
        for k, parameter in self._parameters.items():
            grad = parameter.grad
            started, version = self._started.get(k, (None, 0))
            if grad is not None and (started is not grad or version != grad._version):
                self.begin(k)
        self._device.settle()
        self._started.clear()
        self._outs = {}

    def unpin(self) -> None:
        """Wait for all copies, and unpin all memory, which the caller is about to free."""
        if self._pins is not None:
            self._device.settle()
            self._pins.free()
            self._pins = None

    def forget(self) -> None:
        """Unpin all memory, wait for all copies, and copy no more gradients."""
        self.unpin()
        self._device.settle()  # also waits for the copies at the end of a run
        self._outs = {}

    def _pin(self, arrays: Arrays) -> None:
        if self._pins is not None:
            self._pins.hold(arrays)


class Pins:
    """Pinned memory: the vectors that hold parameters and gradients, each pinned once.

    Vectors that share a page are pinned together. A page cannot be pinned twice, and a copy may not
    cross the limit of two pinned ranges.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._arrays: dict[int, Arrays] = {}  # by the id of the mapping
        self._ranges: list[tuple[int, int]] = []  # addresses of whole pages, begin and end

    def hold(self, arrays: Arrays) -> None:
        """Pin the vector of these arrays, unless it is pinned.

        Raises:
            UserError: If it cannot be pinned.
        """
        if id(arrays) in self._arrays:
            return
        self._arrays[id(arrays)] = arrays
        begins = [array.ctypes.data for array in arrays.values()]
        ends = [array.ctypes.data + array.nbytes for array in arrays.values()]
        begin, end = min(begins) // PAGE * PAGE, -(-max(ends) // PAGE) * PAGE
        overlapping = [pages for pages in self._ranges if pages[0] < end and begin < pages[1]]
        if any(b <= begin and end <= e for b, e in overlapping):
            return
        if overlapping:
            self._device.settle()
        for pages in overlapping:
            self._device.unpin(pages[0])
            self._ranges.remove(pages)
        begin = min([begin, *(b for b, _ in overlapping)])
        end = max([end, *(e for _, e in overlapping)])
        self._device.pin(begin, end - begin)
        self._ranges.append((begin, end))

    def free(self) -> None:
        """Unpin all memory; no copy may be in progress."""
        for begin, _ in self._ranges:
            self._device.unpin(begin)
        self._ranges.clear()
        self._arrays.clear()
