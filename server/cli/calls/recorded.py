"""Requests with their answers in a file, to be asked again: a JSON object a line."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenweir import Generation

from engine.json_file import parse_object
from server.cli.calls.json_lines import plain
from server.cli.exit_codes import NOT_USABLE, CommandError

Note = Callable[[str, object, Mapping[str, Any], "Generation"], None]

_NOT_ASKED_AGAIN = frozenset({"timeout", "request_id", "tokens_per_message"})
_KEYS = {"model", "prompt", "options", "answer"}
_MAX_LINE = 64 << 20  # bytes


@dataclass(frozen=True)
class Recorded:
    """A request, and what came of it, as JSON has it."""

    place: str  # file and line
    model: str
    prompt: Any  # a text, token ids, or a conversation
    options: dict[str, Any]  # the client's
    answer: dict[str, Any]  # a Generation


@contextlib.contextmanager
def recording(path: Path | None) -> Iterator[Note]:
    """Write what is noted in the block; the file is there at its end, however that comes.

    None: nowhere. If nothing was noted, an older file stays. Raises CommandError if it cannot be
    written there.
    """
    if path is None:
        yield lambda *_: None
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")

    def end() -> None:
        if temporary.stat().st_size:
            temporary.replace(path)
        else:
            temporary.unlink()

    try:
        file = temporary.open("w", encoding="utf-8")
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}", NOT_USABLE) from error
    try:
        with file:

            def note(
                model: str, prompt: object, options: Mapping[str, Any], answer: Generation
            ) -> None:
                asked = {name: one for name, one in options.items() if name not in _NOT_ASKED_AGAIN}
                found = {"model": model, "prompt": prompt, "options": asked, "answer": answer}
                line = json.dumps(plain(found), ensure_ascii=False, separators=(",", ":"))
                file.write(f"{line}\n")

            yield note
    except OSError:  # a full disk, say: the last line may be cut off
        temporary.unlink(missing_ok=True)
        raise
    except BaseException:
        end()
        raise
    end()


def read_recorded(path: Path) -> Iterator[Recorded]:
    """Yield what a file has; CommandError names the line that is none of `recording`, or none."""
    if not path.stat().st_size:
        raise CommandError(
            f"{path} is empty; `tokenweir generate --record` writes requests", NOT_USABLE
        )
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE + 1), b""), start=1):
            place = f"{path}:{number}"
            try:
                yield _recorded(line, place)
            except ValueError as error:
                raise CommandError(
                    f"{place} is not what `tokenweir generate --record` writes: {error}",
                    NOT_USABLE,
                ) from error


def _recorded(line: bytes, place: str) -> Recorded:
    """Return what a line has; ValueError for what neither asks nor answers."""
    if len(line) > _MAX_LINE:
        raise ValueError(f"it has more than {_MAX_LINE:,} bytes")
    found = parse_object(line)
    if set(found) != _KEYS:
        raise ValueError(f"it has not the keys {', '.join(sorted(_KEYS))}")
    for key, kind in (("model", str), ("prompt", (str, list)), ("options", dict)):
        if not isinstance(found[key], kind):
            raise ValueError(f"its {key} is {found[key]!r:.64}")
    if not _is_answer(found["answer"]):
        raise ValueError("its answer has no sequences of tokens, or does not say its seed")
    if (bias := found["options"].get("logit_bias")) is not None:  # keys of JSON are texts
        if not isinstance(bias, dict):
            raise ValueError(f"its logit_bias is {bias!r:.64}")
        found["options"]["logit_bias"] = {int(token): one for token, one in bias.items()}
    return Recorded(place, **found)


def _is_answer(answer: object) -> bool:
    match answer:
        case {
            "sequences": list(sequences),
            "provenance": {"seed": int()},
            "prompt_logprobs": _,
            "source_pieces": _,
        }:
            ids = [one.get("token_ids") for one in sequences if isinstance(one, dict)]
            return len(ids) == len(sequences) and all(isinstance(one, list) for one in ids)
    return False
