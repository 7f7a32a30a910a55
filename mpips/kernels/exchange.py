"""Loops of pulls, waits, pushes and rounds within a node."""

import math
from functools import cache
from time import perf_counter_ns
from typing import TYPE_CHECKING

from mpips.kernels.atomics import find_ahead, meet, meet_and_add, observe, publish
from mpips.kernels.compiled import Kernel, Matrix, Vector, kernel
from mpips.kernels.rule_loops import (
    copy,
    dense,
    loop_of,
    rates_of,
    several,
    states_of,
    step,
    summed,
)

if TYPE_CHECKING:  # the compiler of loops defines these names
    from mpips.kernels.intrinsics import array_at, copy_bytes, now_ns

POLLS = 50  # polls of header words between two reads of the clock
LONG_NS = 140_000  # twice the cost of a sleep; a gap between two pushes counts at most this long
RECENT = 8  # the running mean of gaps gives the last one a weight of 1 / RECENT
PUSH, PIECE = range(2)  # words of an undo log that change as a push is applied
HEADER = 10  # words of a push's header that the worker writes: see `mpips.transport.push`
SEQ_BITS, WORKER_BITS, NUMBER_BITS = 40, 21, 28
REPORT = 8  # numbers of a rank's report of a round


@kernel()
def pull(
    awaited: Vector, value: int, headers: Vector, params: Vector, bounds: Matrix, words: Vector,
    out: Vector, versions: Vector,
) -> int:  # fmt: skip
    """Copy shards of local servers.

    The loop reads the committed version before it copies a shard, and the begun version after. A
    copy is torn if the begun version is newer: an update was under way.

    Args:
        awaited: Addresses of header words that must have reached `value`; see `reached`.
        value: If one of the words is smaller, nothing is copied.
        headers: Address of each shard's header, shape (n,), dtype int64.
        params: Address of each shard's parameters, shape (n,), dtype int64. They have the dtype of
            `out`.
        bounds: Begin and end of each shard in `out`, and number of its server, shape (n, 3), dtype
            int64.
        words: Indices in a header of the committed version and of the begun version, shape (2,),
            dtype int64.
        out: Gets the shards.
        versions: Gets the committed version of each shard, at its server's number, dtype int64.

    Returns:
        Number of torn copies; -1 if nothing was copied.

    Raises:
        ValueError: If a shard is not within `out`, or a server's number not within `versions`.
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

    It has a parameter for each word of a header, since loops take no objects.

    Args:
        pushed: Header words; the first one is the number of the worker's pushes, published here.
        header: Header of the push; see `mpips.transport.push`.
        reals: The same memory as `header`, dtype float64.
        read: Gets a copy of `versions`.
        versions: Version of each shard that the worker read, dtype int64.
        worker: Worker number.
        seq: Number of the push; the worker's first is 1.
        epoch: Epoch of the push's batch.
        begin: First sample of the batch.
        end: One past its last sample.
        samples: Number of samples in the batch.
        loss: Mean loss over the batch.
        number: Number of the batch, in the order in which batches are assigned.
        factor: Factor of the learning rate.

    Raises:
        ValueError: If the header is too short, or `read` and `versions` differ in length.
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
    """Poll header words until all have reached a value, or a time has passed.

    Args:
        words: Addresses of header words, shape (n,), dtype int64. The words are int64, 8-byte
            aligned, and stay alive during the call.
        value: Least value that each word must have.
        patience_ns: Longest time to poll, in nanoseconds.

    Returns:
        Whether all words have reached the value. All that their owners wrote before is then
        visible.
    """
    k, polls, end = 0, 0, 0
    while k < words.size:
        if observe(array_at(words[k], words, 1), 0) >= value:
            k += 1
            continue
        if polls % POLLS == 0:
            now = now_ns()
            end = end or now + patience_ns
            if now >= end:
                return False
        polls += 1
    return True


@step
def rate_of(lr: float, times: float, over: float, then: float) -> float:
    """Return a rate of a step: ``lr * times / over * then``, or just `times` if `over` is 0."""
    return lr * times / over * then if over != 0 else times


@kernel(quick=True)
def push_word(version: int, worker: int, seq: int) -> int:
    """Return the identity of a push in one word: parity of its version, worker, and number."""
    return ((version & 1) << WORKER_BITS | worker) << SEQ_BITS | seq


@cache
def serving(step: Kernel) -> Kernel:
    """Make the loop by which a server applies the pushes of its node, in the order of arrival.

    The loop returns the number of pushes that it has applied. It ends when `rates` has no further
    row, the time is over, or no push has come for a while. It also ends if a word of `others` is
    ahead, or a learning rate is missing. It publishes the same words in the same order as
    `mpips.ps.shard.Server.apply`. This function is long because the text of a loop is in one piece.

    The loop takes the parameters, the state vectors, and

    - `header` and `applied`: the server's header words, and its ledger of applied pushes;
    - `workers` and `limit`: worker number of each entry of `pushed`, and the largest push number of
      each worker that may be applied; see `mpips.kernels.atomics.find_ahead`;
    - `pushed`: address of each worker's number of pushes;
    - `addresses`: six addresses for each worker: its push headers, the versions of this shard that
      it read, and its gradients for this shard, each for even and for odd push numbers;
    - `rates`: one row for each push. The first number is the learning rate, or NaN if it is not
      known. Three numbers for each rate of the step follow, the arguments of `rate_of`;
    - `headers`: gets the header of each applied push, one row for each;
    - `others`, `others_index`, `others_done`, `others_limit`: arguments of `find_ahead`; the loop
      ends if it finds a word;
    - `words`: indices of the committed and the begun version in the server's header, and of the
      version read and the factor in a push's header;
    - `undo` and `undo_log`: memory for old values, shape (turns, vectors, piece), and the words of
      the undo log (`mpips.failover.undo_log`). If the memory is empty, no old values are saved;
    - `state`: four numbers that the loop reads and writes. They are the index in `pushed` to check
      first; the nanoseconds spent in applying pushes; the mean gap between recent pushes in
      nanoseconds; and the time when the last push was applied. If no push comes, the mean gap
      becomes at least as long as the wait;
    - `budget_ns` and `patience_ns`: time after which the loop ends, and longest wait for a push.

    If a push has a factor of the learning rate, and that rate is not known, the loop ends before
    this push. If it is the first push, the nanoseconds in `state` become -1.
    """
    s, count = several("s{}", states_of(step)), len(rates_of(step))
    r = several("r{}", count)
    made = several("rate_of(lr, rates[done, 3 * {0} + 1], rates[done, 3 * {0} + 2], "
                   "rates[done, 3 * {0} + 3])", count)  # fmt: skip
    copies = "".join(f"copy(s{k}[p], old[{k + 1}]); " for k in range(states_of(step)))
    text = f"""
def loop(
    params: Vector, {s:?: Vector, }header: Vector, applied: Vector, workers: Vector, limit: Vector,
    pushed: Vector, addresses: Matrix, rates: Matrix, headers: Matrix, others: Vector,
    others_index: Vector, others_done: Vector, others_limit: Vector, words: Vector, undo: Array,
    undo_log: Vector, state: Vector, budget_ns: int, patience_ns: int,
) -> int:
    if rates.shape[0] != headers.shape[0] or rates.shape[1] != {1 + 3 * count} or words.size != 4:
        raise ValueError("{step.name}: a row of {1 + 3 * count} numbers a push is expected")
    if addresses.shape[0] != pushed.size or addresses.shape[1] != 6 or state.size != 4:
        raise ValueError("{step.name}: six addresses a worker are expected")
    keeps = undo.size > 0
    if keeps and (undo.shape[1] != {1 + len(s)} or undo_log.size <= PIECE):
        raise ValueError("{step.name}: room for {1 + len(s)} vectors is expected")
    piece = undo.shape[2] if keeps else max(params.size, 1)
    version = observe(header, words[0])
    begun = since = now_ns()
    done, polls, spent = 0, 0, 0
    while done < rates.shape[0]:
        k = find_ahead(pushed, workers, applied, limit, state[0])
        if k < 0:
            polls += 1
            if polls % POLLS == 0:
                if now_ns() - since >= patience_ns:
                    state[2] = max(state[2], min(patience_ns, LONG_NS))
                    break
                if others.size and find_ahead(
                    others, others_index, others_done, others_limit, 0
                ) >= 0:
                    break
            elif not patience_ns:
                break
            continue
        worker = workers[k]
        seq = observe(applied, worker) + 1
        odd = seq % 2
        push = array_at(addresses[k, odd], header, headers.shape[1])
        lr, factor = rates[done, 0], array_at(addresses[k, odd] + 8 * words[3], rates, 1)[0]
        if factor != 1 and math.isnan(lr):
            state[1] = spent if done else -1
            return done
        since = now_ns()
        state[2] += (min(since - state[3], LONG_NS) - state[2]) // RECENT
        lr *= factor
        row = headers[done]
        copy(push, row)
        row[words[2]] = array_at(addresses[k, 2 + odd], header, 1)[0]
        version += 1
        if keeps:
            publish(undo_log, PUSH, push_word(version, worker, seq))
        publish(header, words[1], version)
        grad, number = array_at(addresses[k, 4 + odd], params, params.size), version << NUMBER_BITS
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
        polls, now = 0, now_ns()
        spent += now - since
        since = state[3] = now
        if now - begun >= budget_ns:
            break
        if others.size and find_ahead(others, others_index, others_done, others_limit, 0) >= 0:
            break
    state[1] = spent
    return done
"""
    return loop_of(
        f"{step.name}_serving", text, apply=dense(step), rate_of=rate_of, observe=observe,
        publish=publish, find_ahead=find_ahead, copy=copy, push_word=push_word, math=math,
        POLLS=POLLS, LONG_NS=LONG_NS, RECENT=RECENT, PUSH=PUSH, PIECE=PIECE,
        NUMBER_BITS=NUMBER_BITS,
    )  # fmt: skip


@cache
def whole_round(step: Kernel) -> Kernel:
    """Make the loop of a round: a barrier, the update by the sum of gradients, another barrier.

    First the loop takes the arguments that stay the same from round to round:

    - `words`, `polls`, `reports` and `sums`: those of `mpips.kernels.atomics.meet_and_add`;
    - `report`: gets this rank's report, which other ranks read; one of `reports`;
    - `seconds`: gets the time spent at the barriers, also in a call before with `met` = 0, and the
      time spent in the update; shape (2,), dtype float64;
    - parameters, state vectors, and `rows`, `begin` and `buffer` of `summed`.

    Then it takes

    - `weights`: those of the rows;
    - `turn`: number of the first barrier; the second one has the next number;
    - `met`: whether all ranks have met at the first barrier in an earlier call;
    - each rate, and each number of the report, as a float64.

    The loop returns how many of the two barriers all ranks have reached. With 0 nothing is updated
    yet.
    """
    s, r = several("s{}", states_of(step)), several("r{}", len(rates_of(step)))
    m = several("m{}", REPORT)
    text = f"""
def loop(
    words: Vector, polls: int, reports: Vector, sums: Vector, report: Vector, seconds: Vector,
    params: Vector, {s:?: Vector, }rows: Vector, begin: int, buffer: Vector, weights: Vector,
    turn: int, met: int, {r:?: float, }{m:?: float, }
) -> int:
    if seconds.size != 2 or report.size != {REPORT}:
        raise ValueError("{step.name}: two times and a report are expected")
    start = now_ns()
    if not met:
        {several("report[{}]", REPORT):?, } = {m:?, }
    reached = met != 0 or meet_and_add(words, turn, polls, reports, sums)
    here = now_ns()
    seconds[0] = 1e-9 * (here - start) + (seconds[0] if met else 0.0)
    if not reached:
        return 0
    update(params, {s:?, }rows, weights, begin, buffer, {r:?, })
    end = now_ns()
    seconds[1] = 1e-9 * (end - here)
    reached = meet(words, turn + 1, polls)
    seconds[0] += 1e-9 * (now_ns() - end)
    return 2 if reached else 1
"""
    names = {"meet": meet, "meet_and_add": meet_and_add, "update": summed(step)}
    in_python = {"now_ns": perf_counter_ns}  # to explain an error
    return loop_of(f"{step.name}_round", text, **names, **in_python)
