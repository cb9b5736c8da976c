"""GPT-2: norm first, learned positions, packed and transposed projections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from exporter.huggingface.conversion import NameTable, Transposed, layers, modules, packed_inputs
from exporter.huggingface.decoder import DecoderConfig, decoder_config
from exporter.huggingface.family import WRITES, Activation, Family
from exporter.models.config import PositiveInt, Probability, TransformerConfig


class GPT2Config(DecoderConfig):
    """`config.json` of a GPT-2.

    reorder_and_upcast_attn is not here: it changes nothing in float32.
    """

    second_names: ClassVar[Mapping[str, str]] = {
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "max_position_embeddings": "n_positions",
    }

    vocab_size: PositiveInt = 50257
    max_position_embeddings: PositiveInt = Field(1024, alias="n_positions")
    hidden_size: PositiveInt = Field(768, alias="n_embd")
    num_hidden_layers: PositiveInt = Field(12, alias="n_layer")
    num_attention_heads: PositiveInt = Field(12, alias="n_head")
    intermediate_size: PositiveInt | None = Field(None, alias="n_inner")
    hidden_act: Activation = Field("gelu_new", alias="activation_function")
    norm_eps: float = Field(1e-5, alias="layer_norm_epsilon")
    hidden_dropout_prob: Probability = Field(0.1, alias="resid_pdrop")
    attention_probs_dropout_prob: Probability = Field(0.1, alias="attn_pdrop")
    scale_attn_weights: Literal[True] = True
    scale_attn_by_inverse_layer_idx: Literal[False] = False
    add_cross_attention: Literal[False] = False


def _weights(config: TransformerConfig) -> NameTable:
    theirs, transposed = "transformer.h", Transposed()
    outputs = {"output": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
    return {
        **packed_inputs("decoder", f"{theirs}.{{i}}.attn.c_attn", config, transposed),
        **layers("decoder", theirs, transposed, **outputs),
        **layers("decoder", theirs, attention_norm="ln_1", feed_forward_norm="ln_2"),
        **modules(
            {
                "decoder.embeddings.token": "transformer.wte",
                "decoder.embeddings.positions": "transformer.wpe",
                "decoder.output": "lm_head",
                "decoder.final_norm": "transformer.ln_f",
            }
        ),
    }


GPT2 = Family(
    title="GPT-2",
    model_types=("gpt2",),
    fields=GPT2Config,
    to_config=decoder_config,
    weights=_weights,
    abilities=WRITES,
    body="transformer.",
    ignored=r".*\.attn\.(bias|masked_bias)",
)
