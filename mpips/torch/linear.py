"""Linear layers whose backward pass writes a weight's gradient into the push buffer.

Autograd makes each gradient in memory of its own, from which it is copied. For the weights of
large linear layers, which are most of many models, that copy costs as much as a round. So while a
run goes on, the large `torch.nn.Linear` modules of its model are of the class `Linear` below. It
computes the same; wherever something else may look at the gradient, autograd makes it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

LEAST = 1 << 18  # elements; a smaller gradient is copied sooner than Python can be called
ALIGNED_BYTES = 64  # at other addresses the product takes longer than the copy that is saved
# Multiplies two matrices into the gradient of a weight, or returns False.
Write = Callable[[torch.Tensor, torch.Tensor], bool]

_writes: dict[int, Write] = {}  # by the id of the weight: copies of a module have none


class Linear(torch.nn.Linear):
    """A `torch.nn.Linear` of a model in a run."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return ``input @ weight.T + bias``."""
        weight = self.weight
        plain = (
            torch.compiler.is_compiling()
            or id(weight) not in _writes
            or torch._C._are_functorch_transforms_active()
            or torch.is_autocast_enabled("cpu")
            or not torch.is_grad_enabled()
            or input.dtype != weight.dtype
            or not weight.requires_grad
        )
        if plain:
            return super().forward(input)
        found: torch.Tensor = _Linear.apply(input, weight, self.bias, _writes[id(weight)])
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        _, _, *state = super().__reduce_ex__(protocol)
        return object.__new__, (torch.nn.Linear,), *state  # what copies and pickles of it are


def convert(
    model: torch.nn.Module, writes: Mapping[torch.nn.Parameter, Write]
) -> list[tuple[torch.nn.Module, int]]:
    """Have gradients of large weights be written by `writes`; returns what `restore` takes."""
    found = []
    for module in model.modules():
        large = type(module) is torch.nn.Linear and module.weight.numel() >= LEAST
        if large and (write := writes.get(module.weight)) is not None:
            found.append((module, id(module.weight)))
            module.__class__, _writes[id(module.weight)] = Linear, write
    return found


def restore(converted: list[tuple[torch.nn.Module, int]]) -> None:
    """Undo `convert`; without an effect where that was done."""
    while converted:
        module, key = converted.pop()
        module.__class__ = torch.nn.Linear
        _writes.pop(key, None)


class _Linear(torch.autograd.Function):
    """``x @ weight.T + bias``."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, write: Write
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.write = write
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, flat = grads[0], grads[0].dim() == 2
        if not flat:  # each view costs some 20 us where caches are cold
            rows = rows.reshape(-1, weight.shape[0])
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        found: list[torch.Tensor | None] = [None] * 4
        if of_x:
            found[0] = rows.mm(weight) if flat else rows.mm(weight).view_as(x)
        if of_weight:
            factors = rows.t(), x if flat else x.reshape(-1, weight.shape[1])
            # Where the pass itself is differentiated, all has to be known to autograd.
            if torch.is_grad_enabled() or not _adds(ctx, 1) or not ctx.write(*factors):
                found[1] = factors[0].mm(factors[1])
        if of_bias:
            found[2] = rows.sum(0)
        return tuple(found)


def _adds(ctx: Any, k: int) -> bool:
    """Whether this pass adds to the ``grad`` of input `k`: `torch.autograd.grad` does not."""
    try:
        return bool(torch._C._will_engine_execute_node(ctx.next_functions[k][0]))
    except RuntimeError:  # it is asked for by torch.autograd.grad
        return False
