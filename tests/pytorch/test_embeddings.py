"""Embeddings whose rows are tables: beside torch's, on rows that are here, and on real ranks."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import mpips.torch as mt  # noqa: E402
from mpips.errors import UserError  # noqa: E402
from mpips.torch.embedding import Source, bind_tables  # noqa: E402
from mpips.torch.model import make_model  # noqa: E402

ROWS, DIM = 12, 3


class Store:
    """Rows of a model's tables as a worker has them, and what is pushed."""

    def __init__(self, model: Any) -> None:
        self.source, rng = Source(), np.random.default_rng(0)
        self.rows = {
            name: rng.standard_normal((table.rows, table.dim))
            for name, table in bind_tables(model, self.source).items()
        }
        self.pulled = list[list[int]]()
        self.source.open(self.pull)

    def pull(self, name: str, ids: np.ndarray) -> np.ndarray:
        self.pulled.append(sorted(ids.tolist()))
        return self.rows[name][ids % len(self.rows[name])]

    def pushed(self) -> np.ndarray:
        """Return the sums of what waits, as gradients of a whole table; NaN where there is none."""
        (rows,) = self.rows.values()
        sums = np.full_like(rows, np.nan)

        def push(name: str, ids: np.ndarray, grads: np.ndarray) -> None:
            assert len(set(ids.tolist())) == len(ids) == len(grads)
            ids = ids % len(rows)  # as hashed ones
            sums[ids] = np.nan_to_num(sums[ids]) + grads

        self.source.push_into(push)
        return sums


def one(*args: Any, kind: Any = mt.Embedding, **options: Any) -> tuple[Any, Store]:
    """Return an embedding of a model of its own, and its rows."""
    model = nn.ModuleDict({"it": kind(ROWS, DIM, *args, **options)})
    return model["it"], Store(model)


IDS = torch.tensor([[1, 4, 1, 7], [4, 4, 2, 1], [11, 0, 7, 7]])
OFFSETS = torch.tensor([0, 3, 3, 9])
# Options, whether the ids are flat with offsets, the offsets, and whether samples have weights.
BAGS: dict[str, tuple[dict[str, Any], Any, bool]] = {
    "mean": ({}, None, False),
    "sum": ({"mode": "sum"}, None, False),
    "weighted": ({"mode": "sum"}, None, True),
    "offsets": ({"mode": "mean"}, OFFSETS, False),
    "short offsets": ({"mode": "sum"}, OFFSETS.int(), False),
    "weighted offsets": ({"mode": "sum"}, OFFSETS, True),
    "ends": ({"include_last_offset": True}, torch.tensor([0, 3, 3, 12]), False),
    "padding": ({"padding_idx": 4}, None, False),
    "padding from the end": ({"mode": "sum", "padding_idx": -5}, OFFSETS, True),
    "no padding there": ({"padding_idx": 9}, None, False),
}


@pytest.mark.parametrize("name", BAGS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_bags_are_those_of_torch(name: str, dtype: Any) -> None:
    options, offsets, weighted = BAGS[name]
    ids = (IDS if offsets is None else IDS.reshape(-1)).to(dtype)
    bag, store = one(kind=mt.EmbeddingBag, **options)
    plain = nn.EmbeddingBag(ROWS, DIM, _weight=torch.tensor(store.rows["it"]), **options)
    found = list[Any]()
    for module in (bag, plain):
        weights = torch.linspace(0, 1, ids.numel(), dtype=torch.float64).reshape(ids.shape)
        placed = offsets.to(dtype) if offsets is not None and module is plain else offsets
        out = module(ids, placed, weights.requires_grad_() if weighted else None)
        (out * torch.arange(1, DIM + 1)).square().sum().backward()
        found.append((out, weights.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-14)
    grads, there = store.pushed(), np.unique(IDS[bag.padding_idx != IDS])
    assert store.pulled == [np.unique(IDS).tolist()], "each once"
    np.testing.assert_array_equal(np.flatnonzero(np.isfinite(grads).all(1)), there)
    np.testing.assert_allclose(np.nan_to_num(grads), plain.weight.grad.numpy(), rtol=1e-12)


@pytest.mark.parametrize("padding", [None, 4, -1])
@pytest.mark.parametrize("ids", [IDS, IDS[0, 0], IDS[:0], torch.tensor([4, 4])])
def test_rows_are_those_of_torch(padding: Any, ids: Any) -> None:
    embedding, store = one(padding)  # as torch takes it
    rows = torch.tensor(store.rows["it"])
    if padding is not None:
        rows[padding] = 0
    plain = nn.Embedding(ROWS, DIM, padding_idx=padding, _weight=rows)
    out, expected = embedding(ids), plain(ids)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    for found in (out, expected):
        found.mul_(2)  # a result is no leaf
        found.square().sum().backward()
    np.testing.assert_allclose(np.nan_to_num(store.pushed()), plain.weight.grad.numpy(), rtol=1e-12)


def test_ids_that_are_hashed_may_be_any_integers() -> None:
    """An id is read once, whichever its row is; whoever reads it finds that."""
    embedding, store = one(hashed=True, padding_idx=-7)
    many = 1 << 40
    out = embedding(torch.tensor([many, -7, 5, many]))
    expected = store.rows["it"][[many % ROWS, 0, 5, many % ROWS]]
    expected[1] = 0
    np.testing.assert_array_equal(out.detach(), expected)
    assert store.pulled == [[-7, 5, many]]
    out.sum().backward()
    grads = store.pushed()
    assert grads[[many % ROWS, 5], 0].tolist() == [2, 1]
    assert np.isfinite(grads).all(1).sum() == 2


def test_gradients_wait_for_the_step() -> None:
    """Of all passes of a step; what no backward pass comes to is not kept, and none is twice."""
    embedding, store = one()
    twice, ids = embedding(IDS[0]).sum() + embedding(IDS[1]).sum(), IDS[:2].reshape(-1)
    twice.backward(retain_graph=True)
    twice.backward()
    counts = np.bincount(ids, minlength=ROWS)[:, None].repeat(DIM, 1)
    np.testing.assert_array_equal(np.nan_to_num(store.pushed()), 2 * counts)
    assert np.isnan(store.pushed()).all(), "they have gone"
    with torch.no_grad():
        assert not embedding(IDS).requires_grad
    out = embedding(IDS)
    asked = torch.autograd.grad(out.square().sum(), out)[0]
    assert asked.shape == out.shape
    assert np.isnan(store.pushed()).all()
    rows = weakref.ref(out.grad_fn.next_functions[0][0].variable)
    assert rows() is not None
    del out, asked
    gc.collect()
    assert rows() is None, "nothing holds a pass that was left"
    embedding(IDS).sum().backward()
    store.source.forget()
    assert np.isnan(store.pushed()).all(), "of a batch that was left"


@pytest.mark.long
def test_a_compiled_model_is_cut_at_its_tables() -> None:
    model = nn.Sequential(mt.Embedding(ROWS, DIM), nn.Tanh(), nn.Linear(DIM, 2).double())
    store = Store(model)
    compiled, expected = torch.compile(model, backend="aot_eager"), list[Any]()
    for call in (model, compiled, compiled):
        call(IDS).square().sum().backward()
        expected.append(store.pushed())
        store.rows["0"] += 0 if call is model else 1  # rows are read in each pass
    np.testing.assert_allclose(expected[1], expected[0], rtol=1e-12)
    assert not np.allclose(expected[2], expected[1], equal_nan=True)


def test_copies_read_on_and_pickles_read_nowhere() -> None:
    embedding, store = one(padding_idx=2)
    other = copy.deepcopy(embedding)
    torch.testing.assert_close(other(IDS), embedding(IDS))
    again = pickle.loads(pickle.dumps(embedding))
    outside = r"a forward pass of an mpips\.torch\.Embedding outside a run, .* mpips\.torch\.run"
    store.source.close()
    for closed in (again, embedding, mt.Embedding(ROWS, DIM)):
        with pytest.raises(UserError, match=outside):
            closed(IDS)
    assert not list(again.parameters())
    assert not again.state_dict()


def test_a_model_in_16_bits_has_rows_of_them() -> None:
    model = nn.Sequential(mt.Embedding(ROWS, DIM), nn.Linear(DIM, 2)).bfloat16()
    store = Store(model)
    store.rows["0"] = store.rows["0"].astype("f4")
    out = model(IDS)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert store.pushed().dtype == np.float32


REFUSED: dict[str, Callable[[], object]] = {
    f"id {ROWS} at place 1 for table 'it', expected ids from 0 to": (
        lambda: one()[0](torch.tensor([0, ROWS]))
    ),
    "id -1 at place 0 for table 'it'": lambda: one()[0](torch.tensor([-1])),
    "ids of table 'it' of dtype float32, expected an integer": lambda: one()[0](torch.ones(1)),
    r"input list of an mpips\.torch\.Embedding, expected a tensor of ids": lambda: one()[0]([0, 1]),
    "padding_idx=12 of 12 embeddings, expected one from -12": lambda: one(ROWS),
    "mode='max' of an EmbeddingBag, expected sum or mean": lambda: mt.EmbeddingBag(
        9, 2, mode="max"
    ),
    "a model that is an Embedding and nothing else": lambda: Store(mt.Embedding(ROWS, DIM)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_an_embedding_cannot_be_or_read(message: str) -> None:
    with pytest.raises(UserError, match=message):
        REFUSED[message]()


def test_which_embeddings_are_tables() -> None:
    """Of torch's none; one that has two names in a model is one table."""
    model = nn.ModuleDict({"dense": nn.Embedding(ROWS, DIM), "table": mt.Embedding(ROWS, DIM)})
    model["again"] = model["table"]
    assert list(Store(model).rows) == ["table"]
    assert list(make_model(lambda: model, 0).state_dict()) == ["dense.weight"]
