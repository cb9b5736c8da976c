"""A certificate chooses tokens as the engine does: none that the package bans, however likely."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from exporter.certificate.cases import no_progress
from exporter.certificate.certificate import certify
from exporter.certificate.loss import LossLimits

from engine.package.manifest import PackageFormat
from engine.package.package import load_package, write_manifest
from exporter.checkpoint import load_checkpoint
from exporter.export import export_package
from exporter.verification import verify_package
from tests.exporter.conftest import make_likely_and_ban

MakeCheckpoint = Callable[..., Path]

BANNED = 7


@pytest.fixture
def checkpoint(make_checkpoint: MakeCheckpoint) -> Path:
    path = make_checkpoint("gpt", output_bias=True)
    make_likely_and_ban(path, BANNED)
    return path


def test_what_a_format_loses_is_counted_without_tokens_that_are_banned(
    checkpoint: Path, tmp_path: Path
) -> None:
    form, limits = PackageFormat(weights="int4"), LossLimits(1, 100, 1)
    export_package(checkpoint, tmp_path / "package", weights="int4", limits=limits)
    loaded, package = load_checkpoint(checkpoint), load_package(tmp_path / "package")

    counted = certify(loaded, package.path, no_progress, form=form, limits=limits, bans=False)
    found = package.manifest.certificate

    assert counted.tokens_equal == counted.tokens_compared > 500  # of the banned one alone
    assert 0.5 < found.tokens_equal / found.tokens_compared < 0.97
    assert found.covered["banned_tokens"] == 1 and "banned_tokens" not in counted.covered


def test_a_package_is_verified_as_it_was_certified_and_the_difference_is_noted(
    checkpoint: Path, tmp_path: Path
) -> None:
    export_package(checkpoint, tmp_path / "package")
    package = load_package(tmp_path / "package")
    earlier = certify(load_checkpoint(checkpoint), package.path, no_progress, bans=False)
    assert earlier.covered != package.manifest.certificate.covered
    assert not verify_package(package.path, checkpoint).summary().count("bans")

    write_manifest(package.manifest.model_copy(update={"certificate": earlier}), package.path)
    verified = verify_package(package.path, checkpoint)

    assert verified.certificate == earlier
    assert "counts tokens that it bans as likeliest ones" in verified.summary()
