"""Mistral: as Llama, with grouped heads and, in the first version, a window in every layer."""

from __future__ import annotations

from dataclasses import replace

from exporter.huggingface.families.llama import LLAMA
from exporter.huggingface.stacks.rotary_decoder import ROTARY, windowed

MISTRAL = replace(
    LLAMA,
    title="Mistral",
    model_types=("mistral",),
    options=ROTARY,
    computed=windowed,
    supported={"layer_types": (None,)},
)
