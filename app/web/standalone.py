"""A plot as one HTML file that needs neither a server nor a network.

Plotly and plots.js are part of the file (1.5 MB). Its content security policy allows these two scripts, by their
hashes, and no request.
"""

import base64
import functools
import hashlib
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse, Response
from markupsafe import Markup

from app.web.templates import STATIC, page_text
from flopwatch.text.times import current_time
from flopwatch.version import own_version

STYLES = ("colours.css", "file.css")
"""The files of `static` that a file's style is made of."""
PLOTLY = "vendor/plotly/plotly-cartesian.min.js"
DRAWING = "plots.js"


@dataclass(frozen=True)
class Assets:
    """The style and the scripts that every file contains, and the content security policy that allows them."""

    style: Markup
    plotly: Markup
    drawing: Markup
    policy: str


@functools.cache
def assets() -> Assets:
    """Read the styles and scripts of `static`."""
    style = "".join((STATIC / name).read_text(encoding="utf-8") for name in STYLES)
    scripts = [(STATIC / name).read_text(encoding="utf-8") for name in (PLOTLY, DRAWING)]
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    hashes = " ".join(f"'sha256-{digest}'" for digest in digests)
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "form-action 'none'; base-uri 'none'"
    )
    return Assets(Markup(style), Markup(scripts[0]), Markup(scripts[1]), policy)  # noqa: S704


def whole_file(request: Request, name: str, **values: Any) -> Response:
    """Return a plot as a file under the name by which it is saved; `values` are those of plot.html."""
    own = assets()
    text = page_text(
        "plot.html",
        assets=own,
        source=str(request.url),
        made_at=f"{current_time():%Y-%m-%d %H:%M:%S} UTC",
        version=own_version(),
        **values,
    )
    headers = {"Content-Disposition": f'inline; filename="{name}"', "Content-Security-Policy": own.policy}
    return HTMLResponse(text, headers=headers)
