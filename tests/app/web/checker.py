"""Reads a page without JavaScript, and checks what every page must keep."""

import json
import re
from html.parser import HTMLParser
from typing import Any

REFERENCES = {"href", "src", "action", "formaction", "hx-get", "hx-sse:connect", "data-plot", "data-plotly"}


class Checker(HTMLParser):
    """Checks nesting and ids, and collects text, addresses of this server, and places of the page."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.fragments: list[str] = []
        self.text = ""
        self.holds_data = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in {"meta", "link", "input", "br", "wbr", "hr", "img"}:
            self.open.append(tag)
        self.holds_data = tag == "script" and dict(attrs).get("type") == "application/json"
        sends = tag == "form" and dict(attrs).get("method") == "post"
        for name, value in attrs:
            if name == "id":
                assert value is not None
                self.ids.append(value)
            if name == "action" and sends:
                continue
            if name in REFERENCES and value:
                (self.fragments if value.startswith("#") else self.references).append(value.removeprefix("#"))
            assert not name.startswith("on"), "inline scripts are forbidden by the page's policy"
            assert name != "style", "inline styles too"

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script" and data.strip():
            assert self.holds_data, "inline script"
            json.loads(data)
            return
        assert "`" not in data or {"code", "pre", "textarea"} & set(self.open), "no markup is shown as it is written"
        self.text += data


def page(site: Any, path: str, status: int = 200) -> Checker:
    response = site.http.get(path)
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("text/html")
    assert "script-src 'self';" in response.headers["content-security-policy"]
    checker = Checker()
    checker.feed(response.text)
    assert (checker.open, len(checker.ids)) == ([], len(set(checker.ids)))
    assert re.search(r'<html lang="en">', response.text)
    assert response.text.count("<h1") == 1
    assert all(name in checker.ids for name in checker.fragments), "a place of this page"
    assert all(re.match(r"/(?!/)", reference) for reference in checker.references), "nothing from another server"
    return checker
