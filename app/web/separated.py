"""Several texts in one field of a form, separated by commas; one with a comma in it stands in double quotes.

    course=cs336, "note=a, b", "said=""yes"" twice"

A double quote inside quotes is written twice, as in CSV. Blanks count only inside quotes.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator

_PART = re.compile(r'\s*(?:"((?:[^"]|"")*)"\s*(?:,|$)|([^,]*)(?:,|$))')
_NEEDS_QUOTES = re.compile(r'[,"]|^\s|\s$|=\s')


def split(text: str) -> list[str]:
    """Return the texts; empty ones are left out."""
    return [part for part, _ in _parts(text)]


def joined(texts: Iterable[str]) -> str:
    """Write texts so that `split` returns them."""
    return ", ".join('"' + text.replace('"', '""') + '"' if _NEEDS_QUOTES.search(text) else text for text in texts)


def pairs(text: str) -> list[tuple[str, str]]:
    """Return key and value of each `key=value`. Raises ValueError, with a cure, for another text or a key twice."""
    named = []
    for part, is_exact in _parts(text):
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"{part!r} must be written key=value")
        named.append((key.strip(), value if is_exact else value.strip()))
    if twice := [key for key, count in Counter(key for key, _ in named).items() if count > 1]:
        raise ValueError(f"the key {twice[0]!r} is there twice: leave one of them out")
    return named


def _parts(text: str) -> Iterator[tuple[str, bool]]:
    at = 0
    while at < len(text):
        match = _PART.match(text, at)
        assert match is not None, "a part without quotes takes all up to the next comma"
        at = match.end()
        part = match[2].strip() if match[1] is None else match[1].replace('""', '"')
        if part:
            yield part, match[1] is not None
