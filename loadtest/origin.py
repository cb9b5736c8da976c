"""The origin of a result: the code, the versions, the machine, the command, the time."""

from __future__ import annotations

import shlex
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_SECRETS, _HIDDEN = ("--token", "--admin-token"), "HIDDEN"


def code_commit() -> str:
    """Return the commit that this code is of, "+" behind it if files were changed since."""
    try:
        commit = _git("rev-parse", "HEAD")
        return commit + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown: the code is in no repository"


def typed_command() -> str:
    """Return the command of this process as a person would type it; without a token."""
    words: list[str] = []
    for word in sys.argv[1:]:
        name, is_assigned, _ = word.partition("=")
        if is_assigned and name in _SECRETS:
            word = f"{name}={_HIDDEN}"
        words.append(_HIDDEN if words and words[-1] in _SECRETS else word)
    return shlex.join(["tokenweir", *words])


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions_of(*distributions: str) -> dict[str, str]:
    """Return the versions of those that are installed: of one module there may be several."""
    found = {}
    for name in distributions:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _git(*arguments: str) -> str:
    directory = Path(__file__).parent
    # Without the repository's own file here it is another project's, around an installed copy.
    subprocess.run(
        ["git", "ls-files", "--error-unmatch", Path(__file__).name],
        cwd=directory,
        check=True,
        capture_output=True,
    )
    done = subprocess.run(
        ["git", *arguments], cwd=directory, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()
