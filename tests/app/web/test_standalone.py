"""A plot as one file, which needs no server and asks nobody for anything."""

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from app import web
from app.web.plots.drawing import PALETTE
from app.web.standalone import STYLES

WEB = Path(web.__file__).parent


def get(site: Any, path: str, status: int = 200) -> Any:
    response = site.http.get(path)
    assert response.status_code == status, response.text
    return response


def figures(text: str) -> list[Any]:
    """What Plotly draws on a page, in order."""
    return [json.loads(found) for found in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', text)]


def check(response: Any) -> tuple[str, list[Any]]:
    """Check what every file must keep; return its text without scripts, and its figures."""
    text: str = response.text
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert policy.replace("'", "&#39;") in text
    scripts = re.findall('<script(?: type="module")?>(.*?)</script>', text, flags=re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert re.findall(r"'sha256-([^']+)'", policy) == hashes, "Plotly and plots.js, and no other script"
    shown = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert "<script" not in shown
    assert not re.search(r"""(src|href)\s*=""", shown), "it loads nothing and leads nowhere"
    assert "url(" not in shown
    return shown, figures(text)


def test_files_define_every_colour_that_figures_name() -> None:
    sources = [*WEB.glob("plots/*.py"), WEB / "samples.py", *WEB.glob("panels/*.py")]
    named = {name for path in sources for name in re.findall(r"var\((--[a-z0-9-]+)[,)]", path.read_text())}
    named |= {name[4:-1] for name in PALETTE}
    styles = "".join((WEB / "static" / name).read_text() for name in STYLES)
    assert "--good" in named
    assert named <= set(re.findall(r"^  (--[a-z0-9-]+):", styles, flags=re.MULTILINE))
