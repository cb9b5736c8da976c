"""Makes python/tokenweir/_sync_calls.py, the calls for threads, of those for asyncio."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent / "python" / "tokenweir"
MADE = PACKAGE / "_sync_calls.py"
_WORDS = (
    (
        "The calls of a server that both clients have, for asyncio; _sync_calls.py is made of it.",
        "The calls of a server, for threads; made by proto/sync_calls.py of _calls.py.",
    ),
    ("import grpc.aio", "import grpc"),
    ("grpc.aio.", "grpc."),
    ("async def", "def"),
    ("await ", ""),
    ("Async", ""),
)


def made() -> str:
    """Return the text of the module."""
    text = (PACKAGE / "_calls.py").read_text()
    for word, instead in _WORDS:
        text = text.replace(word, instead)
    for command in (["check", "--select", "I", "--fix", "--quiet"], ["format"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--stdin-filename", MADE, "-"]
        done = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True)
        text = done.stdout
    return text


if __name__ == "__main__":
    MADE.write_text(made())
