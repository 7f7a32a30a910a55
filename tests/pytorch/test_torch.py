"""`mpips.torch`: PyTorch models with a loop of their own, on real ranks and alone."""

import random
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch import ROOT, run
from runs import printed_by

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import mpips  # noqa: E402
import mpips.torch as mt  # noqa: E402
from mpips.errors import UserError  # noqa: E402
from mpips.torch.model import (  # noqa: E402
    Bound,
    Initial,
    evaluating,
    make_model,
    trained_parameters,
)
from mpips.torch.optimizer import Losses  # noqa: E402
from mpips.torch.worker import TorchSamples, check_loader  # noqa: E402

PROGRAMS = ROOT / "tests" / "pytorch" / "programs"
ONE, OTHER = [pytest.mark.one_mpi], [pytest.mark.long, pytest.mark.other_mpi]
LINES = {  # programs with their arguments, and where they run
    "follows,quick": ONE,  # rates, groups, and parameters that are frozen
    "follows,long": OTHER,
    "follows,counts": ONE,  # of steps of several batches
    "epochs,numbered": ONE,  # each sample is in each epoch of a loop once
    "epochs,streamed": OTHER,
    "together,tensors": OTHER,  # reduced, and models saved
    "together,buffers": ONE,  # of all kinds
    "together,means": [pytest.mark.long, *ONE],  # of BatchNorm
    "embeddings": OTHER,
    "epochs,read": OTHER,  # by processes
    "begins": ONE,  # with what another run has left, or the loop's function loads
}
TOLD = {  # how often each prints what
    "together,tensors": {"of all workers": 2},
    "begins": {
        "goes on with its own parameters, not with the program's '0.weight' and 7 more": 1,
        "not in the model, left out of init_from: more": 2,
    },
    "follows,quick": {"`lr_scheduler.step()` before": 0},
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> str:
    return printed_by(PROGRAMS, tmp_path_factory.mktemp("programs"), request)


@pytest.mark.launch
@pytest.mark.parametrize(
    "line",
    [pytest.param(k, marks=[*marks, pytest.mark.program(k)]) for k, marks in LINES.items()],
)
def test_programs_do_as_torch_does(line: str, told: str) -> None:
    assert told.count(f"== {line} on rank ") == 3
    for text, count in TOLD.get(line, {}).items():
        assert told.count(text) == count, text


@pytest.mark.launch
@pytest.mark.long
@pytest.mark.other_mpi
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_model_apart_from_the_replica_is_trained_alike(device: str, tmp_path: Path) -> None:
    args = [str(PROGRAMS / "device.py"), str(tmp_path), device]
    assert run(2, args, tmp_path, 200).check().output.count("is done") == 4


# Without ranks -------------------------------------------------------------------------------


def left(*_: int, of: list[list[int]] = [[], [1, 2]]) -> list[int]:  # noqa: B006
    """Return samples the first time alone."""
    return of.pop()


STREAMS: dict[str, Callable[[], object]] = {
    "samples 2.5 of a stream, expected an integer >= 1": lambda: mt.Streamed([1, 2], 2.5),
    "without a sample for worker 2 of 3": lambda: next(mt.Streamed([1, 2], 5).part(2, 3)),
    r"iterated only once, expected .* Streamed\(lambda": lambda: mt.Streamed(iter([1, 2]), 2),
    "worker 0 iterates again, and that yields nothing": lambda: [*mt.Streamed(left, 5).part(0, 1)],
    "batch_size=2, expected one of samples, batch_size=None": lambda: mt.Streamed(
        DataLoader([1, 2], 2), 2
    ),
    r"num_workers=4 .* with a stream.*DataLoader\(dataset, None": lambda: check_loader(
        mt.Streamed([1, 2], 2), 4, {}
    ),
}


@pytest.mark.parametrize("message", STREAMS)
def test_what_is_no_stream_is_refused(message: str) -> None:
    with pytest.raises(UserError, match=message):
        STREAMS[message]()


def test_a_stream_may_be_a_loader_of_samples() -> None:
    part = mt.Streamed(DataLoader([1, 2, 3], None, num_workers=1), samples=2).part(1, 2)
    assert [next(part) for _ in range(3)] == [2, 2, 2]


class Two(torch.nn.Module):  # type: ignore[name-defined, misc]
    """A frozen layer, one that is trained, one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.used, self.unused = torch.nn.Linear(3, 1), torch.nn.Linear(2, 1)

    def forward(self, x: Any) -> Any:
        return self.used(self.frozen(x)).sum()


def memory(model: Any) -> dict[str, np.ndarray]:
    """Return arrays like the trained parameters, of NaN."""
    return {name: np.full_like(array, np.nan) for name, array in Initial(model).items()}


def test_what_a_forward_pass_takes_off_running_means_is_pushed() -> None:
    model = make_model(lambda: torch.nn.BatchNorm1d(2), 0)
    bound, params, out = Bound(model, 0.5), dict(Initial(model)), memory(model)
    params["running_mean"][:] = 1, 2
    bound.move_to(params)
    bound.collect_into(out)
    model(torch.tensor([[2.0, 2.0], [4.0, 2.0]])).sum().backward()
    bound.complete()
    np.testing.assert_allclose(out["running_mean"], [-0.5 * 0.1 * 2, 0], atol=1e-6)
    np.testing.assert_array_equal(params["running_mean"], [1, 2])
    with evaluating(model, {**params, "running_mean": np.array([7, 7], "f4")}):
        assert model.running_mean.tolist() == [7, 7]
    assert model.running_mean.tolist() == pytest.approx([1.2, 2])


def test_what_a_run_was_made_without_cannot_be_trained() -> None:
    model = make_model(Two, 0)
    bound, params = Bound(model), memory(model)
    bound.collect_into(memory(model))
    model.frozen.requires_grad_(True)
    message = (
        r"a gradient of 'frozen\.weight', which was frozen when the model was made, expected .*"
        r'groups=\[mpips\.Group\("frozen\.\*", lr=1e-4\)\]'
    )
    with pytest.raises(UserError, match=message):
        bound.move_to(params)
    model(torch.ones(3)).backward()
    with pytest.raises(UserError, match=message):
        bound.complete()
    model.bfloat16()
    with pytest.raises(UserError, match=r"torch.bfloat16 on cpu, .* worker\.to\(device\)"):
        bound.move_to(params)


def test_what_is_frozen_in_the_loop_is_named_and_evaluated() -> None:
    """Initial parameters move with it, and are not held."""
    model = make_model(Two, 0)
    initial, first = Initial(model), model.used.weight.data_ptr()
    bound, params, out = Bound(model), dict(initial), memory(model)
    params["used.weight"] = params["used.weight"].copy()
    bound.move_to(params)
    assert model.used.weight.data_ptr() != first
    assert np.shares_memory(initial["used.weight"], params["used.weight"])
    for frozen in (False, True, False):
        model.used.weight.requires_grad_(not frozen)
        bound.collect_into(out)
        model(torch.ones(3)).backward()
        bound.complete()
        assert bound.frozen == ("used.weight",) * frozen
        assert out["used.weight"].any() != frozen
        assert list(initial) == list(params)
        assert model.used.weight.grad is None
        other = {name: array + 1 for name, array in params.items()}
        with evaluating(model, other):
            assert float(model.used.bias) == other["used.bias"]
            assert float(model.used.weight[0, 0]) == other["used.weight"][0, 0]
        assert float(model.used.weight.detach()[0, 0]) == params["used.weight"][0, 0]
    assert list(Bound(model, 1.0, bound.parameters).parameters) == list(params)


def test_an_evaluation_leaves_each_module_in_its_mode() -> None:
    """A part of a model may be set apart, as one freezes BatchNorm."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Dropout())
    model[0].eval()
    with evaluating(model, {}):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, False, True]


def within() -> Any:
    """Return a mean whose gradient is left by a pass of its own."""
    return checkpoint(lambda x: x @ W / 4, torch.ones(4, requires_grad=True), use_reentrant=True)


W, QUARTER = torch.nn.Parameter(torch.tensor([1.0, 2, 3, 6])), torch.tensor(0.25)
LOSSES: dict[str, Callable[[], object]] = {
    "one": lambda: W.mean().backward(),
    "several": lambda: torch.autograd.backward([W[:2].sum() / 4, W[2:].sum() / 4]),
    "one of each": lambda: (W.square() / W.detach()).backward(torch.full((4,), 0.25)),
    "some with a factor": lambda: torch.autograd.backward([W.sum(), 0 * W[0]], [QUARTER, None]),
    "two": lambda: [(k * W.mean()).backward() for k in (0.5, 1.5)],
    "a part of a model behind it": lambda: [W.mean().backward(), (2 * W).backward(W.detach())],
    "a part of a model before it": lambda: [(2 * W).backward(W.detach()), W.mean().backward()],
    "one within another": lambda: (within() ** 2 / 3).backward(),
    "another thread": lambda: ThreadPoolExecutor(1).submit(W.mean().backward).result(),
}


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_gradient_of_a_gradient_is_torchs_and_is_freed() -> None:
    """A penalty on gradients, whose first pass keeps its graph."""
    alone, model = (make_model(lambda: torch.nn.Linear(2, 1), 0) for _ in range(2))
    bound, params, out, batches = Bound(model), dict(Initial(model)), memory(model), list[Any]()
    bound.move_to(params)
    for k in range(2):
        bound.collect_into(out)
        x = torch.full((3, 2), 1.0 + k)
        batches.append(weakref.ref(x))
        for net in (alone, model):
            net.zero_grad()
            net(x).square().sum().backward(create_graph=True)
            (net.weight.grad.square().sum() * 0.1).backward()
        bound.complete()
        np.testing.assert_allclose(out["weight"], alone.weight.grad.detach(), rtol=1e-6)
    del x
    alone.zero_grad()
    assert [batch() for batch in batches] == [None, None]


def test_losses_are_noted() -> None:
    """A call counts with what it differentiates; where there are scalars, with these alone."""
    losses, found = Losses(), dict[str, Any]()
    hook = W.register_post_accumulate_grad_hook(lambda _: losses.notice())
    torch.autograd.grad(W.mean(), W)
    assert losses.mean() is None
    for name, call in LOSSES.items():
        call()
        found[name] = losses.mean()
        losses.clear()
    hook.remove()
    W.mean().backward()
    assert losses.mean() is None
    assert found == pytest.approx(dict.fromkeys(LOSSES, 3.0))


def frozen_sparse() -> Any:
    model = torch.nn.Sequential(torch.nn.Embedding(3, 2, sparse=True), torch.nn.Linear(2, 1))
    model[0].requires_grad_(False)
    return model


SPARSE = r", expected an mpips\.torch\.{0}, whose rows are a table of the servers; or leave out"
MODELS: dict[str, Callable[[], Any]] = {
    r"'weight' of a torch\.nn\.Embedding\(sparse=True\)" + SPARSE.format("Embedding"): (
        lambda: torch.nn.Embedding(3, 2, sparse=True)
    ),
    r"'0\.weight' of a torch\.nn\.EmbeddingBag\(sparse=True\)" + SPARSE.format("EmbeddingBag"): (
        lambda: torch.nn.Sequential(torch.nn.EmbeddingBag(3, 2, sparse=True))
    ),
    r"'0\.weight' of a torch\.nn\.Embedding": frozen_sparse,  # which a group trains later
    "parameter 'weight' of torch.complex64, expected one of .*bfloat16": (
        lambda: torch.nn.Linear(2, 2).to(torch.complex64)
    ),
    "parameter 'weight' of a lazy module, .* call the module once in model=": (
        lambda: torch.nn.LazyLinear(2)
    ),
    "parameter 'weight' on meta, expected .* the memory of the host": (
        lambda: torch.nn.Linear(2, 2, device="meta")
    ),
}


@pytest.mark.parametrize("message", MODELS)
def test_models_that_cannot_be_trained(message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_model(MODELS[message], 0, [mpips.Group("0.*", lr=0.1)])
    assert list(trained_parameters(make_model(frozen_sparse, 0))) == ["1.weight", "1.bias"]


def test_a_model_of_random_numbers_is_the_same_on_every_rank() -> None:
    """Also of those that torch does not draw, which go on behind it."""

    class Features(torch.nn.Linear):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(2, 1)
            drawn = torch.tensor([np.random.rand(), random.random()])
            self.register_buffer("drawn", drawn)

    one, before, other = make_model(Features, 5), np.random.rand(), make_model(Features, 5)
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    assert before not in (np.random.rand(), float(one.drawn[0]))


X, Y = torch.arange(12.0).reshape(6, 2), torch.arange(6)


@pytest.mark.parametrize("dataset", [TensorDataset(X, Y), list(zip(X, Y, strict=True))])
def test_batches_are_those_of_a_data_loader(dataset: Any) -> None:
    batch, _ = TorchSamples(dataset).read(np.array([4, 1]))
    assert [type(batch), *(each.tolist() for each in batch)] == [list, X[[4, 1]].tolist(), [4, 1]]
    assert TorchSamples(dataset, len).read(np.array([3, 2, 5]))[0] == 3


class Negated(TensorDataset):  # type: ignore[misc]
    def __getitem__(self, k: int) -> Any:
        x, y = super().__getitem__(k)
        return -x, y


def test_a_dataset_of_tensors_may_have_samples_of_its_own() -> None:
    (x, y), _ = TorchSamples(Negated(X, Y)).read(np.array([4, 1]))
    assert (x.tolist(), y.tolist()) == ((-X[[4, 1]]).tolist(), [4, 1])
