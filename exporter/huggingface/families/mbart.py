"""mBART: as BART, with norm first; languages are told by tokens."""

from __future__ import annotations

from dataclasses import replace

from exporter.huggingface.families.bart import BART
from exporter.huggingface.family import Options, Original
from exporter.huggingface.stacks.bart_like import bart_like


def _computed(original: Original) -> Options:
    return bart_like(original, start=original.tokens.eos)


def _notes(original: Original) -> list[str]:
    """Say what outputs begin behind, where the original does not."""
    if original.said.get("decoder_start_token_id") is not None:
        return []
    return [
        "config.json has no decoder_start_token_id: outputs begin behind the end token, or "
        "behind the token of --target-lang"
    ]


MBART = replace(
    BART,
    title="mBART",
    model_types=("mbart",),
    fixed={**BART.fixed, "norm_position": "first"},
    computed=_computed,
    notes=_notes,
)
