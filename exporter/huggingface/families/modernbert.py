"""ModernBERT: norm first, rotary positions, most layers with a window, gated feed-forward."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from exporter.huggingface.conversion import NameTable, modules, packed
from exporter.huggingface.encoder_heads import HeadedConfig, pooler
from exporter.huggingface.family import ACTIVATIONS, Activation, Family, SpecialTokens
from exporter.models.config import PositiveInt, Probability, TransformerConfig

Kind = Literal["full_attention", "sliding_attention"]


class RotaryBase(BaseModel):
    """How the positions of a kind of layer turn."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    rope_type: Literal["default"] = "default"
    rope_theta: float | None = None


class ModernBertConfig(HeadedConfig):
    """`config.json` of a ModernBERT; older files have the pattern of layers and the bases apart."""

    vocab_size: PositiveInt = 50368
    hidden_size: PositiveInt = 768
    intermediate_size: PositiveInt = 1152
    num_hidden_layers: PositiveInt = 22
    num_attention_heads: PositiveInt = 12
    hidden_activation: Activation = "gelu"
    max_position_embeddings: PositiveInt = 8192
    norm_eps: float = 1e-5
    norm_bias: bool = False
    pad_token_id: int = 50283
    attention_bias: bool = False
    attention_dropout: Probability = 0.0
    layer_types: tuple[Kind, ...] | None = None
    global_attn_every_n_layers: PositiveInt = 3
    local_attention: PositiveInt = 128
    rope_parameters: dict[Kind, RotaryBase] = {}
    global_rope_theta: float = 160_000.0
    local_rope_theta: float = 10_000.0
    embedding_dropout: Probability = 0.0
    mlp_bias: bool = False
    classifier_pooling: Literal["cls", "mean"] = "cls"
    classifier_bias: bool = False
    classifier_activation: Activation = "gelu"

    @property
    def local_layers(self) -> tuple[int, ...]:
        """The layers in which a token sees its neighbours only."""
        if self.layer_types is not None:
            return tuple(
                i for i, kind in enumerate(self.layer_types) if kind == "sliding_attention"
            )
        every = self.global_attn_every_n_layers
        return tuple(i for i in range(self.num_hidden_layers) if i % every)

    def base(self, kind: Kind) -> float:
        """Return the rotary base of a kind of layer."""
        old = self.global_rope_theta if kind == "full_attention" else self.local_rope_theta
        parameters = self.rope_parameters.get(kind)
        return (parameters.rope_theta if parameters else None) or old


def _config(source: ModernBertConfig, tokens: SpecialTokens) -> TransformerConfig:
    window: dict[str, Any] = {}
    if source.local_layers:
        window = {
            "window": source.local_attention // 2 + 1,
            "windowed_layers": source.local_layers,
            "local_rotary_base": source.base("sliding_attention"),
        }
    head = source.head_options(
        pooling="mean" if source.classifier_pooling == "mean" else "first",
        pooler=ACTIVATIONS[source.classifier_activation],
        pooler_bias=source.classifier_bias,
        pooler_norm=True,
    )
    return TransformerConfig(
        **head,
        **window,
        d_model=source.hidden_size,
        num_heads=source.num_attention_heads,
        attention_bias=source.attention_bias,
        d_ff=source.intermediate_size,
        num_encoder_layers=source.num_hidden_layers,
        activation=ACTIVATIONS[source.hidden_activation],
        gated_feed_forward=True,
        feed_forward_bias=source.mlp_bias,
        norm_position="first",
        norm_bias=source.norm_bias,
        norm_eps=source.norm_eps,
        first_norm=False,
        dropout=source.embedding_dropout,
        attention_dropout=source.attention_dropout,
        vocab_size=source.vocab_size,
        max_source_len=source.max_position_embeddings,
        positions="rotary",
        rotary_base=source.base("full_attention"),
        scale_embeddings=False,
        embedding_norm=True,
        pad_token_id=source.pad_token_id,
    )


def _weights(config: TransformerConfig) -> NameTable:
    ours, theirs = "encoder.layers.{i}", "model.layers.{i}"
    inputs = dict.fromkeys(("q_proj", "k_proj", "v_proj"), config.d_model)
    gated = dict.fromkeys(("gate_proj", "up_proj"), config.d_ff)
    return {
        **packed(f"{ours}.self_attention", inputs, f"{theirs}.attn.Wqkv"),
        **packed(f"{ours}.feed_forward", gated, f"{theirs}.mlp.Wi"),
        **modules(
            {
                "embeddings.token": "model.embeddings.tok_embeddings",
                "embeddings.norm": "model.embeddings.norm",
                f"{ours}.self_attention.out_proj": f"{theirs}.attn.Wo",
                f"{ours}.self_attention_residual.norm": f"{theirs}.attn_norm",
                f"{ours}.feed_forward.down_proj": f"{theirs}.mlp.Wo",
                f"{ours}.feed_forward_residual.norm": f"{theirs}.mlp_norm",
                "encoder.final_norm": "model.final_norm",
                "pooler.norm": "head.norm",
                "classifier": "classifier",
                **pooler(config, "head.dense"),
            }
        ),
    }


MODERNBERT = Family(
    title="ModernBERT",
    model_types=("modernbert",),
    source=ModernBertConfig,
    to_config=_config,
    weights=_weights,
    abilities=("classify", "label", "embed"),
    body="model.",
    ignored=r"head\..*|decoder\..*",
)
