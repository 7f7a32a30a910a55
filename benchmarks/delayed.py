"""nanoGPT's script with gradients some updates old: ``python -m benchmarks.delayed UPDATES OLD``.

It shows the cost of staleness alone, in one process with the same samples and schedule.
"""

import contextlib
import io
import os
import re
import runpy
import sys
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tests.pytorch.scripts.diffs import script

SCRIPTS = Path(__file__).parents[1] / "tests" / "pytorch" / "scripts"


class Delay:
    """Hooks that make a script compute its gradients from older parameters."""

    def __init__(self, old: int) -> None:
        self.kept = deque[list[torch.Tensor]](maxlen=old + 1)

    def before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Set the newest parameters before the optimizer updates them."""
        if self.kept:
            self.show(optimizer, self.kept[-1])

    def after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Save the newest parameters, and set old ones for the next gradient."""
        found = (p for group in optimizer.param_groups for p in group["params"])
        self.kept.append([p.detach().clone() for p in found])
        self.show(optimizer, self.kept[0])

    @torch.no_grad()
    def show(self, optimizer: torch.optim.Optimizer, values: list[torch.Tensor]) -> None:
        """Set the parameters."""
        found = (p for group in optimizer.param_groups for p in group["params"])
        for p, value in zip(found, values, strict=True):
            p.copy_(value)


def run(updates: int, old: int) -> str:
    """Return the loss at the end."""
    source = script("nanogpt")
    source, count = re.subn(r"(_iters\b.* = .*)\b100,", rf"\g<1>{updates},", source)
    assert count == 2, "updates, and those of the schedule"
    delay, said = Delay(old), io.StringIO()
    hooks = (
        register_optimizer_step_pre_hook(delay.before),
        register_optimizer_step_post_hook(delay.after),
    )
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(said):
        os.chdir(folder)
        Path("script.py").write_text(source)
        runpy.run_path("script.py", run_name="__main__")
    for hook in hooks:
        hook.remove()
    return said.getvalue().split()[-1]


if __name__ == "__main__":
    sys.path.insert(0, str(SCRIPTS))
    torch.set_num_threads(1)
    for each in map(int, sys.argv[2:]):
        print(f"gradients {each} updates old: val loss {run(int(sys.argv[1]), each)}", flush=True)
