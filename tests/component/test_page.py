"""The status page in a real browser: filter, refresh, a dead exporter, no GPU, many holders, hostile names, small screens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.testbed.browser import Browser, start_browser
from tests.testbed.processes import Processes

pytestmark = pytest.mark.browser
IDLE = {"kind": "constant", "value": 0}
HOSTILE = "<img src=x onerror=document.title='hacked'>"
ROWS = "[...document.querySelectorAll('tbody')].filter(row => row.checkVisibility())"
SHOWN = f"{ROWS}.map(row => row.rows[0].cells[6].innerText.split('\\n')[0])"
WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with start_browser(tmp_path_factory.mktemp("profile")) as started:
        started.size(1300, 800)
        yield started


def serve(processes: Processes, path: Path, scenario: dict[str, Any]) -> tuple[Any, str]:
    (path / "scenario.yaml").write_text(yaml.safe_dump(scenario), encoding="utf-8")
    (path / "config.yaml").write_text("attribution: {interval: 500ms}\n", encoding="utf-8")
    flags = (f"--devices.scenario={path / 'scenario.yaml'}", f"--config.file={path / 'config.yaml'}")
    return processes.start_exporter(*flags, "--no-attribution.kubelet", "--no-attribution.slurm")


def pod(gpu: int, name: str, **more: Any) -> dict[str, Any]:
    return {"gpu": gpu, "kind": "pod", "name": name, **more}


def test_filter_words_choose_rows_and_remain_after_a_refresh(
    browser: Browser, processes: Processes, tmp_path: Path
) -> None:
    gpus = [{"model": "H100", "load": IDLE}] * 3
    holders = [pod(0, "ml/train-0/main"), pod(1, "vision/train-1/main")]
    exporter, url = serve(processes, tmp_path, {"gpus": gpus, "holders": holders})
    browser.open(url)
    browser.wait(f"{ROWS}.length === 3 && document.body.innerText.includes('vision/')")
    browser.press("Tab", 9)
    assert browser.ask("document.activeElement.id") == "filter", "the first thing that the keyboard reaches"
    browser.type("train VISION")
    browser.wait(f"{ROWS}.length === 1")
    assert browser.ask(SHOWN) == ["vision/train-1/main"]
    before = browser.ask("document.getElementById('now').textContent")
    browser.size(360, 800)
    assert browser.ask(SHOWN) == ["vision/train-1/main"], "also on a phone"
    browser.size(1300, 800)
    browser.ask("window.here = 1")
    browser.wait(f"document.getElementById('now').textContent !== {before!r}")
    assert browser.ask("window.here") == 1, "the page was not left"
    assert browser.ask(SHOWN) == ["vision/train-1/main"]
    assert browser.ask("document.getElementById('silent').checkVisibility()") is False
    browser.ask("own = fetch, 0")
    for answer in (
        "new Response('<div id=now>busy</div>', {status: 503})",
        "new Response('<p>log in</p>')",
        "new Promise((_, no) => options.signal?.addEventListener('abort', no))",  # hangs
    ):
        browser.ask(f"fetch = async (_, options) => {answer}, 0")
        browser.ask("read(), 0")  # at once, not at the next interval
        browser.wait("document.getElementById('silent').checkVisibility()")
        assert browser.ask(SHOWN) == ["vision/train-1/main"], "nothing else takes the place of what was known"
        browser.ask("fetch = own, read(), 0")
        browser.wait("!document.getElementById('silent').checkVisibility()")
    exporter.stop()
    browser.wait("document.getElementById('silent').checkVisibility()")
    assert "This page shows old values" in browser.ask("document.getElementById('silent').innerText")
    assert browser.ask(SHOWN) == ["vision/train-1/main"]


def test_without_javascript_the_page_shows_all_rows_and_no_filter_field(
    browser: Browser, processes: Processes, tmp_path: Path
) -> None:
    _, url = serve(processes, tmp_path, {"gpus": [{"model": "H100"}] * 2, "holders": [pod(0, "ml/a/main")]})
    browser.open(url, script=False)
    assert browser.ask(f"{ROWS}.length") == 2
    assert browser.ask("document.getElementById('filter').checkVisibility()") is False
    assert browser.ask("document.querySelector('meta[http-equiv=refresh]').content") == "5"


def test_the_page_shows_a_hostile_name_as_text_and_reports_missing_gpus(
    browser: Browser, processes: Processes, tmp_path: Path
) -> None:
    (tmp_path / "none").mkdir()
    _, url = serve(processes, tmp_path, {"gpus": [{"model": "H100"}], "holders": [pod(0, f"ml/{HOSTILE}/main")]})
    browser.open(url)
    browser.wait("document.body.innerText.includes('onerror')")
    assert browser.ask("[document.title, document.images.length]") == ["gpu-exporter", 0]
    _, url = processes.start_exporter("--no-attribution.kubelet", "--no-attribution.slurm")  # there is no driver here
    browser.open(url)
    assert browser.ask(
        "[document.querySelectorAll('table').length, document.querySelectorAll('.tile b')[0].innerText]"
    ) == [
        0,
        "0",
    ]


@pytest.mark.parametrize(("width", "height"), [(360, 800), (860, 900), (1300, 900), (3840, 2160)])
def test_the_page_fits_the_width_of_the_screen(
    browser: Browser, processes: Processes, tmp_path: Path, width: int, height: int
) -> None:
    parts = [{"profile": "1g.10gb", "load": IDLE}] * 7
    long = "namespace-of-a-team-with-a-long-name/a-pod-of-the-usual-length-7d9c5b8f4d-x2x9p/main"
    holders = [pod(gpu, f"{gpu}-{long}", mig=part) for gpu in range(8) for part in range(7)]
    _, url = serve(processes, tmp_path, {"gpus": [{"model": "H100", "mig": parts}] * 8, "holders": holders})
    browser.size(width, height)
    browser.open(url)
    browser.wait(f"{ROWS}.length === 64")
    assert browser.ask(WIDE) <= 0
    browser.ask("window.scrollTo(0, 900)")
    top = browser.ask("document.querySelector('th').getBoundingClientRect().top")
    assert top == 0, "the head of the table stays"
    browser.size(1300, 800)
