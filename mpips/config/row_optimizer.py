"""The update rule of tables' rows, as command lines and job files say it: ``ftrl: lr=1, l1=1``."""

import re
from dataclasses import dataclass
from typing import Any

from mpips.config.groups import NUMBER
from mpips.errors import UserError

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
    found: dict[str, float] = {}
    for setting in filter(None, settings.split(",")):
        key, _, number = (part.strip() for part in setting.partition("="))
        if key in found:
            raise UserError(f"{key} twice in row_optimizer {text!r}", "once")
        found[key] = float(number)
    return RowOptimizer(name.strip(), found)
