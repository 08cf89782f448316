"""Several texts in one field of a form, separated by commas; one with a comma in it stands in double quotes, as in CSV.

course=cs336, "note=a, b", "said=""yes"" twice"
"""

import csv
from collections import Counter
from collections.abc import Iterable


def split(text: str) -> list[str]:
    """Return the texts without the blanks around them; empty ones are left out. Raises ValueError for a huge one, and
    for double quotes that do not enclose a whole text."""
    try:
        rows = list(csv.reader(text.splitlines(), skipinitialspace=True, strict=True))
    except csv.Error as error:
        raise ValueError(f'{error}; double quotes enclose a whole text, as in "a=1, 2", "b=3"') from error
    return [part.strip() for row in rows for part in row if part.strip()]


def joined(texts: Iterable[str]) -> str:
    """Write texts so that `split` returns them."""
    return ", ".join('"' + text.replace('"', '""') + '"' if {*text} & {*',"'} else text for text in texts)


def pairs(text: str) -> list[tuple[str, str]]:
    """Return key and value of each `key=value`. Raises ValueError, with a cure, for another text or a key twice."""
    named = []
    for part in split(text):
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"{part!r} must be written key=value")
        named.append((key.strip(), value.strip()))
    if twice := [key for key, count in Counter(key for key, _ in named).items() if count > 1]:
        raise ValueError(f"the key {twice[0]!r} is there twice: leave one of them out")
    return named
