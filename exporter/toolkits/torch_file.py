"""Reads what `torch.save` wrote, and runs nothing of it.

torch reads tensors and plain data (`weights_only`). Toolkits save objects of their own beside them:
options, vocabularies. Each becomes a `Record`, which has what the object had and can do nothing;
its class is not imported.
"""

from __future__ import annotations

import pickletools
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.wording import listed
from exporter.huggingface.weights.stored import DAMAGE, check_plain

# The packages of objects that are known to stand in such files.
_KNOWN = (
    "_codecs",
    "argparse",
    "collections",
    "datetime",
    "enum",
    "fairseq",
    "functools",
    "numpy",
    "omegaconf",
    "onmt",
    "pathlib",
    "torch",
    "torchtext",
    "typing",
)
_KNOWN_TYPES = (
    *("bool", "bytearray", "bytes", "complex", "dict", "float", "int", "list", "object", "set"),
    *("slice", "str", "tuple"),
)
_NUM_PICKLES = 4  # a file from before 2020 has its mark, version, machine, and then the object


class Record:
    """An object in a file: the arguments that it was made of, and its attributes."""

    arguments: tuple[object, ...]
    fields: dict[str, object]

    def __new__(cls, *arguments: object) -> Record:
        record = object.__new__(cls)
        record.arguments, record.fields = arguments, {}
        return record

    def __setstate__(self, state: object) -> None:
        """Keep attributes; the reader of pickles calls this instead of the object's own."""
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                self.fields.update(part)


def read_torch_file(path: Path) -> dict[str, Any]:
    """Return the dictionary that a file holds; tensors are on the disk until they are used.

    Raises CheckpointError for what is no such file, or damaged, or names what no toolkit saves.
    """
    try:
        is_archive = zipfile.is_zipfile(path)
        names = _known_names(path, is_archive=is_archive)
        # Records of all objects, but plain dictionaries of those with defaults.
        kinds: list[Any] = [
            ((lambda *_: {}) if name == "collections.defaultdict" else Record, name)
            for name in names
        ]
        with torch.serialization.safe_globals(kinds):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except CheckpointError:
        raise
    except DAMAGE as error:
        raise CheckpointError(
            f"{path} is not a file of torch.save, or damaged: {error}; copy or save it again"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no checkpoint, but a {type(content).__name__}")
    return content


def tensors_of(content: Mapping[str, Any], key: str, path: Path) -> dict[str, Tensor]:
    """Return the tensors under a key; CheckpointError names what is none."""
    found = content[key]
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: {key} is not a dictionary of tensors; save the model again")
    others = [
        str(name)
        for name, one in found.items()
        if not (isinstance(name, str) and isinstance(one, Tensor))
    ]
    if others:
        raise CheckpointError(
            f"{path}: {key} holds what is not a tensor: {listed(others)}; save the model again"
        )
    try:
        check_plain(found, path)
    except ValueError as error:
        raise CheckpointError(f"{path}: {key}: {error}; save the model again") from error
    return found


def plain(value: object) -> object:
    """Return options as plain data: of a Namespace and of OmegaConf, dictionaries and lists.

    A value that refers to another one (`${model.x}`) or that nobody set (`???`) is None.
    """
    if isinstance(value, Record):
        for name in ("_content", "_val"):  # OmegaConf: a container's, a node's
            if name in value.fields:
                return plain(value.fields[name])
        if value.fields or not value.arguments:
            return plain(value.fields)
        return plain(value.arguments[0])  # the value of an enumeration
    if isinstance(value, dict):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, str) and value.startswith(("${", "???")) else value


def _known_names(path: Path, *, is_archive: bool) -> list[str]:
    """Return the classes and functions that a file names, reading no object.

    Raises CheckpointError for those that no toolkit saves.
    """
    names: set[str] = set()
    if is_archive:
        names.update(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    else:
        with path.open("rb") as file:
            for _ in range(_NUM_PICKLES):
                for opcode, argument, _ in pickletools.genops(file):
                    if opcode.name == "GLOBAL":
                        names.add(str(argument).replace(" ", "."))
    builtin = {
        f"{module}.{name}" for name in _KNOWN_TYPES for module in ("builtins", "__builtin__")
    }
    foreign = [name for name in sorted(names - builtin) if name.partition(".")[0] not in _KNOWN]
    if foreign:
        raise CheckpointError(
            f"{path} names {listed(foreign)}, which no checkpoint of OpenNMT-py or fairseq needs, "
            "so it is not read; where you trust it, load it and save the parts that are needed: "
            "`torch.save({key: content[key] for key in (...)}, PATH)` with model, generator, opt "
            "and vocab of OpenNMT-py, model and args or cfg of fairseq; of a model of Hugging Face "
            "its weights alone, `torch.save(content['state_dict'], 'pytorch_model.bin')`"
        )
    return sorted(names)
