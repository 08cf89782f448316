"""The failure codes of errors that runners raise."""

import errno

import pytest

from workers.outcome import InvalidEnvironment, failure_code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidEnvironment("no compiler"), "invalid_environment"),
        (ModuleNotFoundError("No module named 'mine'"), "invalid_environment"),
        (OSError(errno.ENOSPC, "No space left on device"), "storage_full"),
        (ValueError("mine"), "failed"),
    ],
)
def test_the_failure_code_of_an_error(error: Exception, code: str) -> None:
    assert failure_code(error) == code
