"""Options of attention (section 3.2 of Vaswani et al. 2017)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from exporter.models.config.checked import Checks
from exporter.models.config.sizes import (
    WITH_DECODER,
    PositiveFloat,
    PositiveInt,
    SizeOptions,
    Width,
)

_CACHE_WIDTHS = 8  # the attention kernels take multiples of it only


class AttentionOptions(SizeOptions):
    """Heads: how wide they are, and how they score."""

    key_dim: Width | None = None  # width of a head's keys and queries; None: d_model / num_heads
    value_dim: Width | None = None  # width of a head's values; None: d_model / num_heads
    attention_bias: bool = True
    attention_output: bool = True  # W_O; False: the values of a single head are the output
    attention_score: Literal["dot", "additive"] = "dot"  # additive: encoder-only families
    attention_normalizer: Literal["softmax", "relu"] = "softmax"  # relu: encoder-only families
    attention_scale: PositiveFloat | None = None  # None: 1 / sqrt(key_dim)
    attention_output_bias: bool | None = None  # None: as attention_bias
    attention_softcap: PositiveFloat | None = None  # c * tanh(score / c)
    qk_norm: bool = False  # mean-square norms of every query and key
    # A query sees so many keys, the one at its own place among them: before it, of one-pass
    # families on either side; None: all
    window: PositiveInt | None = None
    windowed_layers: tuple[int, ...] | None = None  # None: all

    @property
    def kv_heads(self) -> int:
        """Number of heads of keys and values; each serves num_heads / kv_heads query heads."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_key_dim(self) -> int:
        """Width of a head's queries and keys."""
        return self.key_dim or self.d_model // self.num_heads

    @property
    def head_value_dim(self) -> int:
        """Width of a head's values."""
        return self.value_dim or self.d_model // self.num_heads

    @property
    def cache_head_dim(self) -> int:
        """Width of a head in the cache: the wider of keys and values, up to a multiple of 8."""
        widest = max(self.head_key_dim, self.head_value_dim)
        return -(-widest // _CACHE_WIDTHS) * _CACHE_WIDTHS

    def layer_window(self, layer: int) -> int | None:
        """Return how many keys a query of this layer sees, None for all before it."""
        return self.window if self._is_windowed(layer) else None

    def _is_windowed(self, layer: int) -> bool:
        return self.windowed_layers is None or layer in self.windowed_layers

    @property
    def attention_checks(self) -> Checks:
        """The rules between options of attention."""
        return (
            self._check_width,
            self._check_output,
            self._check_scale,
            self._check_score,
            self._check_groups,
            self._check_group_family,
            self._check_windowed_layers,
            self._check_score_family,
            self._check_window_family,
            self._check_qk_norm,
        )

    def _check_windowed_layers(self) -> Iterator[str]:
        if self.windowed_layers is not None and self.window is None:
            yield "windowed_layers needs window, how many keys a query of them sees"

    def _check_score_family(self) -> Iterator[str]:
        given = {
            "attention_softcap": self.attention_softcap,
            "qk_norm": self.qk_norm,
        }
        for name, value in given.items():
            if value and self.family != "gpt":
                yield f"{name} is for gpt, got {self.family}"

    def _check_window_family(self) -> Iterator[str]:
        if self.window is not None and self.family in ("encoder-decoder", "vit"):
            yield f"window is for gpt, bert and labeller, got {self.family}"

    def _check_qk_norm(self) -> Iterator[str]:
        if self.qk_norm and self.head_key_dim % 8:
            yield f"qk_norm needs a key_dim that is a multiple of 8, got {self.head_key_dim}"

    def _check_width(self) -> Iterator[str]:
        if self.d_model % self.num_heads and (self.key_dim is None or self.value_dim is None):
            yield (
                f"d_model ({self.d_model}) must be a multiple of num_heads ({self.num_heads}), "
                "or key_dim and value_dim must be given"
            )

    def _check_output(self) -> Iterator[str]:
        is_one_head = self.num_heads == 1 and self.head_value_dim == self.d_model
        if not self.attention_output and not is_one_head:
            yield (
                "attention without an output projection needs one head with values as wide as the "
                f"model, got num_heads {self.num_heads}, value_dim {self.head_value_dim} and "
                f"d_model {self.d_model}"
            )

    def _check_scale(self) -> Iterator[str]:
        if self.attention_score == "additive" and self.attention_scale is not None:
            yield f"attention_scale ({self.attention_scale}) is for dot scores, got additive"

    def _check_score(self) -> Iterator[str]:
        is_plain = (self.attention_score, self.attention_normalizer) == ("dot", "softmax")
        if not is_plain and self.family in WITH_DECODER:
            yield "additive scores and the relu normaliser are for encoder-only families"

    def _check_groups(self) -> Iterator[str]:
        if self.num_heads % self.kv_heads:
            yield (
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads "
                f"({self.num_kv_heads})"
            )

    def _check_group_family(self) -> Iterator[str]:
        if self.kv_heads != self.num_heads and self.family != "gpt":
            yield (
                f"num_kv_heads ({self.num_kv_heads}) below num_heads ({self.num_heads}) is for "
                f"gpt, got {self.family}"
            )
