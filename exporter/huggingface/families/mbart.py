"""mBART: as BART, with norm first; languages are told by tokens."""

from __future__ import annotations

from exporter.huggingface.bart_like import BODY, UNUSED, bart_like
from exporter.huggingface.families.bart import BartConfig, weights
from exporter.huggingface.family import WRITES, Family, SpecialTokens
from exporter.models.config import TransformerConfig


class MBartConfig(BartConfig):
    """`config.json` of an mBART."""

    decoder_start_token_id: int | None = None

    def notes(self) -> list[str]:
        """Say what outputs begin behind, where the original does not."""
        if self.decoder_start_token_id is not None:
            return []
        return [
            "config.json has no decoder_start_token_id: outputs begin behind the end token, or "
            "behind the token of --target-lang"
        ]


def _config(given: MBartConfig, tokens: SpecialTokens) -> TransformerConfig:
    if tokens.decoder_start is None:
        tokens = SpecialTokens(tokens.eos, tokens.pad, decoder_start=tokens.eos)
    return bart_like(
        given,
        tokens,
        norm_position="first",
        embedding_norm=True,
        positions="learned",
        output_bias=True,
    )


MBART = Family(
    title="mBART",
    model_types=("mbart",),
    fields=MBartConfig,
    to_config=_config,
    weights=weights,
    abilities=WRITES,
    body=BODY,
    ignored=UNUSED,
)
