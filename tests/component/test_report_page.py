"""The page of a usage report in a real browser: on a phone, a laptop and A4, light and dark, also with long names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_exporter.reports.usage.render.page import render_page
from gpu_exporter.reports.usage.render.view import LEVELS, ReportView
from tests.testbed.browser import Browser, start_browser
from tests.testbed.usage import EVIL, build_report

pytestmark = pytest.mark.browser
A4_PX = 703  # width of the text area: 210 mm without margins of 12 mm, at 96 pixels an inch
NAMES = {"hostile": EVIL, "long": "x" * 300, "words": "a long name of many words " * 8}
TOO_WIDE = """[...document.querySelectorAll('body *')].filter(each => !each.closest('.scroll') && !each.closest('svg')
  && each.getBoundingClientRect().right > document.documentElement.clientWidth + 1).map(each => each.outerHTML.slice(0, 80))"""
# The end of the last part of each bar, in units of the bar, and the end of its outline, which is the hours held.
BARS = """[...document.querySelectorAll('svg.bar')].map(bar => {
  const [held, ...parts] = [...bar.querySelectorAll('rect')].map(each => each.getBBox());
  return [held.width, Math.max(0, ...parts.map(each => each.x + each.width))]; })"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with start_browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


def show(
    browser: Browser, place: Path, name: str, width: int, *, media: str = "", scheme: str = "light", by: str = "tenant"
) -> None:
    page = place / "report.html"
    page.write_text(render_page(build_report(name), ReportView(by)), "utf-8")
    browser.size(width, 900)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.call("Emulation.setEmulatedMedia", media=media, features=features)
    browser.open(page.as_uri(), script=False)


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize(("width", "media"), [(390, ""), (320, ""), (1280, ""), (A4_PX, "print")])
def test_no_part_of_the_page_is_wider_than_the_screen_or_the_paper(
    browser: Browser, tmp_path: Path, name: str, width: int, media: str
) -> None:
    for by in LEVELS:
        show(browser, tmp_path, name, width, media=media, by=by)
        assert browser.ask(TOO_WIDE) == []
        assert browser.ask("document.documentElement.scrollWidth <= innerWidth")
    if media == "print":
        shown = "[...document.querySelectorAll('table')].every(each => each.getBoundingClientRect().right <= innerWidth + 1)"
        assert browser.ask(shown), "paper has no scroll box"


def test_each_bar_ends_where_the_hours_held_end(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, "wind", 1280)
    bars = browser.ask(BARS)
    assert len(bars) == 9
    for held, parts in bars:
        assert parts == pytest.approx(held, abs=0.5)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_parts_differ_from_each_other_and_text_from_its_background(
    browser: Browser, tmp_path: Path, scheme: str
) -> None:
    show(browser, tmp_path, "wind", 1280, scheme=scheme)
    colors = browser.ask(
        "[...document.querySelectorAll('.legend i')].map(each => getComputedStyle(each).backgroundColor)"
    )
    assert len(colors) == len(set(colors)) == 8
    style = "getComputedStyle(document.querySelector('{}')).{}"
    back, text, dim = (
        luminance(browser.ask(style.format(*each)))
        for each in (("body", "backgroundColor"), ("body", "color"), (".dim", "color"))
    )
    assert (back > 0.5) == (scheme == "light")
    for each in (text, dim):
        assert (max(back, each) + 0.05) / (min(back, each) + 0.05) >= 4.5, "WCAG 2.1, 1.4.3"


def luminance(color: str) -> float:
    """Relative luminance of `rgb(R, G, B)`: WCAG 2.1."""
    values = [float(part) / 255.0 for part in color.removeprefix("rgb(").rstrip(")").split(",")]
    red, green, blue = (each / 12.92 if each <= 0.03928 else ((each + 0.055) / 1.055) ** 2.4 for each in values)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
