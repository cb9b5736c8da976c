"""A whole engine on the emulated device, from packages: every kind of request comes to its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.package.manifest import PackageFormat
from tests.emulated.conftest import RunScript
from tests.parity.conftest import CONFIGS
from tests.parity.uncertified import write_uncertified

pytestmark = [pytest.mark.emulated, pytest.mark.long, pytest.mark.timeout(600)]

PACKAGES: list[tuple[str, PackageFormat]] = [
    ("gpt", PackageFormat.of("cuda", "fp16")),
    ("llama", PackageFormat.of("cuda", "bf16")),
    ("llama", PackageFormat.of("cuda", "fp32")),
    ("llama", PackageFormat.of("cuda", "fp16", weights="int4")),
    ("llama-wide", PackageFormat.of("cuda", "fp16", kv_cache="int8")),
    ("encoder-decoder", PackageFormat.of("cuda", "fp16")),
    ("encoder-decoder", PackageFormat.of("cuda", "fp32")),
]


def test_every_kind_of_request_is_served(on_device: RunScript, tmp_path: Path) -> None:
    paths = []
    for i, (name, form) in enumerate(PACKAGES):
        directory = tmp_path / f"{i}-{name}"
        paths.append(str(write_uncertified(CONFIGS[name], directory, form).path))

    found = on_device("run_engine.py", *paths)

    process = found["process"]
    assert (process["ended"], process["running"]) == ({"finished": 48}, 0)
    assert process["captured"] == found[paths[0]]["captured"]
    for path in paths:
        assert found[path]["ended"] == {"finished": 48}
        assert found[path]["scored"] == 2 and found[path]["running"] == 0
        assert found[path]["captured in"] == ["engine"]
        one, several = found[path]["captured"]
        assert one.startswith(
            "package: captured a decode call of 8 rows with their likeliest token"
        )
        assert several.startswith(
            "package: captured a decode call of 8 rows with their 61 likeliest"
        )
