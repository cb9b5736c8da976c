"""Says which tensors a file of weights announces and ends before."""

from __future__ import annotations

import io
import mmap
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from pydantic import BaseModel, TypeAdapter
from safetensors import SafetensorError
from torch import Tensor

from engine.json_file import parse_object

Load = Callable[[io.BytesIO], object]

# The exceptions that libraries raise for a damaged file.
DAMAGE: tuple[type[Exception], ...] = (
    *(SafetensorError, OSError, RuntimeError, EOFError, ValueError, struct.error),
    *(pickle.UnpicklingError, AssertionError, AttributeError, LookupError, TypeError),
)

_MAX_HEADER_BYTES = 2**26
_PART, _END_OF_PART = b"PK\3\4", b"PK\7\10"  # signatures in a zip archive
_PART_HEADER = struct.Struct("<4s22xHH")  # ..., length of the name, of what is behind it
_KEY = -4  # index in ("storage", type, key, device, size) and the operator that makes a tuple


class _Place(BaseModel):
    data_offsets: tuple[int, int]  # behind the header


def cut_safetensors(path: Path) -> list[str]:
    """Return the tensors that a safetensors file has no room for."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = parse_object(file.read(length)) if length < _MAX_HEADER_BYTES else {}
        header.pop("__metadata__", None)
        places = TypeAdapter(dict[str, _Place]).validate_python(header)
    except (ValueError, OSError):
        return []
    room = path.stat().st_size - 8 - length
    return sorted(name for name, place in places.items() if place.data_offsets[1] > room)


def _load_tensors(archive: io.BytesIO) -> object:
    return torch.load(archive, weights_only=True)


def cut_torch_tensors(path: Path, load: Load = _load_tensors) -> list[str]:
    """Return the tensors of an archive by torch.save whose numbers are not all there.

    `load` reads the objects of an archive; in one that ends too early they come first, then the
    numbers, and the directory of both is lost. Files from before 2020 are not archives.
    """
    if zipfile.is_zipfile(path):
        return []
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            return _cut(content, load)
    except DAMAGE:
        return []  # the objects are cut off themselves


def _cut(content: mmap.mmap, load: Load) -> list[str]:
    name, first = _part_at(content, 0)
    if not name.endswith("data.pkl"):
        return []
    pickled = content[first : content.find(_END_OF_PART, first)]
    with torch.serialization.skip_data():
        loaded = load(_archive(pickled))
    keys = iter(_storage_keys(pickled))
    storages: dict[int, str] = {}  # keys by addresses
    sizes: dict[str, int] = {}
    tensors: dict[str, str] = {}
    for name, tensor in _tensors(loaded):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in storages:
            storages[storage.data_ptr()] = next(keys)
        key = storages[storage.data_ptr()]
        sizes[key], tensors[name] = storage.nbytes(), key
    whole = set(_whole_storages(content, sizes))
    return [name for name, key in tensors.items() if key not in whole]


def _archive(pickled: bytes) -> io.BytesIO:
    """Return an archive of the objects alone."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3\n")
    made.seek(0)
    return made


def _storage_keys(pickled: bytes) -> Iterator[str]:
    """Yield the names of the storages, each where it comes first."""
    before: list[tuple[str, object]] = []
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name == "BINPERSID" and isinstance(key := before[_KEY][1], str):
            yield key  # named again it is a number in the memory of the pickle
        if "PUT" not in opcode.name:
            before.append((opcode.name, argument))


def _tensors(value: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from _tensors(one, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for i, one in enumerate(value):
            yield from _tensors(one, f"{name}.{i}")


def _part_at(content: mmap.mmap, place: int) -> tuple[str, int]:
    """Return the name of the part whose header is at a place, and where its content begins."""
    _, length, more = _PART_HEADER.unpack_from(content, place)
    begin = place + _PART_HEADER.size
    return content[begin : begin + length].decode(), begin + length + more


def _whole_storages(content: mmap.mmap, sizes: Mapping[str, int]) -> Iterator[str]:
    """Yield the keys of the storages whose bytes are all there."""
    place = 0
    while 0 <= place < len(content) - _PART_HEADER.size:
        name, first = _part_at(content, place)
        key = name.rpartition("/data/")[2]
        end = first + sizes.get(key, 0)
        if key in sizes and end <= len(content):
            yield key
        place = content.find(_PART, end)
