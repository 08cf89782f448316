"""Results of jobs as tables: measurements of many jobs pivoted, the tables that units reported, and comparisons.

`app.store.reading` reads the rows. `cases` gathers them, `pivoting` makes a Sheet of them, `unit_tables` of what units
reported. `comparing` makes a Comparison, which `comparison_sheet` writes as a Sheet; `rendering` writes any Sheet.
"""

from app.metrics import column_name
from app.results.arranging import coordinate_of, spellings
from app.results.comparing import Comparison, Question, compare, compare_sides
from app.results.comparison_sheet import sheet_of
from app.results.heads import renamed
from app.results.history import CaseChoice, History, cases_of_job, history
from app.results.pivoting import Layout, local_table, metric_table, table
from app.results.rendering import render
from app.results.sheet import Cell, Column, Sheet
from app.results.unit_tables import Excerpt, list_tables, merged, result_table, sweep_table
from app.store.reading.measurements import JobChoice

__all__ = [
    "CaseChoice",
    "Cell",
    "Column",
    "Comparison",
    "Excerpt",
    "History",
    "JobChoice",
    "Layout",
    "Question",
    "Sheet",
    "cases_of_job",
    "column_name",
    "compare",
    "compare_sides",
    "coordinate_of",
    "history",
    "list_tables",
    "local_table",
    "merged",
    "metric_table",
    "renamed",
    "render",
    "result_table",
    "sheet_of",
    "spellings",
    "sweep_table",
    "table",
]
