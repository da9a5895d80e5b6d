"""The HTML report in a real browser: it loads alone, filters, sorts, opens rows and keeps its state in the address."""

import importlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from reports import NAN, REL_L2, empty, example, large, rel_l2

from m3_hw.parity.report import save_html
from m3_hw.parity.results import Case, Report, Result

CI = bool(os.environ.get("CI"))
playwright = importlib.import_module("playwright.sync_api") if CI else pytest.importorskip("playwright.sync_api")
CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None and not CI, reason="no Chromium here (CI must have one)")

ARGUMENTS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync"
)
REL_L2_COLUMN = 10
OPEN_FP16 = '.row[data-row="sparse_attention/cpu/fp16"]'


@pytest.fixture(scope="module")
def browser() -> Iterator:
    assert CHROMIUM, "CI has no Chromium: apt-get install chromium"
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS.split())
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, tmp_path: Path):
    """Opens a report in a fresh page; afterwards nothing may have been logged or asked of a network."""
    pages, complaints = [], []

    def open_report(report: Report, state: str = "", **options):
        file = tmp_path / "report.html"
        save_html(report, file)
        page = browser.new_page(**{"viewport": {"width": 1500, "height": 900}, **options})
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: request.url.split("#")[0] == file.as_uri() or complaints.append(request.url))
        page.goto(file.as_uri() + state)
        pages.append(page)
        return page

    yield open_report
    for page in pages:
        page.close()
    assert complaints == []


def shown(page) -> list[str]:
    return page.eval_on_selector_all(".row", "rows => rows.map(row => row.dataset.row)")


def column(page, number: int) -> list[str]:
    return [text.strip() for text in page.locator(f".row td:nth-child({number})").all_text_contents()]


def test_page_shows_the_run_and_every_row(open_page):
    page = open_page(example())
    head = page.inner_text("#head")
    for text in (
        "failed",
        "2 fail",
        "7 pass",
        "Simulated: ascend.",
        "m3-hw parity run --backend cpu <&>",
        "torch 2.13.0",
        "2026-12-03 17:00:00 UTC",
    ):
        assert text in head
    assert len(shown(page)) == 10
    assert page.inner_text("#shown") == "10 of 10 rows"
    assert "simulated" in page.inner_text('.row[data-row="sparse_attention/ascend/bf16"]')
    assert "simulated" not in page.inner_text('.row[data-row="sparse_attention/cpu/bf16"]')


def test_row_shows_its_numbers(open_page):
    text = open_page(example()).inner_text('.row[data-row="sparse_attention/cpu/bf16"]')
    for number in (
        "90 %",
        "out: worst row 0.009, limit 0.01",
        "rel_l2: worst row ≤ 0.01",
        "one rounding at the end",
        "0.002",
        "2.00e-6",
        "99.99 %",
    ):
        assert number in text


def test_text_filter_reduces_rows_by_name_and_by_message(open_page):
    page = open_page(example())
    page.fill("#q", "ROPE cuda")
    assert shown(page) == ["rope/cuda/bf16", "rope/cuda/fp32"]
    assert page.inner_text("#shown") == "2 of 10 rows"
    page.fill("#q", "first at [3, 17]")
    assert shown(page) == ["sparse_attention/cpu/fp16"]
    page.fill("#q", "no such thing")
    assert shown(page) == []
    assert page.is_visible("text=No row matches.")
    page.click("button[type=reset]")
    page.wait_for_selector(".row")
    assert len(shown(page)) == 10


@pytest.mark.parametrize(
    ("select", "value", "rows"),
    [
        ("op", "rms_norm", ["rms_norm/cpu/bf16", "rms_norm/cuda/bf16"]),
        ("backend", "ascend", ["sparse_attention/ascend/bf16"]),
        ("dtype", "fp16", ["sparse_attention/cpu/fp16"]),
        ("status", "fail", ["sparse_attention/cpu/fp16", "sparse_attention/cpu/fp32"]),
        ("status", "gap", ["rope/cuda/bf16", "rope/cuda/fp32", "sparse_attention/ascend/bf16"]),
        ("status", "unavailable", ["rms_norm/cuda/bf16"]),
    ],
)
def test_each_select_reduces_rows(open_page, select, value, rows):
    page = open_page(example())
    page.select_option(f"#{select}", value)
    assert shown(page) == rows


def test_counts_in_the_header_select_their_status(open_page):
    page = open_page(example())
    page.click("#head button.fail")
    assert page.input_value("#status") == "fail"
    assert len(shown(page)) == 2


def numbers_report() -> Report:
    values = {"a": 9e-5, "b": NAN, "c": 1e-3, "d": float("inf"), "e": 20.0, "f": 3.0, "g": 0.0}
    results = [
        Result(Case(f"op_{name}", "cpu", "float32", "s"), "parity", "pass", metrics={"y": rel_l2(value)}, tolerance={"y": REL_L2})
        for name, value in values.items()
    ]
    results.append(Result(Case("op_z", "cpu", "float32", "s"), "parity", "gap", "not written yet"))
    return Report("small", 0, "", "", {}, results=results)


def test_sort_orders_numbers_by_value_with_the_non_finite_last_both_ways(open_page):
    page = open_page(numbers_report())
    page.click("th[data-key=rel_l2] button")
    assert page.get_attribute("th[data-key=rel_l2]", "aria-sort") == "ascending"
    assert column(page, REL_L2_COLUMN) == ["0", "9.00e-5", "0.001", "3", "20", "inf", "NaN", ""]
    page.click("th[data-key=rel_l2] button")
    assert page.get_attribute("th[data-key=rel_l2]", "aria-sort") == "descending"
    page.wait_for_function("document.querySelector('.row').dataset.row === 'op_e/cpu/fp32'")
    assert column(page, REL_L2_COLUMN) == ["20", "3", "0.001", "9.00e-5", "0", "inf", "NaN", ""]


def test_sort_orders_text_and_verdicts(open_page):
    page = open_page(example())
    page.click("th[data-key=verdict] button")
    assert [v.split(",")[0] for v in column(page, 4)] == ["fail"] * 2 + ["pass"] * 5 + ["gap"] * 2 + ["unavailable"]
    page.click("th[data-key=op] button")
    page.click("th[data-key=op] button")
    assert column(page, 1) == sorted(column(page, 1), reverse=True)
    assert page.locator("th[aria-sort]").count() == 1


def test_sort_and_expand_work_from_the_keyboard(open_page):
    page = open_page(example())
    page.focus("th[data-key=cases] button")
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    assert column(page, 5)[0] == "2000"
    page.focus(".row button")
    page.keyboard.press("Enter")
    assert page.get_attribute(".row button", "aria-expanded") == "true"
    assert page.evaluate("document.activeElement.matches('.row button')")
    page.keyboard.press("Enter")
    assert page.locator(".detail").count() == 0


def test_expanded_row_shows_the_failing_cases_message_and_numbers(open_page):
    page = open_page(example())
    assert page.locator(".detail").count() == 0
    page.click(OPEN_FP16)
    text = page.inner_text(".detail")
    for part in (
        "out: NaN or inf differ at 5 of 512 elements, first at [3, 17]: has nan, wanted 1.5",
        "decode",
        "worst row inf (row 3)",
        "limit 0.004",
    ):
        assert part in text
    page.click(OPEN_FP16)
    assert page.locator(".detail").count() == 0


def test_hostile_names_and_messages_are_shown_as_text(open_page):
    page = open_page(example())
    page.click('.row[data-row="sparse_attention/cpu/fp32"]')
    text = page.inner_text(".detail")
    assert 'case <b>&"</script><!-- ünïcode 漢 | `x`' in text
    assert "[bold]boom[/bold]" in text
    assert page.locator(".detail b").count() == 0


def test_notes_and_gap_reasons_are_shown(open_page):
    page = open_page(example(), "#open=sparse_attention/cpu/bf16&open=sparse_attention/ascend/bf16")
    text = " ".join(page.locator(".detail").all_inner_texts())
    assert "Note: scaled to 1/8 of its length" in text
    assert "head_dim above 128" in text


def test_hash_restores_filters_sort_and_open_rows(open_page):
    page = open_page(example())
    page.fill("#q", "sparse")
    page.select_option("#backend", "cpu")
    page.select_option("#status", "fail")
    page.click("th[data-key=dtype] button")
    page.click("th[data-key=dtype] button")
    page.click(OPEN_FP16)
    again = open_page(example(), page.evaluate("location.hash"))
    assert shown(again) == shown(page) == ["sparse_attention/cpu/fp32", "sparse_attention/cpu/fp16"]
    assert [again.input_value(f"#{s}") for s in ("q", "op", "backend", "dtype", "status")] == ["sparse", "", "cpu", "", "fail"]
    assert again.get_attribute("th[data-key=dtype]", "aria-sort") == "descending"
    assert again.locator(".detail").count() == 1


def test_hash_of_another_report_is_harmless(open_page):
    page = open_page(example(), "#op=unknown&sort=nothing-&open=x")
    assert len(shown(page)) == 10


def test_hash_that_changes_later_is_followed(open_page):
    page = open_page(example())
    page.evaluate("location.hash = '#op=rope'")
    page.wait_for_function("document.querySelectorAll('.row').length === 2")


def test_narrow_screens_scroll_only_the_table(open_page):
    page = open_page(example(), viewport={"width": 380, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("(box => box.scrollWidth > box.clientWidth)(document.querySelector('.scroll'))")
    page.click(OPEN_FP16)
    assert page.evaluate("document.querySelector('.inside').getBoundingClientRect().width <= innerWidth")


def test_dark_scheme_has_its_own_colours(open_page):
    grounds = [open_page(example(), color_scheme=s).evaluate("getComputedStyle(document.body).backgroundColor") for s in ("light", "dark")]
    light, dark = (sum(map(int, ground.removeprefix("rgb(").rstrip(")").split(","))) for ground in grounds)
    assert light > 700
    assert dark < 100


def test_details_are_built_on_demand_however_many_results(open_page):
    page = open_page(large(100, 30))
    assert page.locator(".row").count() == 100
    assert page.evaluate("document.querySelectorAll('*').length") < 5000
    page.click(".row >> nth=0")
    assert page.locator(".detail tbody tr").count() == 30


def test_empty_run_says_so(open_page):
    page = open_page(empty())
    assert "Nothing ran" in page.inner_text("#head")
    assert "failed" in page.inner_text("#head")
    assert page.inner_text("#shown") == "0 of 0 rows"
