"""Real pairs, from the message catalogues of the programs on a machine, and a model of them."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from exporter.examples.message_pairs import FOLDER, read_pairs, write_pairs
from exporter.tasks import build_own_task
from exporter.tasks.own.data import OwnData
from exporter.training.trainer import train

_LANGUAGE = "vi"
_LEAST = 15_000  # pairs; fewer are of a machine with few programs


def write_catalogue(path: Path, messages: dict[str, str]) -> None:
    """Write a catalogue as msgfmt does: lengths and places of the messages, then of the texts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = {"": "Content-Type: text/plain; charset=UTF-8\n", **messages}
    rows = [text.encode() for text in (*sorted(texts), *(texts[key] for key in sorted(texts)))]
    place, table = 28 + 8 * len(rows), b""
    for row in rows:
        table += struct.pack("<II", len(row), place)
        place += len(row) + 1
    header = struct.pack("<7I", 0x950412DE, 0, len(texts), 28, 28 + 8 * len(texts), 0, place)
    path.write_bytes(header + table + b"".join(row + b"\0" for row in rows))


def test_pairs_are_the_sentences_of_all_catalogues_a_line_each(tmp_path: Path) -> None:
    folder = tmp_path / "xx" / "LC_MESSAGES"
    messages = {
        "no such\nfile": "keine  Datei",
        "menu\x04Save as": "Sichern als",
        "%d line\x00%d lines": "%d Zeile\x00%d Zeilen",
        "Open": "Auf",
        "the same": "the same",
        "too long " * 20: "zu lang",
    }
    write_catalogue(folder / "a.mo", messages)
    write_catalogue(folder / "b.mo", {"no such file": "die Datei fehlt", "not found": "fehlt"})
    write_catalogue(folder / "iso_639.mo", {"Old Norse": "Altnordisch"})
    (folder / "c.mo").write_bytes(b"no catalogue")

    assert read_pairs("xx", tmp_path) == {
        "no such file": "keine Datei",
        "Save as": "Sichern als",
        "%d line": "%d Zeile",
        "not found": "fehlt",
    }


def test_pairs_are_written_a_line_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_catalogue(tmp_path / "xx" / "LC_MESSAGES" / "a.mo", {"no such file": "fehlt"})
    monkeypatch.setattr("exporter.examples.message_pairs.FOLDER", tmp_path)

    assert write_pairs("xx", tmp_path / "xx.tsv") == f"1 pairs in {tmp_path / 'xx.tsv'}"
    assert (tmp_path / "xx.tsv").read_text() == "no such file\tfehlt\n"


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_half_of_the_steps_bring_a_model_above_copying_and_a_dictionary(tmp_path: Path) -> None:
    if (found := len(read_pairs(_LANGUAGE))) < _LEAST:
        pytest.skip(f"{FOLDER} has {found:,} messages in {_LANGUAGE}, wanted {_LEAST:,}")
    write_pairs(_LANGUAGE, tmp_path / "pairs.tsv")
    data = OwnData(tmp_path / "pairs.tsv")

    report = train(
        lambda seed: build_own_task("translation", data, seed=seed),
        tmp_path / "run",
        steps=data.shape.steps // 2,
    )

    assert report.target_reached, report.summary
