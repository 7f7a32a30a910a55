"""Module in flat memory: parameters and gradients as views.

Parameters in 16 bits or on another device are copies of that memory.
"""

import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from mpips.config.groups import Group
from mpips.errors import UserError
from mpips.problems.base import Arrays
from mpips.torch.copies import Copies
from mpips.torch.embedding import RowsModule
from mpips.torch.processes import seed_generators

SPARSE = (torch.nn.Embedding, torch.nn.EmbeddingBag)
NORMS = torch.nn.modules.batchnorm._NormBase  # normalization with running means
HALVES = (torch.bfloat16, torch.float16)  # of parameters that are stored and pushed in float32
DTYPES = (torch.float32, torch.float64, *HALVES)


def make_model(
    make: Callable[[], torch.nn.Module], seed: int, groups: Sequence[Group] = ()
) -> torch.nn.Module:
    """Return a new module, the same on every rank.

    Args:
        make: Class or function that returns the module.
        seed: Seed of the random numbers for the module, of torch, NumPy and Python.
        groups: Groups of the run. The loop may train parameters to which they give a rate.

    Raises:
        UserError: If the result is not a module, or its parameters cannot be trained.
    """
    if isinstance(make, torch.nn.Module) or not callable(make):
        got = f"model of type {type(make).__name__}"
        raise UserError(got, "a class or function that makes one", "such as model=Net, not Net()")
    with _seeded(seed):
        model = make()
    if not isinstance(model, torch.nn.Module):
        raise UserError(f"a model of type {type(model).__name__}", "a torch.nn.Module")
    trained = trained_parameters(model, groups)
    if not trained and not any(isinstance(module, RowsModule) for module in model.modules()):
        raise UserError("a model without a parameter that requires a gradient", "at least one")
    for name, parameter in trained.items():
        if is_lazy(parameter):
            got = f"parameter {name!r} of a lazy module, without a shape"
            raise UserError(got, "a shape", "call the module once in model=, with a batch of zeros")
        if parameter.device.type != "cpu":
            got = f"parameter {name!r} on {parameter.device}"
            remedy = "leave out .to(device): a worker moves it, by worker.to(device)"
            raise UserError(got, "parameters in the memory of the host", remedy)
        if parameter.dtype not in DTYPES:
            got = f"parameter {name!r} of {parameter.dtype}"
            raise UserError(got, f"one of {', '.join(map(str, DTYPES))}")
    numbers = {id(parameter) for parameter in trained.values()}
    for name, owner in model.named_modules():
        if isinstance(owner, SPARSE) and owner.sparse and id(owner.weight) in numbers:
            kind = "EmbeddingBag" if isinstance(owner, torch.nn.EmbeddingBag) else "Embedding"
            weight = f"{name}.weight".lstrip(".")
            got = f"{weight!r} of a torch.nn.{kind}(sparse=True)"
            expected = f"an mpips.torch.{kind}, whose rows are a table of the servers"
            raise UserError(got, expected, "or leave out sparse=True: it is a parameter then")
    return model


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed random numbers within the block; those of NumPy and Python go on behind it."""
    before, of_numpy = random.getstate(), np.random.get_state()
    seed_generators(seed, seed, seed)
    torch.manual_seed(seed)  # also on devices, as for dropout
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(of_numpy)


def trained_parameters(
    model: torch.nn.Module, groups: Sequence[Group] = ()
) -> dict[str, torch.nn.Parameter]:
    """Return the trained parameters by name, tied ones once.

    A parameter is trained if it requires a gradient, or if a group gives it a rate: the loop may
    train it later.
    """
    patterns = [group.pattern for group in groups if group.lr]
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad or any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def for_numpy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor for NumPy: a copy if it `needs_copy`, else a view."""
    on_cpu = tensor.detach().cpu().resolve_conj().resolve_neg()
    return on_cpu.float() if on_cpu.is_floating_point() and on_cpu.itemsize < 4 else on_cpu


def tensors_by_name(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a model, tied ones once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def place_of(model: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    """Return the module that has a parameter or buffer, and the name that it has there."""
    owner, _, last = name.rpartition(".")
    return model.get_submodule(owner), last


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is an array of numbers: not sparse, quantized or on meta."""
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_meta)


def needs_copy(tensor: torch.Tensor) -> bool:
    """Return whether a tensor cannot be a view of an array: it has 16 bits, or is on a device."""
    return tensor.dtype in HALVES or tensor.device.type != "cpu"


def _copied(parameters: Sequence[torch.nn.Parameter]) -> dict[int, torch.nn.Parameter]:
    """Return the parameters that need copies, or are narrower than the memory, by number."""
    narrow = torch.float32 if torch.float64 in {p.dtype for p in parameters} else None
    return {k: p for k, p in enumerate(parameters) if needs_copy(p) or p.dtype is narrow}


class Initial(Mapping[str, np.ndarray]):
    """Trained parameters of a model as arrays, followed by its running means.

    Arrays share memory with their parameters, unless these need copies. The mapping holds no arrays
    of its own: when parameters move into a replica, their first memory is freed.

    Attributes:
        running: Copies of the running means, by name.
    """

    def __init__(self, model: torch.nn.Module, groups: Sequence[Group] = ()) -> None:
        self._parameters, self.running = trained_parameters(model, groups), statistics_of(model)

    def __getitem__(self, name: str) -> np.ndarray:
        if name in self.running:
            return self.running[name]
        return for_numpy(self._parameters[name]).contiguous().numpy()

    def __iter__(self) -> Iterator[str]:
        return iter((*self._parameters, *self.running))

    def __len__(self) -> int:
        return len(self._parameters) + len(self.running)


def statistics_of(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Return the running means and variances of normalization, as copies."""
    return {name: for_numpy(b).numpy().copy() for name, b in _running(model).items()}


def _running(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the running means and variances of normalization, by name, shared ones once."""
    buffers = {}
    for name, buffer in model.named_buffers():
        if isinstance(place_of(model, name)[0], NORMS) and buffer.is_floating_point():
            buffers[name] = buffer
    return buffers


def tensors_of(arrays: Arrays) -> list[torch.Tensor]:
    """Return tensors that share the memory of arrays, in their order.

    A replica is read-only, which PyTorch's tensors cannot be: its warning is suppressed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return [torch.from_numpy(array) for array in arrays.values()]


class Bound:
    """A model whose parameters move from one memory to another, without a copy.

    Parameters that need copies (`needs_copy`) and their gradients are copied by `Copies`. So are
    those of 32 bits beside others of 64 bits, which is then the memory's dtype.

    Running means (`statistics_of`) are copied too, if the memory has them. The forward pass changes
    them; the decrease times `share` is pushed in place of their gradient.

    Args:
        model: The module.
        share: Factor of the change of running means.
        trained: Names of its trained parameters; by default those that require a gradient now.
        early: Whether to copy gradients to the host within the backward pass. If a loop changes
            them in place later, they are copied again, except for changes of ``.data``, which
            PyTorch does not count.
        notice: Called within a backward pass when a gradient is complete.

    Attributes:
        share: As given.
        copies: Copies of the parameters that need them.
        parameters: The trained parameters, by name.
        frozen: Names of the parameters that required no gradient at the last `complete`.
        unmoved: Whether the parameters are still in their first memory.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        share: float = 1.0,
        trained: Iterable[str] | None = None,
        early: bool = False,
        notice: Callable[[], None] = lambda: None,
    ) -> None:
        self.model, self.share = model, share
        self._notice = notice
        self._running = _running(model)
        self._out: Arrays = {}  # buffers of the gradients
        names = set(trained_parameters(model) if trained is None else trained)
        named = list(model.named_parameters())
        self.parameters, self.unmoved = {n: p for n, p in named if n in names}, True
        self._parameters = list(self.parameters.values())
        self.copies = Copies(_copied(self._parameters))
        self.frozen: tuple[str, ...] = ()
        self._others = {name: p for name, p in named if name not in names}
        self._tensors_by_id: dict[int, tuple[Arrays, list[torch.Tensor]]] = {}
        self._params: Arrays = {}
        self._grads: list[torch.Tensor] = []
        numbered = enumerate(self._parameters)
        self._hooks = [_on_gradient(p, partial(self._take, k, early)) for k, p in numbered]

    def move_to(self, params: Arrays) -> None:
        """Make the parameters views of these arrays, or copies if they need them."""
        if self.unmoved:
            self._check_devices()
        _copy_into(self._running, params)
        same = params is self._params
        tensors = self._tensors(params)
        if not same:
            for k, parameter in enumerate(self._parameters):
                if k not in self.copies:
                    parameter.data = tensors[k]
        self.copies.load(params, tensors)
        self._params, self.unmoved = params, False

    def collect_into(self, out: Arrays) -> None:
        """Set the arrays that get the gradients of the next backward passes."""
        self._grads, self._out = self._tensors(out), out
        self.copies.collect_into(out, self._grads)

    def complete(self) -> None:
        """Complete the gradients of a step: a parameter that no loss depended on gets zeros.

        Copied parameters have summed their gradients in their own memory; these are copied to the
        host. Gradients of later backward passes are not collected until the next `collect_into`.

        Raises:
            UserError: If a parameter has a gradient, but was frozen when the model was made, and
                no group gives it a rate.

        Blocks: until the copies are complete.
        """
        for name, parameter in self._others.items():
            if parameter.grad is not None:
                raise _never_trained(name)
        self.copies.finish()
        frozen = []
        for k, (name, parameter) in enumerate(self.parameters.items()):
            grad = parameter.grad
            if grad is None:
                self._grads[k].zero_()
                frozen += [] if parameter.requires_grad else [name]
                continue
            if grad is not self._grads[k] and k not in self.copies:
                self._grads[k].copy_(grad.detach())
            parameter.grad = None
        self.frozen, self._grads = tuple(frozen), []
        for name, buffer in self._running.items():
            if name in self._out:
                np.subtract(self._params[name], for_numpy(buffer).numpy(), out=self._out[name])
                self._out[name][...] *= self.share

    def drop(self) -> None:
        """Drop the gradients, so that the next backward pass does not add to them."""
        for parameter in self._parameters:
            parameter.grad = None

    def forget(self) -> None:
        """Release all memory, and collect no more gradients."""
        self.copies.forget()
        self._tensors_by_id.clear()
        self._params, self._grads, self._out = {}, [], {}
        for hook in self._hooks:
            hook.remove()

    def _check_devices(self) -> None:
        copied = _copied(self._parameters)
        for k, (name, parameter) in enumerate(self.parameters.items()):
            if (k in copied) != (k in self.copies):
                got = f"parameter {name!r} of {parameter.dtype} on {parameter.device}"
                expected = "a model that is as it was made"
                raise UserError(got, expected, "move it by worker.to(device)")

        for name, parameter in self._others.items():
            if parameter.requires_grad:
                raise _never_trained(name)

    def _tensors(self, arrays: Arrays) -> list[torch.Tensor]:
        if id(arrays) not in self._tensors_by_id:
            self._tensors_by_id[id(arrays)] = arrays, tensors_of(arrays)
        return self._tensors_by_id[id(arrays)][1]

    def _take(self, k: int, early: bool, parameter: torch.Tensor) -> None:
        """Make a parameter's gradient the buffer's view; later passes add to it in place."""
        self._notice()
        if parameter.grad.is_sparse:  # as that of functional.embedding may be
            parameter.grad = parameter.grad.to_dense()
        if k in self.copies:
            if early:
                self.copies.begin(k)
        elif self._grads and not (parameter.grad is self._grads[k] or parameter.grad.requires_grad):
            self._grads[k].copy_(parameter.grad)
            parameter.grad = self._grads[k]


def _on_gradient(
    parameter: torch.nn.Parameter, call: Callable[[torch.Tensor], None]
) -> RemovableHandle:
    """Call `call` after each accumulation of a gradient, also of a parameter that is frozen now."""
    required = parameter.requires_grad
    parameter.requires_grad_(True)
    handle = parameter.register_post_accumulate_grad_hook(call)
    parameter.requires_grad_(required)
    return handle


def _never_trained(name: str) -> UserError:
    got = f"a gradient of {name!r}, which was frozen when the model was made"
    pattern = f"{name.rpartition('.')[0]}.*" if "." in name else name
    remedy = f'give it a rate, such as groups=[mpips.Group("{pattern}", lr=1e-4)]'
    return UserError(got, "one that is trained, or that a group gives a rate", remedy)


@contextmanager
def evaluating(model: torch.nn.Module, params: Arrays) -> Iterator[None]:
    """Within the block, set a model to evaluation, with these parameters and running means."""
    named = dict(model.named_parameters())
    modes = [(module, module.training) for module in model.modules()]
    running, means = _running(model), statistics_of(model)
    known = {name: array for name, array in params.items() if name in named}
    parameters = [named[name] for name in known]  # also those that the loop has frozen
    before = [p.data for p in parameters]
    for parameter, tensor in zip(parameters, tensors_of(known), strict=True):
        parameter.data = tensor.to(parameter.device, parameter.dtype)
    _copy_into(running, params)
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:  # a part of the model may be set apart
            module.training = training
        for parameter, data in zip(parameters, before, strict=True):
            parameter.data = data
        _copy_into(running, means)


def _copy_into(running: Mapping[str, torch.Tensor], arrays: Arrays) -> None:
    for name, buffer in running.items():
        if name in arrays:
            buffer.copy_(torch.tensor(arrays[name]))


def state_of(model: torch.nn.Module, params: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Return the model's state dict with these parameters, as copies in the host's memory."""
    with evaluating(model, params):
        state = model.state_dict().items()
        return {name: on_host(value) for name, value in state}


def on_host(value: Any) -> Any:
    """Return a copy of a tensor on the host; tensors in containers are copied too.

    The copy has its own memory: a view of a replica would be sent and saved with the whole replica.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {name: on_host(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [*map(on_host, value)] if isinstance(value, list) else (*map(on_host, value),)
    return value
