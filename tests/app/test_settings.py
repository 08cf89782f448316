"""What users are told of settings that make no sense."""

import pytest

from app.errors import CannotRunHere
from app.settings import Settings
from flopwatch import defaults


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("FLOPWATCH_API_TOKEN", " abc", "begins or ends with a blank, which no client can send"),
        (
            "FLOPWATCH_ARTIFACTS_URL",
            "s3:///prefix",
            "must be a folder, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix",
        ),
        ("FLOPWATCH_ALLOWED_HOSTS", "[::1], https://a.example", "must be names or addresses, without http:// and port"),
        ("FLOPWATCH_ALLOWED_HOSTS", "*.b.example a.example:80", "must be names or addresses, without http:// and port"),
        ("FLOPWATCH_MAX_PRIORITY", "", "must be written submit=0,code=10, or none"),
        ("FLOPWATCH_PERFETTO_URL", "ui", "must be an address such as https://ui.perfetto.dev, or empty"),
        (
            "FLOPWATCH_ARTIFACTS_URL",
            "s3://key:secret@bucket",
            "must have no credentials and options: set them as variables, AWS_…",
        ),
    ],
)
def test_a_message_has_the_variable_and_our_words_only(monkeypatch, name, value, told) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(CannotRunHere) as caught:
        Settings.from_environment()
    assert caught.value.detail == f"{name}: {told}"


def test_an_empty_data_folder_is_the_default_one_as_clients_read_it(monkeypatch) -> None:
    monkeypatch.setenv("FLOPWATCH_DATA_DIR", "")
    assert Settings.from_environment().data_dir == defaults.data_dir()
