"""A convolutional net learns the digits in each mode, beside plain torch on as many samples."""

import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path

import nets
import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch.nn import functional as F
from torch.utils.data import DataLoader

import mpips
import mpips.torch as mt

RATE, EPOCHS, SIZE = 3e-3, 4, 16
SHARE = {"sync": 0.08, "local_sgd": 0.1, "easgd": 0.12}  # larger batches, or few exchanges


def alone(train: torch.utils.data.Dataset, test: torch.utils.data.TensorDataset) -> float:
    """Return the accuracy that plain torch reaches in one process."""
    torch.manual_seed(0)
    model = nets.Net()
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0)
    for _ in range(EPOCHS):
        for x, y in DataLoader(train, SIZE, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        return nets.metrics(model, test.tensors)["accuracy"]


def on_one(compute: Callable[[], float]) -> float:
    """Return what rank 0 computes; the others leave it the cores."""
    value = np.array([compute() if MPI.COMM_WORLD.rank == 0 else 0.0])
    request = MPI.COMM_WORLD.Ibcast(value)
    while not request.Test():
        time.sleep(0.01)
    return float(value[0])


def main(out: Path, *modes: str) -> None:
    """Train in each of the modes, and compare."""
    train_set, test_set = nets.digits()
    reference = on_one(lambda: alone(train_set, test_set))
    found: dict[str, float] = {}
    evaluated = list[int]()

    def train(worker: mt.Worker) -> None:
        model, opt = worker.model, worker.optimizer
        before = [p.data for p in model.parameters()]  # held: nothing else gets their memory
        for x, y in worker.loader(train_set, batch_size=SIZE, epochs=EPOCHS):
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            if worker.steps == 3:  # with the parameters of the batch in work, which stay
                middle = worker.evaluate(nets.metrics, test_set)
                model.eval()
                with torch.no_grad():
                    mine = nets.metrics(model, test_set.tensors)
                model.train()
                assert middle == pytest.approx(mine, rel=1e-4)
                evaluated.append(worker.id)
            opt.step()
        places = {data.data_ptr() for data in before}
        assert all(p.data_ptr() not in places for p in model.parameters()), "they were views"
        found.update(worker.evaluate(nets.metrics, test_set))

    threads = threading.active_count()
    for mode in modes:
        found.clear()
        evaluated.clear()
        result = mt.run(
            train, model=nets.Net, optimizer=mpips.AdamW(RATE), mode=mode, out=out / mode,
            quiet=True, evaluate=nets.metrics, held_out=test_set, eval_every=4, schedule="cosine",
        )  # fmt: skip
        accuracy = result.summary["accuracy"]
        assert accuracy >= reference - SHARE.get(mode, 0.06), (mode, accuracy, reference)
        own = nets.Net()
        own.load_state_dict(result.state_dict)
        own.eval()
        with torch.no_grad():
            mine = nets.metrics(own, test_set.tensors)
        assert abs(mine["accuracy"] - accuracy) < 1e-6, "the state dict is the model evaluated"
        assert bool(evaluated) == bool(found), "on each worker"
        if found:
            assert abs(found["loss"] - mine["loss"]) < 1e-5
        ends = time.monotonic() + 20  # a thread that has written ends when nobody holds it
        while threading.active_count() > threads and time.monotonic() < ends:
            gc.collect()
            time.sleep(0.01)
        assert threading.active_count() == threads, threading.enumerate()
        if MPI.COMM_WORLD.rank == 0:
            print(f"{mode}: {accuracy:.4f}, plain torch {reference:.4f}", flush=True)
