"""Module in flat memory: parameters and gradients as views.

Those in 16 bits, and those on another device, are copies of what is there.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from mpips.config.groups import Group
from mpips.errors import UserError
from mpips.problems.base import Arrays
from mpips.torch.copies import Copies
from mpips.torch.embedding import RowsModule

SPARSE = (torch.nn.Embedding, torch.nn.EmbeddingBag)
NORMS = torch.nn.modules.batchnorm._NormBase  # what has running means
# What parameters are kept and pushed as.
DTYPES = {
    torch.float32: "float32", torch.float64: "float64",
    torch.bfloat16: "float32", torch.float16: "float32",
}  # fmt: skip
HALVES = (torch.bfloat16, torch.float16)


def make_model(
    make: Callable[[], torch.nn.Module], seed: int, groups: Sequence[Group] = ()
) -> torch.nn.Module:
    """Return a fresh module, alike on every rank.

    Args:
        make: A class or function that returns it.
        seed: Of everything random in it.
        groups: Of the run, whose loop may train what these give a rate.

    Raises:
        UserError: If it is none, or has parameters that cannot be trained here.
    """
    if isinstance(make, torch.nn.Module) or not callable(make):
        got = f"model of type {type(make).__name__}"
        raise UserError(got, "a class or function that makes one", "such as model=Net, not Net()")
    torch.manual_seed(seed)
    model = make()
    if not isinstance(model, torch.nn.Module):
        raise UserError(f"a model of type {type(model).__name__}", "a torch.nn.Module")
    trained = trained_parameters(model, groups)
    if not trained and not any(isinstance(module, RowsModule) for module in model.modules()):
        raise UserError("a model without a parameter that requires a gradient", "at least one")
    for name, parameter in trained.items():
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


def trained_parameters(
    model: torch.nn.Module, groups: Sequence[Group] = ()
) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that are trained, tied ones once.

    They are those that require a gradient, and those that a group gives a rate: it is for later.
    """
    patterns = [group.pattern for group in groups if group.lr]

    def may_be(name: str, parameter: torch.nn.Parameter) -> bool:
        return parameter.requires_grad or any(fnmatchcase(name, one) for one in patterns)

    return {name: p for name, p in model.named_parameters() if may_be(name, p)}


def for_numpy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that `is_apart` as a copy that NumPy can take, another as it is."""
    found = tensor.detach().cpu()
    return found.float() if found.dtype in HALVES else found


def tensors_by_name(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a model, tied ones once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def is_apart(tensor: torch.Tensor) -> bool:
    """Return whether it cannot be a view of arrays here: one in 16 bits, or on another device."""
    return tensor.dtype in HALVES or tensor.device.type != "cpu"


class Initial(Mapping[str, np.ndarray]):
    """The trained parameters of a model as arrays, and behind them its running means.

    Parameters share their memory with the arrays, unless one `is_apart`, but do not hold it: when
    they move into a replica, the memory that they had at first is given back.

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
    """Return the buffers that normalization keeps of the batches, by name, shared ones once."""
    found = {}
    for name, buffer in model.named_buffers():
        module = model.get_submodule(name.rpartition(".")[0])
        if isinstance(module, NORMS) and buffer.is_floating_point():
            found[name] = buffer
    return found


def tensors_of(arrays: Arrays) -> list[torch.Tensor]:
    """Return tensors that share the memory of arrays, in their order.

    A replica is only to be read: PyTorch has no such tensors, and would warn of it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return [torch.from_numpy(array) for array in arrays.values()]


class Bound:
    """A model whose parameters are moved from one memory to another, without a copy.

    Those that are apart (`is_apart`) are copied, and their gradients as well (`Copies`).

    Running means (`statistics_of`) are copied, where the memory has any: the forward pass changes
    them, and what it takes off them, times `share`, stands where their gradient would.

    Args:
        model: The module.
        share: Of the change of its running means that counts.
        trained: Names of its trained parameters; by default those that require a gradient now.
        early: Whether gradients of those that are apart are copied within the backward pass. What a
            loop then changes in place is copied once more, unless PyTorch cannot know of it
            (``.data``).
        noticed: Called within a backward pass whenever it has added to a gradient.

    Attributes:
        share: As given.
        copies: Of those that are apart.
        parameters: The trained ones, by name.
        frozen: Names of those that no gradient was wanted of, when it was last complete.
        unmoved: Whether they are still in the memory that the module was made with.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        share: float = 1.0,
        trained: Iterable[str] | None = None,
        early: bool = False,
        noticed: Callable[[], None] = lambda: None,
    ) -> None:
        self.model, self.share = model, share
        self._noticed = noticed
        self._running = _running(model)
        self._out: Arrays = {}  # where the gradients go
        names = set(trained_parameters(model) if trained is None else trained)
        named = list(model.named_parameters())
        self.parameters, self.unmoved = {n: p for n, p in named if n in names}, True
        self._parameters = list(self.parameters.values())
        self.copies = Copies({k: p for k, p in enumerate(self._parameters) if is_apart(p)})
        self.frozen: tuple[str, ...] = ()
        self._others = {name: p for name, p in named if name not in names}
        self._known: dict[int, tuple[Arrays, list[torch.Tensor]]] = {}
        self._params: Arrays = {}
        self._grads: list[torch.Tensor] = []
        numbered = enumerate(self._parameters)
        self._hooks = [_when_accumulated(p, partial(self._take, k, early)) for k, p in numbered]

    def move_to(self, params: Arrays) -> None:
        """Have the parameters read from these arrays from now on; those apart are copied."""
        if self.unmoved:
            self._check_places()
        _copy_into(self._running, params)
        known = params is self._params
        tensors = self._tensors(params)
        if not known:
            for k, parameter in enumerate(self._parameters):
                if k not in self.copies:
                    parameter.data = tensors[k]
        self.copies.load(params, tensors)
        self._params, self.unmoved = params, False

    def collect_into(self, out: Arrays) -> None:
        """Have the gradients of the next backward passes go into these arrays."""
        self._grads, self._out = self._tensors(out), out
        self.copies.collect_into(out, self._grads)

    def complete(self) -> None:
        """Make the gradients whole: of a parameter that no loss depended on it is zero.

        Those of parameters apart have been added up there, and are copied. Those of backward passes
        from here on, until the next `collect_into`, go nowhere.

        Raises:
            UserError: If a parameter has one that was frozen when the model was made, and has no
                group with a rate.

        Blocks: until they are copied.
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
                self._grads[k].copy_(grad)
            parameter.grad = None
        self.frozen, self._grads = tuple(frozen), []
        for name, buffer in self._running.items():
            if name in self._out:
                np.subtract(self._params[name], for_numpy(buffer).numpy(), out=self._out[name])
                self._out[name][...] *= self.share

    def drop(self) -> None:
        """Drop the gradients: what the next backward pass leaves is its own alone."""
        for parameter in self._parameters:
            parameter.grad = None

    def forget(self) -> None:
        """Forget all memory, and leave the gradients as they come."""
        self.copies.forget()
        self._known.clear()
        self._params, self._grads, self._out = {}, [], {}
        for hook in self._hooks:
            hook.remove()

    def _check_places(self) -> None:
        for k, (name, parameter) in enumerate(self.parameters.items()):
            if is_apart(parameter) != (k in self.copies):
                got = f"parameter {name!r} of {parameter.dtype} on {parameter.device}"
                expected = "a model that is as it was made"
                raise UserError(got, expected, "move it by worker.to(device)")

        for name, parameter in self._others.items():
            if parameter.requires_grad:
                raise _never_trained(name)

    def _tensors(self, arrays: Arrays) -> list[torch.Tensor]:
        known = self._known.get(id(arrays))
        if known is None:
            known = self._known[id(arrays)] = arrays, tensors_of(arrays)
        return known[1]

    def _take(self, k: int, early: bool, parameter: torch.Tensor) -> None:
        """Copy the first gradient of a step; those after it are added in place."""
        self._noticed()
        if k in self.copies:
            if early:
                self.copies.begin(k)
        elif self._grads and parameter.grad is not self._grads[k]:
            self._grads[k].copy_(parameter.grad)
            parameter.grad = self._grads[k]


def _when_accumulated(
    parameter: torch.nn.Parameter, call: Callable[[torch.Tensor], None]
) -> RemovableHandle:
    """Call `call` when a gradient was accumulated; the parameter may be frozen for now."""
    wanted = parameter.requires_grad
    parameter.requires_grad_(True)
    handle = parameter.register_post_accumulate_grad_hook(call)
    parameter.requires_grad_(wanted)
    return handle


def _never_trained(name: str) -> UserError:
    got = f"a gradient of {name!r}, which was frozen when the model was made"
    pattern = f"{name.rpartition('.')[0]}.*" if "." in name else name
    remedy = f'give it a rate, such as groups=[mpips.Group("{pattern}", lr=1e-4)]'
    return UserError(got, "one that is trained, or that a group gives a rate", remedy)


@contextmanager
def evaluating(model: torch.nn.Module, params: Arrays) -> Iterator[None]:
    """Have a model evaluate, with these parameters, within the block."""
    named, was = dict(model.named_parameters()), model.training
    running, means = _running(model), statistics_of(model)
    known = {name: array for name, array in params.items() if name in named}
    parameters = [named[name] for name in known]  # which the loop may have frozen by now
    before = [p.data for p in parameters]
    for parameter, tensor in zip(parameters, tensors_of(known), strict=True):
        parameter.data = tensor.to(parameter.device, parameter.dtype)
    _copy_into(running, params)
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was)
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
        found = model.state_dict().items()
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in found}
