"""Copies to and from a device: pinned memory, a stream of their own, waits.

Everything that only runs where there is a device is in here; what is copied when, and which memory
is pinned, is `mpips.torch.copies`.
"""

import torch

from mpips.errors import UserError


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
