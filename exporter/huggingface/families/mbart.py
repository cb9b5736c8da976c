"""mBART: as BART, with norm first; languages are told by tokens."""

from __future__ import annotations

from exporter.huggingface.bart_like import bart_like
from exporter.huggingface.families.bart import BartConfig, weights
from exporter.huggingface.family import Family, SpecialTokens
from exporter.models.config import TransformerConfig


def _config(source: BartConfig, tokens: SpecialTokens) -> TransformerConfig:
    return bart_like(
        source,
        tokens,
        norm_position="first",
        embedding_norm=True,
        positions="learned",
        output_bias=True,
    )


MBART = Family(
    title="mBART",
    model_types=("mbart",),
    source=BartConfig,
    to_config=_config,
    weights=weights,
    abilities=("generate", "beam", "score"),
    own_output=True,
)
