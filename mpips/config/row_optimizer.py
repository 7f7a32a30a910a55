"""Update rule of table rows as text: ``ftrl: lr=1, l1=1``."""

import re
from dataclasses import dataclass
from typing import Any

from mpips.config.groups import NUMBER, parse_numbers

SETTING = rf"\s*[a-z_0-9]+\s*=\s*{NUMBER}\s*"
ROW_OPTIMIZER = re.compile(rf"([a-z_]+(\s*:{SETTING}(,{SETTING})*)?)?")
FORM = "NAME, or NAME: lr=X, .. (such as ftrl: lr=0.1, l1=0.03)"


@dataclass(frozen=True)
class RowOptimizer:
    """An update rule by its name and numbers; `mpips.optim.row_rules` checks both.

    Attributes:
        name: Of the rule.
        numbers: Its hyperparameters by name.
    """

    name: str
    numbers: dict[str, float]

    def options(self) -> dict[str, Any]:
        """Return the name as ``optimizer``, and the hyperparameters."""
        return {"optimizer": self.name, **self.numbers}


def parse_row_optimizer(text: str) -> RowOptimizer:
    """Return the rule of a text that fits `ROW_OPTIMIZER`.

    Raises:
        UserError: If a number is given twice.
    """
    name, _, settings = text.partition(":")
    return RowOptimizer(name.strip(), parse_numbers(settings, f"row_optimizer {text!r}"))
