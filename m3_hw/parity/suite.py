"""The parity suite as pytest tests; `m3_hw.parity.pytest_plugin` says how to run it."""

import pytest

from m3_hw.parity.checks import Subject
from m3_hw.parity.results import Case
from m3_hw.parity.run import absence, check_case


def test_parity(parity_case: Case, parity_check: str, parity_subject: Subject | None) -> None:
    """One check on one case. Gaps that unsupported.toml lists, and backends that can't be used here, are skipped."""
    result = absence(parity_case) if parity_subject is None else check_case(parity_subject, parity_check)
    assert result is not None
    if result.status in ("gap", "unavailable"):
        pytest.skip(f"{result.status}: {result.message}")
    assert result.status == "pass", result.message


def test_unsupported_toml_names_what_exists(stale_entries: list[str]) -> None:
    """Operators, dtypes, samples and checks in unsupported.toml are real ones."""
    assert not stale_entries
