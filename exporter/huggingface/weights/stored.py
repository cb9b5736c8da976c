"""Reads the weights of an original one tensor at a time: safetensors, or PyTorch's own files.

The latter are pickles. torch reads them with `weights_only`, which makes nothing but tensors.
"""

from __future__ import annotations

import pickle
import re
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import CheckpointError
from engine.json_file import parse_object, read_bounded
from engine.wording import listed, shortened

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
TORCH_NAME = "pytorch_model.bin"
TORCH_INDEX_NAME = "pytorch_model.bin.index.json"
_LAYOUTS = ((WEIGHTS_NAME, INDEX_NAME), (TORCH_NAME, TORCH_INDEX_NAME))
_OTHERS = (".ckpt", ".pt", ".pth", ".bin")  # endings of trainers' files
_MAX_INDEX_BYTES = 2**26
_POINTER = b"version https://git-lfs"  # begins the file that stands for another
_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
FLOATS = tuple(_FLOATS.values())  # types of weights that need nothing else to be understood

# The exceptions that libraries raise for a damaged file.
DAMAGE: tuple[type[Exception], ...] = (
    *(SafetensorError, OSError, RuntimeError, EOFError, ValueError, struct.error),
    *(pickle.UnpicklingError, AssertionError, AttributeError, LookupError, TypeError),
)


class StoredTensor(NamedTuple):
    """A tensor in an open file, of which nothing is read yet."""

    shape: tuple[int, ...]
    dtype: str  # its numbers, as torch names them
    read: Callable[[], Tensor]


StoredWeights = Mapping[str, StoredTensor]  # by their names


def stored_weights(tensors: Mapping[str, Tensor]) -> dict[str, StoredTensor]:
    """Return tensors that torch has read, or mapped: they are on the disk until they are used."""
    return {
        name: StoredTensor(
            tuple(one.shape),
            str(one.dtype).removeprefix("torch."),
            partial(tensors.__getitem__, name),
        )
        for name, one in tensors.items()
    }


@contextmanager
def open_weights(*directories: Path) -> Iterator[StoredWeights]:
    """Open all weights of an original, which may have several directories.

    Raises CheckpointError if there are none, naming all files that are damaged, and all tensors
    that the index names and a file lacks.
    """
    with ExitStack() as stack:
        weights: dict[str, StoredTensor] = {}
        problems: list[str] = []
        found = [item for one in directories for item in _weight_files(one).items()]
        for path, expected in found:
            try:
                there = _open(path, stack)
            except DAMAGE as error:
                is_safe = path.suffix == ".safetensors"
                kind = "safetensors file" if is_safe else "file of tensors alone by torch.save"
                said = str(error).rpartition("WeightsUnpickler error: ")[2]
                # torch advises to load a pickle of more than tensors all the same.
                reason = re.split(r"\n|\. Please |  \(Could", said)[0]
                problems.append(f"{path} is not a {kind}, or damaged{reason and f': {reason}'}")
                continue
            lacking = sorted(set(expected).difference(there))
            if lacking:
                problems.append(f"{path} lacks {listed(lacking)}, which the index names")
            weights |= {_todays(name): one for name, one in there.items()}
        if problems:
            pointers = "".join(map(about_pointers, directories))
            raise CheckpointError(
                f"{listed(problems, '; ')}; copy or save the model again{pointers}"
            )
        yield weights


def about_pointers(directory: Path) -> str:
    """Return what to say behind an error if files of a directory only name what they stand for.

    A repository was cloned then without those that Git LFS keeps apart.
    """
    names = []
    for path in filter(Path.is_file, directory.iterdir()):
        with path.open("rb") as file:
            if file.read(len(_POINTER)) == _POINTER:
                names.append(path.name)
    if not names:
        return ""
    named = listed(sorted(names))
    return f"; of {named} there are only pointers of Git LFS: `git lfs pull` brings them"


def _open(path: Path, stack: ExitStack) -> dict[str, StoredTensor]:
    if path.suffix == ".safetensors":
        file: Any = stack.enter_context(safe_open(path, framework="pt"))
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {
            name: StoredTensor(
                tuple(part.get_shape()),
                _FLOATS.get(part.get_dtype(), part.get_dtype()),
                partial(file.get_tensor, name),
            )
            for name, part in parts.items()
        }
    # Before 2020 torch wrote no archives, and what is none cannot be mapped.
    is_archive = zipfile.is_zipfile(path)
    with warnings.catch_warnings(action="ignore"):  # a pickle of another version
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    if not isinstance(content, dict) or not all(map(torch.is_tensor, content.values())):
        refuse_nested(content, path)
        raise ValueError("it holds more than tensors by name")
    check_plain(content, path)
    return stored_weights(content)


def check_plain(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raise ValueError for a tensor whose numbers are not all in the file that torch read."""
    for name, one in tensors.items():
        is_plain = one.layout == torch.strided and not one.is_meta
        if not is_plain or one.nbytes > path.stat().st_size:
            raise ValueError(f"{shortened(name)} is sparse, or larger than the file")


def refuse_nested(content: object, path: Path) -> None:
    """Raise CheckpointError where a file has the weights under a key, as trainers write them."""
    for key, value in content.items() if isinstance(content, dict) else ():
        if isinstance(value, dict) and value and all(map(torch.is_tensor, value.values())):
            name = shortened(key)
            weights = f"torch.load({path.name!r}, weights_only=True)[{name!r}]"
            raise CheckpointError(
                f"{path} has its weights under {name}; write them alone, "
                f"`torch.save({weights}, {TORCH_NAME!r})`, beside config.json and the tokenizer"
            )


def _todays(name: str) -> str:
    """Return the name that transformers gives a weight of a norm that came from TensorFlow."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
        "LayerNorm.beta", "LayerNorm.bias"
    )


class _Index(BaseModel):
    weight_map: dict[str, str]  # name of a tensor: name of the file that holds it


def _weight_files(directory: Path) -> dict[Path, list[str]]:
    """Return the files, with the tensors that an index promises in each."""
    for single, index in _LAYOUTS:
        if (directory / single).is_file():
            return {directory / single: []}
        if (directory / index).is_file():
            return _indexed(directory / index)
    others = sorted(path.name for end in _OTHERS for path in directory.glob(f"*{end}"))
    how = f"or write the weights of {listed(others)} to {TORCH_NAME} by torch.save, by their names"
    raise CheckpointError(
        f"{directory} has no {WEIGHTS_NAME} and no {INDEX_NAME}, and no {TORCH_NAME}; "
        f"give a directory written by `model.save_pretrained(DIR)`{f', {how}' if others else ''}"
    )


def _indexed(index: Path) -> dict[Path, list[str]]:
    directory = index.parent
    try:
        weight_map = _Index.model_validate(parse_object(read_bounded(index, _MAX_INDEX_BYTES)))
    except (ValueError, OSError) as error:  # pydantic's is a ValueError too
        raise CheckpointError(
            f"{index} is not an index of weights; save the model again"
        ) from error
    files: dict[str, list[str]] = {}
    for tensor, name in weight_map.weight_map.items():
        files.setdefault(name, []).append(tensor)
    outside = sorted(name for name in files if Path(name).name != name)
    if outside:
        raise CheckpointError(f"{index} names files out of its directory: {listed(outside)}")
    missing = sorted(name for name in files if not (directory / name).is_file())
    if missing:
        raise CheckpointError(
            f"{directory} lacks {listed(missing)}, which {index.name} names; copy them too"
        )
    return {directory / name: files[name] for name in sorted(files)}
