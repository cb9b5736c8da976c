"""What most decoders of today share: rotary positions, mean-square norms, gated feed-forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from exporter.huggingface.conversion import HeadOrder, NameTable, layers, modules
from exporter.huggingface.decoder import DecoderConfig, decoder_config
from exporter.huggingface.family import Activation, SpecialTokens
from exporter.huggingface.layered import sliding
from exporter.huggingface.rope import LayerType, RopeParameters, check_one_of
from exporter.models.config import PositiveInt, Probability, TransformerConfig

LAYER = ("decoder.layers.{i}", "model.layers.{i}")  # ours, theirs


class RotaryDecoderConfig(DecoderConfig):
    """`config.json` of such a decoder; older files have `rope_theta` and `rope_scaling` apart."""

    turns_parts: ClassVar[bool] = False  # a part of a head may turn, the rest stay as it is

    hidden_size: PositiveInt = 4096
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt = 32
    num_attention_heads: PositiveInt = 32
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    hidden_act: Activation = "silu"
    norm_eps: float = Field(1e-6, alias="rms_norm_eps")
    tie_word_embeddings: bool = False
    attention_probs_dropout_prob: Probability = Field(0.0, alias="attention_dropout")
    rope_theta: float = 10000.0
    rope_scaling: RopeParameters | None = None
    rope_parameters: RopeParameters | None = None
    partial_rotary_factor: float = 1.0
    original_max_position_embeddings: PositiveInt | None = None
    asked_len: PositiveInt | None = None  # by who imports it; not of the file

    @model_validator(mode="after")
    def _check_rotary(self) -> Self:
        check_one_of(self.rope_scaling, self.rope_parameters)
        if self.turned_share != 1 and not (self.turns_parts and 0 < self.turned_share < 1):
            supported = "above 0, up to 1" if self.turns_parts else "1"
            raise ValueError(
                f"partial_rotary_factor is {self.turned_share}; supported: {supported}"
            )
        return self

    @property
    def rope(self) -> RopeParameters:
        """Return how positions turn, wherever it is written."""
        return self.rope_parameters or self.rope_scaling or RopeParameters()

    @property
    def turned_share(self) -> float:
        """Return which share of a head's numbers turns."""
        share = self.rope.partial_rotary_factor
        return self.partial_rotary_factor if share is None else share

    @property
    def original_len(self) -> int:
        """Return up to which length the places of a text turn as the model first learned them."""
        if self.rope.rope_type != "longrope":
            return self.max_position_embeddings
        original = (
            self.original_max_position_embeddings or self.rope.original_max_position_embeddings
        )
        return min(self.max_position_embeddings, original or self.max_position_embeddings)

    @property
    def is_long(self) -> bool:
        """Whether all texts turn as those do that longrope finds long."""
        return self.asked_len is not None and self.asked_len > self.original_len

    @property
    def max_len(self) -> int:
        """Return how long a text may be."""
        return self.max_position_embeddings if self.is_long else self.original_len

    def notes(self) -> list[str]:
        """Say where texts are shorter than the original allows, or turn otherwise."""
        if self.original_len == self.max_position_embeddings:
            return []
        if self.is_long:
            return [
                "all texts turn by the long_factor of rope_type longrope, where transformers takes "
                f"it for those of more than {self.original_len} tokens; import without --max-len, "
                "or with a smaller one, for its answers to shorter ones"
            ]
        return [
            f"texts may have {self.original_len} tokens, not {self.max_position_embeddings}: "
            "rope_type longrope turns all positions otherwise as soon as a text is longer; "
            f"--max-len above {self.original_len} imports it for long texts"
        ]


def rotary_decoder_config(
    given: RotaryDecoderConfig, tokens: SpecialTokens, **differences: Any
) -> TransformerConfig:
    """Return the options of such a decoder, those in `differences` instead of the usual ones."""
    width = given.head_dim or given.hidden_size // given.num_attention_heads
    turned = int(width * given.turned_share)
    usual = {
        "num_kv_heads": given.num_key_value_heads,
        "key_dim": given.head_dim,
        "value_dim": given.head_dim,
        "attention_bias": False,
        "gated_feed_forward": True,
        "feed_forward_bias": False,
        "norm": "rms",
        "positions": "rotary",
        "rotary_base": given.rope.rope_theta or given.rope_theta,
        "rotary_scaling": given.rope.scaling(
            given.max_position_embeddings,
            given.original_max_position_embeddings,
            is_long=given.is_long,
        ),
        "rotary_dim": None if turned == width else turned,
    }
    return decoder_config(given, tokens, **{**usual, **differences})


def window_options(
    given: RotaryDecoderConfig, window: int | None, layer_types: Sequence[LayerType] | None = None
) -> dict[str, Any]:
    """Return the options of layers that see `window` positions; without types, all do.

    A window that no text outgrows is none.
    """
    if window is None or window >= given.max_len:
        return {}
    if layer_types is None:
        return {"window": window}
    layers = sliding(layer_types)
    return {"window": window, "windowed_layers": layers} if layers else {}


def rotary_decoder_weights(config: TransformerConfig) -> NameTable:
    """Return where Llama has its weights, and most decoders after it."""
    return {
        **modules(
            {
                "decoder.embeddings.token": "model.embed_tokens",
                "decoder.output": "lm_head",
                "decoder.final_norm": "model.norm",
            }
        ),
        **layers(
            "decoder",
            "model.layers",
            query="self_attn.q_proj",
            key="self_attn.k_proj",
            value="self_attn.v_proj",
            query_norm="self_attn.q_norm",
            key_norm="self_attn.k_norm",
            output="self_attn.o_proj",
            attention_norm="input_layernorm",
            gate="mlp.gate_proj",
            up="mlp.up_proj",
            down="mlp.down_proj",
            feed_forward_norm="post_attention_layernorm",
        ),
    }


def turned_first(config: TransformerConfig, table: NameTable) -> NameTable:
    """Return a table by which the numbers of queries and keys that turn begin each half of a head.

    Theirs are the first of the head, whatever turns; the order changes no score.
    """
    order = _order(config.head_key_dim, config.turned_dim)
    changed = dict(table)
    for name, num_heads in (("q_proj", config.num_heads), ("k_proj", config.kv_heads)):
        for kind in ("weight", "bias"):
            ours = f"{LAYER[0]}.self_attention.{name}.{kind}"
            steps = (*table[ours].steps, HeadOrder(order, num_heads))
            changed[ours] = replace(table[ours], steps=steps)
    return changed


def _order(width: int, turned: int) -> tuple[int, ...]:
    half, rest = turned // 2, (width - turned) // 2
    first = (*range(half), *range(turned, turned + rest))
    second = (*range(half, turned), *range(turned + rest, width))
    return (*first, *second)
