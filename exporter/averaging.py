"""Averages the weights of several checkpoints of one model into a new one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from engine.errors import CheckpointError, ConfigError
from exporter.checkpoint import (
    CONFIG_NAME,
    REPORT_NAME,
    TARGET_TOKENIZER_NAME,
    TOKENIZER_NAME,
    WEIGHTS_NAME,
    check_checkpoint,
    check_replaceable,
    model_weights,
    reading_weights,
    streamed_weights,
    write_files,
)
from exporter.training.state import STATE_NAME

_NOT_COPIED = {WEIGHTS_NAME, STATE_NAME, REPORT_NAME}
_MAX_FILE_BYTES = 2**28  # each file beside the weights


def average_checkpoints(
    checkpoints: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]
) -> None:
    """Write the mean of the weights of two or more checkpoints to the directory `out`.

    "Attention Is All You Need" does so with its last 5 or 20 checkpoints (section 6.1). The sums
    are made in float64, one weight at a time. Files beside the weights are those of the last
    checkpoint. Raises ConfigError for fewer than two, CheckpointError for ones that are damaged or
    of different models or tokenizers.
    """
    paths = [Path(path) for path in checkpoints]
    if len(paths) < 2:
        raise ConfigError(f"an average needs two or more checkpoints, got {len(paths)}")
    check_replaceable(Path(out))
    config = check_checkpoint(paths[-1])
    beside = _beside(paths[-1])
    for path in paths[:-1]:
        other, files = check_checkpoint(path), _beside(path)
        # Whatever they are called, for imports have other names; samples and remarks may differ.
        is_alike = other.model_copy(update={"task": config.task}) == config
        wrong = [] if is_alike else [CONFIG_NAME]
        names = (TOKENIZER_NAME, TARGET_TOKENIZER_NAME)
        wrong += [name for name in names if files.get(name) != beside.get(name)]
        if wrong:
            raise CheckpointError(
                f"{path / wrong[0]} is not that of {paths[-1]}: an average is of one model in "
                "several states; give checkpoints of the same run"
            )
    with ExitStack() as stack:
        opened = [stack.enter_context(_open(path)) for path in paths]
        described = model_weights(config.model)
        weights = streamed_weights(described, _means(opened, [weight.name for weight in described]))
        write_files(Path(out), {**beside, WEIGHTS_NAME: weights})


def _open(path: Path) -> Any:
    with reading_weights(path / WEIGHTS_NAME):
        return safe_open(path / WEIGHTS_NAME, framework="pt")


def _means(files: Sequence[Any], names: Sequence[str]) -> Iterator[torch.Tensor]:
    for name in names:
        total = sum(file.get_tensor(name).double() for file in files)
        assert isinstance(total, torch.Tensor)
        yield (total / len(files)).float()


def _beside(path: Path) -> dict[str, bytes]:
    """Return the files of a checkpoint that are neither its weights nor the state of a run."""
    found = sorted(file for file in path.iterdir() if file.is_file())
    kept = [file for file in found if file.name not in _NOT_COPIED]
    for file in kept:
        if file.stat().st_size > _MAX_FILE_BYTES:
            raise CheckpointError(
                f"{file} has {file.stat().st_size:,} bytes, more than {_MAX_FILE_BYTES:,}; it is "
                "not a file of a checkpoint, move it elsewhere"
            )
    return {file.name: file.read_bytes() for file in kept}
