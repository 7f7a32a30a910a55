"""The tables that a problem gives, and the update rules of their rows; starts no MPI."""

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mpips.config import Config
from mpips.config.row_optimizer import parse_row_optimizer
from mpips.errors import UserError
from mpips.layout.tables import Table
from mpips.optim.row_rules import ROW_RULES, RowRule, make_row_rule
from mpips.problems.base import Problem
from mpips.problems.rows import tables_of_problem

if TYPE_CHECKING:
    from mpips.optim.row_rules import Named

INDEX_BYTES = 16  # of a row of a lazy table, about: its key, and entries of the index
EVICTION_BYTES = 15  # more where rows are evicted: when it was pushed, and a larger index
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def checked_tables(given: Any) -> dict[str, Table]:
    """Return a program's tables.

    Raises:
        UserError: If they are no mapping of names to tables, or a name cannot be one.
    """
    example = 'tables={"item": mpips.Table(rows=1000, dim=8)}'
    if not isinstance(given, Mapping):
        raise UserError(f"tables of type {type(given).__name__}", "a mapping", f"such as {example}")
    for name, table in given.items():
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise UserError(f"table {name!r}", "a name of letters, digits, dots, - and _")
        if not isinstance(table, Table):
            got = f"table {name!r} of type {type(table).__name__}"
            raise UserError(got, "an mpips.Table", f"such as {example}")
        rule_of(table, None)
    return dict(given)


def bytes_of_tables(problem: Problem, config: Config, touched: Mapping[str, int]) -> int:
    """Return what the rows of a problem's tables take, with all that their rules keep.

    Args:
        problem: The problem.
        config: The job.
        touched: Rows that a run touches at most, by table; lazy tables have no others.

    Raises:
        UserError: As `checked_tables` and `tables_of_problem`, or if the rule of the job is none
            for rows.
    """
    total, itemsize = 0, np.dtype(config.dtype).itemsize
    for name, given in checked_tables(tables_of_problem(problem)).items():
        table = as_configured(given, config)
        rule = rule_of(table, config)
        assert rule is not None, "the configuration has one"
        each = rule.width(table.dim) * itemsize
        rows = min(table.rows, touched[name]) if table.lazy else table.rows
        each += INDEX_BYTES * table.lazy + EVICTION_BYTES * (table.evict_after is not None)
        total += rows * each
    return total


def as_configured(table: Table, config: Config) -> Table:
    """Return a table with what the configuration says of all that do not say it.

    Raises:
        UserError: If it cannot be.
    """
    if not config.evict_after or table.evict_after is not None:
        return table
    return replace(table, evict_after=config.evict_after)


def rule_of(table: Table, config: Config | None) -> RowRule | None:
    """Return the rule of a table; without one, the configuration's of rows, or that of all."""
    if table.optimizer is not None:
        return make_row_rule(cast("Named", table.optimizer))  # which refuses what is none
    if config is not None and config.row_optimizer:
        return make_row_rule(parse_row_optimizer(config.row_optimizer))
    if config is not None and config.optimizer not in ROW_RULES:
        got = f"tables in a run of optimizer {config.optimizer!r}, which is no rule of rows"
        remedy = "give rows a rule of their own: --row-optimizer adagrad, or Table(optimizer=...)"
        raise UserError(got, f"one of {', '.join(ROW_RULES)}", remedy)
    return None if config is None else make_row_rule(_Optimizer(config))


class _Optimizer:
    """The update rule of a job, as `make_row_rule` takes it."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def options(self) -> dict[str, Any]:
        """Return its name and numbers."""
        c, rule = self._config, ROW_RULES.get(self._config.optimizer)
        names = [each.name for each in fields(rule)] if rule is not None else []
        numbers = {name: getattr(c, name) for name in names if name != "lr" and hasattr(c, name)}
        return {"optimizer": c.optimizer, "lr": c.learning_rate, **numbers}
