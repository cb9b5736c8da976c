"""T5, its later forms and mT5: relative positions, no biases, scores that are not scaled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal, cast

from exporter.huggingface.conversion import (
    ModuleNames,
    NameTable,
    StoredWeight,
    layers,
    modules,
)
from exporter.huggingface.family import (
    ACTIVATIONS,
    WRITES,
    Activation,
    Family,
    SpecialTokens,
    WriterConfig,
)
from exporter.models.config import PositiveFloat, PositiveInt, Probability, TransformerConfig

_LENGTH = 512  # of sources and answers where config.json has no n_positions
_LENGTH_OF_BYTES = 1024
FeedForward = Literal["relu", "gelu", "gelu_new", "silu", "gated-relu", "gated-gelu", "gated-silu"]


class T5Config(WriterConfig):
    """`config.json` of a T5, v1.1, FLAN-T5, MADLAD or ByT5."""

    second_names: ClassVar[Mapping[str, str]] = {
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "head_dim": "d_kv",
    }

    vocab_size: PositiveInt = 32128
    d_model: PositiveInt = 512
    d_kv: PositiveInt = 64
    d_ff: PositiveInt = 2048
    num_layers: PositiveInt = 6
    num_decoder_layers: PositiveInt | None = None
    num_heads: PositiveInt = 8
    relative_attention_num_buckets: PositiveInt = 32
    relative_attention_max_distance: PositiveInt = 128
    dropout_rate: Probability = 0.1
    layer_norm_epsilon: PositiveFloat = 1e-6
    feed_forward_proj: FeedForward = "relu"
    dense_act_fn: Activation | None = None  # what feed_forward_proj says; these two count before it
    is_gated_act: bool | None = None
    n_positions: PositiveInt | None = None
    tokenizer_class: str | None = None
    # Where it is not said to be untied, the output reads what is scaled by 1 / sqrt(d_model).
    tie_word_embeddings: bool = True
    scale_decoder_outputs: bool | None = None

    @property
    def max_len(self) -> int:
        """How long sources and answers may be; the model itself knows no limit."""
        is_bytes = self.tokenizer_class == "ByT5Tokenizer"
        return self.n_positions or (_LENGTH_OF_BYTES if is_bytes else _LENGTH)

    @property
    def output_scale(self) -> float:
        """What the input of the output is multiplied with."""
        scaled = self.scale_decoder_outputs
        scaled = self.tie_word_embeddings if scaled is None else scaled
        return self.d_model**-0.5 if scaled else 1.0

    @property
    def feed_forward(self) -> tuple[Activation, bool]:
        """The function, and whether there is a gate; a gated "gelu" is its tanh form."""
        gate, _, name = self.feed_forward_proj.rpartition("-")
        named = cast(Activation, "gelu_new" if gate and name == "gelu" else name)
        is_gated = bool(gate) if self.is_gated_act is None else self.is_gated_act
        return self.dense_act_fn or named, is_gated


class MT5Config(T5Config):
    """`config.json` of an mT5."""

    vocab_size: PositiveInt = 250112
    d_ff: PositiveInt = 1024
    num_layers: PositiveInt = 8
    num_heads: PositiveInt = 6
    feed_forward_proj: FeedForward = "gated-gelu"

    @property
    def output_scale(self) -> float:
        """Nothing is scaled, whatever is said to be tied."""
        return 1.0


def _config(given: T5Config, tokens: SpecialTokens) -> TransformerConfig:
    activation, is_gated = given.feed_forward
    return TransformerConfig(
        family="encoder-decoder",
        d_model=given.d_model,
        num_heads=given.num_heads,
        key_dim=given.d_kv,
        value_dim=given.d_kv,
        d_ff=given.d_ff,
        num_encoder_layers=given.num_layers,
        num_decoder_layers=given.num_decoder_layers or given.num_layers,
        attention_bias=False,
        attention_scale=1.0,
        activation=ACTIVATIONS[activation],
        gated_feed_forward=is_gated,
        feed_forward_bias=False,
        float32_feed_forward_output=True,  # as `_keep_in_fp32_modules` of transformers has it
        norm="rms",
        norm_position="first",
        norm_eps=given.layer_norm_epsilon,
        dropout=given.dropout_rate,
        vocab_size=given.vocab_size,
        max_source_len=given.max_len,
        max_target_len=given.max_len,
        positions="relative",
        relative_buckets=given.relative_attention_num_buckets,
        relative_max_distance=given.relative_attention_max_distance,
        scale_embeddings=False,
        output_scale=given.output_scale,
        pad_token_id=tokens.pad or 0,
        bos_token_id=(tokens.pad or 0) if tokens.decoder_start is None else tokens.decoder_start,
        eos_token_id=tokens.eos,
    )


def _weights(config: TransformerConfig) -> NameTable:
    tokens: ModuleNames = {
        "source_embeddings.token": ("shared", "encoder.embed_tokens"),
        "decoder.embeddings.token": "decoder.embed_tokens",
        "decoder.output": "lm_head",
    }
    return {
        **modules(tokens),
        **_stack("encoder", "layer.1"),
        **_stack("decoder", "layer.2"),
        **layers(
            "decoder",
            "decoder.block",
            source_query="layer.1.EncDecAttention.q",
            source_key="layer.1.EncDecAttention.k",
            source_value="layer.1.EncDecAttention.v",
            source_output="layer.1.EncDecAttention.o",
            source_norm="layer.1.layer_norm",
        ),
    }


def _stack(name: str, feed_forward: str) -> NameTable:
    """Return what both stacks have; `feed_forward` is the name of that in a layer of theirs."""
    inner = f"{feed_forward}.DenseReluDense"
    bias = f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return {
        **layers(
            name,
            f"{name}.block",
            query="layer.0.SelfAttention.q",
            key="layer.0.SelfAttention.k",
            value="layer.0.SelfAttention.v",
            output="layer.0.SelfAttention.o",
            attention_norm="layer.0.layer_norm",
            up=(f"{inner}.wi", f"{inner}.wi_1"),  # the latter where there is a gate
            gate=f"{inner}.wi_0",
            down=f"{inner}.wo",
            feed_forward_norm=f"{feed_forward}.layer_norm",
        ),
        **modules({f"{name}.final_norm": f"{name}.final_layer_norm"}),
        f"{name}.relative.weight": StoredWeight((bias,)),
    }


T5 = Family(
    title="T5, FLAN-T5, MADLAD, ByT5",
    model_types=("t5",),
    fields=T5Config,
    to_config=_config,
    weights=_weights,
    abilities=WRITES,
    ignored=r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
)
MT5 = replace(T5, title="mT5", model_types=("mt5",), fields=MT5Config)
