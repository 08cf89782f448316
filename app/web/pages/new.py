"""/ui/new: a form for each kind of job, with the equivalent commands."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Annotated, Any
from urllib.parse import parse_qs

from fastapi import APIRouter, Query, Request
from fastapi.responses import RedirectResponse, Response
from pydantic import Field as PydanticField
from pydantic_core import to_json
from starlette.concurrency import run_in_threadpool

from app.api.access import Sender
from app.api.bodies import JobBody, parse, read_limited
from app.api.jobs import submit_job
from app.api.parameters import NO_QUERY, Id, StrictQuery, Text
from app.api.services import CurrentServices, Services
from app.api.specs import check_names, describe, known_names
from app.api.sweeps import SweepBody, submit_sweep, valid_specs
from app.errors import InvalidRequest, NotFound
from app.specs import KINDS, SpecBase
from app.specs._base import without_effect
from app.specs._sweep import expand
from app.web import forms
from app.web.forms import Field
from app.web.pages.job import resubmission
from app.web.templates import Entry, render
from flopwatch.spelling import command, curl

router = APIRouter()
NAVIGATION = Entry("New job", "/ui/new", order=50)

CHECKED_POINTS = 20
"""Number of a sweep's jobs that are validated while somebody types."""
UNPROCESSABLE = 422
MAX_VALUES = 10_000


class NewQuery(StrictQuery):
    """The kind to begin with, and of a comparison that of its sides; and the values: a preset's, or those of a job."""

    kind: Text = "benchmark"
    of: Text | None = None
    preset: Text | None = None
    job: Id | None = None


@router.get("/new")
def new(request: Request, services: CurrentServices, query: Annotated[NewQuery, Query()]) -> Response:
    kind, options = query.kind, {}
    values: Mapping[str, Any] = {}
    if query.job is not None:
        job, _version = services.reading.job(query.job)
        kind, values, options = job["kind"], job["spec"], resubmission(job, services.settings.default_timeout_s)
    described = _described(services, kind)
    of = query.of or forms.side_kind(values)
    if query.preset is not None:
        if query.preset not in described["presets"]:
            known = ", ".join(described["presets"]) or "none"
            raise NotFound(f"Kind {kind} has no preset {query.preset!r}; its presets: {known}.")
        values = described["presets"][query.preset]
    if not values and of in (None, forms.side_kind(described["example"])):
        values = described["example"]  # sides that differ in something
    fields = forms.with_values(_fields(described, of), values)
    return _form(request, described, fields, forms.option_texts(options), preset=query.preset, cloned=query.job)


class SidesQuery(StrictQuery):
    job: list[Id] = PydanticField(min_length=2, max_length=2)
    """The job whose spec is the baseline, and the one whose spec is the candidate."""


@router.get("/new/compare")
def compare(request: Request, services: CurrentServices, query: Annotated[SidesQuery, Query()]) -> Response:
    """Show the form of a comparison, filled with the specs of two jobs."""
    specs = [services.reading.job(job_id)[0]["spec"] for job_id in query.job]
    values = dict(zip(("baseline", "candidate"), specs, strict=True))
    kinds = [str(spec.get("kind")) for spec in specs]
    if len(set(kinds)) > 1:
        of_jobs = " and ".join(f"{job} is of kind {kind}" for job, kind in zip(query.job, kinds, strict=True))
        raise InvalidRequest(f"Both sides of a comparison are of one kind: job {of_jobs}. Choose two jobs of one kind.")
    described = _described(services, "compare")
    fields = forms.with_values(_fields(described, kinds[0]), values)
    return _form(request, described, fields, forms.option_texts({}), preset=None, cloned=None)


def _described(services: Services, kind: str) -> dict[str, Any]:
    if kind not in KINDS:
        raise NotFound(f"There is no kind {kind!r}; known kinds: {', '.join(sorted(KINDS))}.")
    return describe(kind, KINDS[kind], known_names(services))


def _fields(described: Mapping[str, Any], of: str | None) -> list[Field]:
    """Return the fields of a kind with its defaults. `of`: the kind of the specs in it; None: its example's. Raises
    NotFound for one that they may not have."""
    known = forms.side_kinds(described["kind"])
    if of is not None and of not in known:
        raise NotFound(f"A {described['kind']} holds no spec of kind {of!r}; kinds: {', '.join(known)}.")
    return forms.fields_of(described["schema"], forms.with_sides(described["example"], of))


def _form(
    request: Request,
    described: Mapping[str, Any],
    fields: Sequence[Field],
    texts: Mapping[str, str],
    errors: Sequence[Mapping[str, str]] = (),
    **values: Any,
) -> Response:
    own, of_options, others = forms.with_errors(fields, errors)
    *sides, own_section = forms.sections_of(own)
    body = forms.body_of(described["kind"], fields, forms.options_of(texts))
    return render(
        request,
        "new.html",
        status_code=UNPROCESSABLE if errors else 200,
        kinds=forms.kinds(),
        described=described,
        sides=sides,
        own=own_section,
        side_kinds=forms.side_kinds(described["kind"]),
        hidden=[field for field in own if field.widget == "hidden"],
        wrong=[field for field in own if field.errors],
        options=texts,
        option_errors=of_options,
        others=others,
        **_preview(request, body, []),
        **values,
    )


def _preview(request: Request, body: Mapping[str, Any], errors: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    return {
        "jobs": forms.number_of_jobs(body),
        "command": command(body),
        "curl": curl(body, str(request.base_url)),
        "problems": errors,
    }


def _read_form(services: Services, text: str) -> tuple[dict[str, Any], list[Field], dict[str, list[str]]]:
    try:
        form = parse_qs(text, keep_blank_values=True, max_num_fields=MAX_VALUES)
    except ValueError:
        raise InvalidRequest(f"The form has more than {MAX_VALUES} values.") from None
    described = _described(services, form.get("kind", [""])[0])
    sides = [values[0] for name, values in form.items() if name.startswith("spec.") and name.endswith(".kind")]
    of = sides[0] if sides and KINDS[described["kind"]].holds_specs else None
    fields = _fields(described, of)
    known = {field.key for field in fields}
    if unknown := [name for name in form if name.startswith(forms.SPEC) and name not in known]:
        raise InvalidRequest(f"The form of {described['kind']} has no field {unknown[0]!r}.")
    return described, forms.with_form_texts(fields, form), form


@router.post("/new", dependencies=[NO_QUERY])
async def submit(request: Request, services: CurrentServices, sender: Sender) -> Response:
    """Submit the form's job or sweep; if the form is not valid, show it again with the problems at its fields."""
    raw = await read_limited(request, services.settings.max_body_bytes)
    described, fields, form = await run_in_threadpool(_read_form, services, raw.decode(errors="replace"))
    texts = forms.options_from_form(form)
    body = forms.body_of(described["kind"], fields, forms.options_of(texts))
    if problems := forms.text_problems(fields, texts):
        return _form(request, described, fields, texts, problems, preset=None, cloned=None)
    try:
        if "grid" in body:
            submitted = await submit_sweep(services, parse(to_json(body), SweepBody).model, sender)
            return RedirectResponse(f"/ui/sweeps/{submitted.response['id']}", status_code=303)
        submitted = await submit_job(services, parse(to_json(body), JobBody, union_at=("spec",)).model, sender)
        return RedirectResponse(f"/ui/jobs/{submitted.response['id']}", status_code=303)
    except InvalidRequest as invalid:
        return _form(request, described, fields, texts, errors_of(invalid), preset=None, cloned=None)


@router.get("/new/preview")
def preview(request: Request, services: CurrentServices) -> Response:
    """Return the equivalent commands of a form that is being filled in, and its problems so far."""
    described, fields, form = _read_form(services, request.url.query)
    texts = forms.options_from_form(form)
    body = forms.body_of(described["kind"], fields, forms.options_of(texts))
    problems, idle = forms.text_problems(fields, texts), []
    if not problems:
        try:
            idle = without_effect(specs_of(services, body))
        except InvalidRequest as invalid:
            problems = errors_of(invalid)
    return render(request, "preview.html", **_preview(request, body, problems), idle=idle)


def specs_of(services: Services, body: Mapping[str, Any]) -> list[SpecBase]:
    """Return the specs of a body, for a sweep those of its first jobs; raises InvalidRequest with their problems."""
    if "grid" in body:
        sweep = parse(to_json(body), SweepBody).model
        return valid_specs(services, list(islice(expand(sweep.base, sweep.grid, sweep.exclude), CHECKED_POINTS)))
    spec = parse(to_json(body), JobBody, union_at=("spec",)).model.spec
    check_names(spec, known_names(services), "/spec")
    return [spec]


def errors_of(invalid: InvalidRequest) -> list[dict[str, str]]:
    """Return the field errors of a request, or its message if it has none."""
    errors = [{"pointer": field.pointer, "detail": field.detail} for field in invalid.errors]
    return errors or [{"pointer": "", "detail": str(invalid)}]
