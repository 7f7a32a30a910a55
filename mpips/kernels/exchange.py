"""Loops of an exchange on a node: pulls, waits, pushes in turn."""

import math
from functools import cache
from typing import TYPE_CHECKING

from mpips.kernels.atomics import find_ahead, observe, publish
from mpips.kernels.compiled import Kernel, Matrix, Vector, kernel
from mpips.kernels.rule_loops import copy, dense, loop_of, rates_of, several, states_of, step

if TYPE_CHECKING:  # where a loop is compiled, these are among its names
    from mpips.kernels.intrinsics import array_at, copy_bytes, now_ns

LOOKS = 50  # between two looks at the clock, while a word is waited for
LONG_NS = 140_000  # what a sleep costs, twice: a gap between two pushes counts as this at most
RECENT = 8  # gaps that the mean of gaps is made of, by weight
PUSH, PIECE = range(2)  # words of an undo log that change as a push is applied
HEADER = 10  # words that a worker writes of a push's header: see `mpips.transport.push`
SEQ_BITS, WORKER_BITS, NUMBER_BITS = 40, 21, 28


@kernel()
def pull(
    awaited: Vector, value: int, headers: Vector, params: Vector, bounds: Matrix, words: Vector,
    out: Vector, versions: Vector,
) -> int:  # fmt: skip
    """Copy shards, each between a look at the version committed and one at the version begun.

    Args:
        awaited: Addresses of header words, without which nothing is copied; see `reached`.
        value: What each is to have reached.
        headers: Address of each shard's header, shape (n,), dtype int64.
        params: Address of its parameters, likewise, which have the dtype of `out`.
        bounds: Where it begins and ends in `out`, and its server, shape (n, 3), dtype int64.
        words: Of a header: the version committed, and the version begun. Shape (2,), dtype int64.
        out: Where the shards go.
        versions: Becomes each server's version committed, dtype int64.

    Returns:
        How many of the copies are torn: an update was under way. -1 if nothing was copied.

    Raises:
        ValueError: If a shard is not within `out`, or its server is none.
    """
    for k in range(headers.size):
        begin, end, server = bounds[k, 0], bounds[k, 1], bounds[k, 2]
        if not 0 <= begin <= end <= out.size or not 0 <= server < versions.size:
            raise ValueError("pull: shards within the vector are expected")
    for k in range(awaited.size):
        if observe(array_at(awaited[k], awaited, 1), 0) < value:
            return -1
    torn = 0
    for k in range(headers.size):
        begin, end = bounds[k, 0], bounds[k, 1]
        header = array_at(headers[k], versions, max(words[0], words[1]) + 1)
        committed = observe(header, words[0])
        copy_bytes(out[begin:end], params[k], (end - begin) * out.itemsize)
        torn += observe(header, words[1]) > committed
        versions[bounds[k, 2]] = committed
    return torn


@kernel(quick=True)
def announce(
    pushed: Vector, header: Vector, reals: Vector, read: Vector, versions: Vector, worker: int,
    seq: int, epoch: int, begin: int, end: int, samples: int, loss: float, number: int,
    factor: float,
) -> None:  # fmt: skip
    """Write a push's header and the versions read, and then publish its number.

    It has a parameter for each word of a header: loops take no objects.

    Args:
        pushed: Whose first word is the number of pushes announced.
        header: The header; see `mpips.transport.push`.
        reals: The same memory, dtype float64.
        read: Becomes `versions`.
        versions: Version read of each shard, dtype int64.
        worker: Worker number.
        seq: Number of the push.
        epoch: Of the batch that it was computed from.
        begin: First sample of the batch.
        end: One behind its last.
        samples: Samples in it.
        loss: Mean loss over them.
        number: Of the batch, in the order in which batches are assigned.
        factor: Of the learning rate.

    Raises:
        ValueError: If the header is too short, or `versions` are of other shards.
    """
    if min(header.size, reals.size) < HEADER or read.size != versions.size or not pushed.size:
        raise ValueError("announce: a header, and a version of each shard, are expected")
    header[0], header[1], header[2], header[3] = worker, seq, epoch, begin
    header[4], header[5], header[7], header[8] = end, samples, 0, number
    reals[6], reals[9] = loss, factor
    for k in range(read.size):
        read[k] = versions[k]
    publish(pushed, 0, seq)


@kernel()
def reached(words: Vector, value: int, patience_ns: int) -> bool:
    """Look whether header words have reached a value, again and again for a while.

    Args:
        words: Addresses of header words, shape (n,), dtype int64. The words are int64, 8-byte
            aligned, and stay alive during the call.
        value: What each is to reach.
        patience_ns: For how long to wait, in nanoseconds.

    Returns:
        Whether all have. What their owners wrote before is then visible.
    """
    k, looks, end = 0, 0, 0
    while k < words.size:
        if observe(array_at(words[k], words, 1), 0) >= value:
            k += 1
            continue
        if looks % LOOKS == 0:
            now = now_ns()
            end = end or now + patience_ns
            if now >= end:
                return False
        looks += 1
    return True


@step
def rate_of(lr: float, times: float, over: float, then: float) -> float:
    """Return a rate of a step: a product with the learning rate, or a number where `over` is 0."""
    return lr * times / over * then if over != 0 else times


@kernel(quick=True)
def push_word(version: int, worker: int, seq: int) -> int:
    """Return which push makes a version, of which it says whether it is odd."""
    return ((version & 1) << WORKER_BITS | worker) << SEQ_BITS | seq


@cache
def serving(step: Kernel) -> Kernel:
    """Make the loop that applies the pushes of a node, as they come, by the loop of a step.

    It takes parameters, state vectors, and

    - `header` and `applied`, the server's header words and ledger; `own` and `limit` as
      `mpips.kernels.atomics.find_ahead` does;
    - `pushed`, the address of each worker's number of pushes, and `places`, those of its headers,
      versions read of this shard, and gradients of it, each for even and for odd pushes;
    - `rates`, a row for each push that is applied at most: its learning rate, or NaN where that is
      not known, and three numbers a rate of the step, as `rate_of` takes them; and `said`, which
      gets its header;
    - `others`, `others_own`, `others_done`, `others_limit`: what makes the loop end if it is ahead;
    - `words`, of a header the version committed and the version begun, and of a push's header the
      version read and the factor of the rate;
    - `undo` and `undo_log`, memory for the old values of a piece, shape (turns, vectors, piece),
      and its words, which are written as `mpips.failover.undo_log` says; nothing is kept if the
      memory is empty;
    - `state`: which worker is looked at first, for how many nanoseconds pushes were applied, the
      mean gap between two of the last pushes, which one that is waited for in vain makes as long as
      the wait, and when the last push was applied;
    - `budget_ns`, after which it ends, and `patience_ns`, for which it waits for a push at most.

    It is longer than other functions, as the text of a loop is in one piece.

    It returns how many it has applied. Before a push whose rate has a factor it ends, if the
    learning rate is not known; where that is the first, the nanoseconds are -1. What it publishes
    of each, and in which order: see `mpips.ps.shard.Server.apply`.
    """
    s, count = several("s{}", states_of(step)), len(rates_of(step))
    r = several("r{}", count)
    made = several("rate_of(lr, rates[done, 3 * {0} + 1], rates[done, 3 * {0} + 2], "
                   "rates[done, 3 * {0} + 3])", count)  # fmt: skip
    copies = "".join(f"copy(s{k}[p], old[{k + 1}]); " for k in range(states_of(step)))
    text = f"""
def loop(
    params: Vector, {s:?: Vector, }header: Vector, applied: Vector, own: Vector, limit: Vector,
    pushed: Vector, places: Matrix, rates: Matrix, said: Matrix, others: Vector,
    others_own: Vector, others_done: Vector, others_limit: Vector, words: Vector, undo: Array,
    undo_log: Vector, state: Vector, budget_ns: int, patience_ns: int,
) -> int:
    if rates.shape[0] != said.shape[0] or rates.shape[1] != {1 + 3 * count} or words.size != 4:
        raise ValueError("{step.name}: a row of {1 + 3 * count} numbers a push is expected")
    if places.shape[0] != pushed.size or places.shape[1] != 6 or state.size != 4:
        raise ValueError("{step.name}: six places a worker are expected")
    keeps = undo.size > 0
    if keeps and (undo.shape[1] != {1 + len(s)} or undo_log.size <= PIECE):
        raise ValueError("{step.name}: room for {1 + len(s)} vectors is expected")
    piece = undo.shape[2] if keeps else max(params.size, 1)
    version = observe(header, words[0])
    begun = since = now_ns()
    done, looks, spent = 0, 0, 0
    while done < rates.shape[0]:
        k = find_ahead(pushed, own, applied, limit, state[0])
        if k < 0:
            looks += 1
            if looks % LOOKS == 0:
                if now_ns() - since >= patience_ns:
                    state[2] = max(state[2], min(patience_ns, LONG_NS))
                    break
                if others.size and find_ahead(
                    others, others_own, others_done, others_limit, 0
                ) >= 0:
                    break
            elif not patience_ns:
                break
            continue
        worker = own[k]
        seq = observe(applied, worker) + 1
        odd = seq % 2
        found = array_at(places[k, odd], header, said.shape[1])
        lr, factor = rates[done, 0], array_at(places[k, odd] + 8 * words[3], rates, 1)[0]
        if factor != 1 and math.isnan(lr):
            state[1] = spent if done else -1
            return done
        since = now_ns()
        state[2] += (min(since - state[3], LONG_NS) - state[2]) // RECENT
        lr *= factor
        row = said[done]
        copy(found, row)
        row[words[2]] = array_at(places[k, 2 + odd], header, 1)[0]
        version += 1
        if keeps:
            publish(undo_log, PUSH, push_word(version, worker, seq))
        publish(header, words[1], version)
        grad, number = array_at(places[k, 4 + odd], params, params.size), version << NUMBER_BITS
        {r:?, } = {made:?, }
        for at in range(0, params.size, piece):
            p = slice(at, min(at + piece, params.size))
            if keeps:
                old = undo[number % undo.shape[0]]
                copy(params[p], old[0])
                {copies}
                store_ordered(undo_log, PIECE, number)
                number += 1
            apply(params[p], grad[p], {s:?[p], }{r:?, })
        publish(header, words[0], version)
        publish(applied, worker, seq)
        state[0] = (k + 1) % pushed.size
        done += 1
        looks, now = 0, now_ns()
        spent += now - since
        since = state[3] = now
        if now - begun >= budget_ns:
            break
        if others.size and find_ahead(others, others_own, others_done, others_limit, 0) >= 0:
            break
    state[1] = spent
    return done
"""
    return loop_of(
        f"{step.name}_serving", text, apply=dense(step), rate_of=rate_of, observe=observe,
        publish=publish, find_ahead=find_ahead, copy=copy, push_word=push_word, math=math,
        LOOKS=LOOKS, LONG_NS=LONG_NS, RECENT=RECENT, PUSH=PUSH, PIECE=PIECE,
        NUMBER_BITS=NUMBER_BITS,
    )  # fmt: skip
