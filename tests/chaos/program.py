"""A built-in job as a program of `mpips.run`: ``python -m tests.chaos.program OUT [options]``.

Its workers count in a loop of their own what those of `mpips.train` count.
"""

import sys
from collections.abc import Sequence

import numpy as np

import mpips
from mpips.config.command_line import given_values, load
from mpips.datasets import DataInfo
from mpips.library.start import NOT_OPTIONS
from mpips.problems import load_problem
from tests.chaos.builtin import DIGITS


def main(argv: Sequence[str]) -> int:
    out, *words = argv
    config, given = load([*words, "--out", out]), given_values(words)
    samples = DIGITS - round(config.test_fraction * DIGITS)
    data = DataInfo("digits", samples, 0, (), (), None, "none")
    problem = load_problem(config.problem, data, config)

    def train(worker: mpips.Worker) -> None:
        for batch in worker.batches(samples):
            worker.step(problem.loss_and_grad, batch)

    params, rule = problem.init(np.random.default_rng(0)), mpips.SGD(config.learning_rate)
    said = {*NOT_OPTIONS, "optimizer", "lr"}
    options = {name: value for name, value in given.items() if name not in said}
    return mpips.run(train, params, rule, out=out, resume="auto", **options).code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
