"""Requests with their answers in a file, to be asked again: a JSON object a line."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.json_file import parse_object
from server.cli.exit_codes import NOT_USABLE, CommandError
from server.cli.json_lines import plain

if TYPE_CHECKING:
    from tokenweir import Generation

Note = Callable[[str, object, Mapping[str, Any], "Generation"], None]

_NOT_ASKED_AGAIN = frozenset({"timeout", "request_id", "tokens_per_message"})
_KEYS = {"model", "prompt", "options", "answer"}


@dataclass(frozen=True)
class Recorded:
    """A request, and what came of it, as JSON has it."""

    model: str
    prompt: Any  # a text, token ids, or a conversation
    options: dict[str, Any]  # of the client
    answer: dict[str, Any]  # a Generation


@contextlib.contextmanager
def recording(path: Path | None) -> Iterator[Note]:
    """Write what is noted in the block, all at its end, however that comes; None: nowhere."""
    lines: list[str] = []

    def note(model: str, prompt: object, options: Mapping[str, Any], answer: Generation) -> None:
        asked = {name: one for name, one in options.items() if name not in _NOT_ASKED_AGAIN}
        found = plain({"model": model, "prompt": prompt, "options": asked, "answer": answer})
        lines.append(json.dumps(found, ensure_ascii=False, separators=(",", ":")) + "\n")

    try:
        yield note
    finally:
        if path is not None:
            temporary = path.with_name(f".{path.name}.{os.getpid()}")
            temporary.write_text("".join(lines))
            temporary.replace(path)


def read_recorded(path: Path) -> Iterator[Recorded]:
    """Yield what a file has; CommandError names the line that is none of `recording`."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                found = parse_object(line)
                if set(found) != _KEYS:
                    raise ValueError(f"it has not the keys {', '.join(sorted(_KEYS))}")
            except ValueError as error:
                raise CommandError(
                    f"{path}:{number} is not what `tokenweir generate --record` writes: {error}",
                    NOT_USABLE,
                ) from error
            yield Recorded(**found)
