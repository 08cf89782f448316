"""`attention`: times, rates and memory over the sequence length, with a line for each implementation, and errors."""

from app.web.panels._panel import Panel
from app.web.panels._results import JobResults
from app.web.panels.cells import Lines, charts

LINES = Lines("sequence_length", "Sequence length (tokens)", "implementation", of_series=("br", "bc", "threads"))
OUTCOMES = "Crosses at the top stand for cells without a number: out of memory, wrong, unsupported."
TIMES = {
    "forward_backward_ms": "Forward and backward pass",
    "forward_ms": "Forward pass",
    "backward_ms": "Backward pass",
}
ERRORS = {"output_error": "Relative error of the output", "gradient_error": "Relative error of the gradients"}


def panels(results: JobResults) -> list[Panel]:
    panels: list[Panel] = []
    for metric, words in TIMES.items():
        text = "" if panels else f"Time of one call, with its 95 % interval. {OUTCOMES}"
        panels += charts(results, LINES, metric, words, text, folded=bool(panels))
    rate = "Useful FLOPs divided by the median time; of causal attention half of the square counts, and the backward "
    rate += "pass counts as 2 forward passes (where others count 2.5, their rates of both passes are 7/6 of these)."
    panels += charts(results, LINES, "tflops", "Rate", rate)
    memory = "Inputs included, but not the mask that sdpa_* get for a window, documents or bottom_right."
    panels += charts(results, LINES, "peak_memory_mib", "Peak memory", memory, folded=True)
    for metric, words in ERRORS.items():
        panels += charts(results, LINES, metric, words, "Against the oracle in float64.", folded=True)
    return panels
