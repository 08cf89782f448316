"""Results of jobs as tables: measurements of many jobs pivoted, and the tables that units reported.

`choosing` has the statements, `pivoting`, `reported` and `comparing` make a Sheet, and `rendering` writes any Sheet in
the five formats. pandas is imported when something is rendered, and not before.
"""

from app.store.results.comparing import Question, compare, compare_sides
from app.store.results.pivoting import column_name, local_table, table
from app.store.results.rendering import render
from app.store.results.reported import list_tables, merged, result_table
from app.store.results.sheet import Cell, Column, Sheet

__all__ = [
    "Cell",
    "Column",
    "Question",
    "Sheet",
    "column_name",
    "compare",
    "compare_sides",
    "list_tables",
    "local_table",
    "merged",
    "render",
    "result_table",
    "table",
]
