"""What users' errors say, in words. Their own code makes these words, and may fail at it."""

from collections.abc import Iterator

LIMIT = 4000
"""Most characters of an error's text."""
BACKENDS = " This could be because the operator doesn't exist for this backend"
"""What follows in torch's error for an operation that a kind of tensor lacks is a page about torch itself."""


class NotMeasured(Exception):
    """A case has an outcome instead of values; the message is the reason."""

    outcome: str


def text_of(error: BaseException) -> str:
    """Return `str(error)`, cut if it is long; if that raises, what it raises."""
    try:
        text = str(error)
    except BaseException as failure:  # noqa: BLE001 - it is the user's
        text = f"<its str() raises {type(failure).__name__}>"
    text = text.partition(BACKENDS)[0]
    text = text if len(text) <= LIMIT else f"{text[: LIMIT - 1]}…"
    return text.replace("\0", "\\0").encode(errors="backslashreplace").decode()  # a database takes neither


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes, each once."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__


def with_type(error: BaseException, text: str | None = None) -> str:
    """Return the error's type and its text (by default that of `text_of`), if it has one."""
    text = text_of(error) if text is None else text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
