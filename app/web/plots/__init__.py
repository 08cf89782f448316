"""Figures of results, as Plotly's JSON: pure functions of points; standard library."""
