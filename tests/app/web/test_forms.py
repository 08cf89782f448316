"""The form of a job: fields from a schema, and the request that a filled form stands for."""

import html
from typing import Any

import pytest

from app.api.specs import Known, describe
from app.specs import KINDS
from app.web import forms
from flopwatch.spelling import command


def fields_of(kind: str) -> list[forms.Field]:
    described = describe(kind, KINDS[kind], Known({"kinds": set(), "capabilities": set()}))
    return forms.fields_of(described["schema"], forms.with_sides(described["example"], None))


def filled_in(kind: str, **values: Any) -> dict[str, list[str]]:
    """What a browser sends: every field, these with other values. Dots of paths are written as double underscores."""
    form = {field.key: list(field.values) for field in fields_of(kind)}
    for name, value in values.items():
        form[forms.SPEC + name.replace("__", ".")] = value if isinstance(value, list) else [value]
    return form


def body(kind: str, **values: Any) -> dict[str, Any]:
    return forms.body_of(kind, forms.with_form_texts(fields_of(kind), filled_in(kind, **values)), {})


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_forms_have_every_field_and_send_no_defaults(kind: str) -> None:
    fields = fields_of(kind)
    tops = {field.path.partition(".")[0] for field in fields}
    places = KINDS[kind].model_json_schema()["properties"]
    assert tops == {name for name, place in places.items() if "const" not in place}, "there is no choice in a constant"
    inside = {"compare": ("baseline", "candidate"), "diagnosis": ("step",)}
    sides = {name: {"kind": "benchmark"} for name in inside.get(kind, ())}
    assert body(kind) == {"spec": {"kind": kind, **sides}}
    groups = [group for section in forms.sections_of(fields) for _, group in (*section.shown, *section.folded)]
    hidden = [f"{side}.kind" for side in sides]
    assert sorted([*hidden, *(f.path for group in groups for f in group)]) == sorted(f.path for f in fields)


def test_a_list_field_takes_several_values() -> None:
    lists = body("attention", sequence_lengths="64, 128", causal=["true", "false"], implementations=["eager"])
    assert lists["spec"]["sequence_lengths"] == [64, 128]
    assert "grid" not in lists
    sweep = body("benchmark", context_length="64, 128,", precision=["fp32", "bf16"], model__size=["tiny"])
    assert sweep == {
        "base": {"kind": "benchmark", "model": {"size": "tiny"}},
        "grid": {"context_length": [64, 128], "precision": ["fp32", "bf16"]},
    }
    assert forms.number_of_jobs(sweep) == 4
    assert command(sweep) == "flopwatch sweep benchmark context_length=64,128 precision=fp32,bf16 model.size=tiny"


def test_a_given_object_uses_its_own_defaults() -> None:
    """`model` defaults to size small; a model with another width still is of that size unless somebody unticks it."""
    assert body("benchmark", model__d_model="512")["spec"]["model"] == {"size": "small", "d_model": 512}
    assert body("benchmark", model__d_model="512", model__size=[])["spec"]["model"] == {"d_model": 512}


def test_an_emptied_field_is_null_or_left_out() -> None:
    assert body("benchmark", batch_size="", compile=[]) == {"spec": {"kind": "benchmark"}}
    assert body("benchmark", warmup_steps="") == {"spec": {"kind": "benchmark"}}, "null is the default"


def test_a_text_that_is_no_number_is_sent_unchanged() -> None:
    assert body("benchmark", context_length="abc")["spec"]["context_length"] == "abc"
    assert body("benchmark", context_length="NaN")["spec"]["context_length"] == "NaN"
    assert body("benchmark", code="{")["spec"]["code"] == "{"


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_presets_fill_the_form_in(kind: str) -> None:
    for preset in KINDS[kind].presets.values():
        made = forms.body_of(kind, forms.with_values(fields_of(kind), preset), {})["spec"]
        expected = KINDS[kind].model_validate(preset)
        assert KINDS[kind].model_validate(made) == expected


def test_the_sides_of_a_comparison_have_the_fields_of_their_kind() -> None:
    sides = body("compare", baseline__context_length="64", candidate__model__d_model="512", candidate__compile="true")
    assert sides == {
        "spec": {
            "kind": "compare",
            "baseline": {"kind": "benchmark", "context_length": 64},
            "candidate": {"kind": "benchmark", "model": {"size": "small", "d_model": 512}, "compile": True},
        }
    }, "a changed model is given as a whole on its side only"
    assert body("compare", candidate__precision=["bf16", "fp16"])["grid"] == {"candidate.precision": ["bf16", "fp16"]}
    assert "baseline.replicates" not in {field.path for field in fields_of("compare")}, "the comparison has its own"
    [baseline, candidate, own] = forms.sections_of(fields_of("compare"))
    assert (baseline.side, candidate.side, own.side) == ("baseline", "candidate", "")


def test_problems_stand_at_their_fields() -> None:
    errors = [
        {"pointer": "/spec/model/d_model", "detail": "too narrow"},
        {"pointer": "/grid/context_length/1", "detail": "no number"},
        {"pointer": "/spec/model", "detail": "the whole model"},
        {"pointer": "/labels/a b", "detail": "no key"},
        {"pointer": "", "detail": "no job is left"},
    ]
    wrong = {"pointer": "/spec/candidate/model/size", "detail": "no size"}
    sides, _, others = forms.with_errors(fields_of("compare"), [wrong])
    assert ([field.path for field in sides if field.errors], others) == (["candidate.model.size"], [])
    fields, options, others = forms.with_errors(fields_of("benchmark"), errors)
    found = {field.path: field.errors for field in fields if field.errors}
    assert found == {"model.d_model": ("too narrow",), "context_length": ("no number",)}
    assert options == {"labels": ["no key"]}
    assert others == ["/spec/model: the whole model", "no job is left"]


@pytest.mark.parametrize("labels", [{"note": "a, b=c", "x": "y"}, {"said": '"yes", a'}, {"quoted": '"'}, {"none": ""}])
def test_a_clone_has_the_labels_of_the_job(labels: dict[str, str]) -> None:
    texts = forms.option_texts({"labels": labels})
    assert (forms.options_of(texts).get("labels"), forms.text_problems([], texts)) == (labels, [])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a=b, c", "'c' must be written key=value"),
        ("a=b, a=c", "the key 'a' is there twice"),
        ('"a=1', "double quotes enclose a whole text"),
        ('"a"=1', "double quotes enclose a whole text"),
    ],
)
def test_invalid_labels_are_reported(text: str, words: str) -> None:
    [problem] = forms.text_problems([], forms.option_texts({}) | {"labels": text})
    assert (problem["pointer"], words in problem["detail"]) == ("/labels", True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"sha256": "\\ud800"}', "\\ud800 is an unpaired surrogate"),
        ('{"sha256": ', "This is not JSON: Expecting value"),
        ("[" * 20_000, "nested too deeply"),
    ],
    ids=["lone surrogate", "cut", "deep"],
)
def test_invalid_json_is_reported_at_its_field(site: Any, text: str, words: str) -> None:
    fields = {"kind": "benchmark", "spec.code": text}
    answer = site.http.post("/ui/new", data=fields, headers={"Sec-Fetch-Site": "same-origin"})
    assert answer.status_code == 422
    assert 'id="field-code-error-1">This is not JSON: ' in answer.text
    assert 'id="field-code-error-2"' not in answer.text
    assert words in html.unescape(answer.text)
    preview = site.http.get("/ui/new/preview", params=fields)
    assert (preview.status_code, words in html.unescape(preview.text)) == (200, True)


def test_a_field_that_the_form_lacks_is_refused(site: Any) -> None:
    fields = {"kind": "benchmark", "spec.model.sise": "tiny"}
    answer = site.http.post("/ui/new", data=fields, headers={"Sec-Fetch-Site": "same-origin"})
    assert answer.status_code == 422
    assert "The form of benchmark has no field 'spec.model.sise'." in html.unescape(answer.text)


@pytest.mark.parametrize("text", ["9" * 400, "[" * 20_000])
def test_a_wrong_value_is_reported_at_its_field(site: Any, text: str) -> None:
    answer = site.http.get("/ui/new/preview", params={"kind": "benchmark", "spec.batch_size": text})
    assert answer.status_code == 200, answer.text


def test_the_preview_names_fields_without_effect(site: Any) -> None:
    fields = {"kind": "benchmark", "spec.checkpoint_layers": "1", "spec.activation_checkpointing": ["false"]}
    assert "Without effect here: checkpoint_layers." in site.http.get("/ui/new/preview", params=fields).text
    fields["spec.activation_checkpointing"] = ["false", "true"]
    assert "Without effect" not in site.http.get("/ui/new/preview", params=fields).text, "it has one in a job"


def test_a_job_carries_its_fields_without_effect(site: Any) -> None:
    spec = {"kind": "benchmark", "model": {"size": "tiny"}, "checkpoint_layers": 1}
    made = site.http.post("/jobs", json={"spec": spec}).json()
    assert (
        made["without_effect"] == ["checkpoint_layers"] == site.http.get(f"/jobs/{made['id']}").json()["without_effect"]
    )
    assert site.http.get("/jobs?limit=1").json()["data"][0]["without_effect"] is None, "a list is quick"
    assert "Without effect here: checkpoint_layers." in site.http.get(f"/ui/jobs/{made['id']}").text
    used = site.http.post("/jobs", json={"spec": {**spec, "activation_checkpointing": True}}).json()
    assert used["without_effect"] == []
    assert "Without effect" not in site.http.get(f"/ui/jobs/{used['id']}").text
