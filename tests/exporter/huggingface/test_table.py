"""The table of families says what their declarations say, and these what an export says."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from engine.errors import ConfigError
from engine.package.manifest import PackageFormat
from exporter.checkpoint import Checkpoint, CheckpointConfig
from exporter.graphs.package_graphs import check_format
from exporter.graphs.target import CUDA
from exporter.huggingface import FAMILIES
from exporter.huggingface.family import Family, SpecialTokens
from exporter.huggingface.table import family_table
from exporter.models import TransformerConfig
from tests.exporter.huggingface.decoders import DECODERS

README = Path(__file__).parents[3] / "exporter" / "README.md"
BY_TYPE = {name: family for family in FAMILIES for name in family.model_types}
MOST_LINES = 80  # of a family
CUDA_TYPES = ("fp32", "fp16", "bf16")


def test_the_table_of_the_readme_is_that_of_the_declarations() -> None:
    found = re.search(r"^\| family \|(.*\n)+?(?=\n)", README.read_text(), re.M)

    assert found is not None
    assert found[0].strip() == family_table(), "python -m exporter.huggingface.table prints it"


def test_every_model_type_belongs_to_one_family() -> None:
    names = [name for family in FAMILIES for name in family.model_types]

    assert len(names) == len(set(names))
    assert all(family.title and family.abilities for family in FAMILIES)


def test_a_family_is_a_short_declaration() -> None:
    declared = Counter(inspect.getfile(family.fields) for family in FAMILIES)
    too_long = {}
    for path, num_families in declared.items():
        lines = Path(path).read_text().split("\n\n\n", 1)[1].splitlines()  # behind the imports
        if len(lines) > MOST_LINES * num_families:
            too_long[path] = len(lines)

    assert not too_long, "what families share stands beside them"


def _accepted(family: Family[Any], raw: dict[str, Any]) -> list[str]:
    """Return the types in which a model may be exported for CUDA."""
    config, _ = family.read_config(raw, SpecialTokens(eos=1, pad=0, decoder_start=0))
    return _accepted_types(config)


def _accepted_types(config: TransformerConfig) -> list[str]:
    checkpoint: Any = Checkpoint(Path("it"), CheckpointConfig(task="it", model=config), None, None)  # type: ignore[arg-type]
    accepted = []
    for precision in CUDA_TYPES:
        try:
            check_format(PackageFormat.of("cuda", precision), checkpoint)
            accepted.append(precision)
        except ConfigError as error:
            assert precision in str(error) or "cuda" in str(error)
    return accepted


@pytest.mark.parametrize("name", [n for n, f in BY_TYPE.items() if "generate" in f.abilities])
def test_a_model_of_the_published_shape_goes_to_the_targets_of_its_family(name: str) -> None:
    family = BY_TYPE[name]

    accepted = _accepted(family, AutoConfig.for_model(name).to_dict())

    assert set(CUDA.precisions_with(family.needs)) <= set(accepted)


@pytest.mark.parametrize("name", ["gpt_neox", "llama", "opt", "mistral", "gemma2", "gemma3_text"])
def test_a_model_with_all_that_its_family_has_goes_nowhere_else(name: str) -> None:
    raw = AutoConfig.for_model(name, **DECODERS[name]).to_dict()

    assert tuple(_accepted(BY_TYPE[name], raw)) == CUDA.precisions_with(BY_TYPE[name].needs)


def test_windows_of_a_model_without_a_cache_go_to_every_target() -> None:
    config = TransformerConfig(
        family="bert",
        d_model=32,
        num_heads=2,
        d_ff=8,
        num_encoder_layers=1,
        vocab_size=9,
        max_source_len=12,
        labels=("a",),
        window=4,
    )

    assert _accepted_types(config) == [*CUDA_TYPES]
