"""Parameter-sized vectors of a job, beside its host's memory."""

import os
import platform
from pathlib import Path

import numpy as np

from mpips.config import Config
from mpips.errors import UserError, human_bytes
from mpips.layout import Layout
from mpips.optim import make_rule


def least_vectors(config: Config, workers: int) -> int:
    """Return the least that the workers of one host hold together.

    That is a gradient for each worker and, except where a round shares it, a replica; in the modes
    with local steps also what each worker trains by itself.

    Args:
        config: The job.
        workers: Number of workers on the host.
    """
    slots = len(make_rule(config.optimizer).slots)
    shared = config.in_rounds and config.window == "shared" and config.reduce != "allreduce"
    replicas = 1 + (config.prefetch or config.delay_compensation > 0)
    vectors = workers + 1 if shared else (1 + replicas) * workers
    if config.mode == "local_sgd":  # as much for each slot, and one gradient a worker
        moved = 0 if config.local_slots == "keep" else slots
        vectors = (1 + moved) * vectors + (1 + slots - moved + config.streaming) * workers
    if config.mode == "easgd":  # the worker's own replica, its gradient and its slots
        vectors += (2 + slots) * workers
    return vectors


def codec_vectors(config: Config) -> int:
    """Return what a node of several holds for a codec of synchronous rounds."""
    if not config.in_rounds or config.codec == "none":
        return 0
    if config.codec != "powersgd":  # residual or message; and changes on their way back
        return 3 if config.mode == "local_sgd" else 1
    return 1 + len(make_rule(config.optimizer).slots)  # the error, and slots that others own too


def check_memory(layout: Layout, config: Config, workers: int, nodes: int) -> None:
    """Refuse a model that this host cannot hold, before anything of its size is made.

    Args:
        layout: Of the model.
        config: The job.
        workers: Workers on this host.
        nodes: Number of nodes.

    Raises:
        UserError: If the host has less memory than the least that the job needs.
    """
    vectors = least_vectors(config, workers) + (codec_vectors(config) if nodes > 1 else 0)
    needed = vectors * layout.size * np.dtype(config.dtype).itemsize
    there = installed_bytes()
    if workers and needed > there:
        raise UserError(
            f"{workers} workers with {layout.size:,} parameters on {platform.node()} take "
            f"{human_bytes(needed)}",
            f"at most {human_bytes(there)}, its memory",
            "use a smaller model, or fewer ranks on a host",
        )


def available_bytes() -> int:
    """Return the memory that processes of this host can still get."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return installed_bytes()


def installed_bytes() -> int:
    """Return the bytes of memory of this host."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
