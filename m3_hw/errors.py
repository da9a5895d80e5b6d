"""The errors that m3_hw raises: a malformed call and an unsupported call are different errors."""

from subprocess import SubprocessError


class M3HWError(Exception):
    """Base of every error that m3_hw raises on purpose."""


class ContractError(M3HWError, ValueError):
    """The call is malformed: no backend could run it. Names the argument, what it has and what is accepted."""


class NotSupportedError(M3HWError):
    """The call is well-formed, but this backend can't run it. Carries every reason."""


class BackendUnavailableError(M3HWError):
    """The backend can't be used in this process: unknown, not installed, broken, or for another device."""


class BundleError(M3HWError):
    """A parity bundle can't be read, or was not made for this comparison."""


PROBE_ERRORS = (
    ArithmeticError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    SubprocessError,
)
"""What looking at something missing or broken may raise: only for reports that must go on, never for choosing a backend."""
