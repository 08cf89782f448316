"""Results of jobs as tables: measurements of many jobs pivoted, and the tables that units reported.

`choosing` has the statements and `cases` gathers what they read; `pivoting`, `reported` and `comparing` make a Sheet,
and `rendering` writes any Sheet in the five formats. `streaming` writes JSON and CSV of tables that are too large to be
made as a whole.
"""

from app.results.cases import column_name
from app.results.comparing import Question, compare, compare_sides, compare_with_baseline
from app.results.pivoting import local_table, metric_table, table
from app.results.rendering import render
from app.results.reported import list_tables, merged, result_table
from app.results.samples import samples_of
from app.results.sheet import Cell, Column, Sheet
from app.results.streaming import is_too_large, stream
from app.store.reading.measurements import Choice

__all__ = [
    "Cell",
    "Choice",
    "Column",
    "Question",
    "Sheet",
    "column_name",
    "compare",
    "compare_sides",
    "compare_with_baseline",
    "is_too_large",
    "list_tables",
    "local_table",
    "merged",
    "metric_table",
    "render",
    "result_table",
    "samples_of",
    "stream",
    "table",
]
