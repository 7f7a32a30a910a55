"""A device that is not there: it copies as late as it may, and tells of memory used too soon."""

import ctypes
import math
from typing import Any, ClassVar

import torch


class LateDevice:
    """Copies when somebody waits for it, as `mpips.torch.copies.Device` says.

    Until then the target is poisoned. What is copied from must not have changed meanwhile, unless
    it is copied once more. One end of each copy is memory that is pinned, and no page is twice.
    """

    made: ClassVar[list["LateDevice"]] = []

    def __init__(self, device: Any = None) -> None:
        self.pinned: dict[int, int] = {}
        self.pins = self.copies = self.changed = 0
        self.late: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.made.append(self)

    def pin(self, address: int, nbytes: int) -> None:
        assert address % 4096 == nbytes % 4096 == 0 < nbytes
        ends = [(begin, begin + size) for begin, size in self.pinned.items()]
        assert all(address >= e or address + nbytes <= b for b, e in ends), "pinned twice"
        self.pinned[address] = nbytes
        self.pins += 1

    def unpin(self, address: int) -> None:
        assert not self.late, "a copy is under way"
        ctypes.string_at(address, self.pinned.pop(address))  # it is there

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self.pinned or not self.pins:  # at the end parameters come from elsewhere
            assert self._reached(target) or self._reached(source), "memory that is not pinned"
        source = source.detach()
        self.late.append((target, source, source.clone()))
        target.detach().fill_(math.nan)
        self.copies += 1

    def settle(self) -> None:
        targets = [target.data_ptr() for target, *_ in self.late]
        for k, (target, source, was) in enumerate(self.late):
            if not torch.equal(source, was):
                assert targets[k] in targets[k + 1 :], "changed before it was copied"
                self.changed += 1
            target.detach().copy_(source)
        self.late.clear()

    join = settle

    def _reached(self, tensor: torch.Tensor) -> bool:
        begin, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        return any(b <= begin and begin + size <= b + n for b, n in self.pinned.items())
