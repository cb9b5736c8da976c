"""Pegasus: an encoder-decoder with norm first and Marian's positions."""

from __future__ import annotations

from dataclasses import replace

from exporter.huggingface.families.marian import MARIAN
from exporter.huggingface.stacks.bart_like import BART_LIKE, bart_like

PEGASUS = replace(
    MARIAN,
    title="Pegasus",
    model_types=("pegasus",),
    fixed={**MARIAN.fixed, "norm_position": "first"},
    options=BART_LIKE,
    computed=bart_like,
)
