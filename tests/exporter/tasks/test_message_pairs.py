"""Real pairs, from the message catalogues of the programs on a machine."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from exporter.examples.message_pairs import read_pairs, write_pairs


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
