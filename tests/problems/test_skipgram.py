"""Skip-gram on the command line: its pairs, its gradient, and words that come to be alike."""

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch import ROOT, environment
from runs import Plan, final, summary

from mpips.checkpoint import Checkpoint
from mpips.checkpoint.nearest import find_nearest
from mpips.config import Config
from mpips.datasets import Batch, open_dataset
from mpips.errors import UserError
from mpips.planning.explain import Question, explain_alone
from mpips.problems import load_problem
from mpips.problems.gradient_check import check_gradient
from mpips.problems.skipgram import MIDDLE, NEIGHBOUR, TRAINED, alias_table
from mpips.session.data import _keep_words
from mpips.session.folder import Run

PAIRS = """
list tuple  int float  minimum maximum  client server  start stop  input output  read write
encode decode  month year  row column  width height  parent child  encoding charset
threads processes  keys values  year day  host port  upper lower  signal handler  left right
"""
TOPICS, OF_TOPIC, LINES = 8, 6, 1500
SOME = 400  # words of a batch


def write_topics(path: Path) -> int:
    """Write lines that have words of one topic each, between words that all have; how many."""
    rng = np.random.default_rng(0)
    lines = []
    for topic in rng.integers(TOPICS, size=LINES):
        own = [f"t{topic}w{k}" for k in rng.integers(OF_TOPIC, size=8)]
        lines.append(" ".join([*own[:4], "and", *own[4:], "the"]))
    path.write_text("\n".join(lines))
    return 10 * LINES


def topic_hits(found: Checkpoint) -> float:
    """Return the share of the five nearest words that are of a word's own topic."""
    words = [f"t{topic}w{k}" for topic in range(TOPICS) for k in range(OF_TOPIC)]
    near = dict(find_nearest(found, words, "", OF_TOPIC - 1))
    return float(np.mean([[k[:2] == word[:2] for k, _ in near[word]] for word in words]))


class Dense:
    """Rows in arrays, and gradients that are added up there."""

    def __init__(self, words: int, dim: int) -> None:
        rng = np.random.default_rng(3)
        self.rows = {name: rng.normal(size=(words, dim)) for name in (MIDDLE, NEIGHBOUR)}
        self.grads = {name: np.zeros((words, dim)) for name in self.rows}

    def pull(self, name: str, ids: np.ndarray) -> np.ndarray:
        return self.rows[name][ids]

    def push(self, name: str, ids: np.ndarray, grads: np.ndarray) -> None:
        np.add.at(self.grads[name], ids, grads)


@pytest.fixture
def ready(tmp_path: Path) -> tuple[Any, Batch]:
    """Return a problem of topics, and a batch."""
    write_topics(tmp_path / "topics.txt")
    config = Config(problem="skipgram", dataset=f"{tmp_path}/topics.txt", dim=4, negatives=3)
    data = open_dataset(config)
    batch = Batch(*data.train.load(0, SOME, np.dtype("f8")), np.arange(SOME), 2)
    return load_problem("skipgram", data.info, config), batch


def test_the_gradient(tmp_path: Path) -> None:
    write_topics(tmp_path / "topics.txt")
    config = Config(problem="skipgram", dataset=f"{tmp_path}/topics.txt", dim=5, seed=4)
    text, error = check_gradient(config)
    assert error is None
    assert "the gradient is right" in text


def test_a_model_without_parameters_is_explained(tmp_path: Path) -> None:
    write_topics(tmp_path / "topics.txt")
    config = Config(problem="skipgram", dataset=f"{tmp_path}/topics.txt", optimizer="adagrad")
    text = explain_alone(config, Question(ranks=4, nodes=2))
    assert text.startswith("mode async, no parameters\nrows of tables are not counted")


def test_pairs_and_their_loss(ready: tuple[Any, Batch]) -> None:
    problem, batch = ready
    middle, places, ids = problem._pairs(batch, TRAINED)
    words = ids[places]
    assert len(set(ids.tolist())) == len(ids)
    near = {(i, k) for i in range(SOME) for k in batch.x[i : i + 1].indices.tolist()}
    assert {*zip(middle.tolist(), words[:, 0].tolist(), strict=True)} <= near
    assert SOME / 10 < len(middle) < SOME
    table = Dense(len(problem._vocabulary), 4)
    v, u = table.rows[MIDDLE][problem._own(batch)], table.rows[NEIGHBOUR]
    loss = 0.0
    for i, (first, *drawn) in zip(middle, words, strict=True):
        loss += np.log1p(np.exp(-v[i] @ u[first]))
        loss += sum(np.log1p(np.exp(v[i] @ u[k])) for k in drawn if k != first)
    found = problem.loss_and_grad_rows({}, table, batch, {})
    assert found == pytest.approx(loss / SOME)
    assert set(np.flatnonzero(table.grads[NEIGHBOUR].any(axis=1))) <= set(ids.tolist())
    held = problem.evaluate_rows({}, table, batch)["loss"]
    assert held != found
    assert held == problem.evaluate_rows({}, table, batch)["loss"]


def test_what_is_drawn_depends_on_sample_and_epoch_alone(ready: tuple[Any, Batch]) -> None:
    """So a batch that is cut otherwise, or in another order, has the same pairs."""
    problem, batch = ready

    def drawn(ids: np.ndarray, epoch: int) -> list[list[int]]:
        some = Batch(batch.x.take(ids), batch.y[ids], ids, epoch)
        middle, places, words = problem._pairs(some, TRAINED)
        return sorted([int(ids[i]), *words[k]] for i, k in zip(middle, places, strict=True))

    whole = drawn(np.arange(SOME), 2)
    parts = drawn(np.arange(7, SOME)[::-1], 2) + drawn(np.arange(7), 2)
    assert whole == sorted(parts)
    assert whole != drawn(np.arange(SOME), 3)


def test_nothing_is_pushed_where_the_loss_is_not_finite(ready: tuple[Any, Batch]) -> None:
    problem, batch = ready
    table = Dense(len(problem._vocabulary), 4)
    table.rows[NEIGHBOUR][:] = np.nan
    assert np.isnan(problem.loss_and_grad_rows({}, table, batch, {}))
    assert not table.grads[MIDDLE].any()


def test_words_are_drawn_as_often_as_they_weigh() -> None:
    weights = np.random.default_rng(0).random(1000) ** 8 + 1e-9
    share, other = alias_table(weights)
    drawn = share.copy()
    np.add.at(drawn, other, 1 - share)
    np.testing.assert_allclose(drawn, weights * 1000 / weights.sum(), atol=1e-12)
    assert (share >= 0).all()


@pytest.mark.launch
def test_in_one_world(tmp_path: Path) -> None:
    """Words of a topic are alike, in all modes, after a resume too, and what is wrong is told."""
    n = write_topics(tmp_path / "topics.txt")
    plan = Plan(tmp_path)
    text = ["--problem", "skipgram", "--dataset", "topics.txt", "--test-fraction", "0.04"]
    rule = ["--optimizer", "adagrad", "--lr", "0.2", "--batch-size", "64", "--dim", "16"]
    for mode in ("async", "sync"):
        plan.add(mode, 3, [*text, *rule, "--mode", mode, "--epochs", "8"])
    plan.add("async", 4, ["--resume", "--servers", "2", "--epochs", "10"], quiet=False)
    plan.add("async", 3, ["--resume", "--min-count", "2"], 2)
    plan.add("async", 3, ["--resume", "--eval-only"], quiet=False)
    plan.add("digits", 3, ["--problem", "skipgram", *rule], 2)
    plan.add("no words", 3, ["--dim", "16"], 2)
    plan.run(240, tmp_path)
    for mode in ("async", "sync"):
        assert topic_hits(final(plan.out(mode))) > 0.9
    found = summary(plan.out("async"))
    assert found["samples"] == 10 * n * 0.96
    (loss,) = re.findall(r"loss ([\d.]+)", plan.outputs("async")[3])
    assert abs(float(loss) - found["eval_loss"]) < 1e-5
    line = r"^table in: pulled [\d,]+ rows, pushed [\d,]+; by server \d\d%, \d\d%"
    assert re.search(line, plan.outputs("async")[1], re.M), plan.outputs("async")[1]
    words = (plan.out("async") / "words.txt").read_text().splitlines()
    assert {words[0], words[1]} == {f"and {LINES}", f"the {LINES}"}
    told = "\n".join(plan.errors())
    for some in (
        "min_count 2 on resume, expected 5 as in the saved run",
        "dataset 'digits', whose samples are no words, expected a text file",
        "dim 16",
    ):
        assert some in told
    check_command(plan.out("async"))


def check_command(out: Path) -> None:
    """The nearest words are printed; a run without words has numbers, and no table is told."""
    command = [sys.executable, "-m", "mpips.checkpoint", "nearest", str(out), "t3w1", "T0W0"]
    done = subprocess.run(
        [*command, "--count", "3"], env=environment(), capture_output=True, text=True, check=True
    )
    line, other = done.stdout.splitlines()
    assert re.fullmatch(r"t3w1: t3w\d 0\.\d\d, t3w\d 0\.\d\d, t3w\d 0\.\d\d", line), line
    assert other.startswith("T0W0: t0w")
    found = final(out)
    with pytest.raises(UserError, match=r"unknown word 't3w9', expected one of 50 words; did you"):
        list(find_nearest(found, ["t3w9"], "", 3))
    with pytest.raises(UserError, match="0 nearest rows, expected at least 1"):
        list(find_nearest(found, ["the"], "", 0))
    with pytest.raises(UserError, match="unknown table 'inn'"):
        list(find_nearest(found, ["the"], "inn", 3))
    (out / "words.txt").unlink()
    ((number, near),) = find_nearest(found, ["0"], "out", 4)
    assert number == "0"
    assert all(k.isdecimal() and k != "0" for k, _ in near)
    with pytest.raises(UserError, match=r"'the' in a run without words.txt, expected the number"):
        list(find_nearest(found, ["the"], "in", 3))


@pytest.mark.long
@pytest.mark.launch
def test_words_of_documentation(tmp_path: Path) -> None:
    """The job puts related words near each other: by chance not one pair of twenty would be."""
    write = runpy.run_path(str(ROOT / "jobs" / "documentation.py"))["main"]
    write(str(tmp_path / "text.txt"))
    plan = Plan(tmp_path)
    plan.add("words", 4, [str(ROOT / "jobs" / "words.toml"), "--dataset", "text.txt"])
    plan.run(300, tmp_path)
    known = {line.split()[0] for line in (plan.out("words") / "words.txt").read_text().splitlines()}
    pairs = [pair.split() for pair in re.split(r"  |\n", PAIRS.strip())]
    asked = [pair for pair in pairs if known.issuperset(pair)]  # some modules may not be installed
    assert len(asked) >= 15, known
    words = sorted({word for pair in asked for word in pair})
    near = {
        word: {k for k, _ in found}
        for word, found in find_nearest(final(plan.out("words")), words, "", 20)
    }
    hits = [f"{a} {b}" for a, b in asked if b in near[a] or a in near[b]]
    assert len(hits) >= 0.7 * len(asked), hits


def test_other_words_are_refused_on_resume(tmp_path: Path) -> None:
    """Even where the index of the data is gone: rows would be those of other words."""
    run = Run(Config(), tmp_path, None, resumed=False, notes=[])
    _keep_words(run, "the 5\na 3\n")
    run.resumed = True
    _keep_words(run, "the 5\na 3\n")
    with pytest.raises(UserError, match=r"other words than those of .*words.txt"):
        _keep_words(run, "a 5\nthe 3\n")
    assert (tmp_path / "words.txt").read_text() == "the 5\na 3\n"
