"""Packages of random models whose certificate is a stand-in: for what comes behind it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from torch import nn

from engine.package import Certificate, DeviceCertificate, HalfPrecision, PackageFormat
from exporter.checkpoint import save_checkpoint
from exporter.export import export_package
from exporter.models import TransformerConfig
from tests.parity.conftest import byte_tokenizer, random_model, word_tokenizer

HALF = HalfPrecision(
    positions=1,
    tokens_decided=1,
    tokens_equal=1,
    max_abs_logit_diff=0,
    logit_std=1,
    rms_diff=0,
    eager_rms_diff=0,
    max_case_ratio=0,
    max_position_ratio=0,
)


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
    certificate = Certificate(
        cases=1,
        tokens_compared=1,
        tokens_equal=1,
        max_abs_logit_diff=0,
        tolerance=1e-4,
        batch_invariant=False,
        dtype=str(form),
        half=HALF if form.has_half_stage else None,
        device=device,
        covered={},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("exporter.export.certify", lambda *_, **__: certificate)
        export_package(
            directory / "checkpoint",
            directory / "package",
            target=form.target,
            precision=form.precision,
            weights=form.weights,
            kv_cache=form.kv_cache,
        )
    return Uncertified(model.eval(), directory / "package")
