"""What people and CI read of a report says what the report holds, whatever the names and numbers are."""

import io
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from reports import EXACT, HOSTILE, INF, NAN, REL_L2, ULP, empty, example, large, rel_l2
from rich.console import Console

from m3_hw.errors import M3HWError
from m3_hw.parity.report import deciding, markdown_table, number, printable, rows, save_html, save_junit, terminal_table, update_markdown
from m3_hw.parity.results import Case, Report, Result


def terminal(report: Report, width: int = 160) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(terminal_table(report))
    return console.export_text()


def row_of(report: Report, op: str, backend: str, dtype: str):
    return next(r for r in rows(report) if (r.op, r.backend, r.dtype) == (op, backend, dtype))


def measured(metrics: dict, tolerance: dict, status: str = "pass", sample: str = "s") -> Result:
    return Result(Case("op", "cpu", "float32", sample), "parity", status, metrics={"y": metrics}, tolerance={"y": tolerance})


# --- aggregation


def test_rows_group_by_operator_backend_and_dtype():
    keys = [(r.op, r.backend, r.dtype) for r in rows(example())]
    assert keys == sorted(set(keys))
    assert sum(len(r.results) for r in rows(example())) == len(example().results)


def test_cases_count_samples_once_and_certify_aggregates_in_full():
    cpu = row_of(example(), "sparse_attention", "cpu", "bfloat16")
    assert (cpu.cases, cpu.checks) == (2, 3)
    assert row_of(example(), "rms_norm", "cpu", "bfloat16").cases == 2000
    assert row_of(example(), "rope", "cuda", "bfloat16").cases == 0


@pytest.mark.parametrize(
    ("statuses", "verdict", "label"),
    [
        (("pass", "fail", "gap"), "fail", "fail, 1 gap"),
        (("pass", "gap", "gap"), "pass", "pass, 2 gaps"),
        (("pass", "unavailable"), "pass", "pass"),
        (("gap", "unavailable"), "gap", "gap"),
        (("unavailable",), "unavailable", "unavailable"),
    ],
)
def test_verdict_of_a_row(statuses, verdict, label):
    results = [Result(Case("op", "cpu", "float32", f"s{i}"), "parity", status) for i, status in enumerate(statuses)]
    (row,) = rows(Report("small", 0, "", "", {}, results=results))
    assert (row.verdict, row.label) == (verdict, label)


def test_the_deciding_number_is_the_one_nearest_to_its_limit():
    found = deciding(measured(rel_l2(1e-3, worst_row=9e-3), REL_L2))
    assert found is not None
    assert (found.metric, found.value, found.limit) == ("worst row", 9e-3, 1e-2)
    assert found.used == pytest.approx(0.9)


def test_ulps_that_the_floor_excuses_do_not_decide():
    found = deciding(measured({**rel_l2(0.0), "max_ulp": {"ulp": 900}, "judged_ulp": 1}, ULP))
    assert found is not None
    assert (found.metric, found.value) == ("ULP", 1)


def test_misplaced_nan_decides_over_good_finite_values():
    found = deciding(measured(rel_l2(0.0, nonfinite=1), REL_L2, "fail"))
    assert found is not None
    assert found.metric == "misplaced NaN or inf"
    assert found.used == INF


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_number_that_is_not_finite_is_the_worst(value):
    results = [measured(rel_l2(3e-3), REL_L2, sample="fine"), measured(rel_l2(value), REL_L2, sample="broken")]
    (row,) = rows(Report("small", 0, "", "", {}, results=results))
    assert row.worst is not None
    assert row.worst[0].case.sample == "broken"
    assert str(row.largest("rel_l2")) == str(value)


def test_a_failed_case_is_the_worst_even_below_a_passing_one():
    results = [measured({"mismatches": 0}, EXACT, "fail", "failed"), measured(rel_l2(3.9e-3), REL_L2, sample="close")]
    (row,) = rows(Report("small", 0, "", "", {}, results=results))
    assert row.worst is not None
    assert row.worst[0].case.sample == "failed"


def test_nothing_measured_has_no_deciding_number():
    assert deciding(Result(Case("op", "cpu", "float32", "s"), "strided", "pass")) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (2000, "2000"), (0.00390625, "0.00391"), (1e-7, "1.00e-07"), (NAN, "NaN"), (-INF, "-inf"), (None, ""), (1.5e9, "1.50e+09")],
)
def test_number(value, text):
    assert number(value) == text


# --- terminal


def test_terminal_shows_verdict_worst_numbers_and_every_failure():
    text = terminal(example())
    assert "FAILED: 7 pass, 2 fail, 3 gap, 1 unavailable" in text
    assert "out: worst row 0.009, limit 0.01" in text
    failures = text[text.index("2 failed:") :]
    assert "sparse_attention-cpu-float16-decode  parity" in failures
    assert "first at [3, 17]: has nan, wanted 1.5" in failures
    assert "[bold]boom[/bold] \\x1b[31m & <tag> \\x00 \\ud800 </script>" in failures
    assert "not written yet" in text
    assert "no CUDA device" in text


def test_terminal_says_simulated_for_every_simulated_backend():
    report = example()
    failed = Result(Case("rope", "cuda vs ascend", "float32", "neox"), "compare", "fail", "apart")
    report.results.append(failed)
    text = terminal(report)
    assert "simulated, not on hardware: ascend" in text
    assert re.search(r"rope-cuda vs ascend-float32-neox \(simulated\)", text)
    assert len(re.findall(r"^ +simulated ", text, re.MULTILINE)) == sum(row.simulated for row in rows(report)) == 2


def test_terminal_of_an_empty_run_does_not_pass():
    assert "FAILED: nothing ran" in terminal(empty())


def test_terminal_sends_no_control_characters():
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", terminal(example()))


# --- Markdown


def test_markdown_has_an_operator_a_row_and_built_in_backends_first():
    lines = markdown_table(example()).splitlines()
    assert lines[0] == "| operator | cpu | cuda | ascend |"
    assert "| `rope` | – | not written yet | – |" in lines  # noqa: RUF001
    assert "| `sparse_attention` | **fail** fp32 fp16; pass bf16 | – | simulated: pass, 1 gap bf16 |" in lines  # noqa: RUF001
    assert "| `rms_norm` | pass bf16 | no CUDA device | – |" in lines  # noqa: RUF001


def test_markdown_cells_stay_cells_whatever_the_reason():
    results = [Result(Case("op", "cpu", "float32", "s"), "parity", "gap", "a | b\n<!-- /parity-table --> `c` *d*")]
    table = markdown_table(Report("small", 0, "", "", {}, results=results))
    assert len(table.splitlines()) == 3
    assert "a \\| b \\<!-- /parity-table -->" in table


def test_update_markdown_replaces_only_the_table(tmp_path: Path):
    file = tmp_path / "README.md"
    file.write_text("before ü\n<!-- parity-table -->\nold\n<!-- /parity-table -->\nafter\n", encoding="utf-8")
    update_markdown(file, example())
    once = file.read_text(encoding="utf-8")
    assert once == f"before ü\n<!-- parity-table -->\n{markdown_table(example())}\n<!-- /parity-table -->\nafter\n"
    update_markdown(file, example())
    assert file.read_text(encoding="utf-8") == once


@pytest.mark.parametrize(
    "text",
    ["nothing", "<!-- t -->", "<!-- /t --> <!-- t -->", "<!-- t --> <!-- /t --> <!-- t --> <!-- /t -->"],
    ids=["none", "one", "swapped", "twice"],
)
def test_update_markdown_refuses_unclear_markers(tmp_path: Path, text):
    file = tmp_path / "README.md"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(M3HWError, match="one of each"):
        update_markdown(file, example(), marker="t")
    assert file.read_text(encoding="utf-8") == text


# --- JUnit


def junit(report: Report, tmp_path: Path) -> ET.Element:
    save_junit(report, tmp_path / "junit.xml")
    return ET.parse(tmp_path / "junit.xml").getroot()


def test_junit_counts_agree_with_the_report_and_with_the_cases(tmp_path: Path):
    report = example()
    root = junit(report, tmp_path)
    assert root.get("tests") == str(len(report.results))
    for element, cases in [(root, root.findall("*/testcase")), *((s, s.findall("testcase")) for s in root)]:
        assert element.get("tests") == str(len(cases))
        assert element.get("failures") == str(sum(c.find("failure") is not None for c in cases))
        assert element.get("skipped") == str(sum(c.find("skipped") is not None for c in cases))
    assert [s.get("name") for s in root] == sorted({r.case.op for r in report.results})


def test_junit_names_are_unique_and_hold_case_and_check(tmp_path: Path):
    names = [case.get("name") for case in junit(example(), tmp_path).iter("testcase")]
    assert len(set(names)) == len(names)
    assert "sparse_attention-cpu-bfloat16-prefill[unowned]" in names
    assert f"sparse_attention-cpu-float32-{HOSTILE}[strided]" in names


def test_junit_failures_hold_the_message_and_the_numbers(tmp_path: Path):
    failures = {f.get("type"): f for f in junit(example(), tmp_path).iter("failure")}
    assert failures["strided"].get("message") == "[bold]boom[/bold] \\x1b[31m & <tag> \\x00 \\ud800 </script>"
    message, numbers = (failures["parity"].text or "").split("\n", 1)
    assert "has nan, wanted 1.5" in message
    assert json.loads(numbers)["metrics"]["out"]["nonfinite_mismatches"] == 5


def test_junit_skips_gaps_and_unavailable_with_their_reasons(tmp_path: Path):
    reasons = {s.get("message") for s in junit(example(), tmp_path).iter("skipped")}
    assert reasons == {"gap: not written yet", "gap: head_dim above 128", "unavailable: no CUDA device"}


def test_junit_attributes_are_of_the_schemas_types(tmp_path: Path):
    for suite in junit(example(), tmp_path):
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", suite.get("timestamp") or "")
        assert all(float(element.get("time") or "x") >= 0 for element in (suite, *suite.findall("testcase")))
        assert [child.tag for child in suite] == ["properties"] + ["testcase"] * (len(suite) - 1)


def test_junit_of_an_empty_run(tmp_path: Path):
    assert junit(empty(), tmp_path).get("tests") == "0"


@pytest.mark.parametrize("text", ["\x00\x1b\x7f\x85", "\ud800", "￾￿"])
def test_printable_spells_out_what_xml_refuses(text):
    root = ET.Element("a", b=printable(text))
    assert ET.fromstring(ET.tostring(root, encoding="utf-8")).get("b") == printable(text)
    assert printable(text).startswith("\\")


def test_printable_keeps_text_as_it_is():
    assert printable("tab\t line\n ünïcode 漢 🙂 <&>") == "tab\t line\n ünïcode 漢 🙂 <&>"


# --- page (what a browser makes of it: test_report_page.py)


def page_data(report: Report, tmp_path: Path) -> tuple[str, dict]:
    save_html(report, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return text, json.loads(data, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_page_holds_every_result_as_strict_json(tmp_path: Path):
    report = example()
    _, data = page_data(report, tmp_path)
    assert sum(len(row["results"]) for row in data["rows"]) == len(report.results)
    assert data["summary"] == report.summary
    assert data["simulated"] == ["ascend"]
    (failed,) = (row for row in data["rows"] if (row["backend"], row["dtype"]) == ("cpu", "fp16"))
    assert (failed["rel_l2"], failed["worst_row"], failed["worst"]["used"]) == ("NaN", "Infinity", "Infinity")


def test_page_text_cannot_close_the_script_element(tmp_path: Path):
    text, data = page_data(example(), tmp_path)
    assert text.count("</script>") == 2
    assert HOSTILE in {result["sample"] for row in data["rows"] for result in row["results"]}


def test_page_names_no_other_file(tmp_path: Path):
    text, _ = page_data(example(), tmp_path)
    assert not re.search(r"""(src|href)\s*=|@import|url\(|https?://""", text)


def test_page_of_thousands_of_results_stays_small(tmp_path: Path):
    text, data = page_data(large(100, 30), tmp_path)
    assert len(data["rows"]) == 100
    assert len(text) < 1200 * 3000


def test_report_survives_json_with_its_numbers(tmp_path: Path):
    report = example()
    report.save(tmp_path / "r.json")
    again = Report.load(tmp_path / "r.json")
    assert terminal(again) == terminal(report)
