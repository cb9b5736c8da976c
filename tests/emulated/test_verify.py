"""verify --device cuda on the emulated device: what computes nothing is refused."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from engine.package.manifest import PackageFormat, Precision
from exporter.models import TransformerConfig
from tests.emulated.conftest import RunScript
from tests.emulated.models import MODELS
from tests.parity.uncertified import write_uncertified

pytestmark = [pytest.mark.emulated, pytest.mark.long, pytest.mark.timeout(600)]

SHORT = {"vocab_size": 258, "max_source_len": 6, "max_target_len": 6}
CASES: dict[str, tuple[TransformerConfig, Precision]] = {
    "dates": (TransformerConfig.of({**MODELS["dates"], **SHORT}), "fp16"),
    "gpt2": (TransformerConfig.of({**MODELS["gpt2"], **SHORT}), "bf16"),
}


def test_a_package_is_refused_where_nothing_computes_and_its_manifest_stays(
    on_device: RunScript, tmp_path: Path
) -> None:
    paths = {}
    for name, (config, precision) in CASES.items():
        form = PackageFormat.of("cuda", precision)
        paths[name] = write_uncertified(config, tmp_path / name, form).path
    given = [part for path in paths.values() for part in (path, path.parent / "checkpoint")]

    found = on_device("verify_package.py", *map(str, given))

    for path in paths.values():
        seen = found[str(path)]
        assert seen["refusal"] and seen["before"] is None
        device = seen["after"]
        assert (device["gpu"], device["driver"]) == ("EMULATED sm_90", "13.0")
        assert device["onnxruntime"] == version("onnxruntime")
        assert device["buckets"] == [4]
        assert [line.rpartition("; ")[2] for line in seen["again"]] == [
            "device certificate written",
            "device certificate reproduced",
        ]
