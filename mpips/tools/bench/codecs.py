"""Packing and unpacking by every codec on one core, beside a copy."""

import numpy as np

from mpips.codecs import CODECS, Codec, MessageId, buffer_for, make_codec, warm
from mpips.mpi.world import Cluster
from mpips.tools.bench.measure import Options, Row, compare, in_turn

SIZE = 8_000_000
QUICK_SIZE = 80_000
AIM_GB_S = 1.0  # rate of packing for the codecs of ONE_PASS, which visit each element once
ONE_PASS = ("fp16", "bf16", "int8")


def run(cluster: Cluster, options: Options) -> list[Row]:
    """Measure each codec."""
    size = QUICK_SIZE if options.quick else SIZE
    codecs = filter(None, map(make_codec, CODECS))
    return [row for codec in codecs for row in _of(cluster, codec, size, options)]


def _of(cluster: Cluster, codec: Codec, size: int, options: Options) -> list[Row]:
    warm(codec, "f4")
    grad = np.random.default_rng(0).standard_normal(size, "f4")
    state = codec.fresh_state(size, "f4")
    message, out = buffer_for(codec.wire_bytes(size, "f4")), np.zeros(size, "f4")
    sides = {
        "pack": lambda: codec.encode(grad, message, state, MessageId()),
        "unpack": lambda: codec.decode(message, out),
        "memcpy": lambda: np.copyto(out, grad),
    }
    times = in_turn(cluster, sides, 3 * options.repeats)
    return [_row(codec, what, times, grad.nbytes, message.size) for what in ("pack", "unpack")]


def _row(codec: Codec, what: str, times: dict[str, list[float]], nbytes: int, packed: int) -> Row:
    mine, other, ratio = compare(times[what], times["memcpy"])
    rate, copied = nbytes / mine / 1e9, nbytes / other / 1e9
    case = f"{codec.name}, {what} {nbytes / 1e6:g} MB, {nbytes / packed:.3g} x smaller"
    aim = AIM_GB_S / copied if codec.name in ONE_PASS and what == "pack" else None
    return Row("codec", case, rate, "GB/s", "memcpy", copied, ratio, aim)
