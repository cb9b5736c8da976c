"""The layers that every architecture is built of, and their stacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from exporter.models.attention import MultiHeadAttention, cap, local_mask, padding_mask
from exporter.models.cache import LayerCache
from exporter.models.config import TransformerConfig
from exporter.models.embeddings import Embeddings, make_norm
from exporter.models.positions import (
    RelativePositions,
    RotaryPositions,
    make_local_rotary,
    make_relative,
    make_rotary,
)

OUTPUT_BIAS = "decoder.output.bias"  # the weight of a model that has a decoder

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "silu": nn.SiLU,
}


class EncoderOutput(NamedTuple):
    """The output of a one-pass model."""

    logits: Tensor | None  # (B, num_labels), or (B, S, num_labels) of a labeller; None: no labels
    embedding: Tensor | None  # (B, D); None: the model gives no vectors


def make_linear(in_features: int, out_features: int, bias: bool = True) -> nn.Linear:
    """Return a Linear with Xavier weights and zero bias."""
    linear = nn.Linear(in_features, out_features, bias=bias)
    nn.init.xavier_uniform_(linear.weight)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear


def make_final_norm(config: TransformerConfig) -> nn.Module:
    """Return the norm after the last layer, or Identity where the model has none."""
    return make_norm(config) if config.has_final_norm else nn.Identity()


class PositionwiseFeedForward(nn.Module):
    """Section 3.3 of Vaswani et al. 2017: d_model -> d_ff -> d_model, at each position alone.

    Gated as in Shazeer 2020, "GLU Variants Improve Transformer": down(activation(gate) * up).
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        bias = config.feed_forward.bias
        self.gate_proj: nn.Linear | None = None
        if config.feed_forward.gated:
            self.gate_proj = make_linear(config.d_model, config.d_ff, bias=bias)
        self.up_proj = make_linear(config.d_model, config.d_ff, bias=bias)
        self.activation = ACTIVATIONS[config.feed_forward.activation]()
        self.down_proj = make_linear(config.d_ff, config.d_model, bias=bias)
        self.inner_dropout = nn.Dropout(config.feed_forward.dropout)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (B, S, d_model) to (B, S, d_model)."""
        up: Tensor = self.up_proj(hidden)  # (B, S, d_ff)
        if self.gate_proj is None:
            inner: Tensor = self.activation(up)
        else:
            inner = self.activation(self.gate_proj(hidden)) * up
        inner = self.inner_dropout(inner)
        if inner.dtype != (dtype := self.down_proj.weight.dtype):  # it is kept in float32
            inner = inner.to(dtype)
        output: Tensor = self.dropout(self.down_proj(inner))
        return output


class Residual(nn.Module):
    """A residual connection around a sub-layer, which drops out its own output.

    Norm last, as in the paper: norm(x + sublayer(x)). Norm first: x + sublayer(norm(x)). Both:
    x + output_norm(sublayer(norm(x))).
    """

    def __init__(self, config: TransformerConfig, *, has_norm: bool = True) -> None:
        super().__init__()
        self.norm = make_norm(config) if has_norm else nn.Identity()
        self.norm_first = config.norm_position != "last"
        self.output_norm = make_norm(config) if config.norm_position == "both" else nn.Identity()

    def forward(self, hidden: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Map (B, S, d_model) to (B, S, d_model)."""
        if self.norm_first:
            added: Tensor = self.output_norm(sublayer(self.norm(hidden)))
            return hidden + added
        output: Tensor = self.norm(hidden + sublayer(hidden))
        return output


class EncoderLayer(nn.Module):
    """Self-attention over the whole sequence, then feed-forward."""

    def __init__(
        self,
        config: TransformerConfig,
        number: int = 0,
        rotary: RotaryPositions | None = None,
        relative: RelativePositions | None = None,
    ) -> None:
        """`number` is the place of the layer, the first is 0."""
        super().__init__()
        self.self_attention = MultiHeadAttention(config, rotary, relative)
        has_norm = config.first_norm or number > 0
        self.self_attention_residual = Residual(config, has_norm=has_norm)
        self.feed_forward = PositionwiseFeedForward(config)
        self.feed_forward_residual = Residual(config)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, S, d_model) to the same shape; `mask` broadcasts to (B, num_heads, S, S)."""
        hidden = self.self_attention_residual(
            hidden, lambda x: self.self_attention(x, x, x, mask=mask)
        )
        output: Tensor = self.feed_forward_residual(hidden, self.feed_forward)
        return output


class Encoder(nn.Module):
    """A stack of encoder layers over embedded input."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        # One table for all layers; registered first, it is stored once, under this name.
        self.relative = make_relative(config, config.max_source_len, causal=False)
        rotary = make_rotary(config, config.max_source_len)
        local = make_local_rotary(config, config.max_source_len) or rotary
        self._windows = [config.attention.layer_window(i) for i in range(config.num_encoder_layers)]
        self.layers = nn.ModuleList(
            EncoderLayer(config, i, rotary if window is None else local, self.relative)
            for i, window in enumerate(self._windows)
        )
        self.final_norm = make_final_norm(config)
        self.places: Tensor  # (max_source_len,)
        num_places = config.max_source_len if config.attention.window else 0
        self.register_buffer("places", torch.arange(num_places), persistent=False)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, S, d_model) to the same shape; `mask` bool (B, S), True = real position."""
        attention_mask = padding_mask(mask)
        for layer, window in zip(self.layers, self._windows, strict=True):
            seen = attention_mask
            if window is not None:
                seen = local_mask(self.places[: hidden.shape[1]], window, attention_mask)
            hidden = layer(hidden, seen)
        output: Tensor = self.final_norm(hidden)
        return output


class DecoderLayer(nn.Module):
    """Causal self-attention, cross-attention where there is an encoder, then feed-forward."""

    def __init__(
        self,
        config: TransformerConfig,
        rotary: RotaryPositions | None = None,
        relative: RelativePositions | None = None,
        *,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.parallel = config.parallel_residual
        self.self_attention = MultiHeadAttention(config, rotary, relative, window=window)
        self.self_attention_residual = Residual(config)
        self.cross_attention: MultiHeadAttention | None = None
        if config.num_encoder_layers:
            self.cross_attention = MultiHeadAttention(config)
            self.cross_attention_residual = Residual(config)
        self.feed_forward = PositionwiseFeedForward(config)
        self.feed_forward_residual = Residual(config)

    def forward(
        self,
        hidden: Tensor,
        memory: Tensor | None = None,
        source_mask: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Map (B, T, d_model) to the same shape.

        Without a cache `hidden` is the whole target; `memory` (B, S, d_model) is the encoder's
        output and `source_mask` broadcasts to (B, num_heads, T, S). With a cache `hidden` is the
        T newest positions, and the source is read from the cache instead of `memory`.
        """
        if self.parallel:
            attended = self._attend_to_self(self.self_attention_residual.norm(hidden), cache)
            fed: Tensor = self.feed_forward(self.feed_forward_residual.norm(hidden))
            return hidden + (attended + fed)
        hidden = self.self_attention_residual(hidden, lambda x: self._attend_to_self(x, cache))
        if self.cross_attention is not None:
            hidden = self.cross_attention_residual(
                hidden, lambda x: self._attend_to_source(x, memory, source_mask, cache)
            )
        output: Tensor = self.feed_forward_residual(hidden, self.feed_forward)
        return output

    def _attend_to_self(self, hidden: Tensor, cache: LayerCache | None) -> Tensor:
        if cache is not None:
            return self.self_attention.forward_cached(hidden, cache)
        output: Tensor = self.self_attention(hidden, hidden, hidden, is_causal=True)
        return output

    def _attend_to_source(
        self,
        hidden: Tensor,
        memory: Tensor | None,
        source_mask: Tensor | None,
        cache: LayerCache | None,
    ) -> Tensor:
        assert self.cross_attention is not None
        if cache is not None:
            return self.cross_attention.forward_over_row(hidden, cache)
        output: Tensor = self.cross_attention(hidden, memory, memory, mask=source_mask)
        return output


class Decoder(nn.Module):
    """Target embeddings, a stack of decoder layers, and the output head."""

    def __init__(self, config: TransformerConfig, token: nn.Embedding | None = None) -> None:
        super().__init__()
        self.embeddings = Embeddings(config, config.max_target_len, token)
        rotary = make_rotary(config, config.max_target_len)  # one table for all layers
        local = make_local_rotary(config, config.max_target_len) or rotary
        self.relative = make_relative(config, config.max_target_len, causal=True)  # likewise
        windows = [config.attention.layer_window(i) for i in range(config.num_decoder_layers)]
        self.layers = nn.ModuleList(
            DecoderLayer(config, rotary if window is None else local, self.relative, window=window)
            for window in windows
        )
        self.final_norm = make_final_norm(config)
        self.token_out: nn.Module = nn.Identity()
        if config.token_dim is not None:
            self.token_out = make_linear(config.d_model, config.token_dim, bias=False)
        width = config.token_dim or config.d_model  # the output layer's input
        self.output = make_linear(width, config.vocab_size, bias=config.output_bias)
        if config.tie_output:
            self.output.weight = self.embeddings.token.weight
        self.logit_softcap = config.logit_softcap
        self.output_scale = config.output_scale
        self.cache_head_dim = config.cache_head_dim

    def forward(
        self,
        input_ids: Tensor,
        memory: Tensor | None = None,
        source_mask: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        caches: Sequence[LayerCache] | None = None,
    ) -> Tensor:
        """Return the logits (B, T, vocab_size); arguments as of `hidden_states`."""
        hidden = self.hidden_states(
            input_ids, memory, source_mask, position_ids=position_ids, caches=caches
        )
        return self.logits(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (..., vocab_size) of what `hidden_states` returns."""
        if self.logit_softcap is None:
            logits: Tensor = self.output(hidden)
            return logits
        # The bias, by which tokens are kept from being written, has no bound.
        capped = self.capped(functional.linear(hidden, self.output.weight))
        return capped if self.output.bias is None else capped + self.output.bias

    def logits_in_float32(self, hidden: Tensor) -> Tensor:
        """Return them as a graph gives them: a bias in float32 is added in float32."""
        if self.output.weight.dtype == torch.float32:
            return self.logits(hidden)
        logits = self.capped(functional.linear(hidden, self.output.weight).float())
        return logits if self.output.bias is None else logits + self.output.bias

    def capped(self, logits: Tensor) -> Tensor:
        """Return logits, bounded if the model bounds them."""
        return cap(logits, self.logit_softcap)

    def hidden_states(
        self,
        input_ids: Tensor,
        memory: Tensor | None = None,
        source_mask: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        caches: Sequence[LayerCache] | None = None,
    ) -> Tensor:
        """Return what the output head reads, (B, T, d_model or token_dim), after the final norm.

        input_ids, position_ids int64 (B, T); memory (B, S, d_model); source_mask bool (B, S).
        With `caches`, one a layer, the ids are only the newest of each row, `position_ids` says
        where they stand, and each cache holds them afterwards.
        """
        hidden: Tensor = self.embeddings(input_ids, position_ids)
        attention_mask = padding_mask(source_mask)
        for i, layer in enumerate(self.layers):
            hidden = layer(hidden, memory, attention_mask, caches[i] if caches else None)
        hidden = self.token_out(self.final_norm(hidden))
        return hidden if self.output_scale == 1 else hidden * self.output_scale

    def cross_key_values(self, memory: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return each layer's cross-attention keys and values of `memory` (B, S, d_model).

        Each is (B, num_kv_heads, S, head_dim), ready to be written into a row of the cross cache.
        """
        pairs = []
        for layer in self._layers():
            assert layer.cross_attention is not None, "asked of a decoder behind an encoder"
            pairs.append(layer.cross_attention.key_value_rows(memory, self.cache_head_dim))
        return pairs

    def attentions(self) -> Iterator[MultiHeadAttention]:
        """Yield the attention of every layer, to itself and to the source."""
        yield from (layer.self_attention for layer in self._layers())
        yield from self.cross_attentions()

    def cross_attentions(self) -> Iterator[MultiHeadAttention]:
        """Yield the attention of every layer to the source, if there is one."""
        for layer in self._layers():
            if layer.cross_attention is not None:
                yield layer.cross_attention

    def _layers(self) -> list[DecoderLayer]:
        return cast(list[DecoderLayer], list(self.layers))
