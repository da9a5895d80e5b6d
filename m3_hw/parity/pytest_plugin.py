"""pytest plugin: every case x every check as tests, for any backend.

    pytest -p m3_hw.parity.pytest_plugin --pyargs m3_hw.parity.suite --m3-hw-backend NAME

Asked for with `-p` and not registered for every pytest run, since it imports torch.
"""

import functools
from collections.abc import Iterator

import pytest

from m3_hw.errors import ContractError
from m3_hw.parity.cases import DTYPES, TIERS
from m3_hw.parity.checks import CHECKS, Subject, applicable
from m3_hw.parity.results import Case
from m3_hw.parity.run import Options, absence, stale_gaps

OPTIONS = {
    "backend": ("backends", "backend to test, repeatable; all known ones without it"),
    "op": ("ops", "operator to test, repeatable"),
    "dtype": ("dtypes", f"one of {', '.join(DTYPES)}, repeatable"),
    "tier": ("tiers", f"one of {', '.join(TIERS)}, repeatable; small without it"),
    "check": ("checks", f"one of {', '.join(CHECKS)}, repeatable"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options that pick cases; each may repeat."""
    group = parser.getgroup("m3-hw", "parity of m3_hw backends")
    for name, (_, text) in OPTIONS.items():
        group.addoption(f"--m3-hw-{name}", action="append", metavar="NAME", help=text)
    group.addoption("--m3-hw-seed", type=int, default=0, help="seed of the inputs")


def _options(config: pytest.Config) -> Options:
    picked = {field: tuple(names) for name, (field, _) in OPTIONS.items() if (names := config.getoption(f"--m3-hw-{name}"))}
    return Options(seed=config.getoption("--m3-hw-seed"), **picked)


def pytest_configure(config: pytest.Config) -> None:
    """An unknown name ends the run with a usage error that lists the known ones."""
    try:
        _options(config).cases()
    except ContractError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests with `parity_case` and `parity_check` run once for each pair; with `parity_backend`, for each backend."""
    if "parity_case" not in metafunc.fixturenames and "parity_backend" not in metafunc.fixturenames:
        return
    options = _options(metafunc.config)
    cases = options.cases()
    if "parity_backend" in metafunc.fixturenames:
        metafunc.parametrize("parity_backend", sorted({case.backend for case in cases} - {"reference"}))
    else:
        pairs = list(_pairs(cases, options))
        metafunc.parametrize(("parity_case", "parity_check"), pairs, ids=[f"{case.id}-{check}" for case, check in pairs])


def _pairs(cases: list[Case], options: Options) -> Iterator[tuple[Case, str]]:
    """Every case with every check that applies; what a backend lacks stands once, with the check `parity`."""
    last = None
    for case in cases:
        absent = absence(case)
        if absent is None:
            yield from ((case, check) for check in applicable(Subject(case, options.seed), options.checks))
        elif absent != last:
            yield absent.case, "parity"
        last = absent


@pytest.fixture
def parity_subject(parity_case: Case, request: pytest.FixtureRequest) -> Subject | None:
    """The case ready to be checked; None if the backend lacks it."""
    return None if absence(parity_case) else _subject(parity_case, request.config.getoption("--m3-hw-seed"))


@functools.lru_cache(maxsize=1)
def _subject(case: Case, seed: int) -> Subject:
    """Kept for the next check: inputs and golden outputs are made once a case."""
    return Subject(case, seed)


@pytest.fixture
def stale_entries(parity_backend: str) -> list[str]:
    """Entries of the backend's unsupported.toml that name nothing."""
    return stale_gaps(parity_backend)
