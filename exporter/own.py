"""Exports and verifies a model of a person's own class, whose code nothing of ours has to know."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tokenizers import Tokenizer
from torch import nn

from engine.package.manifest import Certificate, Manifest
from engine.wording import shortened
from exporter.checkpoint import CONFIG_NAME, TOKENIZER_NAME, Checkpoint, CheckpointConfig
from exporter.export import export_package
from exporter.files import scratch_directory
from exporter.models.own import OwnConfig, wrap
from exporter.own_trial import try_own
from exporter.verification import Verification, verify_package


def export_own(
    model: nn.Module,
    config: OwnConfig,
    out_dir: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer | None = None,
    samples: Sequence[str] = (),
    **options: Any,
) -> Manifest:
    """Export a model, prove it equal to itself in PyTorch, and write the package.

    `model` has the methods of `GenerativeModel`, or a `forward` of one pass: of `input_ids` and
    `mask`, or of `pixel_values`, to logits, vectors, or both. `samples` are texts that it is tried
    with; `options` and errors are those of `export_package`, and ConfigError for a model that is
    not as `config` describes it, which is tried first, or that torch cannot trace.
    """
    with _as_checkpoint(model, config, tokenizer, samples) as checkpoint:
        return export_package(checkpoint, out_dir, **options)


def verify_own(
    package_dir: str | os.PathLike[str],
    model: nn.Module,
    config: OwnConfig,
    *,
    tokenizer: Tokenizer | None = None,
    samples: Sequence[str] = (),
    **options: Any,
) -> Verification[Certificate]:
    """Compare a package with a model again; arguments as of `export_own`, errors as of verify."""
    with _as_checkpoint(model, config, tokenizer, samples) as checkpoint:
        return verify_package(package_dir, checkpoint, **options)


@contextmanager
def _as_checkpoint(
    model: nn.Module, config: OwnConfig, tokenizer: Tokenizer | None, samples: Sequence[str]
) -> Iterator[Checkpoint]:
    """Give what a package is made of; its files are gone afterwards."""
    name = type(model).__name__
    described = {"task": name, "model": config.model_dump(mode="json", exclude_defaults=True)}
    with scratch_directory("own") as directory, _evaluating(model):
        path = directory / name
        path.mkdir()
        (path / CONFIG_NAME).write_text(json.dumps(described, indent=2) + "\n")
        if tokenizer is not None:
            (path / TOKENIZER_NAME).write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        said = f"compared with {shortened(name)} itself"
        kept = CheckpointConfig(task=name, model=config, original=said)
        wrapped = wrap(model, config)
        try_own(model, config, tokenizer)
        yield Checkpoint(path, kept, wrapped, tokenizer, tuple(samples))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Leave a model as it was trained, or not, so that a training loop goes on as it began."""
    before = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, is_training in before:
            module.training = is_training
