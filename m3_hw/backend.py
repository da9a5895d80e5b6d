"""What a backend is, and how backends are found.

A backend is a package that holds one module per operator, named after it, with a function of the same name and
signature. `docs/adding-a-backend.md` shows one.
"""

import importlib
import importlib.util
import inspect
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import entry_points
from importlib.resources import files
from types import ModuleType
from typing import Any, NamedTuple

from m3_hw.errors import BackendUnavailableError
from m3_hw.spec import OpSpec

ENTRY_POINT_GROUP = "m3_hw.backends"
BUILT_IN = {name: f"m3_hw.backends.{name}" for name in ("cpu", "cuda", "ascend")}


@dataclass(frozen=True)
class Gap:
    """A known gap of a backend, from its unsupported.toml: strict both ways (the harness fails when it closes)."""

    op: str
    reason: str
    dtypes: tuple[str, ...] = ()  # empty: all
    samples: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()


class Implementation(NamedTuple):
    """A backend's function for one operator; `unsupported_reasons` yields why it refuses a call, if it can."""

    function: Callable[..., Any]
    unsupported_reasons: Callable[..., Iterable[str]] | None


class Backend:
    """A backend package: `DEVICE_TYPE`, `unavailable_reasons()`, `<op>.py` each, `unsupported.toml`.

    The package may also hold `versions() -> dict[str, str]` for `m3-hw doctor`, and `SIMULATED_DEVICE_TYPE`, the
    device type it runs on under M3_HW_SIMULATE=1.
    """

    def __init__(self, name: str, package: str) -> None:
        self.name = name
        self.package_name = package

    @cached_property
    def package(self) -> ModuleType:
        """The imported package. Only its own absence means "not installed"; any other import error propagates."""
        try:
            return importlib.import_module(self.package_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{self.package_name}.".startswith(f"{error.name}."):
                raise  # The backend is there, but something that it needs is broken: never "not available".
            raise BackendUnavailableError(f"backend {self.name!r}: its package {self.package_name} is not installed") from None

    @property
    def device_type(self) -> str:
        """Device type of the tensors that the backend takes."""
        return str(self.package.DEVICE_TYPE)

    def device_type_when(self, *, simulate: bool) -> str:
        """The device type that the backend runs on, with or without simulation."""
        simulated = getattr(self.package, "SIMULATED_DEVICE_TYPE", None) if simulate else None
        return str(simulated or self.device_type)

    def unavailable_reasons(self) -> list[str]:
        """Why the backend can't be used in this process; empty if it can."""
        return list(self.package.unavailable_reasons())

    def versions(self) -> dict[str, str]:
        """Versions of what the backend stands on, for `m3-hw doctor`."""
        return dict(getattr(self.package, "versions", dict)())

    @cached_property
    def gaps(self) -> tuple[Gap, ...]:
        """Known gaps, from the package's unsupported.toml."""
        file = files(self.package) / "unsupported.toml"
        if not file.is_file():
            return ()
        listed = tomllib.loads(file.read_text(encoding="utf-8")).get("gap", [])
        return tuple(Gap(gap["op"], gap["reason"], *(tuple(gap.get(k, ())) for k in ("dtypes", "samples", "checks"))) for gap in listed)

    def has(self, op: str) -> bool:
        """Whether the backend has a module for the operator; imports nothing of it."""
        return importlib.util.find_spec(f"{self.package.__name__}.{op}") is not None

    def missing_reason(self, op: str) -> str:
        """What unsupported.toml says of an operator without a module."""
        reasons = [gap.reason for gap in self.gaps if gap.op == op]
        return reasons[0] if reasons else "no implementation, and unsupported.toml doesn't say why"

    def load(self, spec: OpSpec[..., Any]) -> Implementation:
        """The backend's function for an operator. Its signature must be the reference's.

        Raises:
            BackendUnavailableError: The module lacks the function, or its signature drifted.
        """
        module = importlib.import_module(f"{self.package.__name__}.{spec.name}")
        function = getattr(module, spec.name, None)
        if function is None:
            raise BackendUnavailableError(f"backend {self.name!r}: {module.__name__} has no function {spec.name!r}")
        wanted, found = _parameters(spec.reference), _parameters(function)
        if wanted != found:
            raise BackendUnavailableError(f"backend {self.name!r}: signature of {spec.name} is {found}; the spec's is {wanted}")
        return Implementation(function, getattr(module, "unsupported_reasons", None))


def _parameters(function: Callable[..., Any]) -> str:
    """A signature's names, kinds and defaults, without annotations."""
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in inspect.signature(function).parameters.values()]
    return str(inspect.Signature(parameters))


def discover() -> dict[str, Backend]:
    """Every known backend by name: the built-in ones, then those that other distributions register."""
    found = {name: Backend(name, package) for name, package in BUILT_IN.items()}
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name in found or entry.name in ("auto", "reference"):
            raise BackendUnavailableError(f"entry point {entry.value!r} registers a backend named {entry.name!r}, which is taken")
        found[entry.name] = Backend(entry.name, entry.value)
    return found
