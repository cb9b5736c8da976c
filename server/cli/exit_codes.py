"""The exit codes of the commands, one table for all errors."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

DONE = 0
FAILED = 1
USAGE = 2
NOT_USABLE = 3
UNAVAILABLE = 4

MEANINGS: Mapping[int, str] = MappingProxyType(
    {
        DONE: "done",
        FAILED: "a check or a request failed",
        USAGE: "wrong usage",
        NOT_USABLE: "a file, package, checkpoint or setting cannot be used",
        UNAVAILABLE: "no server answers, or it has no room or time now",
        130: "Ctrl-C",
        143: "SIGTERM",
    }
)

# By name, for importing the client's errors takes long; both trees mean the same by a name.
# A class that is not here has the code of the nearest of its bases that is.
_CODES: Mapping[str, int] = MappingProxyType(
    {
        "TokenweirError": FAILED,
        "ConfigError": NOT_USABLE,
        "PackageError": NOT_USABLE,
        "CheckpointError": NOT_USABLE,
        "CertificateError": FAILED,
        "Overloaded": UNAVAILABLE,
        "DeadlineExpired": UNAVAILABLE,
        "Unavailable": UNAVAILABLE,
        "TokenweirClientError": FAILED,
        "ResourceExhausted": UNAVAILABLE,
        "DeadlineExceeded": UNAVAILABLE,
        "LoadTestError": NOT_USABLE,
        "NoServerError": UNAVAILABLE,
        "ModuleNotFoundError": NOT_USABLE,
        "OSError": NOT_USABLE,
    }
)


class CommandError(Exception):
    """Ends a command with one line and one of the codes."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def code_of(error: BaseException) -> int | None:
    """Return the exit code for an error that is raised on purpose; None for any other."""
    if isinstance(error, CommandError):
        return error.exit_code
    names = (base.__name__ for base in type(error).__mro__)
    return next((_CODES[name] for name in names if name in _CODES), None)


def explanation() -> str:
    """Return the codes in one line, for the help."""
    return ", ".join(f"{code} {meaning}" for code, meaning in MEANINGS.items())
