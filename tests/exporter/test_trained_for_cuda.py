"""The models that a demonstration trains go to CUDA in float16, as they do in float32.

Random weights lose the same everywhere, trained ones much at a few positions.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from exporter.export import export_package
from exporter.tasks import TASKS, build_task
from exporter.training.trainer import train

PAGES = sorted(Path(__file__).parents[2].glob("*/docs/**/*.md"))  # texts of English


@pytest.mark.long
@pytest.mark.parametrize("name", TASKS)
def test_a_trained_model_is_as_near_in_float16_as_the_eager_model(
    name: str, tmp_path: Path
) -> None:
    task = build_task(name, files=PAGES if name == "text" else ())
    train(lambda _: task, tmp_path / name)

    manifest = export_package(
        tmp_path / name, tmp_path / "package", target="cuda", precision="fp16"
    )

    found = manifest.certificate.half
    assert found and max(judged.positions for judged in found) >= 40
