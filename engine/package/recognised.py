"""Tells what a person gave as a model: a package, what becomes one and how, or what does not."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from engine.json_file import parse_object, read_bounded
from engine.wording import listed

# The stages of a model on its way to be served, in order.
Stage = Literal["name", "original", "checkpoint", "package"]

_NEXT: Mapping[Stage, str] = MappingProxyType(  # the command that goes on with each
    {
        "name": "hf download {given} --local-dir downloads/{name}",
        "original": "tokenweir import {given} --out checkpoints/{name}",
        "checkpoint": "tokenweir export {given} --out packages/{name}",
        "package": "tokenweir serve {given}",
    }
)
_MADE: Mapping[Stage, str] = MappingProxyType(  # the path of the result
    {"name": "downloads/{name}", "original": "checkpoints/{name}", "checkpoint": "packages/{name}"}
)
_ORIGINAL = "model of another library"
_HUB = re.compile(
    r"((?:https?://)?(?:huggingface\.co|hf\.co)/|hf://)?"
    r"((?:[\w.-]+/[\w.-]+|\w[\w.-]*)(?:@[\w./-]+)?)(?:/|/(?:tree|blob|resolve)/.*)?"
)
_OF_TRAININGS = (".pt", ".pth", ".ckpt")
_PARTS = (".safetensors", ".bin", ".spm", ".model", ".h5", ".msgpack")
_PARTS_BESIDE = (".json", ".txt")  # parts where a model is, else anything
_ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".zst", ".7z")
_MAX_JSON_BYTES = 2**24
_MAX_LOOKED_AT = 10_000  # entries of a folder
_MOST_NAMED = 8


@dataclass(frozen=True)
class Recognised:
    """A path or name that was given, and its stage."""

    given: str
    stage: Stage | None  # None: nothing that becomes a package
    said: str  # its description, or why it is nothing

    def problem(self, *wanted: Stage) -> str | None:
        """Return what it is, with the commands that make what is wanted of it; None: it is that."""
        if self.stage in wanted:
            return None
        if self.stage is None:
            return self.said
        stages = list(_NEXT)
        first, last = stages.index(self.stage), min(map(stages.index, wanted))
        if first > last:
            next_one = _NEXT[self.stage].format(given=self.given, name=self.name)
            other = _ORIGINAL if wanted == ("original",) else wanted[0]
            return f"{self.said}, no {other}; what is next for it: `{next_one}`"
        given, commands = self.given, []
        if self.stage == "name":
            given = given.replace("@", " --revision ")
        for stage in stages[first:last]:
            commands.append(f"`{_NEXT[stage].format(given=given, name=self.name)}`")
            given = _MADE[stage].format(name=self.name)
        no = "" if self.stage == "name" else f", no {' or '.join(wanted)} yet"
        return f"{self.said}{no}: {', '.join(commands)}"

    @property
    def name(self) -> str:
        """The name of a model that is made of it."""
        path = Path(os.path.abspath(self.given))  # a link keeps its own name
        if self.stage == "name":
            name = self.given.partition("@")[0].rpartition("/")[2]
        else:
            name = path.stem if path.is_file() else path.name
        return re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip("._-")[:64] or "model"


def recognise(path: str | os.PathLike[str]) -> Recognised:
    """Look at a path, or at what is none, and read no weight."""
    given = os.fspath(path)
    found = Path(given)
    if not os.path.lexists(found):
        return _missing(given)
    try:
        if found.is_file():
            return _file(found)
        if not (names := _names(found)):
            return Recognised(str(found), None, f"{found} is empty; give the directory of a model")
        return _model(found, names) or Recognised(str(found), None, _why_none(found, names))
    except OSError as error:
        return Recognised(given, None, f"{given} cannot be read: {error.strerror}")


def _missing(given: str) -> Recognised:
    parent, found = Path(given).parent, _HUB.fullmatch(given)
    others = [entry.name for entry in islice(parent.iterdir(), 999)] if parent.is_dir() else []
    near = "".join(get_close_matches(Path(given).name, others, n=1))
    known = (*_OF_TRAININGS, *_PARTS, *_PARTS_BESIDE, *_ARCHIVES, ".gguf", ".onnx")
    is_file = Path(given).suffix in known
    is_short = "/" not in given and not near and not is_file
    if found is not None and (found[1] or is_short or not parent.is_dir()):
        said = f"there is no {given} here; a model of the Hub is fetched first"
        return Recognised(found[2], "name", said)
    if given.startswith("hf://"):
        return Recognised(given, None, f"{given} is no name of the Hub, as hf://ORG/NAME is")
    hint = f"; the nearest is {parent / near}" if near else ""
    return Recognised(given, None, f"there is no {given}{hint}")


def _file(path: Path) -> Recognised:
    with path.open("rb") as file:
        begin = file.read(4)
    if begin == b"GGUF" or path.suffix == ".gguf":
        said = _foreign(path, ".gguf")
    elif path.suffix == ".onnx":
        said = _foreign(path, ".onnx")
    elif path.suffix in _ARCHIVES:
        said = f"{path} is an archive; unpack it, and give the directory of the model"
    elif path.suffix in _PARTS or (path.suffix in _PARTS_BESIDE and _is_model(path.parent)):
        said = f"{path} is a file of a model; give its directory, {path.parent}"
    elif path.suffix in _OF_TRAININGS or begin.startswith((b"PK", b"\x80")):  # by torch.save
        return Recognised(str(path), "original", f"{path} is a checkpoint of another library")
    else:
        said = f"{path} is a file, and no model; give the directory of one"
    return Recognised(str(path), None, said)


def _names(path: Path) -> list[str]:
    return sorted(entry.name for entry in islice(path.iterdir(), _MAX_LOOKED_AT))


def _model(path: Path, names: list[str]) -> Recognised | None:
    """Return what a directory with these entries is; None if no model lies in it itself."""
    if "manifest.json" in names:
        return Recognised(str(path), "package", f"{path} is a package")
    if "config.json" in names:
        return _configured(path, names)
    if any(name.endswith(".pt") for name in names):
        return Recognised(str(path), "original", f"{path} is a {_ORIGINAL}")
    return None


def _configured(path: Path, names: list[str]) -> Recognised:
    try:
        content = parse_object(read_bounded(path / "config.json", _MAX_JSON_BYTES))
    except (ValueError, OSError) as error:
        said = f"{path / 'config.json'} cannot be read: {error}; copy or save the model again"
        return Recognised(str(path), None, said)
    kinds = {Path(name).suffix for name in names}
    if "model" not in content or "model_type" in content:
        foreign = next((kind for kind in (".gguf", ".onnx") if kind in kinds), None)
        if foreign and not kinds & {".safetensors", ".bin"}:
            return Recognised(str(path), None, _foreign(path, foreign))
        return Recognised(str(path), "original", f"{path} is a model of Hugging Face")
    if ".onnx" not in kinds:
        return Recognised(str(path), "checkpoint", f"{path} is a checkpoint")
    said = f"{path} has no manifest.json; it is a package that was not copied whole"
    return Recognised(str(path), None, f"{said}: copy it again, or export the model again")


def _why_none(path: Path, names: list[str]) -> str:
    if "adapter_config.json" in names:
        return (
            f"{path} is an adapter and no model; give its model with the adapter in it: "
            "`AutoPeftModel.from_pretrained(DIR).merge_and_unload().save_pretrained(OTHER)`"
        )
    if "modules.json" in names:
        return (
            f"{path} has its model in a folder, as sentence-transformers saved it once; copy the "
            "files of the first folder that modules.json names beside that file"
        )
    if "snapshots" in names and (copies := sorted(path.glob("snapshots/*/config.json"))):
        return f"{path} is of the cache of the Hub; give a copy in it, {copies[0].parent}"
    inside = [path / name for name in names if _is_model(path / name)]
    if len(inside) == 1:
        return f"{path} has no model itself, it is in `{inside[0].name}/`: give {inside[0]}"
    if inside:
        return f"{path} has models in {listed([one.name for one in inside])}; give one of them"
    for kind in (".gguf", ".onnx"):
        if any(name.endswith(kind) for name in names):
            return _foreign(path, kind)
    return (
        f"{path} has no manifest.json, as packages have, no config.json, as checkpoints have, and "
        f"no .pt, but {listed(names[:_MOST_NAMED])}; a model of Hugging Face is what "
        "`model.save_pretrained(DIR)` and `tokenizer.save_pretrained(DIR)` write"
    )


def _is_model(path: Path) -> bool:
    try:
        if path.name.startswith(".") or not path.is_dir():
            return False
        found = _model(path, _names(path))
        return found is not None and found.stage is not None
    except OSError:  # it may not be looked into
        return False


def _foreign(path: Path, kind: str) -> str:
    what = "is of GGUF, whose weights are rounded for llama.cpp"
    if kind == ".onnx":
        what = "is of ONNX, without the manifest.json of a package"
    return (
        f"{path} {what}, and is not read; give the directory of the model that it was made of, "
        "with config.json, tokenizer and weights"
    )
