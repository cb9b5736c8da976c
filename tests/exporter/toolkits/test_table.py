"""The table of toolkits says what their declarations say, and these what an export takes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from exporter.huggingface.family import SpecialTokens
from exporter.toolkits.fairseq import FAIRSEQ
from exporter.toolkits.opennmt import OPEN_NMT
from exporter.toolkits.table import toolkit_table
from tests.exporter.toolkits.sources import FAIRSEQ_OPTIONS, OPENNMT_OPTIONS

README = Path(__file__).parents[3] / "exporter" / "README.md"
TOKENS = SpecialTokens(eos=2, pad=1, decoder_start=2)
SIZES = {"source_size": 40, "target_size": 30, "encoder_version": 3, "decoder_version": 3}
FOUND = {"add_qkvbias": False, "add_ffnbias": False, "hidden_size": 16}


def test_the_table_of_the_readme_is_that_of_the_declarations() -> None:
    found = re.search(r"^\| toolkit \|(.*\n)+?(?=\n)", README.read_text(), re.M)

    assert found is not None
    assert found[0].strip() == toolkit_table(), "python -m exporter.toolkits.table prints it"


@pytest.mark.parametrize(
    ("family", "options"),
    [
        (FAIRSEQ, FAIRSEQ_OPTIONS),
        (OPEN_NMT, OPENNMT_OPTIONS),
        (OPEN_NMT, {**OPENNMT_OPTIONS, "layer_norm": "rms", "pos_ffn_activation_fn": "silu"}),
    ],
)
def test_a_model_needs_no_more_than_its_toolkit(family: Any, options: dict[str, Any]) -> None:
    config, _ = family.read_config({**options, **SIZES, **FOUND}, TOKENS)

    assert set(config.kernel_features) <= set(family.needs)
