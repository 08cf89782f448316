"""The scripts import kernels, so Triton's interpreter is chosen first, as for the kernels' own tests."""

import tests.kernels.conftest  # noqa: F401
