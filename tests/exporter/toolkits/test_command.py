"""`tokenweir import` takes what a toolkit saved, and says what is for whom."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.cli.app import run
from tests.exporter.toolkits.sources import save_fairseq, save_opennmt


def test_the_command_imports_a_file_and_a_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save_opennmt(tmp_path / "model_step_3.pt")
    save_fairseq(tmp_path / "fairseq")

    of_file = run(["import", str(source.path), "--out", str(tmp_path / "a"), "--max-len", "9"])
    of_directory = run(["import", str(tmp_path / "fairseq"), "--out", str(tmp_path / "b")])

    assert (of_file, of_directory) == (0, 0)
    printed = capsys.readouterr().out
    assert "OpenNMT-py transformer, " in printed
    assert "transformer_iwslt_de_en, " in printed
    assert printed.count("original       not compared with its original") == 2
    assert "note: nothing beside it cuts words: texts are cut at spaces" in printed


@pytest.mark.parametrize(
    ("source", "option", "said"),
    [
        ("fairseq", ["--source-lang", "de"], "--target-lang are for models of Hugging Face"),
        ("gpt2", ["--bpe-codes", "codes"], "--bpe-codes is for checkpoints of OpenNMT-py"),
    ],
)
def test_options_of_others_are_refused(
    source: str,
    option: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    save_fairseq(tmp_path / "fairseq")
    (tmp_path / "codes").touch()
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text("{}")

    assert run(["import", source, "--out", "checkpoint", *option]) != 0

    assert said in " ".join(capsys.readouterr().err.split())
