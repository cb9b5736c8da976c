"""A package of a person's own class needs nothing of theirs where it is served."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from exporter.examples import own_class, torch_transformer
from tests.fakes.served import served


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("example", "name", "prompt", "answer"),
    [(own_class, "counter", "7 8", "9 0 1 2"), (torch_transformer, "turned", "fed", "def")],
)
def test_package_of_an_example_is_served(
    example: ModuleType, name: str, prompt: str, answer: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    example.main(str(tmp_path / name))

    with served(tmp_path, name) as client:
        assert "".join(client.stream(name, prompt, max_new_tokens=4)) == answer
