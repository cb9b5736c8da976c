"""Every family is a short declaration, and what it says goes to the formats that it should."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from engine.errors import ConfigError
from engine.package.manifest import PackageFormat
from exporter.checkpoint import Checkpoint, CheckpointConfig
from exporter.graphs.package_graphs import check_format
from exporter.huggingface import FAMILIES, families
from exporter.huggingface.family import Original, SpecialTokens

BY_TYPE = {name: family for family in FAMILIES for name in family.model_types}
MOST_LINES = 125


def test_every_model_type_belongs_to_one_family() -> None:
    names = [name for family in FAMILIES for name in family.model_types]

    assert len(names) == len(set(names))
    assert all(family.title and family.abilities for family in FAMILIES)


def test_a_family_is_a_short_declaration() -> None:
    too_long = {}
    for path in Path(families.__file__).parent.glob("[!_]*.py"):
        num_lines = len(path.read_text().splitlines())
        if num_lines > MOST_LINES:
            too_long[path.name] = num_lines

    assert not too_long, "what families share stands beside them"


def test_an_int8_cache_goes_to_cuda_with_those_whose_attention_has_a_kernel_for_it() -> None:
    """By the sizes that transformers has where nobody names any: four heads share a key head."""
    names = [name for name, family in BY_TYPE.items() if "generate" in family.abilities]

    assert {name for name in names if has_int8_cache(name)} == {"mistral"}


def has_int8_cache(name: str) -> bool:
    """Say whether a model of a type may have one; nothing else of it may be in the way."""
    tokens = SpecialTokens(eos=1, pad=0, decoder_start=0)
    config = BY_TYPE[name].read_config(Original(AutoConfig.for_model(name), tokens))
    checkpoint: Any = Checkpoint(Path("it"), CheckpointConfig(task="it", model=config), None, None)  # type: ignore[arg-type]
    check_format(PackageFormat.of("cuda", "fp16"), checkpoint)
    try:
        check_format(PackageFormat.of("cuda", "fp16", None, "int8"), checkpoint)
    except ConfigError as error:
        assert "reads int8 itself" in str(error)
        return False
    return True
