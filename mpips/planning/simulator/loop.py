"""Event loop of a simulated asynchronous job, compiled.

Links are pipes. Each node has two, one in each direction. A message leaves in pieces, which
alternate with the pieces of other messages: responses and pushes take turns, and so do messages of
a kind. A piece enters the other node after all earlier ones. So messages share both pipes as TCP
connections share a link. Workers that ask at the same time get their late responses at the same
time, and stay in step.

A **lane** is the shards on one node, or on several equal nodes. A worker pulls a part from each
lane, computes, waits until its last push has left, pushes a part to each lane, and asks for the
next parts. It reads local parts after the time between steps, when its push may be applied. With a
bound on clocks, it reads them when all remote parts have arrived. A server receives a limited
number of remote parts at a time, and applies parts in order of arrival. A run depends only on its
numbers. `mpips.planning.simulator.simulation` fills the arrays.
"""

from mpips.kernels.compiled import Vector, kernel

# isort: off
from mpips.planning.simulator.arrays import (
    APPLIED, APPLY, ARRIVED, ASKED, ASSIGNED, AT, BATCH, BEHIND, BINS, BLOCKED, BOUND, BUSY, CODE,
    COMPLETE, COMPUTE, COPY_S, DELAY, DONE, END_AT, FREE, HEAD, IDLE, IN, IN_BUSY, JOINED, JOINT,
    KIND_BITS, KNOWN, LANES, LANE_BITS, LAST, LAST_AT, MADE, MISSING, NEXT, NODE, OUT_BUSY, PIECES,
    PREFETCH, PULL, PULLED, PULL_IN, PULL_OUT, PUSH, PUSH_IN, PUSH_OUT, QUEUE, QUOTA, READS, REMOTE,
    REPLIED, REPLYING, RING, ROW, SEEN, SENDING, SHARE, SHARES, SINCE, SIZE, SLOTS, STARTED, STEP,
    TAIL, TIME, TOTAL, TO_SEND, TURN, UNSENT, VERSION, WAIT, WAITING, WAITS, WAITS_CLOCK, WARM,
    WARM_AT, WORKERS, Matrix, State, drop_first, put,
)  # fmt: skip
# isort: on

_FREED, _START, _COMPUTED, _DELIVERED, _READ, _APPLY = range(6)  # events
_REPLY, _PUSH = 0, 1  # messages


@kernel()
def try_start(s: State, w: int, now: float) -> None:
    """Begin to compute as soon as everything that the step needs has arrived."""
    worker = s.workers[w]
    odd = int(worker[STEP]) & 1
    if worker[IDLE] and not worker[WAITS_CLOCK] and worker[MISSING + odd] == 0:
        worker[IDLE] = 0
        put(s.events, s.numbers, max(now, worker[ARRIVED + odd]), _START, w, 0)


@kernel()
def arrive(s: State, w: int, step: int, done: float, now: float) -> None:
    """Record when a part that a step needs arrives."""
    worker, odd = s.workers[w], step & 1
    worker[ARRIVED + odd] = max(worker[ARRIVED + odd], done)
    worker[MISSING + odd] -= 1
    try_start(s, w, now)


@kernel()
def receive(s: State, node: int, seconds: float, at: float, whole: float) -> float:
    """Receive a message in a node from time `at` on, for at least `whole`; return its end."""
    pipe = s.pipes[node]
    pipe[IN] = max(at, pipe[IN]) + seconds
    pipe[IN_BUSY] += seconds
    return max(pipe[IN], at + whole)


@kernel()
def enqueue(s: State, node: int, w: int, k: int, kind: int, now: float) -> None:
    """Queue a message out of a node, or begin to send it."""
    row = w * (s.numbers[LANES] + 1) + k
    s.parts[row, TO_SEND + kind] = s.numbers[PIECES]
    if not s.pipes[node, SENDING]:
        begin(s, node, row, kind, now)
    else:
        line_up(s, node, row, kind)


@kernel()
def line_up(s: State, node: int, row: int, kind: int) -> None:
    """Append a message to the queue of its kind."""
    pipe = s.pipes[node]
    if pipe[QUEUE + kind] < 0:
        pipe[QUEUE + kind] = pipe[QUEUE + 2 + kind] = row
    else:
        s.parts[int(pipe[QUEUE + 2 + kind]), BEHIND + kind] = row
        pipe[QUEUE + 2 + kind] = row


@kernel()
def begin(s: State, node: int, row: int, kind: int, now: float) -> None:
    """Begin to send a piece of a message; it occupies the pipe out of the node."""
    stride, pipe = s.numbers[LANES] + 1, s.pipes[node]
    w, k = row // stride, row % stride
    lane, share = s.lanes[k], 1 / s.numbers[PIECES]
    if kind == _PUSH:
        share *= s.workers[w, SHARE]
    seconds = share * (lane[PUSH_OUT] if kind == _PUSH else lane[PULL_OUT])
    pipe[SENDING], pipe[TURN], pipe[ROW] = 1, 1 - kind, row
    pipe[OUT_BUSY] += seconds
    put(s.events, s.numbers, now + seconds, _FREED, node, 0)
    s.parts[row, TO_SEND + kind] -= 1
    if kind == _REPLY:
        reply(s, w, k, now)
        return
    done = receive(s, int(lane[AT]), lane[PUSH_IN] * share, now + lane[DELAY], seconds)
    if s.parts[row, TO_SEND + kind] == 0:
        put(s.events, s.numbers, done, _DELIVERED, w, k)


@kernel()
def freed(s: State, node: int, now: float) -> None:
    """Send the next piece out of a node: kinds of messages take turns, and so do messages."""
    pipe = s.pipes[node]
    pipe[SENDING] = 0
    kind = int(pipe[TURN])
    if s.parts[int(pipe[ROW]), TO_SEND + 1 - kind] > 0:
        line_up(s, node, int(pipe[ROW]), 1 - kind)
    if pipe[QUEUE + kind] < 0:
        kind = 1 - kind
    row = int(pipe[QUEUE + kind])
    if row >= 0:
        last = row == pipe[QUEUE + 2 + kind]
        pipe[QUEUE + kind] = -1 if last else s.parts[row, BEHIND + kind]
        begin(s, node, row, kind, now)


@kernel()
def receive_part(s: State, w: int, k: int, version: float, done: float, now: float) -> None:
    """Receive part `k` of a version for worker `w`'s next replica; it arrives at time `done`."""
    part = s.parts[w * (s.numbers[LANES] + 1) + k]
    step = int(part[PULLED])
    part[PULLED] += 1
    part[SEEN + step % RING] = version
    arrive(s, w, step, done, now)


@kernel()
def reply(s: State, w: int, k: int, now: float) -> None:
    """Send a piece of a response, also to workers of its node that asked meanwhile.

    They see the version of the first piece.
    """
    stride, lane, share = s.numbers[LANES] + 1, s.lanes[k], 1 / s.numbers[PIECES]
    node, at = int(s.workers[w, NODE]), now + 2 * lane[DELAY]
    done = receive(s, node, lane[PULL_IN] * share, at, lane[PULL_OUT] * share)
    row = w * stride + k
    if s.parts[row, TO_SEND + _REPLY] == s.numbers[PIECES] - 1:
        s.parts[row, REPLYING] = lane[VERSION]
    if s.parts[row, TO_SEND + _REPLY] > 0:
        return
    version, others, joint = s.parts[row, REPLYING], -1, s.parts[node * stride + k]
    if k < s.numbers[LANES]:
        others = int(joint[JOINED])
        joint[JOINT], joint[JOINED], joint[DONE], joint[REPLIED] = 0, -1, done, version
    while row >= 0:
        receive_part(s, row // stride, k, version, done, now)
        row = others
        if row >= 0:
            others = int(s.parts[row, NEXT])


@kernel()
def ask(s: State, w: int, now: float) -> None:
    """Ask for the remote parts of a worker's next replica."""
    lanes, node, count = s.lanes, int(s.workers[w, NODE]), s.numbers[LANES]
    for k in range(count):
        at = int(lanes[k, AT])
        if at == node:
            continue
        joint, row = s.parts[node * (count + 1) + k], w * (count + 1) + k
        newer = s.numbers[SHARES] and joint[ASKED] >= s.workers[w, KNOWN]
        if newer and joint[JOINT]:
            s.parts[row, NEXT] = joint[JOINED]
            joint[JOINED] = row
        elif newer and joint[DONE] > now:
            receive_part(s, w, k, joint[REPLIED], joint[DONE], now)  # a shared read is under way
        else:
            joint[JOINT], joint[ASKED] = 1, now
            enqueue(s, at, w, k, _REPLY, now)


@kernel()
def take(s: State, w: int, now: float) -> None:
    """Assign a batch to a worker, which asks for parameters unless it waits for other workers."""
    n, worker = s.numbers, s.workers[w]
    if n[ASSIGNED] >= n[TOTAL] or (n[QUOTA] and worker[STEP] >= n[QUOTA]):
        return
    worker[BATCH + int(worker[STEP]) % RING] = n[ASSIGNED]
    n[ASSIGNED] += 1
    worker[IDLE] = 1
    if n[BOUND] >= 0:
        worker[WAITS_CLOCK] = 1
        n[BLOCKED] += 1
        release(s, w, now)
        return
    pause = s.times[n[WORKERS] + w, int(worker[STEP]) % s.times.shape[1]]
    if pause > 0:
        worker[MISSING + (int(worker[STEP]) & 1)] += 1
        put(s.events, n, now + pause, _READ, w, 0)
    else:
        read_local(s, w)
    if not n[PREFETCH] or worker[STEP] == 0:
        ask(s, w, now)
    try_start(s, w, now)


@kernel()
def read_local(s: State, w: int) -> None:
    """Read the local parts of a worker's next replica."""
    n, worker = s.numbers, s.workers[w]
    for k in range(n[LANES]):
        if s.lanes[k, AT] == worker[NODE]:
            s.parts[w * (n[LANES] + 1) + k, SEEN + int(worker[STEP]) % RING] = s.lanes[k, VERSION]


@kernel()
def start(s: State, w: int, now: float) -> None:
    """Compute a gradient."""
    n, worker = s.numbers, s.workers[w]
    step = int(worker[STEP])
    if n[BOUND] >= 0:
        read_local(s, w)
    if n[STARTED] == n[WARM]:
        s.events[0, WARM_AT] = now
    if n[STARTED] == n[LAST]:
        s.events[0, LAST_AT] = now
    n[STARTED] += 1
    worker[KNOWN] = now
    seconds = s.times[w, step % s.times.shape[1]]
    pause = s.times[n[WORKERS] + w, step % s.times.shape[1]]
    worker[PULL] += now - worker[SINCE] - pause + worker[COPY_S]
    worker[MISSING + (step & 1)] = worker[REMOTE] + n[READS]
    worker[ARRIVED + (step & 1)] = 0
    if n[READS]:
        enqueue(s, int(s.lanes[n[LANES], AT]), w, n[LANES], _REPLY, now)
    if n[PREFETCH]:
        ask(s, w, now)
    worker[COMPUTE] += seconds + pause
    worker[SINCE] = now + worker[COPY_S] + seconds
    put(s.events, s.numbers, worker[SINCE], _COMPUTED, w, 0)


@kernel()
def computed(s: State, w: int, now: float) -> None:
    """Push, unless parts of the last push have not left."""
    if s.workers[w, UNSENT] > 0:
        s.workers[w, WAITING] = 1
    else:
        push(s, w, now)


@kernel()
def push(s: State, w: int, now: float) -> None:
    """Push a part to each lane, and take the next batch."""
    count, worker = s.numbers[LANES], s.workers[w]
    worker[PUSH] += now - worker[SINCE]
    worker[UNSENT] = count
    worker[STEP] += 1
    worker[SINCE] = s.events[0, END_AT] = now
    for k in range(count):
        lane = s.lanes[k]
        if lane[AT] == worker[NODE]:
            apply(s, w, k, now)
        elif lane[SLOTS] > 0:
            lane[SLOTS] -= 1
            enqueue(s, int(worker[NODE]), w, k, _PUSH, now)
        elif lane[HEAD] < 0:
            lane[HEAD] = lane[TAIL] = w
        else:
            s.parts[int(lane[TAIL]) * (count + 1) + k, WAITS] = w
            lane[TAIL] = w
    take(s, w, now)


@kernel()
def free_buffer(s: State, w: int, now: float) -> None:
    """Record that the buffer of a part of a push is free again."""
    worker = s.workers[w]
    worker[UNSENT] -= 1
    if worker[UNSENT] == 0 and worker[WAITING]:
        worker[WAITING] = 0
        push(s, w, now)


@kernel()
def apply(s: State, w: int, k: int, now: float) -> None:
    """Queue a part of a push for its server to apply."""
    lane = s.lanes[k]
    seconds = lane[APPLY] * s.workers[w, SHARE]
    lane[FREE] = max(now, lane[FREE]) + seconds
    lane[BUSY] += seconds
    put(s.events, s.numbers, lane[FREE], _APPLY, w, k)


@kernel()
def applied(s: State, w: int, k: int, now: float) -> None:
    """Count an update, and give its receive slot to the next waiting worker."""
    lane, count = s.lanes[k], s.numbers[LANES]
    part = s.parts[w * (count + 1) + k]
    step = int(part[APPLIED])
    part[APPLIED] += 1
    s.tally[min(BINS - 1, int(lane[VERSION] - part[SEEN + step % RING]))] += 1
    lane[VERSION] += 1
    s.events[0, END_AT] = now
    complete(s, w, int(s.workers[w, BATCH + step % RING]), now)
    if lane[AT] == s.workers[w, NODE]:
        free_buffer(s, w, now)
    elif lane[HEAD] < 0:
        lane[SLOTS] += 1
    else:
        first = int(lane[HEAD])
        lane[HEAD] = -1 if first == lane[TAIL] else s.parts[first * (count + 1) + k, WAITS]
        enqueue(s, int(s.workers[first, NODE]), first, k, _PUSH, now)


@kernel()
def complete(s: State, w: int, batch: int, now: float) -> None:
    """Count a part of a batch as applied, and release workers that waited for it or its clock."""
    n, unapplied = s.numbers, s.tally[BINS:]
    unapplied[batch] -= 1
    if unapplied[batch] == 0:
        release(s, w, now)
    ended = n[COMPLETE] // n[WORKERS]
    while n[COMPLETE] < n[TOTAL] and unapplied[n[COMPLETE]] == 0:
        n[COMPLETE] += 1
    if n[BLOCKED] == 0 or n[COMPLETE] // n[WORKERS] == ended:
        return
    for other in range(n[WORKERS]):
        release(s, other, now)


@kernel()
def release(s: State, w: int, now: float) -> None:
    """Let a worker read once its own pushes and those of earlier clocks are applied."""
    n, worker, unapplied = s.numbers, s.workers[w], s.tally[BINS:]
    if not worker[WAITS_CLOCK]:
        return
    step, workers = int(worker[STEP]), n[WORKERS]
    clock = int(worker[BATCH + step % RING]) // workers
    own_applied = step == 0 or unapplied[int(worker[BATCH + (step - 1) % RING])] == 0
    if own_applied and n[COMPLETE] >= (clock - n[BOUND]) * workers:
        worker[WAITS_CLOCK] = 0
        n[BLOCKED] -= 1
        worker[WAIT] += now - worker[SINCE]
        worker[SINCE] = now
        ask(s, w, now)
        try_start(s, w, now)


@kernel()
def handle(s: State, kind: int, w: int, k: int, now: float) -> None:
    """Handle an event."""
    if kind == _FREED:
        freed(s, w, now)
    elif kind == _START:
        start(s, w, now)
    elif kind == _COMPUTED:
        computed(s, w, now)
    elif kind == _DELIVERED:
        apply(s, w, k, now)
        free_buffer(s, w, now)
    elif kind == _READ:
        read_local(s, w)
        arrive(s, w, int(s.workers[w, STEP]), now, now)
    else:
        applied(s, w, k, now)


@kernel()
def simulate(
    events: Matrix, numbers: Vector, workers: Matrix, lanes: Matrix,
    parts: Matrix, pipes: Matrix, times: Matrix, tally: Vector,
) -> int:  # fmt: skip
    """Simulate from the first step of all workers to the last update.

    Args:
        events: Space for the heap, shape (most + 1, 3), dtype float64.
        numbers: Shape (NUMBERS,), dtype int64.
        workers: Shape (workers, WORKER_COLUMNS), dtype float64.
        lanes: Shape (lanes + 1, LANE_COLUMNS), dtype float64.
        parts: Shape (workers * (lanes + 1), PART_COLUMNS), dtype float64.
        pipes: Shape (nodes, PIPE_COLUMNS), dtype float64.
        times: Seconds of gradients, and then those between steps, shape (2 * workers, steps).
        tally: Shape (BINS + batches,), dtype int64.

    Returns:
        Number of events.
    """
    s = State(events, numbers, workers, lanes, parts, pipes, times, tally)
    for w in range(numbers[WORKERS]):
        if numbers[READS]:
            enqueue(s, int(lanes[numbers[LANES], AT]), w, numbers[LANES], _REPLY, 0.0)
        take(s, w, 0.0)
    while numbers[SIZE] > 0:
        now, code = events[1, TIME], int(events[1, CODE])
        drop_first(events, numbers)
        mask = (1 << LANE_BITS) - 1
        handle(s, code >> KIND_BITS, (code >> LANE_BITS) & mask, code & mask, now)
    return numbers[MADE]
