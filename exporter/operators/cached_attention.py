"""Attention of a decoder to its own row of the cache: new positions are written, then read.

`CachedAttention`, with rotary positions `RotaryCachedAttention`, and of both a twin whose cache is
int8. The new positions are the last of each row: those up to seqlens_k[b] of row b exist after the
call.
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
INT8_OF = {name: f"Int8{name}" for name in (CACHED, ROTARY)}  # what takes its place: an int8 cache


class _Inputs(NamedTuple):
    """What the operator reads, the queries, keys and values of the new positions still apart."""

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
) -> _Outputs:
    """Write S new positions into each row, then attend from them causally to their own row.

    query (B, S, num_heads * D); key, value (B, S, num_kv_heads * D); past_key, past_value
    (B, num_kv_heads, max_len, D); seqlens_k int32 (B,) = length of the row after this call,
    minus 1; total_seq int32 (1,) = at least the largest such length; position_ids int64 (B, S) =
    the new positions. With `rotary`, cosines and sines (max_len, D / 2), queries and keys are
    turned by their place in the row.
    Returns the output (B, S, num_heads * D) and the rows as they are afterwards. The new positions
    are the last S of the row. The one exception is a first call padded on the right (length below
    S): it writes positions 0 to S-1, and gives garbage for padding that later calls overwrite.
    """
    inputs = _Inputs(query, key, value, past_key, past_value, seqlens_k, total_seq, position_ids)
    attend = _emit if torch.onnx.is_in_onnx_export() else _attend
    return attend(inputs, _Heads(num_heads, num_kv_heads, scale, rotary))


def _emit(inputs: _Inputs, heads: _Heads) -> _Outputs:
    # [B, S, (num_heads + 2 * num_kv_heads) * D]
    packed = torch.cat((inputs.query, inputs.key, inputs.value), dim=-1)
    output, present_key, present_value = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::{ROTARY if heads.rotary else CACHED}",
        (packed, *inputs[3:], *(heads.rotary or ())),
        {
            "num_heads": heads.num_heads,
            "num_kv_heads": heads.num_kv_heads,
            "head_dim": inputs.past_key.shape[3],
            "scale": heads.scale,
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

    allowed = torch.arange(present_key.shape[2], device=query.device) <= places[..., None]
    output = F.scaled_dot_product_attention(
        query,
        present_key,
        present_value,
        attn_mask=allowed[:, None],  # (B, 1, S, max_len)
        scale=heads.scale,
        enable_gqa=heads.num_heads != heads.num_kv_heads,
    )
    return merge_heads(output), present_key, present_value


_ROTARY_INPUTS = ("cos_cache", "sin_cache")
_INT8_INPUTS = ("key_scale", "value_scale")


def _function(name: str, body: str) -> str:
    """Return the function of an operator of this family."""
    inputs = "packed_qkv, past_key, past_value, seqlens_k, total_seq, position_ids".split(", ")
    inputs += _ROTARY_INPUTS if name.endswith(ROTARY) else ()
    inputs += _INT8_INPUTS if name in INT8_OF.values() else ()
    return f"""
{name} <num_heads, num_kv_heads, head_dim, scale>
  ({", ".join(inputs)}) => (output, present_key, present_value)
{{
{body}
}}
"""


def _group_query(name: str) -> str:
    """Return the fastest kernel; it turns by the place in the row, which seqlens_k tells it."""
    is_rotary, is_int8 = name.endswith(ROTARY), name in INT8_OF.values()
    inputs = ["packed_qkv", "", "", "past_key", "past_value", "seqlens_k", "total_seq"]
    inputs += _ROTARY_INPUTS if is_rotary else ("", "") if is_int8 else ()
    inputs += ("", "", "", *_INT8_INPUTS) if is_int8 else ()
    attributes = ["num_heads: int = @num_heads", "kv_num_heads: int = @num_kv_heads"]
    if is_int8:
        attributes += [f'{part}_quant_type: string = "PER_TENSOR"' for part in ("k", "v")]
        attributes += ["kv_cache_bit_width: int = 8"]
    attributes += ["scale: float = @scale"]
    attributes += ["do_rotary: int = 1", "rotary_interleaved: int = 0"] if is_rotary else []
    kernel = "output, present_key, present_value = com.microsoft.GroupQueryAttention"
    return _function(name, f"  {kernel} <{', '.join(attributes)}> ({', '.join(inputs)})")


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
  attended = Attention <scale: float = @scale, is_causal: int = 1>
    ($query, present_key, present_value, , , , lengths)
  tokens_first = Transpose <perm: ints = [0, 2, 1, 3]> (attended)
  flat = Concat <axis: int = 0> (same, rest)
  output = Reshape (tokens_first, flat)
"""


def _standard(name: str) -> str:
    """Return the standard's own operators, for what the fastest kernel lacks."""
    if name == ROTARY:
        attended = Template(_ATTEND).substitute(query="turned_query", key="turned_key")
        return _function(name, f"{_SPLIT_HEADS}{_ROTATE}{attended}")
    attended = Template(_ATTEND).substitute(query="query", key="key")
    return _function(name, f"{_SPLIT_HEADS}{attended}")


GROUP_QUERY: Functions = {name: _group_query(name) for name in (CACHED, ROTARY, *INT8_OF.values())}
STANDARD: Functions = {name: _standard(name) for name in (CACHED, ROTARY)}
