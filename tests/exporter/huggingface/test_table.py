"""The table of families says what their declarations say."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from engine.errors import ConfigError
from engine.package.manifest import PackageFormat
from exporter.checkpoint import Checkpoint, CheckpointConfig
from exporter.graphs.package_graphs import check_format
from exporter.huggingface import FAMILIES
from exporter.huggingface.family import SpecialTokens
from exporter.huggingface.table import family_table

README = Path(__file__).parents[3] / "exporter" / "README.md"
BY_TYPE = {name: family for family in FAMILIES for name in family.model_types}
MOST_LINES = 80  # of a family


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


def test_an_int8_cache_goes_to_cuda_with_those_whose_attention_has_a_kernel_for_it() -> None:
    """By the sizes that transformers has where nobody names any: four heads share a key head."""
    names = [name for name, family in BY_TYPE.items() if "generate" in family.abilities]

    assert {name for name in names if has_int8_cache(name)} == {"mistral"}


def has_int8_cache(name: str) -> bool:
    """Say whether a model of a type may have one; nothing else of it may be in the way."""
    raw = AutoConfig.for_model(name).to_dict()
    config, _ = BY_TYPE[name].read_config(raw, SpecialTokens(eos=1, pad=0, decoder_start=0))
    checkpoint: Any = Checkpoint(Path("it"), CheckpointConfig(task="it", model=config), None, None)  # type: ignore[arg-type]
    check_format(PackageFormat.of("cuda", "fp16"), checkpoint)
    try:
        check_format(PackageFormat.of("cuda", "fp16", None, "int8"), checkpoint)
    except ConfigError as error:
        assert "reads int8 itself" in str(error)
        return False
    return True
