"""Results of jobs as tables: measurements of many jobs pivoted, and the tables that units reported.

`choosing` has the statements and `cases` gathers what they read; `pivoting`, `reported` and `comparing` make a Sheet,
and `rendering` writes any Sheet in the five formats. `streaming` writes JSON and CSV of tables that are too large to be
made as a whole.
"""

from app.store.results.cases import column_name
from app.store.results.choosing import Choice
from app.store.results.comparing import Question, compare, compare_sides, compare_with_baseline
from app.store.results.pivoting import local_table, metric_table, table
from app.store.results.rendering import render
from app.store.results.reported import list_tables, merged, result_table
from app.store.results.samples import samples_of
from app.store.results.sheet import Cell, Column, Sheet
from app.store.results.streaming import is_too_large, stream

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
