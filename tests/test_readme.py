"""What the README shows is what runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "backends" / "README.md"])


def test_the_example_runs_and_its_comments_are_true(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(example, names)
    printed = eval(capsys.readouterr().out)
    assert [row[-1] for row in printed] == [698 // 128, 699 // 128, 299 // 128]


def test_set_up_comes_first_and_its_commands_are_targets() -> None:
    commands = re.findall(r"^make (\w+)", README, flags=re.MULTILINE)
    assert commands[:2] == ["parity", "test"]
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert set(commands) <= set(targets)


def test_the_parity_table_has_its_markers() -> None:
    assert README.count("<!-- parity-table -->") == README.count("<!-- /parity-table -->") == 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    for link in links:
        assert link.startswith("https://") or (page.parent / link).exists(), link
