"""Progress display: a bar on a terminal, or lines."""

from collections.abc import Callable, Sequence
from typing import Any

from mpips.errors import write_line
from mpips.launch.terminal import Terminal, find_terminal

# Seconds between two lines of a log: the first, then a share of the time gone, at most the last.
LINE_S, LINE_SHARE, LINE_MAX_S = 2.0, 0.1, 60.0
BAR = "{l_bar}{bar}| {elapsed}<{remaining}{postfix}"  # of 80 columns


class Progress:
    """A bar, lines, or both, as there is a terminal or not; found out with the first line.

    Args:
        total_steps: Updates in the whole run, for the bar; None if unknown.
        hushed: Whether nothing is to be shown any more, as the job ends.
        sparse: Whether lines come less often than they are shown, and ever less; a bar does not.
    """

    def __init__(
        self, total_steps: int | None, hushed: Callable[[], bool], sparse: bool = False
    ) -> None:
        self._total, self._hushed, self._sparse = total_steps, hushed, sparse
        self._next_s = 0.0  # after the start, when the next line may come
        self._bar: Any = None
        self._found: tuple[Terminal | None, bool] | None = None

    def show(self, gone_s: float, step: int, words: Sequence[str], last: bool = False) -> bool:
        """Show `words` about update `step`, so many seconds after the start.

        Returns:
            Whether they are shown: a line only if it is time for one, or it is the `last`.
        """
        if self._hushed():
            return False
        if self._found is None:
            self._found = find_terminal()
        terminal, lines = self._found
        if terminal is not None:
            self._show_bar(terminal, step, ", ".join(words).replace(" samples/s", "/s"))
        lines = lines and (last or not self._sparse or gone_s >= self._next_s)
        if lines:
            self._next_s = gone_s + max(LINE_S, min(LINE_MAX_S, LINE_SHARE * gone_s))
            write_line(f"[{gone_s:7.1f} s] step {step:>8d}  {'  '.join(words)}")
        return lines or terminal is not None

    def _show_bar(self, terminal: Terminal, step: int, text: str) -> None:
        if self._bar is None:
            from tqdm import tqdm

            tqdm.monitor_interval = 0  # no thread of its own: every line draws it
            self._bar = tqdm(
                total=self._total, initial=step, file=terminal, dynamic_ncols=True, bar_format=BAR
            )
        self._bar.n = step
        self._bar.set_postfix_str(text)

    def end_bar(self) -> None:
        """Leave the bar as it is; the next line begins another."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def close(self) -> None:
        """Close the bar and the terminal; may be called twice."""
        self.end_bar()
        if self._found is not None and self._found[0] is not None:
            self._found[0].close()
        self._found = None
