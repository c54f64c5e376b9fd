"""Pages in a real browser: Debian's Chromium, driven by Playwright. All tests share one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from patience import PATIENCE_SECONDS
from stored_runs import a_case, a_result, a_run, a_summary, with_facts

from ddpbench.interchange import sources
from ddpbench.present.document import ReportRun
from ddpbench.present.writers import page_file
from ddpbench.records.schema import Finding
from ddpbench.records.wording import install_extra

pytestmark = pytest.mark.thorough

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

STEP = Path(__file__).parents[2] / "results/reference/ddp-cpu-2-ranks"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
WIDE, PHONE = 1280, 390
SCRIPT = "<script>alert(1)</script>"


def missing() -> str | None:
    """Return what these tests lack; None if nothing."""
    if find_spec("playwright") is None or find_spec("axe_playwright_python") is None:
        return f"no playwright: {install_extra('test')}"
    return None if CHROMIUM else "no chromium: apt-get install chromium"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """The browser of all tests here."""
    if (why := missing()) is not None:
        if os.environ.get("DDPBENCH_TEST_ALL"):
            pytest.fail(f"no browser, and CI must have one: {why}")
        pytest.skip(why)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a DDP step on gloo and mpi, which has a finding."""
    page = tmp_path_factory.mktemp("step") / "page.html"
    page_file.save(page, [ReportRun(STEP.name, sources.read(STEP), STEP)])
    return page


Open = Callable[..., "Page"]


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Return a function that opens a page, and fails the test for what the page may not do."""
    contexts, complaints = [], []

    def open_page(path: Path, width: int = WIDE) -> Page:
        viewport: Any = {"width": width, "height": 900}
        context = browser.new_context(viewport=viewport, offline=True)
        context.set_default_timeout(1000 * PATIENCE_SECONDS)
        contexts.append(context)
        page = context.new_page()
        url = path.as_uri()
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: request.url != url and complaints.append(request.url))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def draw_all(page: Page, charts: str = "figure[data-chart]") -> None:
    """Scroll to every chart, as a reader does, and wait until it is drawn."""
    for chart in page.locator(f"{charts}:visible").all():
        chart.scroll_into_view_if_needed()
        chart.locator("svg[aria-hidden]").wait_for()


def drawn(page: Page) -> int:
    return page.locator("figure svg[aria-hidden]").count()


@pytest.mark.parametrize("width", [WIDE, PHONE])
def test_a_page_is_accessible(step: Path, open_page: Open, width: int) -> None:
    """axe finds nothing in the page of a real run with its charts drawn and its tables open."""
    from axe_playwright_python.sync_playwright import Axe

    page = open_page(step, width)
    draw_all(page)
    for summary in page.locator("summary").all():
        summary.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator(".finding").count() == 1
    report = Axe().run(page)
    assert report.violations_count == 0, report.generate_report()


def test_only_charts_in_sight_are_drawn(reference: Path, open_page: Open) -> None:
    """A page opens with the charts near the window, and draws the others when they come near; on
    a phone it never scrolls sideways. The page of a default sweep stays below 3 MB."""
    assert reference.stat().st_size < 3_000_000
    page = open_page(reference, PHONE)
    page.locator("figure svg[aria-hidden]").first.wait_for()
    charts = page.locator("figure[data-chart]").count()
    assert drawn(page) < charts
    draw_all(page)
    assert drawn(page) == charts > 5
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE


def test_a_backend_and_an_operation_can_be_hidden(reference: Path, open_page: Open) -> None:
    """Without its check mark a backend leaves charts, also those drawn later, and tables; an
    operation's charts leave the page. Both come back."""
    page = open_page(reference)
    chart = page.locator("figure[data-operation=all_reduce]").first
    chart.scroll_into_view_if_needed()
    points = chart.locator(".mark-symbol.role-mark path")
    points.first.wait_for()
    both = points.count()
    chart.locator("summary").click()
    rows = chart.locator("tbody tr:visible")
    assert rows.count() == 26
    page.get_by_role("checkbox", name="gloo").uncheck()
    count = "n => document.querySelectorAll(n[0]).length"
    marks = f"#{chart.get_attribute('id')} .mark-symbol.role-mark path"
    page.wait_for_function(f"{count} == n[1] / 2", arg=[marks, both])
    assert rows.count() == 13
    assert "gloo" not in " ".join(rows.all_inner_texts())
    draw_all(page, "figure[data-operation=broadcast]")
    last = page.locator("figure[data-operation=broadcast] svg").first
    assert last.locator(".mark-symbol.role-mark path").count() * 2 <= both
    page.get_by_role("checkbox", name="gloo").check()
    page.wait_for_function(f"{count} == n[1]", arg=[marks, both])
    assert rows.count() == 26

    charts = page.locator("figure[data-operation=all_gather]")
    shown = charts.count()
    assert shown
    page.get_by_role("checkbox", name="all_gather").uncheck()
    assert not any(chart.is_visible() for chart in charts.all())
    assert page.locator("figure[data-operation=broadcast]").first.is_visible()
    page.get_by_role("checkbox", name="all_gather").check()
    assert all(chart.is_visible() for chart in charts.all())


def test_markup_in_names_is_text(tmp_path: Path, open_page: Open) -> None:
    """A host, a backend, an operation, a word of the command line and a finding that contain HTML
    appear as text: in the page, in axes, legends and tooltips."""
    cases = [
        a_case(nbytes=size, backend=backend, operation=f"op{SCRIPT}")
        for size in (1024, 4096)
        for backend in (f"a{SCRIPT}", f"b{SCRIPT}")
    ]
    run = a_run(
        *(a_result(case, summary=a_summary()) for case in cases),
        command_line=("ddpbench", "collectives", "--output", SCRIPT),
        findings=(Finding("error", "bad", f"host {SCRIPT} is slow", f"leave out {SCRIPT}"),),
    )
    run = with_facts(run, {"cpu_model": SCRIPT}, {"hostname": SCRIPT})
    path = tmp_path / "page.html"
    page_file.save(path, [ReportRun(f"run {SCRIPT}", run)])
    page = open_page(path)
    draw_all(page)
    assert page.locator("h1").inner_text() == f"run {SCRIPT}"
    for text in (f"host {SCRIPT} is slow", f"leave out {SCRIPT}", f"'{SCRIPT}'"):
        assert page.get_by_text(text).first.is_visible()
    assert page.locator("svg text", has_text=SCRIPT).count()
    page.locator("figure .mark-symbol.role-mark path").first.hover(force=True)
    tooltip = page.locator("#vg-tooltip-element.visible")
    tooltip.wait_for()
    assert SCRIPT in tooltip.inner_text()
    assert page.locator("script:text('alert(1)')").count() == 0
