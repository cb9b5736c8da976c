"""Models of a person's own classes, wrapped so that they are exported as ours are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from exporter.models.attention import MultiHeadAttention, padding_mask
from exporter.models.cache import LayerCache
from exporter.models.config import HeadConfig, ImageConfig, PositionConfig, TransformerConfig
from exporter.models.layers import EncoderOutput
from exporter.operators.cross_attention import cross_attention_over_row
from exporter.operators.heads import merge_heads, pad_heads, split_heads, unpad_heads

KeysAndValues = Sequence[tuple[Tensor, Tensor]]  # a layer each, (B, S, num_heads * head_dim)


class OwnConfig(TransformerConfig):
    """The configuration of an own model; options that only our blocks have keep their defaults."""

    vector_width: int | None = None  # None: it gives no vectors

    @property
    def gives_alignment(self) -> bool:
        """Whether a decoder tells what it attends to in its source: our blocks only."""
        return False

    @property
    def vector_dim(self) -> int | None:
        """Width of the vector of a text or picture."""
        return self.vector_width

    @classmethod
    def generator(
        cls,
        *,
        vocab_size: int,
        max_len: int,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        eos_token_id: int | None = None,
        max_source_len: int = 0,
        start_token_id: int | None = None,
    ) -> Self:
        """Describe a `GenerativeModel`: its decoder, and how long sources are if it has some."""
        return cls(
            architecture="encoder-decoder" if max_source_len else "decoder",
            vocab_size=vocab_size,
            max_target_len=max_len,
            max_source_len=max_source_len,
            num_decoder_layers=num_layers,
            num_encoder_layers=1 if max_source_len else 0,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            key_dim=head_dim,
            value_dim=head_dim,
            d_model=num_heads * head_dim,
            d_ff=1,
            positions=PositionConfig(kind="learned"),
            bos_token_id=start_token_id,
            eos_token_id=eos_token_id,
        )

    @classmethod
    def text_encoder(
        cls,
        *,
        vocab_size: int,
        max_len: int,
        labels: tuple[str, ...] = (),
        each_token: bool = False,
        vector_dim: int | None = None,
    ) -> Self:
        """Describe a model of one pass over a text: classes of it, or of each token, or vectors."""
        return cls(
            architecture="encoder",
            head=HeadConfig(each_token=each_token),
            vocab_size=vocab_size,
            max_source_len=max_len,
            labels=labels,
            vector_width=vector_dim,
            **_ONE_PASS,
        )

    @classmethod
    def image_encoder(
        cls, image: ImageConfig, *, labels: tuple[str, ...] = (), vector_dim: int | None = None
    ) -> Self:
        """Describe a model of one pass over an image."""
        return cls(
            architecture="vision-encoder",
            image=image,
            labels=labels,
            vector_width=vector_dim,
            **_ONE_PASS,
        )


_ONE_PASS: dict[str, Any] = {"d_model": 1, "num_heads": 1, "d_ff": 1, "num_encoder_layers": 1}


class Attend(Protocol):
    """Attention as the blocks of a decoder call it: plain in training, cached where it serves."""

    @property
    def position_ids(self) -> Tensor:
        """The positions of the new tokens, int64 (B, T)."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend causally from new positions to themselves and to those before.

        query (B, T, num_heads * head_dim); key, value (B, T, num_kv_heads * head_dim). Returns the
        shape of `query`.
        """

    def to_source(self, layer: int, query: Tensor) -> Tensor:
        """Attend from new positions to the source, (B, T, num_heads * head_dim) to the same."""


class GenerativeModel(Protocol):
    """A model that generates; those behind a source have the last two methods besides."""

    def embed(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Return what goes into the first block, (B, T, D), for int64 ids and places (B, T)."""

    def blocks(self, hidden: Tensor, attend: Attend) -> Tensor:
        """Return what comes out of the last block, (B, T, D); every block calls `attend` once."""

    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits (..., vocab_size) of (..., D)."""

    def encode(self, source_ids: Tensor, source_mask: Tensor | None) -> Tensor:
        """Return the memory (B, S, D) of sources; the mask is True for real tokens."""

    def source_keys_values(self, memory: Tensor) -> KeysAndValues:
        """Return what every block of the decoder reads of a source."""


class PlainAttention:
    """Attends over whole sequences, as in training; no cache."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        position_ids: Tensor | None = None,
        sources: KeysAndValues = (),
        source_mask: Tensor | None = None,
    ) -> None:
        """`sources` are a GenerativeModel's, `source_mask` bool (B, S): True = real token."""
        self._heads = num_heads, num_kv_heads or num_heads
        self._position_ids = position_ids
        self._sources = sources
        self._mask = padding_mask(source_mask)

    @property
    def position_ids(self) -> Tensor:
        """See Attend."""
        assert self._position_ids is not None, "give them to PlainAttention"
        return self._position_ids

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See Attend."""
        return self._attend(query, key, value, is_causal=True)

    def to_source(self, layer: int, query: Tensor) -> Tensor:
        """See Attend."""
        return self._attend(query, *self._sources[layer], mask=self._mask)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        num_heads, num_kv_heads = self._heads
        heads = F.scaled_dot_product_attention(
            split_heads(query, num_heads),
            split_heads(key, num_kv_heads),
            split_heads(value, num_kv_heads),
            attn_mask=mask,
            is_causal=is_causal,
            enable_gqa=num_heads != num_kv_heads,
        )
        return merge_heads(heads)


class _CachedAttention:
    """Attends over the rows of a cache, and keeps the new positions there."""

    def __init__(
        self, config: TransformerConfig, caches: Sequence[LayerCache], position_ids: Tensor
    ) -> None:
        self._config = config
        self._caches = caches
        self._scale = config.head_key_dim**-0.5
        self.position_ids = position_ids

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self._caches[layer].attend(
            query,
            key,
            value,
            num_heads=self._config.num_heads,
            num_kv_heads=self._config.kv_heads,
            value_dim=self._config.head_value_dim,
            scale=self._scale,
        )

    def to_source(self, layer: int, query: Tensor) -> Tensor:
        source, num_heads = self._caches[layer].cross, self._config.num_heads
        assert source is not None, "a model behind a source is described with max_source_len"
        padded = pad_heads(query, num_heads, source.key.shape[-1])
        output = cross_attention_over_row(padded, source, num_heads=num_heads, scale=self._scale)
        return unpad_heads(output, num_heads, self._config.head_value_dim)


class OwnDecoder(nn.Module):
    """The decoder of a `GenerativeModel`, with the methods that ours has."""

    def __init__(self, model: nn.Module, config: TransformerConfig) -> None:
        super().__init__()
        self.model = model
        self.config = config
        self.cache_head_dim = config.cache_head_dim

    def hidden_states(
        self,
        input_ids: Tensor,
        memory: Tensor | None = None,
        source_mask: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        caches: Sequence[LayerCache] | None = None,
    ) -> Tensor:
        """Return what the head reads, (B, T, D); arguments as of our `Decoder`."""
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).expand(input_ids.shape)
        hidden: Tensor = self._own.embed(input_ids, position_ids)
        return self._own.blocks(hidden, self._attend(memory, source_mask, position_ids, caches))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (..., vocab_size) of hidden states (..., D)."""
        return self._own.head(hidden)

    def logits_in_float32(self, hidden: Tensor) -> Tensor:
        """Return them as a graph gives them."""
        return self.logits(hidden).float()

    def cross_key_values(self, memory: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values of a source, ready to be written into a row of its cache."""
        heads, width = self.config.num_heads, self.cache_head_dim
        return [
            (
                split_heads(pad_heads(key, heads, width), heads),
                split_heads(pad_heads(value, heads, width), heads),
            )
            for key, value in self._own.source_keys_values(memory)
        ]

    def attentions(self) -> Iterator[MultiHeadAttention]:
        """Yield none: heads are widened where they are computed."""
        return iter(())

    def cross_attentions(self) -> Iterator[MultiHeadAttention]:
        """Yield none, likewise."""
        return iter(())

    @property
    def _own(self) -> GenerativeModel:
        own: GenerativeModel = self.model  # type: ignore[assignment]
        return own

    def _attend(
        self,
        memory: Tensor | None,
        source_mask: Tensor | None,
        position_ids: Tensor,
        caches: Sequence[LayerCache] | None,
    ) -> Attend:
        if caches is not None:
            return _CachedAttention(self.config, caches, position_ids)
        return PlainAttention(
            self.config.num_heads,
            self.config.num_kv_heads,
            position_ids=position_ids,
            sources=() if memory is None else self._own.source_keys_values(memory),
            source_mask=source_mask,
        )


class _Writer(nn.Module):
    def __init__(self, model: nn.Module, config: OwnConfig) -> None:
        super().__init__()
        self.config = config
        self.decoder = OwnDecoder(model, config)

    def encode(self, source_ids: Tensor, source_mask: Tensor | None = None) -> Tensor | None:
        """Return the memory of sources, None if the model reads none."""
        if not self.config.max_source_len:
            return None
        memory: Tensor = self.decoder.model.encode(source_ids, source_mask)  # type: ignore[operator]
        return memory


class _OnePass(nn.Module):
    """A model whose `forward` gives logits, vectors, or both in this order."""

    def __init__(self, model: nn.Module, config: OwnConfig) -> None:
        super().__init__()
        self.config = config
        self.model = model

    def forward(self, *inputs: Tensor | None) -> EncoderOutput:
        found = self.model(*inputs)
        if isinstance(found, tuple | list):
            return EncoderOutput(*found)
        return EncoderOutput(found, None) if self.config.labels else EncoderOutput(None, found)


class _Reader(_OnePass):
    def forward(self, input_ids: Tensor, mask: Tensor | None = None) -> EncoderOutput:  # type: ignore[override]
        if mask is None:
            mask = torch.ones_like(input_ids, dtype=torch.bool)
        return super().forward(input_ids, mask)


class _Viewer(_OnePass):
    def multiply_patches(self) -> None:
        """Change nothing: what such a model makes of pixels is its own."""

    def forward(self, pixel_values: Tensor) -> EncoderOutput:  # type: ignore[override]
        return super().forward(pixel_values)


def wrap(model: nn.Module, config: OwnConfig) -> nn.Module:
    """Return a model of a person's own class as one that is exported."""
    kinds: dict[str, type[nn.Module]] = {"vision-encoder": _Viewer, "encoder": _Reader}
    return kinds.get(config.architecture, _Writer)(model, config).eval()
