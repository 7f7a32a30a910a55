"""Tables of a problem, with the update rules of their rows."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np

from mpips.config import Config
from mpips.config.groups import RowOptimizer, parse_rule
from mpips.config.user_file import names_class
from mpips.errors import UserError
from mpips.layout.tables import Table
from mpips.optim.row_rules import ROW_RULES, RowRule, make_row_rule
from mpips.problems.base import Problem
from mpips.problems.rows import tables_of_problem

INDEX_BYTES = 16  # approximate bytes of a row in a lazy table's index: its key and its entries
EVICTION_BYTES = 15  # further bytes with eviction: the time of the last push, and a larger index
TABLE_MODES = ("async", "ssp", "sync", "hybrid")
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def checked_tables(given: Any) -> dict[str, Table]:
    """Return a program's tables.

    Raises:
        UserError: If they are no mapping of names to tables, or a name is not allowed.
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
        if table.optimizer is not None:
            make_row_rule(table.optimizer)  # raises if it is no rule
    return dict(given)


def configured_tables(problem: Problem, config: Config) -> Iterator[tuple[str, Table, RowRule]]:
    """Yield the name of each table of a problem, the table, and the rule of its rows.

    The configuration gives the settings that a table does not give itself.

    Raises:
        UserError: As `checked_tables` and `tables_of_problem`, or if the job's rule is no row rule.
    """
    for name, table in checked_tables(tables_of_problem(problem)).items():
        if config.evict_after and table.evict_after is None:
            table = replace(table, evict_after=config.evict_after)
        yield name, table, _rule_of(table, config)


def _rule_of(table: Table, config: Config) -> RowRule:
    """Return the rule of a table: its own, else the job's for rows, else the job's optimizer."""
    c = config
    if table.optimizer is not None:
        return make_row_rule(table.optimizer)
    if c.row_optimizer:
        return make_row_rule(parse_rule(c.row_optimizer, "row_optimizer"))
    if names_class(c.optimizer):
        decay = {} if c.weight_decay is None else {"weight_decay": c.weight_decay}
        return make_row_rule(RowOptimizer(c.optimizer, {"lr": c.learning_rate, **decay}))
    if c.optimizer not in ROW_RULES:
        got = f"tables in a run of optimizer {c.optimizer!r}, which is no rule of rows"
        given = "--row-optimizer adagrad, Table(optimizer=...) or Embedding(optimizer=...)"
        remedy = f"give rows a rule of their own: {given}"
        raise UserError(got, f"one of {', '.join(ROW_RULES)}", remedy)
    names = {each.name for each in fields(ROW_RULES[c.optimizer])} - {"lr"}
    numbers = {name: x for name in names if (x := getattr(c, name, None)) is not None}
    return make_row_rule(RowOptimizer(c.optimizer, {"lr": c.learning_rate, **numbers}))


def check_options(config: Config, nodes: int) -> None:
    """Refuse modes and options that do not support tables, for a job on that many nodes.

    Raises:
        UserError: If the job is refused.
    """
    c = config
    if c.mode not in TABLE_MODES:
        raise UserError(f"tables in mode {c.mode!r}", f"mode {' or '.join(TABLE_MODES)}")
    if c.mode == "hybrid" and c.clip:
        remedy = "rows are applied before the norm of the whole is known: leave out --clip"
        raise UserError(f"clip {c.clip:g} in mode 'hybrid'", "clip 0", remedy)
    if c.mode == "hybrid" and c.record and c.codec != "none" and nodes > 1:
        got = f"record with codec {c.codec!r} in mode 'hybrid' on several nodes"
        raise UserError(got, "codec 'none'", "leave out --codec, or --record")
    if c.mode == "sync" and c.reduce == "allreduce":
        remedy = "rows are exchanged in shared memory and by messages: leave out --reduce"
        raise UserError("reduce 'allreduce' with tables", "reduce 'auto' or 'shared'", remedy)
    if c.codec == "powersgd":
        remedy = "rows have no matrix to be taken apart: use another --codec, or none"
        raise UserError("codec 'powersgd' with tables", "a codec of single numbers", remedy)
    if nodes > 1 and c.node_aggregation:
        got = f"node_aggregation with tables, on {nodes} nodes"
        raise UserError(got, "each worker's rows sent by itself", "leave node_aggregation out")
    for name in ("delay_compensation", "backup_workers"):
        if given := getattr(c, name):
            got = f"{name}={given} with tables"
            raise UserError(got, f"{name} as it is by default", "leave it out")


def bytes_of_tables(problem: Problem, config: Config, touched: Mapping[str, int]) -> int:
    """Return the bytes of all tables' rows, with their slots.

    Args:
        problem: The problem.
        config: The job.
        touched: Largest number of rows that a run touches, by table; a lazy table has no others.

    Raises:
        UserError: As `configured_tables`.
    """
    total, itemsize = 0, np.dtype(config.dtype).itemsize
    for name, table, rule in configured_tables(problem, config):
        row_bytes = rule.width(table.dim) * itemsize
        rows = min(table.rows, touched[name]) if table.lazy else table.rows
        row_bytes += INDEX_BYTES * table.lazy + EVICTION_BYTES * (table.evict_after is not None)
        total += rows * row_bytes
    return total
