"""Settings, read from the environment (`FLOPWATCH_*`). Nothing is built at import."""

from __future__ import annotations

import base64
import difflib
import re
from collections.abc import Mapping
from ipaddress import IPv4Network, IPv6Network, ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationError
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from app.errors import CannotRunHere
from app.logs import LogFormat, LogLevel
from app.tokens import Scope
from flopwatch import defaults

if TYPE_CHECKING:
    from sqlalchemy import URL


def _split(value: object) -> object:
    return [part for part in value.replace(",", " ").split() if part] if isinstance(value, str) else value


def _default_if_empty(value: object) -> object:
    return defaults.data_dir() if value == "" else value  # as clients read it


def _no_limit(value: object) -> object:
    return None if isinstance(value, str) and value.strip().lower() == "none" else value


def _ceilings(value: object) -> object:
    if not isinstance(value, str):
        return value
    if value.strip().lower() == "none":
        return ()
    pairs = [part.partition("=") for part in value.replace(",", " ").split()]
    if not pairs or not all(separator for _, separator, _ in pairs):
        raise PydanticCustomError("ceilings", "must be written submit=0,code=10, or none")
    return tuple((scope, priority) for scope, _, priority in pairs)


def _is_a_token(token: SecretStr) -> SecretStr:
    text = token.get_secret_value()
    if not text:
        raise PydanticCustomError("token", "is empty, which protects nothing: set a token, or unset the variable")
    if text != text.strip():
        raise PydanticCustomError("token", "begins or ends with a blank, which no client can send")
    return token


def _is_a_host(name: str) -> str:
    try:
        ip_address(name.strip("[]"))
    except ValueError:
        if not re.fullmatch(r"\*|(\*\.)?[^*/:]+", name):
            raise PydanticCustomError("host", "must be names or addresses, without http:// and port") from None
    return name


def _is_a_site(address: str) -> str:
    if address and not (address.startswith(("http://", "https://")) and urlsplit(address).hostname):
        raise PydanticCustomError("site", "must be an address such as https://ui.perfetto.dev, or empty")
    return address


def _is_a_secret(secret: SecretStr) -> SecretStr:
    prefix, _, key = secret.get_secret_value().partition("_")
    try:
        size = len(base64.b64decode(key, validate=True)) if prefix == "whsec" else 0
    except ValueError:
        size = 0
    if not 24 <= size <= 64:
        raise PydanticCustomError("secret", 'must be "whsec_" and 24 to 64 bytes in base64: openssl rand -base64 32')
    return secret


OBJECT_STORES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
"""Schemes of object stores' URLs, each with how the names of the variables begin from which obstore reads its
credentials."""


def _is_a_store(place: str) -> str:
    scheme, separator, _ = place.partition("://")
    if not separator and place.strip():
        return place
    if scheme not in OBJECT_STORES or not urlsplit(place).hostname:
        forms = "a folder, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix"
        raise PydanticCustomError("store", f"must be {forms}")
    if "@" in place or "?" in place or "#" in place:
        raise PydanticCustomError(
            "store", f"must have no credentials and options: set them as variables, {OBJECT_STORES[scheme]}…"
        )
    return place


MAX_TIMEOUT_S = 30 * 86_400.0

# The environment separates them by commas or blanks.
Hosts = Annotated[tuple[Annotated[str, AfterValidator(_is_a_host)], ...], NoDecode, BeforeValidator(_split)]
Networks = Annotated[tuple[IPv4Network | IPv6Network, ...], NoDecode, BeforeValidator(_split)]
Days = Annotated[float, Field(gt=0, le=36_500, allow_inf_nan=False)]


PREFIX = "FLOPWATCH_"
READ_ELSEWHERE = ("FLOPWATCH_URL",)
"""Variables with the prefix that are read, but are not fields of Settings."""
SECRETS = ("FLOPWATCH_API_TOKEN", "FLOPWATCH_NOTIFY_SECRET")
"""The variables that a server needs and a worker does not."""


class Settings(BaseSettings):
    """One process's settings; every field is an environment variable with the prefix FLOPWATCH_. docs/settings.md says
    what each is for."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="ignore")

    data_dir: Annotated[Path, BeforeValidator(_default_if_empty), AfterValidator(Path.absolute)] = Field(
        default_factory=defaults.data_dir
    )
    database_url: str | None = None
    artifacts_url: Annotated[str, AfterValidator(_is_a_store)] | None = None
    host: str = defaults.HOST
    port: int = Field(default=defaults.PORT, ge=0, le=65535)
    allowed_hosts: Hosts = ()
    api_token: Annotated[SecretStr, AfterValidator(_is_a_token)] | None = None
    trusted_proxies: Networks | None = None
    """None: FORWARDED_ALLOW_IPS, or 127.0.0.1."""
    requests_per_minute: int | None = Field(default=None, ge=1)
    max_queued_jobs: int | None = Field(default=None, ge=1)
    max_running_devices: int | None = Field(default=None, ge=1)
    max_priority: Annotated[tuple[tuple[Scope, int], ...], NoDecode, BeforeValidator(_ceilings)] = (
        ("submit", 0),
        ("code", 0),
    )
    fair_share_half_life_h: float = Field(default=1.0, gt=0, le=8760)
    insecure: bool = False
    lease_s: float = Field(default=30.0, gt=0, le=86_400)
    busy_timeout_s: float = Field(default=5.0, gt=0, le=600)
    default_timeout_s: Annotated[float | None, BeforeValidator(_no_limit)] = Field(
        default=3600.0, gt=0, le=MAX_TIMEOUT_S
    )
    max_timeout_s: float | None = Field(default=None, gt=0, le=MAX_TIMEOUT_S)
    max_body_bytes: int = Field(default=1 << 20, ge=1024)
    max_connections: int = Field(default=2000, ge=16, le=1_000_000)
    request_timeout_s: float = Field(default=30.0, gt=0, le=3600)
    grace_s: float = Field(default=10.0, ge=0, le=3600)
    keep_events_days: Days = 7.0
    keep_jobs_days: Days | None = None
    max_artifact_bytes: int = Field(default=16 << 30, ge=1024)
    allow_code: bool = False
    perfetto_url: Annotated[str, AfterValidator(_is_a_site)] = "https://ui.perfetto.dev"
    notify_secret: Annotated[SecretStr, AfterValidator(_is_a_secret)] | None = None
    notify_networks: Networks = ()
    log_format: LogFormat = "console"
    log_level: LogLevel = "INFO"

    @classmethod
    def from_environment(cls, **settings: Any) -> Self:
        """Read the environment's settings, except those given. Raises CannotRunHere, which names invalid ones."""
        try:
            return cls(**settings)
        except ValidationError as error:
            wrong = error.errors(include_url=False)
            detail = "; ".join(f"FLOPWATCH_{str(field['loc'][0]).upper()}: {field['msg']}" for field in wrong)
        raise CannotRunHere(detail)  # the error as its cause would show values, such as the token

    @property
    def resolved_database_url(self) -> str | URL:
        """The database's URL: FLOPWATCH_DATABASE_URL, or SQLite in the data folder, whatever characters its name
        has."""
        from sqlalchemy import URL  # client commands, which have no database, start sooner without it

        return self.database_url or URL.create("sqlite", database=str(self.data_dir / "flopwatch.sqlite3"))

    @property
    def artifacts_dir(self) -> Path:
        """The folder of the content-addressed artifact files, if they are not on an object store."""
        return self.data_dir / "artifacts" if self.artifacts_url is None else Path(self.artifacts_url)

    @property
    def object_store_url(self) -> str | None:
        """The URL of the object store that has the files; None if a folder has them."""
        return self.artifacts_url if self.artifacts_url and "://" in self.artifacts_url else None

    @property
    def ceilings_dir(self) -> Path:
        """The folder of the measured ceilings of a worker host's devices."""
        return self.data_dir / "ceilings"


def unknown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that look like settings but are not, each with a sentence that says so."""
    known = [*(name.upper() for name in Settings.model_fields), *(name[len(PREFIX) :] for name in READ_ELSEWHERE)]
    warnings = {}
    for name in sorted(environment):
        own = name.upper().removeprefix(PREFIX)
        if name.upper().startswith(PREFIX) and own not in known:
            near = difflib.get_close_matches(own, known, n=1)
            cure = f": did you mean {PREFIX}{near[0]}?" if near else ""
            warnings[name] = f"{name} is no setting, and nothing reads it{cure}"
    return warnings
