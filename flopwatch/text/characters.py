"""Escapes control characters in texts of jobs and other users. Standard library only.

A terminal obeys control characters. With them a job's output, an error or a name could write to the clipboard, change
the text on the screen, or type a command (OSC, CSI, carriage returns), or make one text look like another
(bidirectional overrides).
"""

from collections.abc import Iterable


def _characters(*ranges: tuple[int, int]) -> Iterable[int]:
    return (code for first, last in ranges for code in range(first, last + 1))


_LAYOUT = (0x09, 0x0A)
_CONTROLS = frozenset(
    _characters(
        (0x00, 0x1F),
        (0x7F, 0x9F),  # DELETE, and C1: U+009B is CSI in one character
        (0x061C, 0x061C),
        (0x200E, 0x200F),
        (0x2028, 0x202E),  # separators of lines and paragraphs; bidirectional embeddings and overrides
        (0x2066, 0x2069),
        (0xD800, 0xDFFF),  # lone surrogates, which no terminal can be sent
    )
)
_NAMES = {0x09: r"\t", 0x0A: r"\n", 0x0D: r"\r"}
_IN_ONE_LINE = {
    code: _NAMES.get(code) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}") for code in _CONTROLS
}
_IN_TEXT = {code: text for code, text in _IN_ONE_LINE.items() if code not in _LAYOUT}
# In valid JSON, control characters stand inside strings only, except the white space between tokens.
_IN_JSON = {code: f"\\u{code:04x}" for code in _CONTROLS if code not in (*_LAYOUT, 0x0D)}


def shown(text: str) -> str:
    """Return the text with its control characters escaped, as `\\x1b`; tabs and line ends stay."""
    return text.replace("\r\n", "\n").translate(_IN_TEXT)


def one_line(text: str) -> str:
    """Return the text with all its control characters escaped, line ends included, so that it stays one line."""
    return text.translate(_IN_ONE_LINE)


def in_json(text: str) -> str:
    """Return the same JSON, with control characters escaped as JSON does."""
    return text.translate(_IN_JSON)
