"""A request to stop that comes from within, at a random step."""

import os
import random
import signal

from mpips.config import Config

ENDLESS = 1000  # epochs; what tests call endless is far more
LONGEST = 12


class Countdown:
    """Sends this process SIGUSR1 after 1 to `LONGEST` steps, where ``--epochs`` is endless."""

    def __init__(self, config: Config) -> None:
        self._left = random.randint(1, LONGEST) if config.epochs > ENDLESS else 0

    def count(self) -> None:
        """Note a step."""
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
