"""The formats of tables, and the statistics of which they can be made. Standard library only."""

from typing import Literal, get_args

Format = Literal["json", "csv", "markdown", "latex", "html"]
FORMATS: tuple[Format, ...] = get_args(Format)
Statistic = Literal["median", "mean", "min", "max", "p05", "p25", "p75", "p95"]
DEFAULT_STATISTIC: Statistic = "median"
