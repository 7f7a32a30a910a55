"""Linear layers whose backward pass writes the gradient of a weight where it is pushed from.

Autograd makes each gradient in memory of its own, from which it has to be copied. Of the weights of
large linear layers, which are most of many models, that costs as much as a round. So while a run
goes on ``torch.nn.functional.linear`` is one that has their gradients multiplied into place. What
it computes is the same; wherever something else may look at the gradient, autograd makes it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

LEAST = 1 << 18  # elements; a smaller gradient is copied sooner than Python can be called
ALIGNED_BYTES = 64  # at other addresses the product takes longer than the copy that is saved
# Multiplies two matrices into the gradient of a weight, or returns False.
Write = Callable[[torch.Tensor, torch.Tensor], bool]

_writes: dict[int, Write] = {}  # by the id of the weight
_passes = 0  # calls of `backward` under way, which add to `grad`: `torch.autograd.grad` does not


def register(weight: torch.nn.Parameter, write: Write) -> None:
    """Have the gradient of a large weight be written by `write`, until `unregister`."""
    if weight.dim() == 2 and weight.numel() >= LEAST:
        _writes[id(weight)] = write


def unregister(weight: torch.nn.Parameter) -> None:
    """Leave it to autograd."""
    _writes.pop(id(weight), None)


class _Linear(torch.autograd.Function):
    """``x @ weight.T + bias``."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, write: Write
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.write = write
        return _linear(x, weight, bias)

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
            if not _passes or torch.is_grad_enabled() or not ctx.write(*factors):
                found[1] = factors[0].mm(factors[1])
        if of_bias:
            found[2] = rows.sum(0)
        return tuple(found)


_linear = functional.linear


def _direct(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    write = _writes.get(id(weight))
    plain = (
        write is None
        or torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch.is_autocast_enabled("cpu")
        or not torch.is_grad_enabled()
        or input.dtype != weight.dtype
        or not weight.requires_grad
    )
    return _linear(input, weight, bias) if plain else _Linear.apply(input, weight, bias, write)


@contextmanager
def direct_gradients() -> Iterator[None]:
    """Write gradients into place within the block, of weights that are registered in it."""
    backward = torch.autograd.backward

    def counted(*args: Any, **options: Any) -> None:
        global _passes
        # Gradients that are asked of some tensors alone do not go to the others.
        counts = options.get("inputs") is None and len(args) < 5
        _passes += counts
        try:
            backward(*args, **options)
        finally:
            _passes -= counts

    functional.linear, torch.autograd.backward = _direct, counted
    try:
        yield
    finally:
        functional.linear, torch.autograd.backward = _linear, backward
        _writes.clear()
