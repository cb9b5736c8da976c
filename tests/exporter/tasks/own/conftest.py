"""A person's data, made up: small, and learnable in seconds."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from exporter.tasks.own import size
from exporter.tasks.own.size import Size

WORDS = {"one": "eins", "two": "zwei", "six": "sechs", "ten": "zehn", "cat": "Katze", "dog": "Hund"}


@pytest.fixture(autouse=True)
def small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a tiny model smaller still: what is tested is the way from a file to a checkpoint."""
    tiny = Size(32, 2, 64, 1, 1, 400, 60, 512, 1e-2, 1e-2)
    monkeypatch.setattr(size, "SIZES", {"tiny": tiny, "base": tiny})
    monkeypatch.setattr("exporter.tasks.own.data.SIZES", size.SIZES)


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """Numbers and animals, word for word, in capitals behind an animal."""
    rng = random.Random(0)
    rows = []
    for _ in range(600):
        words = rng.choices(list(WORDS), k=rng.randint(2, 4))
        behind = [False, *(word in ("cat", "dog") for word in words)]
        target = [
            WORDS[word].upper() if loud else WORDS[word]
            for word, loud in zip(words, behind, strict=False)
        ]
        rows.append(f"{' '.join(words)}\t{' '.join(target)}")
    return _write(tmp_path / "pairs.tsv", ["source\ttarget", *rows])


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Texts whose label is that of the animal in them."""
    rng = random.Random(0)
    rows = []
    for _ in range(600):
        animal = rng.choice(("cat", "dog"))
        words = [*rng.choices(("one", "two", "six", "ten"), k=rng.randint(1, 6)), animal]
        rng.shuffle(words)
        rows.append(f"{' '.join(words)}\t{animal.upper()}")
    return _write(tmp_path / "texts.tsv", rows)


@pytest.fixture
def sentences(tmp_path: Path) -> Path:
    """Words whose tag says what stands before them: no word has a tag of its own."""
    rng = random.Random(0)
    lines = ["-DOCSTART- -X- O", "", "# numbers and animals"]
    for _ in range(400):
        before = "START"
        for word in rng.choices(list(WORDS), k=rng.randint(2, 5)):
            lines.append(f"{word} x {before}")
            before = word.upper()
        lines.append("")
    return _write(tmp_path / "sentences.conll", lines)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Bright and dark pictures, each kind in a folder."""
    rng = np.random.default_rng(0)
    for label, low in (("bright", 150), ("dark", 0)):
        folder = tmp_path / "pictures" / label
        folder.mkdir(parents=True)
        for i in range(120):
            pixels = rng.integers(low, low + 100, (40, 30, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{i}.png")
    return tmp_path / "pictures"


def _write(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
