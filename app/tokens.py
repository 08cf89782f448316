"""The form of access tokens, `fw_<id>_<secret><checksum>`, and what their scopes allow. Standard library only.

A scanner of sources and logs finds a token by its form, and the checksum tells a mistyped one without the database.
"""

import hashlib
import re
import secrets
import zlib
from typing import Literal, get_args

Scope = Literal["read", "submit", "code", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
"""Each scope includes those before it."""

ID_BYTES = 5
SECRET_BYTES = 32
_FORM = re.compile(rf"fw_([0-9a-f]{{{2 * ID_BYTES}}})_[0-9a-f]{{{2 * SECRET_BYTES}}}([0-9a-f]{{8}})")


def mint() -> tuple[str, str]:
    """Return the id and the whole text of a new token."""
    token_id = secrets.token_hex(ID_BYTES)
    text = f"fw_{token_id}_{secrets.token_hex(SECRET_BYTES)}"
    return token_id, text + _checksum(text)


def id_of(text: str) -> str | None:
    """Return the id in a token; None if the text is no token, or was mistyped."""
    match = _FORM.fullmatch(text)
    return match[1] if match is not None and match[2] == _checksum(text[: -len(match[2])]) else None


def digest(text: str) -> str:
    """Return what is stored of a token: its SHA-256.

    The secret has 256 random bits, so nobody can guess texts until one has this digest: a slow hash, as passwords need,
    would only slow down each request.
    """
    return hashlib.sha256(text.encode()).hexdigest()


def includes(held: Scope, needed: Scope) -> bool:
    """Return True if a token with the scope `held` may do what asks for `needed`."""
    return SCOPES.index(held) >= SCOPES.index(needed)


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"
