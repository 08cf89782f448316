"""/compare: compares two finished jobs, or the two sides of one job that measured both in turns, with a verdict."""

from typing import Annotated
from urllib.parse import quote

from anyio.to_thread import run_sync
from fastapi import APIRouter, Query
from fastapi.responses import Response
from pydantic import Field

from app import results
from app.api import schemas
from app.api.parameters import Id, StrictQuery, Text, described
from app.api.services import CurrentServices
from app.api.tables import in_every_format, written
from app.errors import FieldError, InvalidRequest
from app.store.database.engine import Database
from flopwatch.table_options import Format

router = APIRouter(prefix="/compare", tags=["results"])

READABLE = " ,;:()<>=+*/."
"""Characters of a sentence that need no escaping in a header."""
SHOWN_TO_PEOPLE = 20
"""Default number of rows of each table and phase of a profile in Markdown, LaTeX and HTML."""


class ComparedQuery(StrictQuery):
    """The jobs to compare: `baseline` or `baseline_name`, and `candidate`; or `job`."""

    baseline: list[Id] = Field(default=[], max_length=1000)
    """The id of the job to compare with; repeat it for several, which are samples of the cases that they share."""
    baseline_name: Text | None = None
    """Instead of `baseline`: the name of a baseline; its results of the candidate's cases are compared."""
    candidate: list[Id] = Field(default=[], max_length=1000)
    """The id of the job that is compared; repeat it for several."""
    job: Id | None = None
    """Instead of both: the id of a job of kind `compare`, whose sides are compared."""
    metric: list[Text] = Field(default=[], max_length=100)
    """A metric, named as its column (`step_ms`); repeat it for several. Only these are compared, and `sentence` and
    `gate` are about them. By default all are compared, and the kind's most important one is judged."""
    fail_above_percent: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)] | None = None
    """Ask for `gate`: whether the candidate is worse by more than this many percent."""
    expect_equal: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    """Ask for `gate`: it is `wrong` if the numbers that the steps return (the loss) differ by more than this, relative
    to the larger one, and `missing` if there are none."""
    limit: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """For profiles and memory: the largest number of rows of each table and phase, those with the largest changes; by
    default 20 in Markdown, LaTeX and HTML, and all in JSON and CSV."""

    def comparison(self, database: Database) -> results.Comparison:
        question = results.Question(list(dict.fromkeys(self.metric)), self.fail_above_percent, self.expect_equal)
        if self.job is not None:
            return results.compare_sides(database, self.job, question)
        baseline = self.baseline if self.baseline_name is None else self.baseline_name
        return results.compare(database, baseline, self.candidate, question)

    def check(self) -> None:
        """Raise InvalidRequest when the query names too few jobs, or too many."""
        is_set = {"baseline": bool(self.baseline), "candidate": bool(self.candidate)}
        named = self.baseline_name is not None
        if self.job is not None:
            is_set["baseline_name"] = named
            wrong = [(name, "leave it out: `job` has both sides") for name, is_present in is_set.items() if is_present]
        else:
            why = "give its id; or `job`, the id of a job of kind compare"
            wrong = [
                (name, why) for name, is_present in is_set.items() if not (is_present or (named and name == "baseline"))
            ]
            if named and self.baseline:
                wrong.append(("baseline", "leave it out: `baseline_name` says what to compare with"))
        errors = tuple(FieldError(f"/{name}", f"Query parameter {name!r}: {detail}") for name, detail in wrong)
        if errors:
            raise InvalidRequest("; ".join(error.detail for error in errors), errors=errors)


class CompareQuery(ComparedQuery):
    """The jobs to compare, and how the answer is written."""

    format: Format = "json"


HEADERS = {
    "Flopwatch-Wrong": "The sides with a result that is not the reference's, separated by commas; if there are any.",
    "Flopwatch-Gate": "The gate's outcome, if one is asked for.",
    "Flopwatch-Gate-Sentence": "The same in words: UTF-8, percent-encoded.",
}


@router.get(
    "",
    responses={200: in_every_format(schemas.Comparison) | {"headers": described(HEADERS)}},
    summary="Two jobs, or two sides, compared",
)
async def compare(services: CurrentServices, query: Annotated[CompareQuery, Query()]) -> Response:
    """For profiles, returns what each kernel, operator and class gained or lost per step; for memory, what each line of
    code has alive at the peak; for other kinds, the metrics' medians, with interval, test and power.

    `sentence` states the finding in words; `alternated` is true if fresh processes measured both sides in turns. In
    every format, the headers `Flopwatch-Gate` and `Flopwatch-Gate-Sentence` (percent-encoded UTF-8) have the gate's
    answer, if the request asks for it.
    """
    query.check()
    for_people = query.format in ("markdown", "latex", "html")
    limit = SHOWN_TO_PEOPLE if query.limit is None and for_people else query.limit

    def make() -> Response:
        comparison = query.comparison(services.database)
        response = written(results.sheet_of(comparison, limit), query.format)
        if comparison.wrong_sides:
            response.headers["Flopwatch-Wrong"] = ", ".join(comparison.wrong_sides)
        if gate := comparison.judgement.gate:
            response.headers["Flopwatch-Gate"] = gate.outcome
            response.headers["Flopwatch-Gate-Sentence"] = quote(gate.sentence, safe=READABLE)
        return response

    return await run_sync(make, limiter=services.tables)
