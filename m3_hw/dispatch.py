"""Which backend runs a call: `use_backend()`, then M3_HW_BACKEND, then the device of the tensors.

The only reader of M3_HW_* variables. `docs/backends.md` explains the rules to users.
"""

import functools
import inspect
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from operator import or_
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from m3_hw.backend import Backend, Implementation, discover
from m3_hw.errors import PROBE_ERRORS, BackendUnavailableError, ContractError, NotSupportedError
from m3_hw.spec import OpSpec

P = ParamSpec("P")
R = TypeVar("R")

_requested: ContextVar[str | None] = ContextVar("m3_hw_backend", default=None)
_library = torch.library.Library("m3_hw", "DEF")  # type: ignore[no-untyped-call]
_operators: dict[str, "_Operator"] = {}
_warned: set[tuple[str, str]] = set()


class Selection(NamedTuple):
    """What runs a call, and why."""

    backend: str
    reason: str


@dataclass(frozen=True)
class Capability:
    """One operator on one backend: whether it can be used in this process, and on what."""

    op: str
    backend: str
    status: Literal["available", "simulated", "unavailable", "missing"]
    device_type: str
    reasons: tuple[str, ...]


class _Entry(NamedTuple):
    """A resolved line of an operator's table."""

    backend: str
    function: Callable[..., Any]
    unsupported_reasons: Callable[..., Any] | None
    reason: str


@functools.cache
def backends() -> dict[str, Backend]:
    """Every known backend by name; `reference` is not among them, since it runs anywhere."""
    return discover()


def simulating() -> bool:
    """M3_HW_SIMULATE=1: the cuda and ascend backends run without their hardware. Read once, at the first use."""
    return _flag("M3_HW_SIMULATE")


def value_checks(device_type: str) -> bool:
    """Whether calls on a device type have their tensors' values checked: on the CPU always, elsewhere under M3_HW_CHECK=1."""
    return device_type == "cpu" or _flag("M3_HW_CHECK")


@functools.cache
def _flag(variable: str) -> bool:
    value = os.environ.get(variable, "0")
    if value not in ("0", "1", ""):
        raise BackendUnavailableError(f"{variable} has {value!r}; accepted: 0, 1")
    return value == "1"


def _check_name(name: str, origin: str) -> str:
    known = ("auto", "reference", *backends())
    if name not in known:
        raise BackendUnavailableError(f"{origin} has {name!r}; accepted: {', '.join(known)}")
    return name


def requested_backend() -> Selection:
    """The backend that is asked for, and by what."""
    if (name := _requested.get()) is not None:
        return Selection(name, "use_backend()")
    return _by_default()


@functools.cache
def _by_default() -> Selection:
    """What M3_HW_BACKEND asks for. Read once, at the first use: a look at the environment takes a fourth of a call's budget."""
    if name := os.environ.get("M3_HW_BACKEND"):
        return Selection(_check_name(name, "M3_HW_BACKEND"), "M3_HW_BACKEND")
    return Selection("auto", "the device of the tensors")


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run the operators called inside on one backend; goes before M3_HW_BACKEND.

    Args:
        name: "auto", "reference", "cpu", "cuda", "ascend" or a plugin's.

    Raises:
        BackendUnavailableError: Unknown name; lists the known ones.
    """
    token = _requested.set(_check_name(name, "use_backend()"))
    try:
        yield
    finally:
        _requested.reset(token)


def _not_inside() -> torch._C.DispatchKeySet:
    names = ("AutogradFunctionality", "AutocastCPU", "AutocastCUDA", "AutocastPrivateUse1")
    return functools.reduce(or_, (torch._C.DispatchKeySet(torch._C._dispatch_key_parse(name)) for name in names))


_NOT_INSIDE = _not_inside()
"""What torch must not do inside an operator: record gradients, of which none has any, or change dtypes by autocast."""


class _Operator:
    """The kernel behind one torch op: checks the contract, takes the table's line, calls it."""

    def __init__(self, spec: OpSpec[..., Any]) -> None:
        self.spec = spec
        self._table: dict[tuple[str, str, torch.dtype], _Entry] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        device = args[0].device
        self.check(device, args, kwargs)
        function = self.choose(device, args, kwargs).function
        if torch.is_grad_enabled() or torch._C._is_any_autocast_enabled():
            with torch._C._ExcludeDispatchKeyGuard(_NOT_INSIDE):
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    def choose(self, device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Entry:
        """What runs a call that keeps the contract."""
        key = (_requested.get() or _by_default().backend, device.type, args[0].dtype)
        entry = self._table.get(key) or self._resolve(key)
        refuse = entry.unsupported_reasons
        if refuse is not None and next(iter(refuse(*args, **kwargs)), None) is not None:
            reasons = list(refuse(*args, **kwargs))
            return self._fall_back(f"{self.spec.name} on {entry.backend}: " + "; ".join(reasons), device)
        return entry

    def check(self, device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The contract of a call, before any memory is written."""
        try:
            self._check_devices(device, args)
            self.spec.check(*args, **kwargs)
            if value_checks(device.type):
                self.spec.check_values(*args, **kwargs)
        except ContractError as error:
            raise ContractError(f"{self.spec.name}: {error}") from None

    def _check_devices(self, device: torch.device, args: tuple[Any, ...]) -> None:
        for value in args:
            if isinstance(value, Tensor) and value.device != device:
                argument = list(self.spec.reference.__annotations__)[next(i for i, other in enumerate(args) if other is value)]
                raise ContractError(f"{argument} has device {value.device}; accepted: {device}, the device of the first argument")

    def fake(self, *args: Any, **kwargs: Any) -> Any:
        """The spec's fake kernel. torch sends it every call with a meta tensor, real ones among them too."""
        try:
            self._check_devices(args[0].device, args)
        except ContractError as error:
            raise ContractError(f"{self.spec.name}: {error}") from None
        return self.spec.fake(*args, **kwargs)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as torch passes them: only keyword-only ones by name."""
        bound = inspect.signature(self.spec.reference).bind(*args, **kwargs)
        return bound.args, bound.kwargs

    def _resolve(self, key: tuple[str, str, torch.dtype]) -> _Entry:
        """Fill a line of the table. Not cached when it falls back, so that the policy is read anew."""
        name, device_type, _ = key
        try:
            entry = self.select(name, device_type)
        except NotSupportedError as error:
            return self._fall_back(str(error), torch.device(device_type))
        self._table[key] = entry
        return entry

    def select(self, name: str, device_type: str) -> _Entry:
        """The implementation for tensors of a device type.

        Raises:
            BackendUnavailableError: The backend can't be used here, or is for another device.
            NotSupportedError: It can, but lacks this operator.
        """
        if name == "reference":
            return _Entry(name, self.spec.reference, None, "asked for by name")
        if name == "auto":
            backend, reason = _backend_for(device_type), f"first backend for {device_type} tensors"
        else:
            backend, reason = backends()[name], "asked for by name"
        wanted = backend.device_type_when(simulate=simulating())
        if wanted != device_type:
            raise BackendUnavailableError(
                f"{self.spec.name}: backend {backend.name!r} takes {wanted} tensors, these are on {device_type}; "
                "tensors are never moved between devices"
            )
        if reasons := backend.unavailable_reasons():
            raise BackendUnavailableError(f"{self.spec.name}: backend {backend.name!r} is not available: " + "; ".join(reasons))
        if not backend.has(self.spec.name):
            raise NotSupportedError(f"{self.spec.name} on {backend.name}: {backend.missing_reason(self.spec.name)}")
        implementation: Implementation = backend.load(self.spec)
        return _Entry(backend.name, *implementation, reason)

    def _fall_back(self, why: str, device: torch.device) -> _Entry:
        policy = os.environ.get("M3_HW_FALLBACK", "error")
        if policy not in ("error", "reference"):
            raise BackendUnavailableError(f"M3_HW_FALLBACK has {policy!r}; accepted: error, reference")
        if policy == "error":
            raise NotSupportedError(f"{why} (M3_HW_FALLBACK=reference would run the reference instead)")
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise NotSupportedError(f"{why}; the reference can't run during graph capture")
        return _Entry("reference", functools.partial(self._run_reference, why), None, why)

    def _run_reference(self, why: str, *args: Any, **kwargs: Any) -> Any:
        if (self.spec.name, why) not in _warned:
            _warned.add((self.spec.name, why))
            warnings.warn(f"{why}; running the reference instead", RuntimeWarning, stacklevel=5)
        return self.spec.reference(*args, **kwargs)


def _backend_for(device_type: str) -> Backend:
    for backend in backends().values():
        if backend.device_type == device_type:
            return backend
    raise BackendUnavailableError(
        f"no backend for {device_type} tensors; known: {', '.join(backends())} (M3_HW_BACKEND=reference runs on any device)"
    )


def register(spec: OpSpec[P, R]) -> Callable[P, R]:
    """Make a spec a torch op, and return the public function that calls it."""
    operator = _operators[spec.name] = _Operator(spec)
    _library.define(spec.name + torch.library.infer_schema(spec.reference, mutates_args=spec.mutates))  # type: ignore[no-untyped-call]
    _library.impl(spec.name, operator, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"m3_hw::{spec.name}", operator.fake, lib=_library)
    overload = getattr(torch.ops.m3_hw, spec.name).default

    @functools.wraps(spec.reference)
    def public(*args: P.args, **kwargs: P.kwargs) -> R:
        return overload(*args, **kwargs)  # type: ignore[no-any-return]

    return public


def _operator(op: str) -> _Operator:
    if op not in _operators:
        raise ContractError(f"op has {op!r}; accepted: {', '.join(_operators)}")
    return _operators[op]


def specs() -> dict[str, OpSpec[..., Any]]:
    """Every operator's spec by name."""
    return {name: operator.spec for name, operator in _operators.items()}


def selected(op: str, *args: Any, **kwargs: Any) -> Selection:
    """Which backend would run this call, and why.

    Args:
        op: Operator's name.
        *args, **kwargs: The call's arguments; nothing is run.

    Returns:
        The backend's name and the reason, such as "first backend for cpu tensors (the device of the tensors)".

    Raises:
        ContractError, BackendUnavailableError, NotSupportedError: As the call itself would.
    """
    operator = _operator(op)
    args, kwargs = operator.bind(args, kwargs)
    operator.check(args[0].device, args, kwargs)
    entry = operator.choose(args[0].device, args, kwargs)
    return Selection(entry.backend, f"{entry.reason} ({requested_backend().reason})")


def why_not(op: str, backend: str, *args: Any, **kwargs: Any) -> list[str]:
    """Every reason why a backend would not run an operator; empty if it would.

    Args:
        op: Operator's name.
        backend: Backend's name.
        *args, **kwargs: A call. Without one, only what doesn't depend on the call is answered.

    Returns:
        The reasons, each with what the call has and what is accepted.

    Raises:
        ContractError: Unknown operator; lists the known ones.
        BackendUnavailableError: Unknown backend name; lists the known ones.
    """
    operator = _operator(op)
    if _check_name(backend, "backend") in ("auto", "reference"):
        return []
    if args or kwargs:
        args, kwargs = operator.bind(args, kwargs)
    found = backends()[backend]
    try:
        reasons = found.unavailable_reasons()
        wanted = found.device_type_when(simulate=simulating())
        if not found.has(op):
            reasons.append(found.missing_reason(op))
        if args and args[0].device.type != wanted:
            reasons.append(f"takes {wanted} tensors, these are on {args[0].device.type}")
        if reasons or not args:
            return list(dict.fromkeys(reasons))
        refuse = found.load(operator.spec).unsupported_reasons
    except BackendUnavailableError as error:
        return [str(error)]
    return list(refuse(*args, **kwargs)) if refuse else []


def capabilities() -> list[Capability]:
    """Every operator on every backend: available, simulated, or why not."""
    rows = []
    for op in _operators:
        rows.append(Capability(op, "reference", "available", "any", ()))
        rows.extend(_capability(op, backend) for backend in backends().values())
    return rows


def _capability(op: str, backend: Backend) -> Capability:
    try:
        reasons = tuple(why_not(op, backend.name))
        device_type, missing = backend.device_type, not backend.has(op)
    except PROBE_ERRORS as error:  # Broken, not absent: a call raises this very error, a report goes on.
        return Capability(op, backend.name, "unavailable", "?", (f"broken: {type(error).__name__}: {error}",))
    except BackendUnavailableError as error:
        return Capability(op, backend.name, "unavailable", "?", (str(error),))
    simulated = simulating() and backend.device_type_when(simulate=True) != device_type
    status: Literal["available", "simulated", "unavailable", "missing"]
    status = "missing" if missing else "unavailable" if reasons else "simulated" if simulated else "available"
    return Capability(op, backend.name, status, device_type, reasons)
