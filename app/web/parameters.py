"""Query parameters as a page's form sends them: every field, the empty ones too."""

from pydantic import BeforeValidator

NONE_IF_EMPTY = BeforeValidator(lambda value: value or None)
