"""What decoders without an encoder share."""

from __future__ import annotations

from typing import Any

from exporter.huggingface.family import SpecialTokens, WriterConfig
from exporter.huggingface.stack import StackConfig
from exporter.models.config import PositiveInt, TransformerConfig


class DecoderConfig(StackConfig, WriterConfig):
    """`config.json` of a decoder."""

    vocab_size: PositiveInt
    max_position_embeddings: PositiveInt
    tie_word_embeddings: bool = True

    @property
    def max_len(self) -> int:
        """Return how long a text may be."""
        return self.max_position_embeddings


def decoder_config(
    given: DecoderConfig, tokens: SpecialTokens, **differences: Any
) -> TransformerConfig:
    """Return the options of a GPT-2, those in `differences` instead of its own."""
    usual = {
        "family": "gpt",
        **given.layer_options,
        "num_decoder_layers": given.num_hidden_layers,
        "norm_position": "first",
        "vocab_size": given.vocab_size,
        "max_target_len": given.max_len,
        "positions": "learned",
        "scale_embeddings": False,
        "tie_output": given.tie_word_embeddings,
        "pad_token_id": tokens.pad or 0,
        "eos_token_id": tokens.eos,
    }
    return TransformerConfig.model_validate({**usual, **differences})
