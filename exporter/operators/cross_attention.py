"""Attention of a decoder to the sources that its rows have, as they lie in the sources' cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from exporter.operators.domain import DOMAIN, VERSION, Functions
from exporter.operators.heads import merge_heads, split_heads

_NAME = "CrossAttention"

# Queries of one source that the function has a branch for, in the order in which it looks for
# them; the node says for each how many heads that makes.
GROUPED_WIDTHS = (4, 2, 8, 16)


@dataclass(frozen=True)
class SourceRow:
    """Keys and values of the source sentences, for one layer's cross-attention.

    Several rows of the decoder may attend to one source: the beams of a search.
    """

    key: Tensor  # (C, num_kv_heads, max_len, head_dim)
    value: Tensor  # (C, num_kv_heads, max_len, head_dim)
    source_lengths: Tensor  # int64 (C,)
    beam_rows: Tensor  # int64 (C, G): the decoder's rows of each source, any where there are fewer
    # int64 (B, S): where each query stands in the flattened (C, G, S); eager attention takes one
    # column of it for any S
    row_queries: Tensor

    @classmethod
    def one_each(cls, key: Tensor, value: Tensor, source_lengths: Tensor) -> SourceRow:
        """Return the source rows of a decoder whose row i attends to source i."""
        rows = torch.arange(key.shape[0], device=key.device)
        return cls(key, value, source_lengths, rows[:, None], rows[:, None])

    @property
    def of_rows(self) -> Tensor:
        """The source of each row of the decoder, int64 (B,)."""
        num_queries = self.row_queries.shape[1]
        return self.row_queries[:, 0] // (self.beam_rows.shape[1] * num_queries)


def cross_attention_over_row(
    query: Tensor, source: SourceRow, *, num_heads: int, scale: float
) -> Tensor:
    """Attend from every query to the real positions of its row's source.

    query (B, S, num_heads * D), where S is 1 if a source has several rows. Returns the same shape.
    """
    attend = _emit if torch.onnx.is_in_onnx_export() else _attend
    return attend(query, source, num_heads, scale)


def _emit(query: Tensor, source: SourceRow, num_heads: int, scale: float) -> Tensor:
    """Emit a node; G or S, the number of rows of a source and of queries of a row, is 1."""
    head_dim = source.key.shape[3]
    grouped = {f"num_heads_x{width}": num_heads * width for width in sorted(GROUPED_WIDTHS)}
    lengths = source.source_lengths
    return torch.onnx.ops.symbolic(
        f"{DOMAIN}::{_NAME}",
        (query, source.key, source.value, lengths, source.beam_rows, source.row_queries),
        {
            "num_heads": num_heads,
            **grouped,
            "head_dim": head_dim,
            "width": num_heads * head_dim,
            "capacity": source.key.shape[2],
            "scale": scale,
        },
        dtype=query.dtype,
        shape=query.shape,
        version=VERSION,
    )


def _attend(query: Tensor, source: SourceRow, num_heads: int, scale: float) -> Tensor:
    index = source.of_rows  # (B,)
    query = split_heads(query, num_heads)  # (B, num_heads, S, D)
    positions = torch.arange(source.key.shape[2], device=query.device)
    allowed = positions < source.source_lengths[index, None]  # (B, max_len)
    output = F.scaled_dot_product_attention(
        query,
        source.key[index],
        source.value[index],
        attn_mask=allowed[:, None, None],  # (B, 1, 1, max_len)
        scale=scale,
        enable_gqa=num_heads != source.key.shape[1],
    )
    return merge_heads(output)


# One query a source is what decoding does at every step. Measured on CPU, 4 heads of 32 over 512
# positions of which 25 are the source, microseconds for batch 1 / 8 / 32:
# GroupQueryAttention with no new key 9 / 29 / 76, Attention-24 with nonpad_kv_seqlen 18 / 94 / 269,
# MultiHeadAttention with key_padding_mask 20 / 97 / 296: the last two compute the whole row. On a
# full row all three take the same time. Each gave rows bit-equal alone and in a batch; only the
# first ignores a NaN beyond the source. It takes one query only, so the several queries of a source
# (its beams) become groups of query heads that share a key head; the number of heads is an
# attribute, so there is a branch for each width, and other widths go to Attention-24. Its present
# outputs are left out, or it copies the row.
_HEAD = """
CrossAttention
  <num_heads, num_heads_x2, num_heads_x4, num_heads_x8, num_heads_x16, head_dim, width, capacity,
   scale>
  (query, cross_key, cross_value, source_lengths, beam_rows, row_queries) => (output)
{
  rest = Constant <value_ints: ints = [-1]> ()
  same = Constant <value_ints: ints = [0]> ()
  rank_1 = Constant <value_ints: ints = [1]> ()
  heads_scalar = Constant <value_int: int = @num_heads> ()
  heads_1d = Reshape (heads_scalar, rank_1)
  head_dim_scalar = Constant <value_int: int = @head_dim> ()
  head_dim_1d = Reshape (head_dim_scalar, rank_1)
  width_scalar = Constant <value_int: int = @width> ()
  width_1d = Reshape (width_scalar, rank_1)
  by_query = Concat <axis: int = 0> (rest, width_1d)
  gathered = Gather <axis: int = 0> (query, beam_rows)
"""

# It reads nothing that a layer has for itself, and no constant that a branch reads. So
# onnxruntime computes it once for all layers.
_NO_NEW_KEY = """
  unit = Constant <value_ints: ints = [1]> ()
  none = Constant <value_ints: ints = [0]> ()
  last = Sub (source_lengths, unit)
  seqlens_k = Cast <to: int = 6> (last)
  capacity_scalar = Constant <value_int: int = @capacity> ()
  capacity = Reshape (capacity_scalar, unit)
  total_seq = Cast <to: int = 6> (capacity)
  num_sources = Shape (source_lengths)
  empty = Concat <axis: int = 0> (num_sources, none, width_1d)
  no_key = ConstantOfShape (empty)
  rows_each = Shape <start: int = 1, end: int = 2> (beam_rows)
  queries_each = Shape <start: int = 1, end: int = 2> (row_queries)
  num_queries = Mul (rows_each, queries_each)
  single = Equal (num_queries, unit)
"""

# [C, G, S, width] becomes [C, G * S, width].
_BY_SOURCE = """
  by_source = Concat <axis: int = 0> (same, rest, width_1d)
  queries = Reshape (gathered, by_source)
"""

_TAIL = """
  in_order = Reshape (attended, by_query)
  output = Gather <axis: int = 0> (in_order, row_queries)
}
"""

_SEVERAL_QUERIES = """
      by_head = Concat <axis: int = 0> (same, same, rest, head_dim_1d)
      heads = Reshape (queries, by_head)
      heads_first = Transpose <perm: ints = [0, 2, 1, 3]> (heads)
      over_row = Attention <scale: float = @scale>
        (heads_first, cross_key, cross_value, , , , source_lengths)
      tokens_first = Transpose <perm: ints = [0, 2, 1, 3]> (over_row)
      attended_all = Reshape (tokens_first, by_source)
"""


def _branches() -> str:
    """Return the function: a branch for one query a source, for each width, and for the others."""
    constants = "".join(
        f"  of_{width} = Constant <value_ints: ints = [{width}]> ()\n" for width in GROUPED_WIDTHS
    )
    result, inner = "attended_all", _SEVERAL_QUERIES
    for width in reversed(GROUPED_WIDTHS):
        result, inner = f"attended_or_{width}", _queries_of_width(width, result, inner)
    return f"""{_HEAD}{_BY_SOURCE}
  one = Constant <value_ints: ints = [1]> ()
{constants}{_NO_NEW_KEY}
  attended = If (single) <
    then_branch: graph = one_query () => (float[C, Q, W] attended_1) {{
      attended_1 = com.microsoft.GroupQueryAttention
        <num_heads: int = @num_heads, kv_num_heads: int = @num_heads, scale: float = @scale,
         causal: int = 0>
        (queries, no_key, no_key, cross_key, cross_value, seqlens_k, total_seq)
    }},
    else_branch: graph = several_queries () => (float[C, Q, W] {result}) {{ {inner} }}
  >
{_TAIL}"""


def _queries_of_width(width: int, otherwise: str, others: str) -> str:
    """Return the branch for so many queries a source; else `others` computes `otherwise`."""
    return f"""
      is_{width} = Equal (num_queries, of_{width})
      attended_or_{width} = If (is_{width}) <
        then_branch: graph = grouped_{width} () => (float[C, Q, W] attended_{width}) {{
          by_head = Concat <axis: int = 0> (same, same, rest, head_dim_1d)
          heads = Reshape (queries, by_head)
          grouped = Transpose <perm: ints = [0, 2, 1, 3]> (heads)
          as_one = Concat <axis: int = 0> (same, one, rest)
          one_query = Reshape (grouped, as_one)
          over_row = com.microsoft.GroupQueryAttention
            <num_heads: int = @num_heads_x{width}, kv_num_heads: int = @num_heads,
             scale: float = @scale, causal: int = 0>
            (one_query, no_key, no_key, cross_key, cross_value, seqlens_k, total_seq)
          query_count = Constant <value_ints: ints = [{width}]> ()
          by_group = Concat <axis: int = 0> (same, rest, query_count, head_dim_1d)
          groups = Reshape (over_row, by_group)
          tokens_first = Transpose <perm: ints = [0, 2, 1, 3]> (groups)
          attended_{width} = Reshape (tokens_first, by_source)
        }},
        else_branch: graph = not_{width} () => (float[C, Q, W] {otherwise}) {{ {others} }}
      >
"""


_ONE_ATTENTION = f"""{_HEAD}
  by_head = Concat <axis: int = 0> (same, rest, heads_1d, head_dim_1d)
  heads = Reshape (gathered, by_head)
  heads_first = Transpose <perm: ints = [0, 2, 1, 3]> (heads)
  over_row = Attention <scale: float = @scale>
    (heads_first, cross_key, cross_value, , , , source_lengths)
  attended = Transpose <perm: ints = [0, 2, 1, 3]> (over_row)
{_TAIL}"""

BRANCHES: Functions = {_NAME: _branches()}
ONE_ATTENTION: Functions = {_NAME: _ONE_ATTENTION}
