"""What a parity run found: cases, results, and the report that holds them. Plain data, readable as JSON."""

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

FORMAT = "m3_hw.parity/1"

Status = Literal["pass", "fail", "gap", "unavailable"]
"""pass, fail; gap: fails or is missing as unsupported.toml says; unavailable: the backend can't be used here."""


@dataclass(frozen=True, order=True)
class Case:
    """One operator on one backend, in one dtype, on one sample."""

    op: str
    backend: str
    dtype: str
    sample: str
    tier: str = "small"

    @property
    def id(self) -> str:
        """The same on every machine: names the case in reports, bundles and tests."""
        return f"{self.op}-{self.backend}-{self.dtype}-{self.sample}"


@dataclass
class Result:
    """What one check found on one case; on many cases of one sample name in the certify tier (`cases`).

    metrics: per output, the numbers of m3_hw.parity.metrics (the worst ones where there are many cases).
    tolerance: per output, the rule, its limits and their reason.
    """

    case: Case
    check: str
    status: Status
    message: str = ""
    seconds: float = 0.0
    cases: int = 1
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    tolerance: dict[str, dict[str, Any]] = field(default_factory=dict)
    note: str = ""


@dataclass
class Report:
    """A whole run."""

    tier: str
    seed: int
    created: str  # ISO 8601, UTC
    command: str
    environment: dict[str, Any]  # versions, devices, variables that change numerics
    simulated: list[str] = field(default_factory=list)  # backends that ran without their hardware
    results: list[Result] = field(default_factory=list)
    format: str = FORMAT

    @property
    def summary(self) -> dict[str, int]:
        """Number of results by status."""
        counts = Counter(result.status for result in self.results)
        return {status: counts[status] for status in ("pass", "fail", "gap", "unavailable")}

    @property
    def passed(self) -> bool:
        """Nothing failed, and something passed: an empty run proves nothing."""
        return self.summary["fail"] == 0 and self.summary["pass"] > 0

    def save(self, path: Path) -> None:
        """Write the report as JSON."""
        text = json.dumps({**asdict(self), "summary": self.summary}, indent=1, allow_nan=True)
        path.write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Report":
        """Read a report that `save` wrote."""
        data = json.loads(path.read_text(encoding="utf-8"))
        data.pop("summary")
        results = [Result(**{**r, "case": Case(**r["case"])}) for r in data.pop("results")]
        return cls(**data, results=results)
