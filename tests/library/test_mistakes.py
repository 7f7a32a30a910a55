"""Mistakes in programs: one clear line each, in words of a program, and the trainer's exit code."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch import ROOT, environment

PROGRAM = ROOT / "tests" / "library" / "programs" / "mistakes.py"

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
import mpips.torch as mt

DATA = torch.utils.data.TensorDataset(torch.zeros(20, 3), torch.zeros(20, 1))
net = lambda: torch.nn.Linear(3, 1)
Stream = type("Stream", (torch.utils.data.IterableDataset,), {"__iter__": lambda s: iter([])})

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

# Of each: statements, what is said, and the exit code where it is not 2.
MISTAKES: dict[str, dict[str, tuple[str, str] | tuple[str, str, int]]] = {
    "mpips": {
        "learning_rate": ("run(learning_rate=0.1)", "did you mean 'lr'"),
        "max_steps": ("run(max_steps=3)", "did you mean 'steps'"),
        "num_workers": ("run(num_workers=2)", "mpirun -n N starts N ranks"),
        "validation_data": ("run(validation_data=P)", "did you mean 'held_out'"),
        "test_dataset": ("run(test_dataset=P)", "a program has its own; did you mean 'held_out'"),
        "device": ("run(device='cuda')", "worker.to"),
        "typo": ("run(bacth_size=3)", "did you mean 'batch_size'"),
        "mode": ("run(mode='asynch')", "unknown mode 'asynch'.*'async'"),
        "one rank": ("run(mode='async')", 'start several by mpirun, or give mode="sync"'),
        "text": ("run(batch_size='32')", "batch_size '32', expected an integer"),
        "rate of a rule": ("run(mpips.Adam('0.1'))", "lr '0.1', expected a number > 0"),
        "no end": ("run(epochs=0)", "expected epochs >= 1 or steps >= 1; set epochs="),
        "other mode": ("run(local_steps=4)", 'leave out local_steps=, or use mode="local_sgd"'),
        "death": ("run(on_death='shrink')", "on_death 'shrink' in a program, expected 'restart'"),
        "never": ("run(target_accuracy=0.9, eval_every=0)", "set eval_every="),
        "out is a file": (
            "open('file', 'w'); run(out='file')",
            "out file is a file, .*choose another out=",
        ),
        "out in use": ("open('file', 'w'); run(out='.')", "is not empty, and holds no run"),
        "no run": ("run(resume=True, out='no')", 'resume=True finds no run in no.*resume="auto"'),
        "init_from": ("run(init_from='no.npz')", "no.npz"),
        "rule by name": ("run('adam')", "expected an mpips optimizer; such as mpips.Adam"),
        "rule's class": ("run(mpips.Adam)", "expected an mpips optimizer; such as mpips.Adam"),
        "a rule's rate": ("mpips.Adam(learning_rate=1e-3)", "did you mean 'lr'"),
        "betas": ("mpips.AdamW(1e-3, betas=(0.9, 0.99))", "give beta1 and beta2"),
        "a rate twice": (
            "run(mpips.AdamW(1e-2), lr=1e-3)",
            r"lr=0.001 beside optimizer=AdamW\(lr=0.01, .*, expected one lr; leave out lr",
        ),
        "a rule of another library": (
            "run(AdamW())", r"optimizer torch.optim.AdamW, .* mpips.AdamW\(1e-3, weight_decay="
        ),
        "a model": ("run(hidden=(3,))", "'hidden'.*a program has its own"),
        "momentum": ("mpips.SGD(0.1, momentum=0.9)", "mpips.Momentum has it"),
        "no params": ("mpips.run(train, {}, mode='sync')", "no params"),
        "a list": ("mpips.run(train, [np.zeros(3)], mode='sync')", "params of type list"),
        "text as params": ("mpips.run(train, {'w': 'a'}, mode='sync')", "of dtype <U1"),
        "train called": ("mpips.run(None, P, mode='sync')", "train of type NoneType"),
        "no argument": ("mpips.run(lambda: 0, P, mode='sync')", "write def train.worker.:"),
        "held out": ("run(held_out=5)", "held_out without evaluate"),
        "evaluation": ("run(held_out=5, evaluate=lambda p, b: 1.0)", "evaluate .*returned 1.0"),
        "comm": ("run(comm='world')", "comm of type str"),
        "callback": ("run(callbacks=[print])", "callback"),
        "one callback": ("run(callbacks=mpips.Callback())", "callback"),
        "table": ("run(tables={'item': 3})", "table 'item' of type int"),
        "tables": ("run(tables=[mpips.Table(3, 2)])", "tables of type list"),
        "a table's name": ("run(tables={'a/b': ITEM})", "table 'a/b', expected a name of letters"),
        "tables in local steps": (
            "run(mode='local_sgd', tables={'item': ITEM})",
            "tables in mode 'local_sgd', expected mode async or ssp or sync",
        ),
        "a rule of no rows": ("run(mpips.Lion(), tables={'item': ITEM})", "'lion'"),
        "changed rows": (
            "run(checkpoint_rows='changed')", "checkpoint_rows 'changed' without tables"
        ),
        "rows": ("mpips.Table(-1, 2)", "rows=-1 of a table"),
        "group": ("run(groups=['w'])", "Group"),
        "no loop": ("mpips.run(lambda worker: 0, P, mode='sync', out='run')", "without a loop"),
        "left": ("loop('break')", "left its loop"),
        "not pushed": ("loop('continue')", "taken and not pushed"),
        "pulled late": ("loop('worker.push(1.0); worker.pull()')", "pull without a batch", 1),
        "pushed twice": ("loop('worker.push(1.0)')", "push without a batch", 1),
        "not a number": ("loop('worker.push(\"low\"); continue')", "loss"),
        "nothing": ("loop('worker.push(None); continue')", "loss"),
        "NaN": ("loop('worker.grads[\"w\"][:] = np.nan')", r"left NaN in out\['w'\]"),
        "second loop": (
            "loop(after='worker.batches(5)')", "a second loop over batches, expected one", 1
        ),
        "data": ("loop(n='3.5')", "data of type float"),
        "ragged": ("loop(n='(np.zeros(3), np.zeros(4))')", "arrays of one length"),
        "few samples": ("loop(n='4')", "batch_size 5, expected at most 4"),
        "logged": ("loop('worker.log(kind=1)')", "another name"),
        "no tables": ("loop('worker.pull_rows(\"item\", [1])')", "run without tables"),
        "no rows": ("run().rows('item', [1])", "'item' in a run without tables"),
        "a store alone": ("mpips.Store(None, P)", "a store on one rank"),
        "a store's rate": ("mpips.Store(None, P, learning_rate=0.1)", "'learning_rate' of a store"),
        "a store's servers": ("mpips.Store(None, P, num_servers=1)", "did you mean 'servers'"),
    },
    "torch": {
        "learning_rate": ("run(train, learning_rate=0.1)", "did you mean 'lr'"),
        "instance": ("run(train, net())", "model of type Linear.*model=Net, not Net()"),
        "no module": ("run(train, lambda: 3)", "a model of type int"),
        "no parameter": ("run(train, torch.nn.ReLU)", "without a parameter"),
        "shuffle": (
            "run(lambda w: w.loader(DATA, 5, shuffle=True))",
            r"shuffle= of worker.loader\(\), expected dataset, .*mpips.torch.run shuffle=",
        ),
        "drop_last": ("run(lambda w: w.loader(DATA, 5, drop_last=True))", "counts once an epoch"),
        "pin_memory": ("run(lambda w: w.loader(DATA, 5, pin_memory=True))", "leave it out"),
        "batch-size": ("run(lambda w: w.loader(DATA, batchsize=5))", "did you mean 'batch_size'"),
        "a DataLoader": (
            "run(lambda w: w.loader(torch.utils.data.DataLoader(DATA, 5)))",
            "a DataLoader, expected the dataset of it; .*loader.dataset",
        ),
        "a sampler": (
            "run(lambda w: w.loader(DATA, sampler=torch.utils.data.RandomSampler(DATA)))",
            "sampler= .*without a sampler",
        ),
        "an iterable": ("run(lambda w: [*w.loader(Stream())])", r"mpips.torch.Streamed\("),
        "no step": ("run(lambda w: list(w.loader(DATA, 5)))", "call worker.optimizer.step()"),
        "no backward": (
            "run(lambda w: [w.optimizer.step() for x in w.loader(DATA, 5)])", "loss.backward"
        ),
        "a stream": ("run(lambda w: [0 for x in w.loader(iter(DATA))])", "map-style"),
        "device": ("run(lambda w: w.to('nowhere'))", "device 'nowhere'"),
        "no such device": ("run(lambda w: w.to('cuda:9'))", "a process that has . of cuda"),
        "no loop": ("run(lambda w: 0)", "without a loop"),
        "avg": ("run(lambda w: w.all_reduce(1, op='avg'))", r"op of all_reduce\(\) 'avg', .* mean"),
        "saved early": ("run(lambda w: w.save(1, 'x.pt'))", r"save\(\) before the loop"),
        "saved elsewhere": (
            "run(loop('worker.save(worker.model.state_dict(), \"../x.pt\")'))", "a file's name", 1
        ),
        "an unknown rule": (
            "run(train, rule=lambda p: torch.optim.SparseAdam(p))", "SparseAdam"
        ),
        "lr twice": ("run(train, rule=lambda p: torch.optim.SGD(p, 0.1), lr=0.2)", "one lr"),
        "its own step": ("run(loop('own.step()'))", "worker.optimizer", 1),
        "two passes": ("run(loop('pass', passes=2))", "a second pass in epoch 0", 1),
        "left its pass": ("run(loop('break'))", "ended before all of its batches", 1),
        "no loader": ("run(lambda w: [*w.epochs(3)])", "loader = worker.loader"),
        "printed epoch": ("run(lambda w: print(w.epoch))", "epoch outside the loop"),
        "gathered nothing": ("run(lambda w: w.all_reduce([1]))", "worker.gather.. takes anything"),
    },
    "jax": {
        "max_steps": ("run(max_steps=3)", "did you mean 'steps'"),
        "no loss": ("run(3)", "loss of type int"),
        "integers": ("run(params={'w': jnp.zeros(3, int)})", "'w'.* of dtype int32"),
        "a vector": ("run(lambda p, x, y: x @ p['w'] - y)", "loss that returned"),
        "ragged": ("run(data=(X, Y[:3]))", "arrays of one length"),
        "rule by name": ("run(rule='adam')", "an mpips optimizer"),
        "few samples": ("run(batch_size=50)", "at most 20"),
        "metrics": ("run(evaluate=lambda p, x, y: 0.0, held_out=(X, Y))", "evaluate that returned"),
    },
}  # fmt: skip


@pytest.mark.launch
@pytest.mark.one_mpi
@pytest.mark.parametrize("library", MISTAKES)
def test_a_mistake_is_one_line(library: str, tmp_path: Path) -> None:
    """In a process alone; what several ranks refuse is in `test_library`."""
    if library != "mpips":
        pytest.importorskip(library, reason="an extra", exc_type=ImportError)
    wanted = MISTAKES[library]
    table = tmp_path / "table.json"
    mistakes = {name: statements for name, (statements, *_) in wanted.items()}
    table.write_text(json.dumps({"before": BEFORE[library], "mistakes": mistakes}))
    (tmp_path / "in").mkdir()
    env = {**environment(), "PYTHONPATH": str(ROOT)}
    args = [sys.executable, str(PROGRAM), str(table)]
    subprocess.run(args, cwd=tmp_path / "in", env=env, check=True, timeout=120)
    told = json.loads(table.read_text())
    wrong = []
    for name, (_, pattern, *codes) in wanted.items():
        code, text = told[name]
        one_line = text.startswith("mpips: ") and text.count("\n") == 1
        if not one_line or not re.search(pattern, text) or [code] != (codes or [2]):
            wrong.append(f"{name}: {code} {text}")
    assert not wrong, "\n".join(wrong)
