"""Packages of random models whose certificate is a stand-in: for what comes behind it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from torch import nn

from engine.package.manifest import DeviceCertificate, PackageFormat
from exporter.checkpoint import save_checkpoint
from exporter.models import TransformerConfig
from tests.fakes.stand_in_certificate import export_with_stand_in
from tests.parity.conftest import byte_tokenizer, random_model, word_tokenizer


class Uncertified(NamedTuple):
    """An eager model and the package that was exported from it."""

    model: nn.Module
    path: Path


def write_uncertified(
    config: TransformerConfig,
    directory: Path,
    form: PackageFormat,
    *,
    device: DeviceCertificate | None = None,
) -> Uncertified:
    """Export a random model without comparing anything."""
    model = random_model(config)
    tokenizer = None
    if config.image is None:
        tokenizer = byte_tokenizer() if config.num_decoder_layers else word_tokenizer()
    save_checkpoint(directory / "checkpoint", "tiny", model, tokenizer)
    export_with_stand_in(directory / "checkpoint", directory / "package", form, device=device)
    return Uncertified(model.eval(), directory / "package")
