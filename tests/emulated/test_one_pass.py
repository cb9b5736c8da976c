"""One-pass packages through the engine on the emulated device."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from engine.package.manifest import PackageFormat, Precision
from exporter.models import TransformerConfig
from tests.emulated.conftest import RunScript
from tests.fakes.stand_in_certificate import shown_on_device
from tests.parity.conftest import SHAPE
from tests.parity.test_one_pass_for_cuda import MODELS
from tests.parity.uncertified import write_uncertified

pytestmark = [pytest.mark.emulated, pytest.mark.long, pytest.mark.timeout(600)]

PRECISIONS: dict[str, Precision] = {"bert": "fp16", "labeller": "fp32", "vit": "bf16"}


def write(config: TransformerConfig, directory: Path, precision: Precision) -> Path:
    form = PackageFormat.of("cuda", precision)
    shown = shown_on_device(
        gpu="EMULATED sm_90", onnxruntime=version("onnxruntime"), buckets=(), batch_invariant=False
    )
    return write_uncertified(config, directory, form, device=shown).path


def test_one_pass_models_are_served_on_the_device(on_device: RunScript, tmp_path: Path) -> None:
    paths = {
        family: str(write(MODELS[family], tmp_path / family, precision))
        for family, precision in PRECISIONS.items()
    }

    found = on_device("run_one_pass.py", *paths.values())

    width, labels = SHAPE["d_model"], 3
    bert, labeller, vit = (found[paths[family]] for family in PRECISIONS)
    assert bert["logits"] == vit["logits"] == [[labels]] * 3
    assert labeller["logits"] == [[3, labels], [2, labels], [3, labels]]
    assert all(each["embedding"] == [[width]] * 3 for each in (bert, labeller, vit))


def test_weights_lie_on_the_device_once(on_device: RunScript, tmp_path: Path) -> None:
    config = MODELS["bert"].model_copy(update={"d_ff": 20_000})
    path = write(config, tmp_path, "fp16")
    weights = (path / "model.onnx.data").stat().st_size

    found = on_device("run_one_pass.py", str(path))

    assert weights > 2_000_000
    assert weights <= found[str(path)]["taken"] < 1.3 * weights
