"""What every page must keep in a browser: its width, and its accessibility by axe-core."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from playwright.sync_api import Page

AXE = Path(__file__).parent / "vendor" / "axe" / "axe.min.js"
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
WIDTHS = (1400, 390)


def assert_accessible(page: Page) -> None:
    """No serious or critical violation of axe-core's rules of WCAG 2.2 A and AA."""
    if not page.evaluate("() => 'axe' in window"):
        page.evaluate(AXE.read_text())
    found = page.evaluate("tags => axe.run(document, {resultTypes: ['violations'], runOnly: tags})", TAGS)
    violations = [
        "\n  ".join([f"{violation['id']}: {violation['help']}", *(node["html"][:300] for node in violation["nodes"])])
        for violation in found["violations"]
        if violation["impact"] in ("serious", "critical")
    ]
    assert not violations, "\n".join(violations)


BROKEN_WORDS = """() => {
  const found = [];
  const walker = document.createTreeWalker(document.querySelector("main") ?? document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    if (node.parentElement.closest("pre, script, svg, textarea") || !node.parentElement.checkVisibility()) continue;
    for (const { 0: word, index } of node.data.matchAll(/(?<![\\p{L}\\p{N}])\\p{L}{2,20}(?![\\p{L}\\p{N}])/gu)) {
      const range = document.createRange();
      range.setStart(node, index);
      range.setEnd(node, index + word.length);
      const lines = new Set([...range.getClientRects()].map((rect) => Math.round(rect.top)));
      if (lines.size > 1) found.push(`${word} in ${node.data.trim().slice(0, 80)}`);
    }
  }
  return found;
}"""
"""Words of at most 20 letters that stand on two lines."""


def assert_fits(page: Page) -> None:
    """The page itself needs no sideways scrolling, once its plots have followed the window's width; its tables may
    scroll inside. No word is broken."""
    width = page.viewport_size["width"] if page.viewport_size else 0
    page.wait_for_function("width => document.documentElement.scrollWidth <= width", arg=width, timeout=5_000)
    unresolved = "() => [...document.querySelectorAll('.plot')].filter(it => JSON.stringify(it.data)?.includes('var('))"
    assert page.evaluate(f"({unresolved})().length") == 0, "Plotly takes another colour for one that it cannot read"
    broken = page.evaluate(BROKEN_WORDS)
    assert not broken, "\n".join(["broken words:", *broken])


def at_both_widths(page: Page) -> Iterator[Literal["light", "dark"]]:
    """Show the page on a desktop, light, and on a phone, dark; afterwards as it was."""
    schemes: tuple[Literal["light", "dark"], ...] = ("light", "dark")
    for width, scheme in zip(WIDTHS, schemes, strict=True):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        yield scheme
    page.set_viewport_size({"width": WIDTHS[0], "height": 900})
    page.emulate_media(color_scheme="light")


def assert_readable(page: Page) -> None:
    """The page is accessible and fits, on a desktop and on a phone, light and dark."""
    for _scheme in at_both_widths(page):
        assert_fits(page)
        assert_accessible(page)
