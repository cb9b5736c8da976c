"""The operators of a graph, computed in standard operators alone: all bodies agree with it."""

from __future__ import annotations

from exporter.operators import cached_attention, cross_alignment

_CROSS_ATTENTION = """
CrossAttention
  <num_heads, num_heads_x2, num_heads_x4, num_heads_x8, num_heads_x16, head_dim, width, scale>
  (query, cross_key, cross_value, source_lengths, beam_rows, row_queries) => (output)
{
  rest = Constant <value_ints: ints = [-1]> ()
  same = Constant <value_ints: ints = [0]> ()
  rank_1 = Constant <value_ints: ints = [1]> ()
  head_dim_scalar = Constant <value_int: int = @head_dim> ()
  head_dim_1d = Reshape (head_dim_scalar, rank_1)
  width_scalar = Constant <value_int: int = @width> ()
  width_1d = Reshape (width_scalar, rank_1)
  by_query = Concat <axis: int = 0> (rest, width_1d)
  gathered = Gather <axis: int = 0> (query, beam_rows)
  by_source = Concat <axis: int = 0> (same, rest, width_1d)
  queries = Reshape (gathered, by_source)
  by_head = Concat <axis: int = 0> (same, same, rest, head_dim_1d)
  heads = Reshape (queries, by_head)
  heads_first = Transpose <perm: ints = [0, 2, 1, 3]> (heads)
  key_t = Transpose <perm: ints = [0, 1, 3, 2]> (cross_key)
  products = MatMul (heads_first, key_t)
  scale = Constant <value_float: float = @scale> ()
  scores = Mul (products, scale)
  zero = Constant <value_int: int = 0> ()
  one = Constant <value_int: int = 1> ()
  capacity_1d = Shape <start: int = 2, end: int = 3> (cross_key)
  capacity = Squeeze (capacity_1d)
  positions = Range (zero, capacity, one)
  per_row = Constant <value_ints: ints = [-1, 1, 1, 1]> ()
  limits = Reshape (source_lengths, per_row)
  real = Less (positions, limits)
  minus_infinity = Constant <value_float: float = -inf> ()
  masked = Where (real, scores, minus_infinity)
  weights = Softmax <axis: int = -1> (masked)
  over_row = MatMul (weights, cross_value)
  tokens_first = Transpose <perm: ints = [0, 2, 1, 3]> (over_row)
  attended = Reshape (tokens_first, by_source)
  in_order = Reshape (attended, by_query)
  output = Gather <axis: int = 0> (in_order, row_queries)
}
"""

REFERENCE = {
    **cached_attention.STANDARD,
    "CrossAttention": _CROSS_ATTENTION,
    **cross_alignment.IF_WANTED,
}
