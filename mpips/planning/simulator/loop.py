"""Event loop of a simulated asynchronous job, compiled.

Links are pipes, two a node, one each way. A message leaves in pieces, and so do those that leave
beside it: replies and pushes take turns, and those of a kind too. A piece that has begun to leave
comes into the other node behind what came before it. So messages share both pipes as TCP has them
share a link: workers that ask at once are answered at once, and late, and stay in step. A **lane**
is what the servers of one node own together, or those of several nodes where all are alike. A
worker pulls a part from each lane, computes, waits until the push before has left, pushes a part to
each lane, and asks for the next parts. It reads those of its own node after the time between steps,
when its push may be applied; with a bound on clocks, when all remote ones are here. A server
receives so many remote parts at a time, and applies them in turn. A run depends on its numbers
alone; `mpips.planning.simulator.simulation` fills the arrays.
"""

from mpips.kernels.compiled import Vector, kernel

# isort: off
from mpips.planning.simulator.arrays import (
    AHEAD, APPLIED, APPLY, ARRIVED, ASKED, AT, BATCH, BEHIND, BINS, BLOCKED, BOUND, BUSY, CODE,
    COMPLETE, COMPUTE, COPY_S, DELAY, DONE, END_AT, FOUND, FOUND_IN, FREE, HANDED, HEAD, HELD, IDLE,
    IN, IN_BUSY, JOINED, JOINT, KIND_BITS, KNOWN, LANES, LANE_BITS, LAST, LAST_AT, LEFT, MADE,
    MISSING, NEXT, NODE, OUT_BUSY, PIECES, PLACES, PULL, PULLED, PULL_IN, PULL_OUT, PUSH, PUSH_IN,
    PUSH_OUT, QUEUE, QUOTA, READS, REMOTE, RING, ROW, SEEN, SENDING, SHARE, SHARES, SINCE, SIZE,
    STARTED, STEP, TAIL, TIME, TOTAL, TURN, UNSENT, VERSION, WAIT, WAITING, WAITS, WARM, WARM_AT,
    WORKERS, Matrix, State, drop_first, put,
)  # fmt: skip
# isort: on

_FREED, _START, _COMPUTED, _DELIVERED, _READ, _APPLY = range(6)  # events
_REPLY, _PUSH = 0, 1  # messages


@kernel()
def try_start(s: State, w: int, now: float) -> None:
    """Begin to compute as soon as all that the step needs is here."""
    me = s.workers[w]
    odd = int(me[STEP]) & 1
    if me[IDLE] and not me[HELD] and me[MISSING + odd] == 0:
        me[IDLE] = 0
        put(s.events, s.numbers, max(now, me[ARRIVED + odd]), _START, w, 0)


@kernel()
def arrive(s: State, w: int, step: int, done: float, now: float) -> None:
    """Note when a part of what a step needs will be here."""
    me, odd = s.workers[w], step & 1
    me[ARRIVED + odd] = max(me[ARRIVED + odd], done)
    me[MISSING + odd] -= 1
    try_start(s, w, now)


@kernel()
def receive(s: State, node: int, seconds: float, at: float, whole: float) -> float:
    """Take a message into a node from `at` on, which takes at least `whole`; returns its end."""
    pipe = s.pipes[node]
    pipe[IN] = max(at, pipe[IN]) + seconds
    pipe[IN_BUSY] += seconds
    return max(pipe[IN], at + whole)


@kernel()
def enqueue(s: State, node: int, w: int, k: int, kind: int, now: float) -> None:
    """Send a message out of a node."""
    row = w * (s.numbers[LANES] + 1) + k
    s.parts[row, LEFT + kind] = s.numbers[PIECES]
    if not s.pipes[node, SENDING]:
        begin(s, node, row, kind, now)
    else:
        line_up(s, node, row, kind)


@kernel()
def line_up(s: State, node: int, row: int, kind: int) -> None:
    """Put a message behind those of its kind."""
    pipe = s.pipes[node]
    if pipe[QUEUE + kind] < 0:
        pipe[QUEUE + kind] = pipe[QUEUE + 2 + kind] = row
    else:
        s.parts[int(pipe[QUEUE + 2 + kind]), BEHIND + kind] = row
        pipe[QUEUE + 2 + kind] = row


@kernel()
def begin(s: State, node: int, row: int, kind: int, now: float) -> None:
    """Begin to send a piece of a message: from now on the pipe out of the node is full."""
    stride, pipe = s.numbers[LANES] + 1, s.pipes[node]
    w, k = row // stride, row % stride
    lane, share = s.lanes[k], 1 / s.numbers[PIECES]
    if kind == _PUSH:
        share *= s.workers[w, SHARE]
    seconds = share * (lane[PUSH_OUT] if kind == _PUSH else lane[PULL_OUT])
    pipe[SENDING], pipe[TURN], pipe[ROW] = 1, 1 - kind, row
    pipe[OUT_BUSY] += seconds
    put(s.events, s.numbers, now + seconds, _FREED, node, 0)
    s.parts[row, LEFT + kind] -= 1
    if kind == _REPLY:
        reply(s, w, k, now)
        return
    done = receive(s, int(lane[AT]), lane[PUSH_IN] * share, now + lane[DELAY], seconds)
    if s.parts[row, LEFT + kind] == 0:
        put(s.events, s.numbers, done, _DELIVERED, w, k)


@kernel()
def freed(s: State, node: int, now: float) -> None:
    """Send the next piece out of a node: replies and pushes take turns, and so do their pieces."""
    pipe = s.pipes[node]
    pipe[SENDING] = 0
    kind = int(pipe[TURN])
    if s.parts[int(pipe[ROW]), LEFT + 1 - kind] > 0:
        line_up(s, node, int(pipe[ROW]), 1 - kind)
    if pipe[QUEUE + kind] < 0:
        kind = 1 - kind
    row = int(pipe[QUEUE + kind])
    if row >= 0:
        last = row == pipe[QUEUE + 2 + kind]
        pipe[QUEUE + kind] = -1 if last else s.parts[row, BEHIND + kind]
        begin(s, node, row, kind, now)


@kernel()
def have(s: State, w: int, k: int, version: float, done: float, now: float) -> None:
    """Have a part of a version for a worker's next replica, which is here when it is done."""
    part = s.parts[w * (s.numbers[LANES] + 1) + k]
    step = int(part[PULLED])
    part[PULLED] += 1
    part[SEEN + step % RING] = version
    arrive(s, w, step, done, now)


@kernel()
def reply(s: State, w: int, k: int, now: float) -> None:
    """Send a piece of a part, also to those of its node who ask until it is on its way.

    What they see is the version of the first piece.
    """
    stride, lane, share = s.numbers[LANES] + 1, s.lanes[k], 1 / s.numbers[PIECES]
    node, at = int(s.workers[w, NODE]), now + 2 * lane[DELAY]
    done = receive(s, node, lane[PULL_IN] * share, at, lane[PULL_OUT] * share)
    row = w * stride + k
    if s.parts[row, LEFT + _REPLY] == s.numbers[PIECES] - 1:
        s.parts[row, FOUND_IN] = lane[VERSION]
    if s.parts[row, LEFT + _REPLY] > 0:
        return
    found, others, joint = s.parts[row, FOUND_IN], -1, s.parts[node * stride + k]
    if k < s.numbers[LANES]:
        others = int(joint[JOINED])
        joint[JOINT], joint[JOINED], joint[DONE], joint[FOUND] = 0, -1, done, found
    while row >= 0:
        have(s, row // stride, k, found, done, now)
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
            have(s, w, k, joint[FOUND], joint[DONE], now)  # whose read is under way
        else:
            joint[JOINT], joint[ASKED] = 1, now
            enqueue(s, at, w, k, _REPLY, now)


@kernel()
def take(s: State, w: int, now: float) -> None:
    """Take a batch, and ask for what it needs unless it has to wait for other workers."""
    n, me = s.numbers, s.workers[w]
    if n[HANDED] >= n[TOTAL] or (n[QUOTA] and me[STEP] >= n[QUOTA]):
        return
    me[BATCH + int(me[STEP]) % RING] = n[HANDED]
    n[HANDED] += 1
    me[IDLE] = 1
    if n[BOUND] >= 0:
        me[HELD] = 1
        n[BLOCKED] += 1
        release(s, w, now)
        return
    pause = s.times[n[WORKERS] + w, int(me[STEP]) % s.times.shape[1]]
    if pause > 0:
        me[MISSING + (int(me[STEP]) & 1)] += 1
        put(s.events, n, now + pause, _READ, w, 0)
    else:
        read_local(s, w)
    if not n[AHEAD] or me[STEP] == 0:
        ask(s, w, now)
    try_start(s, w, now)


@kernel()
def read_local(s: State, w: int) -> None:
    """Have the parts of a worker's own node for its next replica."""
    n, me = s.numbers, s.workers[w]
    for k in range(n[LANES]):
        if s.lanes[k, AT] == me[NODE]:
            s.parts[w * (n[LANES] + 1) + k, SEEN + int(me[STEP]) % RING] = s.lanes[k, VERSION]


@kernel()
def start(s: State, w: int, now: float) -> None:
    """Compute a gradient."""
    n, me = s.numbers, s.workers[w]
    step = int(me[STEP])
    if n[BOUND] >= 0:
        read_local(s, w)
    if n[STARTED] == n[WARM]:
        s.events[0, WARM_AT] = now
    if n[STARTED] == n[LAST]:
        s.events[0, LAST_AT] = now
    n[STARTED] += 1
    me[KNOWN] = now
    seconds = s.times[w, step % s.times.shape[1]]
    pause = s.times[n[WORKERS] + w, step % s.times.shape[1]]
    me[PULL] += now - me[SINCE] - pause + me[COPY_S]
    me[MISSING + (step & 1)] = me[REMOTE] + n[READS]
    me[ARRIVED + (step & 1)] = 0
    if n[READS]:
        enqueue(s, int(s.lanes[n[LANES], AT]), w, n[LANES], _REPLY, now)
    if n[AHEAD]:
        ask(s, w, now)
    me[COMPUTE] += seconds + pause
    me[SINCE] = now + me[COPY_S] + seconds
    put(s.events, s.numbers, me[SINCE], _COMPUTED, w, 0)


@kernel()
def computed(s: State, w: int, now: float) -> None:
    """Push, unless parts of the push before have not left."""
    if s.workers[w, UNSENT] > 0:
        s.workers[w, WAITING] = 1
    else:
        push(s, w, now)


@kernel()
def push(s: State, w: int, now: float) -> None:
    """Announce a part to each lane, and go on."""
    count, me = s.numbers[LANES], s.workers[w]
    me[PUSH] += now - me[SINCE]
    me[UNSENT] = count
    me[STEP] += 1
    me[SINCE] = now
    for k in range(count):
        lane = s.lanes[k]
        if lane[AT] == me[NODE]:
            apply(s, w, k, now)
        elif lane[PLACES] > 0:
            lane[PLACES] -= 1
            enqueue(s, int(me[NODE]), w, k, _PUSH, now)
        elif lane[HEAD] < 0:
            lane[HEAD] = lane[TAIL] = w
        else:
            s.parts[int(lane[TAIL]) * (count + 1) + k, WAITS] = w
            lane[TAIL] = w
    take(s, w, now)


@kernel()
def gone(s: State, w: int, now: float) -> None:
    """Note that a part of a push needs its buffer no longer."""
    me = s.workers[w]
    me[UNSENT] -= 1
    if me[UNSENT] == 0 and me[WAITING]:
        me[WAITING] = 0
        push(s, w, now)


@kernel()
def apply(s: State, w: int, k: int, now: float) -> None:
    """Put a part of a push behind what its server applies."""
    lane = s.lanes[k]
    seconds = lane[APPLY] * s.workers[w, SHARE]
    lane[FREE] = max(now, lane[FREE]) + seconds
    lane[BUSY] += seconds
    put(s.events, s.numbers, lane[FREE], _APPLY, w, k)


@kernel()
def applied(s: State, w: int, k: int, now: float) -> None:
    """Count an update, and let in who waits for the place of its body."""
    lane, count = s.lanes[k], s.numbers[LANES]
    part = s.parts[w * (count + 1) + k]
    step = int(part[APPLIED])
    part[APPLIED] += 1
    s.tally[min(BINS - 1, int(lane[VERSION] - part[SEEN + step % RING]))] += 1
    lane[VERSION] += 1
    s.events[0, END_AT] = now
    complete(s, w, int(s.workers[w, BATCH + step % RING]), now)
    if lane[AT] == s.workers[w, NODE]:
        gone(s, w, now)
    elif lane[HEAD] < 0:
        lane[PLACES] += 1
    else:
        first = int(lane[HEAD])
        lane[HEAD] = -1 if first == lane[TAIL] else s.parts[first * (count + 1) + k, WAITS]
        enqueue(s, int(s.workers[first, NODE]), first, k, _PUSH, now)


@kernel()
def complete(s: State, w: int, batch: int, now: float) -> None:
    """Count a part of a worker's batch, and wake who has waited for it or its clock."""
    n, left = s.numbers, s.tally[BINS:]
    left[batch] -= 1
    if left[batch] == 0:
        release(s, w, now)
    ended = n[COMPLETE] // n[WORKERS]
    while n[COMPLETE] < n[TOTAL] and left[n[COMPLETE]] == 0:
        n[COMPLETE] += 1
    if n[BLOCKED] == 0 or n[COMPLETE] // n[WORKERS] == ended:
        return
    for other in range(n[WORKERS]):
        release(s, other, now)


@kernel()
def release(s: State, w: int, now: float) -> None:
    """Have a worker read whose own pushes are applied, and all those of clocks it waits for."""
    n, me, left = s.numbers, s.workers[w], s.tally[BINS:]
    if not me[HELD]:
        return
    step, workers = int(me[STEP]), n[WORKERS]
    clock = int(me[BATCH + step % RING]) // workers
    mine = step == 0 or left[int(me[BATCH + (step - 1) % RING])] == 0
    if mine and n[COMPLETE] >= (clock - n[BOUND]) * workers:
        me[HELD] = 0
        n[BLOCKED] -= 1
        me[WAIT] += now - me[SINCE]
        me[SINCE] = now
        ask(s, w, now)
        try_start(s, w, now)


@kernel()
def handle(s: State, kind: int, w: int, k: int, now: float) -> None:
    """Have an event happen."""
    if kind == _FREED:
        freed(s, w, now)
    elif kind == _START:
        start(s, w, now)
    elif kind == _COMPUTED:
        computed(s, w, now)
    elif kind == _DELIVERED:
        apply(s, w, k, now)
        gone(s, w, now)
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
    """Run from the first step of all workers to the last update.

    Args:
        events: Room for the heap, shape (most + 1, 3), dtype float64.
        numbers: Shape (NUMBERS,), dtype int64.
        workers: Shape (workers, WORKER_COLUMNS), dtype float64.
        lanes: Shape (lanes + 1, LANE_COLUMNS), dtype float64.
        parts: Shape (workers * (lanes + 1), PART_COLUMNS), dtype float64.
        pipes: Shape (nodes, PIPE_COLUMNS), dtype float64.
        times: Seconds of gradients, and then those between steps, shape (2 * workers, steps).
        tally: Shape (BINS + batches,), dtype int64.

    Returns:
        How many events there were.
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
