"""The prompt of mode `generate`, and the table of the tokens that it made, as text where the worker has tiktoken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from app.specs.benchmark import BenchmarkSpec
from workers.outcome import Unsupported
from workers.reporter import Reporter

if TYPE_CHECKING:
    from workers.jobs._training.building import Training
    from workers.measure.table import Scalar

ENCODING = "gpt2"
MAX_SEQUENCES, MAX_TOKENS = 100, 1000
"""The first sequences, and of each the first tokens, that the table has."""


def prompt_of(spec: BenchmarkSpec) -> list[int] | None:
    """Return the tokens of the spec's prompt; None if nothing is generated.

    Raises:
        Unsupported: the worker cannot encode it.
    """
    if spec.mode != "generate" or spec.step_code is not None or spec.prompt is None:
        return None
    coding = encoding()
    if isinstance(coding, str):
        raise Unsupported(f"prompt: {coding}; or give context_length, for random tokens, in its place")
    ids: list[int] = coding.encode_ordinary(spec.prompt)
    return ids


def encoding() -> Any:
    """Return tiktoken's encoding of GPT-2's tokens, or the reason why this worker has none."""
    try:
        import tiktoken
    except ImportError:
        return "this worker has no tiktoken: install it there"
    try:
        return tiktoken.get_encoding(ENCODING)
    except Exception as error:  # noqa: BLE001 - it loads the vocabulary from the network, by another library
        return (
            f"tiktoken cannot load the vocabulary of {ENCODING!r} ({type(error).__name__}: {error}): let the worker "
            "reach it once, with TIKTOKEN_CACHE_DIR set"
        )


def report_generated(spec: BenchmarkSpec, training: Training, report: Reporter) -> None:
    """Report the table `generated`: what the first step made of its prompts, generated again; as text, too, if the
    prompt is one."""
    from workers.measure.table import Column
    from workers.model.steps import GenerateStep

    step = training.step
    if not isinstance(step, GenerateStep):
        return
    prompts, made = (tokens[:MAX_SEQUENCES].tolist() for tokens in step.first_again())
    coding = None if spec.prompt is None else encoding()
    report.table(
        "generated",
        [
            *(Column(name, "integer") for name in ("sequence", "prompt_tokens", "new_tokens")),
            Column("ended", "boolean"),
            *(Column(name, "string") for name in ("prompt_ids", "token_ids", "prompt_text", "text", "note")),
        ],
        [row_of(spec, number, *both, coding) for number, both in enumerate(zip(prompts, made, strict=True))],
    )


def row_of(spec: BenchmarkSpec, sequence: int, prompt: Sequence[int], made: Sequence[int], coding: Any) -> list[Scalar]:
    """Return the row of one sequence, as text by `coding`; None: without text."""
    end = spec.end_token
    new = made if end is None or end not in made else made[: made.index(end) + 1]
    notes = [
        f"the weights are random, of seed {spec.seed}: the text means nothing"
        if spec.code is None
        else f"the weights are those that {spec.code.label()} makes"
    ]
    if max(len(prompt), len(new)) > MAX_TOKENS:
        notes.append(f"the first {MAX_TOKENS} tokens are shown")
    shown = [list(tokens[:MAX_TOKENS]) for tokens in (prompt, new)]
    texts: list[Scalar] = [None, None]
    if coding is not None:
        texts = [coding.decode(tokens) if max(tokens) < coding.n_vocab else None for tokens in shown]
        if None in texts:
            notes.append(f"no text of tokens that {ENCODING} does not have")
    ids = [" ".join(map(str, tokens)) for tokens in shown]
    return [sequence, len(prompt), len(new), end in made, *ids, *texts, "; ".join(notes)]
