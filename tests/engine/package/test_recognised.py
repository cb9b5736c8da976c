"""A path or name given as a model is recognised, with the commands that go on with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenweir

from engine.errors import PackageError
from engine.package.recognised import Stage, recognise
from server.cli.app import run

FILES = {  # by directory
    "package": {"manifest.json": "{}", "config.json": '{"model": {}}', "decoder.onnx": ""},
    "checkpoint": {"config.json": '{"task": "x", "model": {}}', "model.safetensors": ""},
    "llama": {"config.json": '{"model_type": "llama"}', "model.safetensors": ""},
    "fairseq": {"checkpoint_best.pt": "", "dict.de.txt": ""},
    "cut": {"config.json": '{"model": {}}', "decoder.onnx": ""},
    "damaged": {"config.json": "{"},
    "gguf": {"llama-q4.gguf": "GGUF", "README.md": ""},
    "gguf-with-config": {"config.json": '{"model_type": "llama"}', "llama-q4.gguf": "GGUF"},
    "optimum": {"config.json": '{"model_type": "bert"}', "model.onnx": ""},
    "empty": {},
    "lora": {"adapter_config.json": "{}", "adapter_model.safetensors": ""},
    "sentences": {"modules.json": "[]", "0_Transformer/config.json": '{"model_type": "bert"}'},
    "parent": {"model/config.json": '{"model_type": "llama"}', "notes.txt": ""},
    "several": {"a/manifest.json": "{}", "b/config.json": '{"model": {}}', ".c/config.json": "{}"},
    "models--me--it": {"snapshots/abc/config.json": '{"model_type": "llama"}', "refs/main": "abc"},
    "other": {"data.csv": "", "notes.txt": ""},
    "files": {
        "a.gguf": "GGUF",
        "b": "GGUF",
        "a.safetensors": "x",
        "a.onnx": "x",
        "a.zip": "PK",
        "a.ckpt": "PK",
        "saved": "PK",
        "a.py": "import torch",
    },
}
TO_PACKAGE = "`tokenweir export checkpoints/{0} --out packages/{0}`"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for directory, files in FILES.items():
        (tmp_path / directory).mkdir()
        for name, content in files.items():
            path = tmp_path / directory / name
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_text(content)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("given", "wanted", "said"),
    [
        ("package", "package", None),
        ("checkpoint", "checkpoint", None),
        ("llama", "original", None),
        ("fairseq", "original", None),
        ("files/a.ckpt", "original", None),
        ("files/saved", "original", None),
        (
            "checkpoint",
            "package",
            "checkpoint is a checkpoint, no package yet: "
            "`tokenweir export checkpoint --out packages/checkpoint`",
        ),
        (
            "llama",
            "package",
            "llama is a model of Hugging Face, no package yet: "
            f"`tokenweir import llama --out checkpoints/llama`, {TO_PACKAGE.format('llama')}",
        ),
        (
            "llama/",
            "checkpoint",
            "llama is a model of Hugging Face, no checkpoint yet: "
            "`tokenweir import llama --out checkpoints/llama`",
        ),
        (
            "files/a.ckpt",
            "package",
            "files/a.ckpt is a checkpoint of another library, no package yet: "
            f"`tokenweir import files/a.ckpt --out checkpoints/a`, {TO_PACKAGE.format('a')}",
        ),
        (
            "checkpoint",
            "original",
            "checkpoint is a checkpoint, no model of another library; what is next for it: "
            "`tokenweir export checkpoint --out packages/checkpoint`",
        ),
        (
            "package",
            "checkpoint",
            "package is a package, no checkpoint; what is next for it: `tokenweir serve package`",
        ),
        (
            "me/it",
            "original",
            "there is no me/it here; a model of the Hub is fetched first: "
            "`hf download me/it --local-dir downloads/it`",
        ),
        (
            "https://huggingface.co/me/it",
            "package",
            "there is no https://huggingface.co/me/it here; a model of the Hub is fetched first: "
            "`hf download me/it --local-dir downloads/it`, "
            f"`tokenweir import downloads/it --out checkpoints/it`, {TO_PACKAGE.format('it')}",
        ),
        (
            "https://huggingface.co/me/it/tree/main",
            "original",
            "a model of the Hub is fetched first: `hf download me/it --local-dir downloads/it`",
        ),
        (
            "gpt2",
            "original",
            "there is no gpt2 here; a model of the Hub is fetched first: "
            "`hf download gpt2 --local-dir downloads/gpt2`",
        ),
        ("./gpt2", "original", "there is no ./gpt2"),
        ("b.gguf", "original", "there is no b.gguf"),
        ("parent/mdel", "original", "there is no parent/mdel; the nearest is parent/model"),
        ("nowhere/at/all", "original", "there is no nowhere/at/all"),
        ("llma", "original", "there is no llma; the nearest is llama"),
        ("parent", "original", "parent has no model itself, it is in `model/`: give parent/model"),
        ("several", "package", "several has models in a, b; give one of them"),
        ("empty", "original", "empty is empty; give the directory of a model"),
        (
            "gguf",
            "original",
            "gguf is of GGUF, whose weights are rounded for llama.cpp, and is not",
        ),
        ("gguf-with-config", "package", "gguf-with-config is of GGUF, whose weights are rounded"),
        ("files/a.gguf", "package", "files/a.gguf is of GGUF, whose weights are rounded for"),
        ("files/b", "original", "files/b is of GGUF, whose weights are rounded for llama.cpp"),
        ("files/a.safetensors", "original", "a.safetensors is a file of a model; give its dir"),
        ("llama/config.json", "package", "llama/config.json is a file of a model; give its direc"),
        ("other/notes.txt", "package", "other/notes.txt is a file, and no model; give the direc"),
        ("files/a.onnx", "package", "files/a.onnx is of ONNX, without the manifest.json of a"),
        ("files/a.zip", "original", "files/a.zip is an archive; unpack it, and give the direc"),
        ("files/a.py", "original", "files/a.py is a file, and no model; give the directory of"),
        ("optimum", "original", "optimum is of ONNX, without the manifest.json of a package"),
        ("cut", "package", "cut has no manifest.json; it is a package that was not copied whole"),
        ("damaged", "checkpoint", "damaged/config.json cannot be read: Expecting property name"),
        ("lora", "original", "lora is an adapter and no model; give its model with the adapter"),
        ("sentences", "original", "sentences has its model in a folder, as sentence-transformers"),
        ("models--me--it", "original", "is of the cache of the Hub; give a copy in it, models--me"),
        ("other", "original", "and no .pt, but data.csv, notes.txt; a model of Hugging Face is"),
    ],
)
@pytest.mark.usefixtures("here")
def test_what_is_given_is_told(given: str, wanted: Stage, said: str | None) -> None:
    problem = recognise(given).problem(wanted)

    assert (problem is None) == (said is None)
    assert (said or "") in (problem or "")
    assert ("hf download" in (said or "")) == ("hf download" in (problem or ""))


@pytest.mark.parametrize(
    "command",
    [
        ["import", "{}", "--out", "x"],
        ["export", "{}", "--out", "x"],
        ["serve", "{}"],
        ["bench", "{}"],
        ["diff", "package", "{}"],
        ["verify", "package", "{}"],
        ["sign", "{}", "--key", "package/manifest.json"],
        ["average", "{}", "checkpoint", "--out", "x"],
        ["explain", "{}", "text"],
        ["train", "text", "--file", "package/manifest.json", "--init", "{}", "--out", "x"],
    ],
)
@pytest.mark.parametrize(
    ("given", "said", "code"),
    [
        ("parent", "it is in `model/`", 3),
        ("gguf", "is of GGUF", 3),
        ("empty", "empty is empty", 3),
    ],
)
@pytest.mark.usefixtures("here")
def test_every_command_says_it_in_a_line(
    command: list[str], given: str, said: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run([part.format(given) for part in command])

    err = capsys.readouterr().err
    assert said in err and err.splitlines()[-1].lower().startswith("error: ")
    assert found == code


@pytest.mark.usefixtures("here")
def test_load_says_it_too() -> None:
    with pytest.raises(PackageError, match="gguf is of GGUF, whose weights are rounded"):
        tokenweir.load("gguf")


def test_a_model_is_called_as_its_link_and_here_as_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "step-900").mkdir()
    (tmp_path / "dates").symlink_to("step-900")
    monkeypatch.chdir(tmp_path / "step-900")

    assert recognise(tmp_path / "dates").name == "dates"
    assert recognise(".").name == "step-900"
