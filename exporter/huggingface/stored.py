"""Reads the weights of a source from its safetensors files, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import CheckpointError
from engine.json_file import parse_object, read_bounded
from engine.wording import listed

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 2**26
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


class StoredWeights:
    """The tensors of open safetensors files, by name."""

    def __init__(self, files: list[Any]) -> None:
        self._files = {name: file for file in files for name in file.keys()}  # noqa: SIM118

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """Return a tensor as it is stored."""
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


@contextmanager
def open_weights(directory: Path) -> Iterator[StoredWeights]:
    """Open all weights of a source; CheckpointError if there are none or a file is damaged."""
    with ExitStack() as stack:
        files = []
        for path in _weight_files(directory):
            try:
                files.append(stack.enter_context(safe_open(path, framework="pt")))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{path} is no safetensors file, or damaged: {error}; save the model again"
                ) from error
        yield StoredWeights(files)


class _Index(BaseModel):
    weight_map: dict[str, str]  # name of a tensor: name of the file that holds it


def _weight_files(directory: Path) -> list[Path]:
    if (directory / WEIGHTS_NAME).is_file():
        return [directory / WEIGHTS_NAME]
    index = directory / INDEX_NAME
    if not index.is_file():
        raise CheckpointError(_no_weights(directory))
    try:
        content = parse_object(read_bounded(index, _MAX_INDEX_BYTES))
        names = sorted(set(_Index.model_validate(content).weight_map.values()))
    except (ValueError, OSError) as error:  # pydantic's is a ValueError too
        raise CheckpointError(f"{index} is no index of weights; save the model again") from error
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise CheckpointError(f"{index} names files out of its directory: {listed(outside)}")
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{directory} lacks {listed(missing)}, which {INDEX_NAME} names; copy them too"
        )
    return [directory / name for name in names]


def _no_weights(directory: Path) -> str:
    pickled = [name for name in PICKLED if (directory / name).is_file()]
    if not pickled:
        return (
            f"{directory} has no {WEIGHTS_NAME} and no {INDEX_NAME}; give a directory written by "
            "`model.save_pretrained(DIR)`"
        )
    return (
        f"{directory} has its weights in {pickled[0]} only, a pickle, which can run any code and "
        f"is therefore not read; load it with transformers where you trust it, and save it again: "
        f"`model.save_pretrained(DIR)` writes {WEIGHTS_NAME}"
    )
