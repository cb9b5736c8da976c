"""Attention of a decoder to its own row of the cache: new positions are written, then read.

`CachedAttention`, with rotary positions `RotaryCachedAttention`, with a bias for the distance of
query and key `BiasedCachedAttention`; where a query sees only its last keys, `Windowed` stands
before the first two. Each has a form whose cache is int8. The new positions are the last of
each row: those up to seqlens_k[b] of row b exist after the call.
"""

from __future__ import annotations

from dataclasses import dataclass
from string import Template
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from exporter.operators.domain import DOMAIN, VERSION, Functions
from exporter.operators.heads import merge_heads, rotate, split_heads

CACHED, ROTARY = "CachedAttention", "RotaryCachedAttention"
BIASED = "BiasedCachedAttention"
_WINDOWED = {name: f"Windowed{name}" for name in (CACHED, ROTARY)}
_ALL = (CACHED, ROTARY, BIASED, *_WINDOWED.values())
INT8_OF = {name: f"Int8{name}" for name in _ALL}  # the same with an int8 cache


class _Inputs(NamedTuple):
    """The operator's inputs; queries, keys and values of the new positions are still apart."""

    query: Tensor
    key: Tensor
    value: Tensor
    past_key: Tensor
    past_value: Tensor
    seqlens_k: Tensor
    total_seq: Tensor
    position_ids: Tensor


@dataclass(frozen=True)
class _Heads:
    """How the operator attends."""

    num_heads: int
    num_kv_heads: int
    scale: float
    rotary: tuple[Tensor, Tensor] | None
    distance_bias: Tensor | None
    softcap: float | None
    window: int | None

    @property
    def operator(self) -> str:
        """The operator that attends so."""
        if self.distance_bias is not None:
            return BIASED
        name = CACHED if self.rotary is None else ROTARY
        return name if self.window is None else _WINDOWED[name]

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """The inputs beside those that all have."""
        return (self.rotary or ()) if self.distance_bias is None else (self.distance_bias,)


_Outputs = tuple[Tensor, Tensor, Tensor]


def cached_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_key: Tensor,
    past_value: Tensor,
    seqlens_k: Tensor,
    total_seq: Tensor,
    position_ids: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    rotary: tuple[Tensor, Tensor] | None = None,
    distance_bias: Tensor | None = None,
    softcap: float | None = None,
    window: int | None = None,
) -> _Outputs:
    """Write S new positions into each row, then attend from them causally to their own row.

    query (B, S, num_heads * D); key, value (B, S, num_kv_heads * D); past_key, past_value
    (B, num_kv_heads, max_len, D); seqlens_k int32 (B,) = length of the row after this call,
    minus 1; total_seq int32 (1,) = at least the largest such length; position_ids int64 (B, S) =
    the new positions. With `rotary`, cosines and sines (max_len, D / 2), queries and keys are
    turned by their place in the row. With `distance_bias` (max_len, num_heads) row i is added to
    the scores of a query's key that stands i places before it; not both. `softcap` c makes
    c * tanh(score / c) of scores. A query sees no more than the last `window` keys, its own among
    them.
    Returns the output (B, S, num_heads * D) and the rows as they are afterwards. The new positions
    are the last S of the row. The one exception is a first call padded on the right (length below
    S): it writes positions 0 to S-1, and gives garbage for padding that later calls overwrite.
    """
    inputs = _Inputs(query, key, value, past_key, past_value, seqlens_k, total_seq, position_ids)
    attend = _emit if torch.onnx.is_in_onnx_export() else _attend
    how = _Heads(num_heads, num_kv_heads, scale, rotary, distance_bias, softcap, window)
    return attend(inputs, how)


def _emit(inputs: _Inputs, heads: _Heads) -> _Outputs:
    # [B, S, (num_heads + 2 * num_kv_heads) * D]
    packed = torch.cat((inputs.query, inputs.key, inputs.value), dim=-1)
    output, present_key, present_value = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::{heads.operator}",
        (packed, *inputs[3:], *heads.tables),
        {
            "num_heads": heads.num_heads,
            "num_kv_heads": heads.num_kv_heads,
            "head_dim": inputs.past_key.shape[3],
            "capacity": inputs.past_key.shape[2],
            "scale": heads.scale,
            "softcap": heads.softcap or 0.0,
            "window": heads.window or -1,
        },
        dtypes=(inputs.query.dtype, inputs.past_key.dtype, inputs.past_value.dtype),
        shapes=(inputs.query.shape, inputs.past_key.shape, inputs.past_value.shape),
        version=VERSION,
    )
    return output, present_key, present_value


def _attend(inputs: _Inputs, heads: _Heads) -> _Outputs:
    query = split_heads(inputs.query, heads.num_heads)  # (B, num_heads, S, D)
    key = split_heads(inputs.key, heads.num_kv_heads)  # (B, num_kv_heads, S, D)
    value = split_heads(inputs.value, heads.num_kv_heads)
    places = inputs.position_ids

    if heads.rotary is not None:
        cos, sin = (table[places][:, None] for table in heads.rotary)  # (B, 1, S, D / 2)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)

    index = places[:, None, :, None].expand_as(key)
    present_key = inputs.past_key.scatter(2, index, key)
    present_value = inputs.past_value.scatter(2, index, value)

    distances = places[..., None] - torch.arange(present_key.shape[2], device=query.device)
    mask = _mask(distances, heads)
    if heads.softcap is not None:
        output = _attend_capped(query, present_key, present_value, mask, heads)
        return merge_heads(output), present_key, present_value
    output = F.scaled_dot_product_attention(
        query,
        present_key,
        present_value,
        attn_mask=mask,
        scale=heads.scale,
        enable_gqa=heads.num_heads != heads.num_kv_heads,
    )
    return merge_heads(output), present_key, present_value


def _mask(distances: Tensor, heads: _Heads) -> Tensor:
    """Return what is allowed, (B, 1, S, max_len), or added to scores, (B, num_heads, S, max_len).

    `distances` (B, S, max_len) are from a key to a query, negative where the key comes later.
    """
    allowed = (distances >= 0)[:, None]
    if heads.window is not None:
        allowed &= (distances < heads.window)[:, None]
    if heads.distance_bias is None:
        return allowed
    of_keys = heads.distance_bias[distances.clamp(min=0)].permute(0, 3, 1, 2)
    return of_keys.masked_fill(~allowed, -torch.inf)


def _attend_capped(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, heads: _Heads
) -> Tensor:
    """Do as scaled_dot_product_attention with scores that have a bound, and no bias."""
    assert heads.softcap is not None
    group = heads.num_heads // heads.num_kv_heads
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = torch.tanh(query @ key.mT * (heads.scale / heads.softcap)) * heads.softcap
    return scores.masked_fill(~allowed, -torch.inf).softmax(dim=-1) @ value


_ROTARY_INPUTS = ("cos_cache", "sin_cache")
_INT8_INPUTS = ("key_scale", "value_scale")


def _function(name: str, body: str) -> str:
    """Return the function of an operator of this family."""
    inputs = "packed_qkv, past_key, past_value, seqlens_k, total_seq, position_ids".split(", ")
    inputs += _ROTARY_INPUTS if name.endswith(ROTARY) else ()
    inputs += ("distance_bias",) if name.endswith(BIASED) else ()
    inputs += _INT8_INPUTS if name in INT8_OF.values() else ()
    return f"""
{name} <num_heads, num_kv_heads, head_dim, capacity, scale, softcap, window>
  ({", ".join(inputs)}) => (output, present_key, present_value)
{{
{body}
}}
"""


# How many keys there are: of the longest row that is in use, or of a whole row, which is what the
# standard's operator reads. The latter is a constant, as are then the places of the keys.
_KEYS_IN_USE = """
  total_1d = Cast <to: int = 7> (total_seq)
  num_keys = Squeeze (total_1d)
"""
_WHOLE_ROW = """
  num_keys = Constant <value_int: int = @capacity> ()
"""

# How far every new position's keys stand before it, [B, S, T]. Equal in all layers: onnxruntime
# computes it once, outside of them.
_DISTANCES = """
  zero = Constant <value_int: int = 0> ()
  step = Constant <value_int: int = 1> ()
  keys = Range (zero, num_keys, step)
  last_axis = Constant <value_ints: ints = [-1]> ()
  queries = Unsqueeze (position_ids, last_axis)
  signed = Sub (queries, keys)
"""

# Whether these keys are in the window, [B, 1, S, T]; keys behind a query are left out anyway.
_NEAR = f"""{_DISTANCES}
  window = Constant <value_int: int = @window> ()
  is_near = Less (signed, window)
  head_axis = Constant <value_ints: ints = [1]> ()
  near = Unsqueeze (is_near, head_axis)
"""

# The bias of these keys, [B, num_heads, S, T].
_BIAS = f"""{_DISTANCES}
  distances = Max (signed, zero)
  by_key = Gather <axis: int = 0> (distance_bias, distances)
  bias = Transpose <perm: ints = [0, 3, 1, 2]> (by_key)
"""


def _group_query(name: str) -> str:
    """Return the fastest kernel; it turns by the place in the row, which seqlens_k tells it."""
    is_rotary, is_biased = name.endswith(ROTARY), name.endswith(BIASED)
    is_int8 = name in INT8_OF.values()
    inputs = ["packed_qkv", "", "", "past_key", "past_value", "seqlens_k", "total_seq"]
    inputs += _ROTARY_INPUTS if is_rotary else ("", "")
    inputs += ("", "bias" if is_biased else "", "")  # its own positions, and a sink
    inputs += _INT8_INPUTS if is_int8 else ()
    attributes = ["num_heads: int = @num_heads", "kv_num_heads: int = @num_kv_heads"]
    if is_int8:
        attributes += [f'{part}_quant_type: string = "PER_TENSOR"' for part in ("k", "v")]
        attributes += ["kv_cache_bit_width: int = 8"]
    attributes += ["scale: float = @scale", "softcap: float = @softcap"]
    attributes += ["local_window_size: int = @window"]
    attributes += ["do_rotary: int = 1", "rotary_interleaved: int = 0"] if is_rotary else []
    bias = f"{_KEYS_IN_USE}{_BIAS}" if is_biased else ""
    kernel = "output, present_key, present_value = com.microsoft.GroupQueryAttention"
    given = ", ".join(inputs).rstrip(", ")
    return _function(name, f"{bias}  {kernel} <{', '.join(attributes)}> ({given})")


# Slices, for a Split into unequal parts, as of grouped heads, copies their sizes to a device from
# memory of the host that is gone when a captured call is replayed.
_SPLIT_HEADS = """
  one = Constant <value_int: int = 1> ()
  first = Constant <value_int: int = 0> ()
  start = Gather <axis: int = 1> (position_ids, first)
  last = Cast <to: int = 7> (seqlens_k)
  lengths = Add (last, one)
  rank_1 = Constant <value_ints: ints = [1]> ()
  num_heads_scalar = Constant <value_int: int = @num_heads> ()
  num_heads = Reshape (num_heads_scalar, rank_1)
  num_kv_heads_scalar = Constant <value_int: int = @num_kv_heads> ()
  num_kv_heads = Reshape (num_kv_heads_scalar, rank_1)
  head_dim_scalar = Constant <value_int: int = @head_dim> ()
  head_dim = Reshape (head_dim_scalar, rank_1)
  same = Constant <value_ints: ints = [0, 0]> ()
  rest = Constant <value_ints: ints = [-1]> ()
  by_head = Concat <axis: int = 0> (same, rest, head_dim)
  heads = Reshape (packed_qkv, by_head)
  heads_first = Transpose <perm: ints = [0, 2, 1, 3]> (heads)
  key_end = Add (num_heads, num_kv_heads)
  value_end = Add (key_end, num_kv_heads)
  begin = Constant <value_ints: ints = [0]> ()
  by_heads = Constant <value_ints: ints = [1]> ()
  query = Slice (heads_first, begin, num_heads, by_heads)
  key = Slice (heads_first, num_heads, key_end, by_heads)
  value = Slice (heads_first, key_end, value_end, by_heads)
"""

_ROTATE = """
  turned_query = RotaryEmbedding (query, cos_cache, sin_cache, position_ids)
  turned_key = RotaryEmbedding (key, cos_cache, sin_cache, position_ids)
"""

_ATTEND = """
  present_key = TensorScatter <axis: int = -2> (past_key, $key, start)
  present_value = TensorScatter <axis: int = -2> (past_value, value, start)
  attended = Attention <scale: float = @scale, softcap: float = @softcap, is_causal: int = 1>
    ($query, present_key, present_value, $mask, , , lengths)
  tokens_first = Transpose <perm: ints = [0, 2, 1, 3]> (attended)
  flat = Concat <axis: int = 0> (same, rest)
  output = Reshape (tokens_first, flat)
"""


def _standard(name: str) -> str:
    """Return the standard's own operators, for what the fastest kernel lacks."""
    turn, turned = (_ROTATE, "turned_") if name.endswith(ROTARY) else ("", "")
    make_mask, mask = "", ""
    if name == BIASED:
        make_mask, mask = f"{_WHOLE_ROW}{_BIAS}", "bias"
    if name in _WINDOWED.values():
        make_mask, mask = f"{_WHOLE_ROW}{_NEAR}", "near"
    attend = Template(_ATTEND).substitute(query=f"{turned}query", key=f"{turned}key", mask=mask)
    return _function(name, f"{_SPLIT_HEADS}{turn}{make_mask}{attend}")


GROUP_QUERY: Functions = {name: _group_query(name) for name in (*_ALL, *INT8_OF.values())}
STANDARD: Functions = {name: _standard(name) for name in _ALL}
