"""A proof chooses tokens as the engine does: none that the package bans, however likely."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.package.manifest import PackageFormat
from engine.package.package import load_package
from engine.requests.generation_defaults import GenerationDefaults
from exporter.certificate import prove
from exporter.checkpoint import load_checkpoint
from exporter.export import export_package
from exporter.prover.loss import LossLimits
from tests.exporter.conftest import MakeCheckpoint, make_likely_and_ban

pytestmark = pytest.mark.usefixtures("few_cases")

BANNED = 7


def test_what_a_format_loses_is_counted_without_tokens_that_are_banned(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint("gpt", output_bias=True)
    make_likely_and_ban(checkpoint, BANNED)
    form, limits = PackageFormat(weights="int4"), LossLimits(1, 100, 1)
    export_package(checkpoint, tmp_path / "package", weights="int4", limits=limits)
    loaded, package = load_checkpoint(checkpoint), load_package(tmp_path / "package")
    config = loaded.config.model_copy(update={"generation": GenerationDefaults()})

    counted = prove(replace(loaded, config=config), package.path, form, limits=limits)
    found = package.manifest.certificate

    assert counted.tokens_equal == counted.tokens_compared > 100  # the banned one alone
    assert 0.5 < found.tokens_equal / found.tokens_compared < 0.97
    assert found.covered["banned_tokens"] == 1 and "banned_tokens" not in counted.covered
