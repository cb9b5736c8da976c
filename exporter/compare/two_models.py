"""Compares two models of any kind, each a package or a checkpoint."""

from __future__ import annotations

from pathlib import Path

from engine.errors import ConfigError
from exporter.checkpoint import TARGET_TOKENIZER_NAME, TOKENIZER_NAME
from exporter.compare import answering, writing
from exporter.compare.difference import Difference
from exporter.compare.sides import generates, open_side
from exporter.progress import Progress, no_progress


def compare(
    one: Path,
    other: Path,
    text: Path | None = None,
    images: Path | None = None,
    new: int = 32,
    progress: Progress = no_progress,
) -> Difference:
    """Compare two packages, or a package and a checkpoint, by what they write or answer.

    Models that generate write `new` tokens a line; `text` has a prompt or a source in every line,
    and behind a tab a reference. For others `text` and `images` are as `read_texts` and
    `read_images` take them. Without them random tokens or noise do. Raises ConfigError for models
    that differ in kind, vocabulary, contract or tokenizer, and for lines and pictures that cannot
    be used.
    """
    is_writing = generates(one)
    if generates(other) != is_writing:
        problem = (
            "does not generate; give two that do"
            if is_writing
            else "generates; give two that do, or none"
        )
        raise ConfigError(f"{other} holds a model that {problem}")
    sides = open_side(one), open_side(other)
    contracts = [side.contract for side in sides]
    generation = [contract.generation for contract in contracts if contract.generation]
    differ = writing.differing(*generation) if generation else answering.differing(*contracts)
    files = [
        [_content(path / name) for name in (TOKENIZER_NAME, TARGET_TOKENIZER_NAME)]
        for path in (one, other)
    ]
    problems = [*differ, *(["their tokenizers"] if files[0] != files[1] else [])]
    if problems:
        what = "tokens" if is_writing else "answers"
        raise ConfigError(
            f"{one} and {other} differ in {', '.join(problems)}; their {what} are not the same, "
            "give two forms of one model"
        )
    if is_writing:
        return writing.Writing(sides, text, new).difference(progress)
    return answering.Answering(sides, text, images).difference(progress)


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""
