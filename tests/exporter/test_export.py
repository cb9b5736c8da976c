"""Every family is exported and proven, and a package appears whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.package import load_package
from exporter.export import export_package

MakeCheckpoint = Callable[..., Path]

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("encoder-decoder", {}),
    (
        "encoder-decoder",
        {
            "key_dim": None,
            "value_dim": None,
            "norm_position": "last",
            "positions": "learned",
            "share_embeddings": False,
            "tie_output": False,
            "output_bias": False,
            "attention_bias": False,
            "activation": "relu",
        },
    ),
    ("gpt", {}),
    ("gpt", {"norm_position": "last", "positions": "sinusoidal", "final_norm": True}),
    ("bert", {}),
    ("labeller", {}),
    ("labeller", {"attention_score": "dot", "attention_normalizer": "softmax"}),
    ("vit", {}),
]


@pytest.mark.parametrize(("family", "options"), VARIANTS)
def test_every_family_is_exported_with_a_certificate(
    family: str, options: dict[str, Any], make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(family, **options)
    seen = []

    manifest = export_package(
        checkpoint, tmp_path / "package", progress=lambda *at: seen.append(at)
    )

    package = load_package(tmp_path / "package")
    certificate = package.manifest.certificate
    assert package.manifest == manifest
    assert certificate.cases >= 8
    assert certificate.tokens_equal == certificate.tokens_compared > 0
    assert certificate.max_abs_logit_diff < certificate.tolerance
    assert certificate.batch_invariant
    assert seen[-1][0] == seen[-1][1]
    assert {"torch", "onnx", "onnxruntime"} <= set(manifest.toolchain)
    assert [path.name for path in tmp_path.iterdir()] == ["package"]
