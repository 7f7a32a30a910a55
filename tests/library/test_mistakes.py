"""Mistakes in programs: one clear line each, in words of a program, and the trainer's exit code."""

import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpips

BEFORE = {
    "mpips": """
P, ITEM = {"w": np.zeros(3)}, mpips.Table(rows=5, dim=2)
AdamW = type("AdamW", (), {"__module__": "torch.optim", "__repr__": lambda self: "AdamW (\\n)"})

def loop(line="pass", n="20", after="pass", **options):
    text = f"def train(worker):\\n  for batch in worker.batches({n}, batch_size=5, epochs=1):\\n"
    text += f"    worker.grads['w'][:] = 0\\n    {line}\\n    worker.push(1.0)\\n  {after}"
    names = {"mpips": mpips, "np": np}
    exec(compile(text, "own.py", "exec"), names)
    return mpips.run(names["train"], P, mode="sync", quiet=True, out="loop", **options)

def train(worker):
    for batch in worker.batches(20, batch_size=5, epochs=1):
        worker.grads["w"][:] = 0
        worker.push(1.0)

def run(*args, **options):
    return mpips.run(train, P, *args, **{"mode": "sync", "quiet": True, "out": "run", **options})
""",
    "torch": """
import torch
import torch.utils.data as td
import mpips.torch as mt

DATA = td.TensorDataset(torch.zeros(20, 3), torch.zeros(20, 1))
net = lambda: torch.nn.Linear(3, 1)
Stream = type("Stream", (td.IterableDataset,), {"__iter__": lambda s: iter([])})

def run(train, model=net, rule=mpips.SGD(0.1), **options):
    return mt.run(train, model, rule, **{"mode": "sync", "quiet": True, "out": "run", **options})

def train(worker):
    for x, y in worker.loader(DATA, batch_size=5, epochs=1):
        ((worker.model(x) - y) ** 2).mean().backward()
        worker.optimizer.step()

def loop(line, passes=1):
    text = "def train(worker):\\n  own = torch.optim.SGD(worker.model.parameters(), 0.1)\\n"
    text += "  loader = worker.loader(DATA, batch_size=5)\\n  for _ in worker.epochs(2):\\n"
    text += f"   for _ in range({passes}):\\n    for x, y in loader:\\n"
    text += "     ((worker.model(x) - y) ** 2).mean().backward()\\n"
    text += f"     worker.optimizer.step()\\n     {line}\\n"
    names = {"torch": torch, "DATA": DATA}
    exec(compile(text, "own.py", "exec"), names)
    return names["train"]
""",
    "jax": """
import jax.numpy as jnp
import mpips.jax as mj

P = {"w": jnp.zeros(3)}
X, Y = np.zeros((20, 3), "f4"), np.zeros(20, "f4")
loss = lambda params, x, y: ((x @ params["w"] - y) ** 2).mean()

def run(loss=loss, params=P, data=(X, Y), rule=mpips.SGD(0.1), **options):
    options = {"mode": "sync", "batch_size": 5, "epochs": 1, "quiet": True, "out": "run"} | options
    return mj.run(loss, params, data, rule, **options)
""",
}

# Of each: statements, and what is said; the exit code is 2, or 1 where it follows the arrow.
MISTAKES = {
    "mpips": r"""
run(learning_rate=0.1)  ->  did you mean 'lr'
run(num_workers=2)  ->  mpirun -n N starts N ranks
run(test_dataset=P)  ->  a program has its own; did you mean 'held_out'
run(device='cuda')  ->  worker.to
run(bacth_size=3)  ->  did you mean 'batch_size'
run(mode='asynch')  ->  unknown mode 'asynch'.*'async'
run(mode='async')  ->  start several by mpirun, or give mode="sync"
run(batch_size='32')  ->  batch_size '32', expected an integer
run(mpips.Adam('0.1'))  ->  lr '0.1', expected a number > 0
run(epochs=0)  ->  expected epochs >= 1 or steps >= 1; set epochs=
run(local_steps=4)  ->  leave out local_steps=, or use mode="local_sgd"
run(on_death='shrink')  ->  on_death 'shrink' in a program, expected 'restart'
run(target_accuracy=0.9, eval_every=0)  ->  set eval_every=
run(target_accuracy=0.9)  ->  target_accuracy 0.9 without held-out samples
run(); mpips.run(train, P, resume=True, out='run').rows('i', 1)  ->  run without tables
open('file', 'w'); run(out='file')  ->  out file is a file, .*choose another out=
open('file', 'w'); run(out='.')  ->  is not empty, and holds no run
run(resume=True, out='no')  ->  resume=True finds no run in no.*resume="auto"
run(init_from='no.npz')  ->  no.npz
run('adam')  ->  expected an mpips optimizer; such as mpips.Adam
run(mpips.Adam)  ->  expected an mpips optimizer; such as mpips.Adam
mpips.Adam(learning_rate=1e-3)  ->  did you mean 'lr'
mpips.AdamW(1e-3, betas=(0.9, 0.99))  ->  give beta1 and beta2
run(mpips.AdamW(1e-2), lr=1e-3)  ->  lr=0.001 beside optimizer=AdamW\(lr=0.01, .*; leave out lr
run(AdamW())  ->  optimizer torch.optim.AdamW, .* mpips.AdamW\(1e-3, weight_decay=
run(hidden=(3,))  ->  'hidden'.*a program has its own
mpips.SGD(0.1, momentum=0.9)  ->  mpips.Momentum has it
mpips.run(train, {}, mode='sync')  ->  no params
mpips.run(train, [np.zeros(3)], mode='sync')  ->  params of type list
mpips.run(train, {'w': 'a'}, mode='sync')  ->  of dtype <U1
mpips.run(train, {'w': [np.nan]}, mode='sync')  ->  parameters with NaN or infinity in 'w'
mpips.run(None, P, mode='sync')  ->  train of type NoneType
mpips.run(lambda: 0, P, mode='sync')  ->  write def train.worker.:
run(held_out=5)  ->  held_out without evaluate
run(held_out=5, evaluate=lambda p, b: 1.0)  ->  evaluate .*returned 1.0
run(comm='world')  ->  comm of type str
run(callbacks=[print])  ->  callback
run(callbacks=mpips.Callback())  ->  callback
run(tables={'item': 3})  ->  table 'item' of type int
run(tables=[mpips.Table(3, 2)])  ->  tables of type list
run(tables={'a/b': ITEM})  ->  table 'a/b', expected a name of letters
run(mode='local_sgd', tables={'item': ITEM})  ->  in mode 'local_sgd', expected mode async or ssp
run(mpips.Lion(), tables={'item': ITEM})  ->  'lion'
run(checkpoint_rows='changed')  ->  checkpoint_rows 'changed' without tables
mpips.Table(-1, 2)  ->  rows=-1 of a table
run(groups=['w'])  ->  Group
mpips.run(lambda worker: 0, P, mode='sync', out='run')  ->  without a loop
loop('break')  ->  left its loop
loop('continue')  ->  taken and not pushed
loop('worker.push(1.0); worker.pull()')  ->1  pull without a batch
loop('worker.push(1.0)')  ->1  push without a batch
loop('worker.push("low"); continue')  ->  loss
loop('worker.push(None); continue')  ->  loss
loop('worker.grads["w"][:] = np.nan')  ->  NaN in 'w', at a loss of 1,
loop(after='worker.batches(5)')  ->1  a second loop over batches, expected one
loop(n='3.5')  ->  data of type float
loop(n='True')  ->  data of type bool
loop(n='"abc"')  ->  data of type str
loop(n='0')  ->  data without a sample
loop(n='[]')  ->  data without a sample
loop(n='{}')  ->  data with no array
loop(n='{"a": 3.0}')  ->  data with data\[.a.\] of shape \(\), expected arrays of one length
loop(n='(np.zeros(3), np.zeros(4))')  ->  arrays of one length
loop(n='4')  ->  batch_size 5, expected at most 4
loop('worker.log(kind=1)')  ->  another name
loop('worker.log(worker=1)')  ->  log\(worker=...\), expected another name
loop('worker.log()')  ->  log\(\) of nothing, expected numbers by name
loop('worker.log(x=np.ones(1))')  ->  of ndarray, expected a number
loop('worker.log(x=1j)')  ->  of complex, expected a number
loop('worker.log(x=201 * "x")')  ->  of 201 letters, expected a number, or a text
loop('worker.pull_rows("item", [1])')  ->  run without tables
run().rows('item', [1])  ->  'item' in a run without tables
mpips.Store(None, P)  ->  a store on one rank
mpips.Store(None, P, learning_rate=0.1)  ->  'learning_rate' of a store
mpips.Store(None, P, num_servers=1)  ->  did you mean 'servers'
""",
    "torch": r"""
run(train, learning_rate=0.1)  ->  did you mean 'lr'
run(train, net())  ->  model of type Linear.*model=Net, not Net()
run(train, lambda: 3)  ->  a model of type int
run(train, torch.nn.ReLU)  ->  without a parameter
run(lambda w: w.loader(DATA, 5, shuffle=True))  ->  shuffle= of .*, .*mpips.torch.run shuffle=
run(lambda w: w.loader(DATA, 5, drop_last=True))  ->  counts once an epoch
run(lambda w: w.loader(DATA, 5, pin_memory=True))  ->  leave it out
run(lambda w: w.loader(DATA, batchsize=5))  ->  did you mean 'batch_size'
run(lambda w: w.loader(td.DataLoader(DATA, 5)))  ->  expected the dataset of it; .*loader.dataset
run(lambda w: w.loader(DATA, sampler=td.RandomSampler(DATA)))  ->  sampler= .*without a sampler
run(lambda w: [*w.loader(Stream())])  ->  mpips.torch.Streamed\(
run(lambda w: list(w.loader(DATA, 5)))  ->  call worker.optimizer.step()
run(lambda w: [w.optimizer.step() for x in w.loader(DATA, 5)])  ->  loss.backward
run(lambda w: [0 for x in w.loader(iter(DATA))])  ->  map-style
run(lambda w: w.to('nowhere'))  ->  device 'nowhere'
run(lambda w: w.to('cuda:9'))  ->  a process that has . of cuda
run(lambda w: 0)  ->  without a loop
run(lambda w: w.all_reduce(1, op='avg'))  ->  op of all_reduce\(\) 'avg', .* mean
run(lambda w: w.save(1, 'x.pt'))  ->  save\(\) before the loop
run(loop('worker.save(worker.model.state_dict(), "../x.pt")'))  ->1  a file's name
run(train, rule=lambda p: torch.optim.SparseAdam(p))  ->  SparseAdam
run(train, rule=lambda p: torch.optim.SGD(p, 0.1), lr=0.2)  ->  one lr
run(loop('own.step()'))  ->1  worker.optimizer
run(loop('pass', passes=2))  ->1  a second pass in epoch 0
run(loop('break'))  ->1  ended before all of its batches
run(lambda w: [*w.epochs(3)])  ->  loader = worker.loader
run(lambda w: [w.loader(DATA, 5, epochs=2), *w.epochs(3)])  ->  epochs\(3\) .* with epochs=2
run(lambda w: print(w.epoch))  ->  epoch outside the loop
run(lambda w: w.all_reduce([1]))  ->  worker.gather.. takes anything
""",
    "jax": r"""
run(max_steps=3)  ->  did you mean 'steps'
run(3)  ->  loss of type int
run(params={'w': jnp.zeros(3, int)})  ->  'w'.* of dtype int32
run(lambda p, x, y: x @ p['w'] - y)  ->  loss that returned
run(data=(X, Y[:3]))  ->  arrays of one length
run(rule='adam')  ->  an mpips optimizer
run(batch_size=50)  ->  at most 20
run(evaluate=lambda p, x, y: 0.0, held_out=(X, Y))  ->  evaluate that returned
""",
}


def make(statements: str, names: dict[str, Any]) -> tuple[int, str]:
    """Run a program that makes a mistake; returns its exit code, and what Python prints of it."""
    stream, code = io.StringIO(), 0
    with contextlib.redirect_stderr(stream):
        try:
            exec(compile(statements, "own.py", "exec"), names)
        except BaseException as error:
            try:
                sys.excepthook(type(error), error, error.__traceback__)
                code = 1
            except SystemExit as end:
                code = int(str(end.code))
    return code, stream.getvalue()


@pytest.mark.one_mpi
@pytest.mark.parametrize("library", MISTAKES)
def test_a_mistake_is_one_line(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process alone; what several ranks refuse is in `test_library`."""
    if library != "mpips":
        pytest.importorskip(library, reason="an extra", exc_type=ImportError)
    wrong = []
    for number, line in enumerate(MISTAKES[library].strip().splitlines()):
        statements, expected, pattern = re.split(" +->(1?) +", line)
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        names = {"np": np, "mpips": mpips}
        exec(BEFORE[library], names)
        code, text = make(statements, names)
        one_line = text.startswith("mpips: ") and text.count("\n") == 1
        if not one_line or not re.search(pattern, text) or code != int(expected or 2):
            wrong.append(f"{statements}: {code} {text}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.one_mpi
def test_a_program_runs_again_after_an_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a notebook, which keeps the exception: the run's folder is free."""
    monkeypatch.chdir(tmp_path)
    names = {"np": np, "mpips": mpips}
    exec(BEFORE["mpips"], names)
    with pytest.raises(ZeroDivisionError):
        names["loop"]("1 / 0")
    assert names["loop"](resume="auto").reason == "epochs"
