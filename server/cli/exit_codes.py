"""The exit codes of the commands, one table for all errors."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

DONE = 0
FAILED = 1
USAGE = 2
NOT_USABLE = 3
UNAVAILABLE = 4
TARGET_MISSED = 5

MEANINGS: Mapping[int, str] = MappingProxyType(
    {
        DONE: "done",
        FAILED: "a check or a request failed",
        USAGE: "wrong usage",
        NOT_USABLE: "a file, package, checkpoint or setting cannot be used",
        UNAVAILABLE: "no server answers, or it has no room or time now",
        TARGET_MISSED: "a trained model missed its task's target",
        130: "Ctrl-C",
        143: "SIGTERM",
    }
)


class CommandError(Exception):
    """Ends a command with one line and one of the codes."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def code_of(error: BaseException) -> int | None:
    """Return the exit code for an error that is raised on purpose; None for any other."""
    if isinstance(code := getattr(error, "exit_code", None), int):  # ours, or of the load test
        return code
    # Here, for what is imported takes long, and only a command that has failed needs it.
    import tokenweir

    from engine import errors

    # A class that is not here has the code of the nearest of its bases that is.
    codes = {
        errors.TokenweirError: FAILED,
        errors.ConfigError: NOT_USABLE,
        errors.PackageError: NOT_USABLE,
        errors.PackageUnreachable: UNAVAILABLE,
        errors.CheckpointError: NOT_USABLE,
        errors.CertificateError: FAILED,
        errors.Overloaded: UNAVAILABLE,
        errors.DeadlineExpired: UNAVAILABLE,
        errors.Unavailable: UNAVAILABLE,
        tokenweir.TokenweirClientError: FAILED,
        tokenweir.Unavailable: UNAVAILABLE,
        tokenweir.ResourceExhausted: UNAVAILABLE,
        tokenweir.DeadlineExceeded: UNAVAILABLE,
        ModuleNotFoundError: NOT_USABLE,
        OSError: NOT_USABLE,
    }
    return next((codes[base] for base in type(error).__mro__ if base in codes), None)


def explanation() -> str:
    """Return the codes in one line, for the help."""
    return ", ".join(f"{code} {meaning}" for code, meaning in MEANINGS.items())
