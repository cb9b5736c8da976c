"""A plain `torch.nn.Transformer` with its embeddings and its head, as a model that writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from exporter.models.own import Attend, KeysAndValues, OwnConfig

Embed = Callable[[Tensor, Tensor], Tensor]  # ids and places, int64 (B, S), to (B, S, d_model)


class TorchTransformer(nn.Module):
    """Computes what the module computes, but for the cache; its weights are the module's own."""

    def __init__(
        self, transformer: nn.Transformer, source: nn.Module, target: nn.Module, output: nn.Module
    ) -> None:
        """`source` and `target` embed tokens, given ids and places; `output` makes logits.

        Raises ValueError for a module that is not batch_first.
        """
        super().__init__()
        if not transformer.batch_first:
            raise ValueError("the module is not batch_first; build it with batch_first=True")
        self.transformer = transformer
        self.source = source
        self.target = target
        self.output = output

    def describe(
        self,
        *,
        vocab_size: int,
        max_source_len: int,
        max_len: int,
        start_token_id: int,
        eos_token_id: int,
    ) -> OwnConfig:
        """Return what the engine has to know, the sizes of the module filled in."""
        num_heads = self.transformer.nhead
        return OwnConfig.generator(
            vocab_size=vocab_size,
            max_len=max_len,
            max_source_len=max_source_len,
            start_token_id=start_token_id,
            eos_token_id=eos_token_id,
            num_layers=len(self._layers),
            num_heads=num_heads,
            head_dim=self.transformer.d_model // num_heads,
        )

    def embed(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """See GenerativeModel."""
        return cast(Embed, self.target)(input_ids, position_ids)

    def encode(self, source_ids: Tensor, source_mask: Tensor | None = None) -> Tensor:
        """See GenerativeModel."""
        encoder = cast(nn.TransformerEncoder, self.transformer.encoder)
        places = torch.arange(source_ids.shape[1], device=source_ids.device)
        hidden = cast(Embed, self.source)(source_ids, places.expand(source_ids.shape))
        padding = None if source_mask is None else ~source_mask
        for layer in encoder.layers:
            hidden = layer(hidden, src_key_padding_mask=padding)
        return hidden if encoder.norm is None else encoder.norm(hidden)

    def source_keys_values(self, memory: Tensor) -> KeysAndValues:
        """See GenerativeModel."""
        pairs = []
        for layer in self._layers:
            _, key, value = _project(layer.multihead_attn, memory)
            pairs.append((key, value))
        return pairs

    def blocks(self, hidden: Tensor, attend: Attend) -> Tensor:
        """See GenerativeModel."""
        for i, layer in enumerate(self._layers):
            hidden = _run(layer, i, hidden, attend)
        norm = cast(nn.TransformerDecoder, self.transformer.decoder).norm
        return hidden if norm is None else norm(hidden)

    def head(self, hidden: Tensor) -> Tensor:
        """See GenerativeModel."""
        logits: Tensor = self.output(hidden)
        return logits

    @property
    def _layers(self) -> list[nn.TransformerDecoderLayer]:
        decoder = cast(nn.TransformerDecoder, self.transformer.decoder)
        return cast(list[nn.TransformerDecoderLayer], list(decoder.layers))


def _run(layer: nn.TransformerDecoderLayer, i: int, hidden: Tensor, attend: Attend) -> Tensor:
    """Do as `layer` does in eval mode."""

    def to_self(x: Tensor) -> Tensor:
        output: Tensor = layer.self_attn.out_proj(attend(i, *_project(layer.self_attn, x)))
        return output

    def to_source(x: Tensor) -> Tensor:
        query, _, _ = _project(layer.multihead_attn, x)
        output: Tensor = layer.multihead_attn.out_proj(attend.to_source(i, query))
        return output

    def feed_forward(x: Tensor) -> Tensor:
        output: Tensor = layer.linear2(layer.activation(layer.linear1(x)))
        return output

    for norm, sublayer in (
        (layer.norm1, to_self),
        (layer.norm2, to_source),
        (layer.norm3, feed_forward),
    ):
        if layer.norm_first:
            hidden = hidden + sublayer(norm(hidden))
        else:
            hidden = norm(hidden + sublayer(hidden))
    return hidden


def _project(attention: nn.MultiheadAttention, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of (B, S, d_model), each of that shape."""
    packed = F.linear(hidden, attention.in_proj_weight, attention.in_proj_bias)
    query, key, value = packed.chunk(3, dim=-1)
    return query, key, value
