"""What computes the operators of `tokenweir`: for each a function a target, in ONNX's text form.

`cpu` is made of the fastest kernels of onnxruntime there, `reference` of standard operators.
`cuda` has no control flow and no node that onnxruntime keeps off the device (Shape), so that a call
can be captured as a CUDA graph: sizes are attributes. In half precision it is the kernel of `cpu`,
in float32, for which that kernel is missing there, TensorScatter and Attention. Its cross-attention
is Attention with the lengths of the sources in every precision.
"""

from __future__ import annotations

from collections.abc import Mapping
from string import Template
from types import MappingProxyType
from typing import Literal

import onnx
import onnx_ir as ir

from exporter.operators import DOMAIN, GROUPED_WIDTHS, OPSET

_CONTRIB = "com.microsoft"

Body = Literal["cpu", "cuda", "cuda-fp32", "reference"]
CUDA_BODIES: tuple[Body, ...] = ("cuda", "cuda-fp32")

# Positions up to seqlens_k[b] of row b exist after the call; the new ones are the last of them.
_CACHED_ATTENTION_CPU = """
CachedAttention <num_heads, num_kv_heads, head_dim, scale>
  (packed_qkv, past_key, past_value, seqlens_k, total_seq, position_ids) =>
  (output, present_key, present_value)
{
  output, present_key, present_value = com.microsoft.GroupQueryAttention
    <num_heads: int = @num_heads, kv_num_heads: int = @num_kv_heads, scale: float = @scale>
    (packed_qkv, , , past_key, past_value, seqlens_k, total_seq)
}
"""

# The kernel turns by the place in the row, which it knows from seqlens_k.
_ROTARY_CACHED_ATTENTION_CPU = """
RotaryCachedAttention <num_heads, num_kv_heads, head_dim, scale>
  (packed_qkv, past_key, past_value, seqlens_k, total_seq, position_ids, cos_cache,
   sin_cache)
  => (output, present_key, present_value)
{
  output, present_key, present_value = com.microsoft.GroupQueryAttention
    <num_heads: int = @num_heads, kv_num_heads: int = @num_kv_heads, scale: float = @scale,
     do_rotary: int = 1, rotary_interleaved: int = 0>
    (packed_qkv, , , past_key, past_value, seqlens_k, total_seq, cos_cache, sin_cache)
}
"""

_INT8_CACHE = """k_quant_type: string = "PER_TENSOR", v_quant_type: string = "PER_TENSOR",
     kv_cache_bit_width: int = 8, scale: float = @scale"""

_INT8_CACHED_ATTENTION_CPU = (
    _CACHED_ATTENTION_CPU.replace("CachedAttention <", "Int8CachedAttention <")
    .replace("position_ids) =>", "position_ids, key_scale, value_scale) =>")
    .replace("total_seq)\n}", "total_seq, , , , , , key_scale, value_scale)\n}")
    .replace("scale: float = @scale", _INT8_CACHE)
)

_INT8_ROTARY_CACHED_ATTENTION_CPU = (
    _ROTARY_CACHED_ATTENTION_CPU.replace("RotaryCachedAttention <", "Int8RotaryCachedAttention <")
    .replace("sin_cache)\n  =>", "sin_cache, key_scale, value_scale)\n  =>")
    .replace("sin_cache)\n}", "sin_cache, , , , key_scale, value_scale)\n}")
    .replace("scale: float = @scale", _INT8_CACHE)
)

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

_CACHED_ATTENTION_REFERENCE = f"""
CachedAttention <num_heads, num_kv_heads, head_dim, scale>
  (packed_qkv, past_key, past_value, seqlens_k, total_seq, position_ids) =>
  (output, present_key, present_value)
{{{_SPLIT_HEADS}{Template(_ATTEND).substitute(query="query", key="key")}}}
"""

_ROTARY_CACHED_ATTENTION_REFERENCE = f"""
RotaryCachedAttention <num_heads, num_kv_heads, head_dim, scale>
  (packed_qkv, past_key, past_value, seqlens_k, total_seq, position_ids, cos_cache,
   sin_cache)
  => (output, present_key, present_value)
{{{_SPLIT_HEADS}{_ROTATE}{Template(_ATTEND).substitute(query="turned_query", key="turned_key")}}}
"""

# One query a source is what decoding does at every step. Measured on CPU, 4 heads of 32 over a row
# of 512 positions of which 25 are the source, microseconds for batch 1 / 8 / 32:
# GroupQueryAttention with no new key 9 / 29 / 76, Attention-24 with nonpad_kv_seqlen 18 / 94 / 269,
# MultiHeadAttention with key_padding_mask 20 / 97 / 296: the last two compute the whole row. On a
# full row all three take the same time. Each gave rows bit-equal alone and in a batch; only the
# first ignores a NaN beyond the source. It takes one query only, so the several queries of a source
# (its beams) become groups of query heads that share a key head; the number of heads is an
# attribute, so there is a branch for each width, and other widths go to Attention-24. Its present
# outputs are left out, or it copies the row.
_CROSS_ATTENTION_HEAD = """
CrossAttention
  <num_heads, num_heads_x2, num_heads_x4, num_heads_x8, num_heads_x16, head_dim, width, scale>
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

# Outside of the branches, so that onnxruntime computes it once for all layers.
_NO_NEW_KEY = """
  no_key = Slice (queries, zero, zero, one)
  last = Sub (source_lengths, one)
  seqlens_k = Cast <to: int = 6> (last)
  capacity = Shape <start: int = 2, end: int = 3> (cross_key)
  total_seq = Cast <to: int = 6> (capacity)
"""

# [C, G, S, width] becomes [C, G * S, width].
_BY_SOURCE = """
  by_source = Concat <axis: int = 0> (same, rest, width_1d)
  queries = Reshape (gathered, by_source)
"""

_CROSS_ATTENTION_TAIL = """
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


def _cross_attention_cpu() -> str:
    """Return the function: a branch for one query a source, for each width, and for the others."""
    constants = "".join(
        f"  of_{width} = Constant <value_ints: ints = [{width}]> ()\n" for width in GROUPED_WIDTHS
    )
    result, inner = "attended_all", _SEVERAL_QUERIES
    for width in reversed(GROUPED_WIDTHS):
        result, inner = f"attended_or_{width}", _queries_of_width(width, result, inner)
    return f"""{_CROSS_ATTENTION_HEAD}{_BY_SOURCE}
  zero = Constant <value_ints: ints = [0]> ()
  one = Constant <value_ints: ints = [1]> ()
{constants}
  num_queries = Shape <start: int = 1, end: int = 2> (queries)
  single = Equal (num_queries, one)
{_NO_NEW_KEY}
  attended = If (single) <
    then_branch: graph = one_query () => (float[C, Q, W] attended_1) {{
      attended_1 = com.microsoft.GroupQueryAttention
        <num_heads: int = @num_heads, kv_num_heads: int = @num_heads, scale: float = @scale,
         causal: int = 0>
        (queries, no_key, no_key, cross_key, cross_value, seqlens_k, total_seq)
    }},
    else_branch: graph = several_queries () => (float[C, Q, W] {result}) {{ {inner} }}
  >
{_CROSS_ATTENTION_TAIL}"""


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


_CROSS_ATTENTION_CUDA = f"""{_CROSS_ATTENTION_HEAD}
  by_head = Concat <axis: int = 0> (same, rest, heads_1d, head_dim_1d)
  heads = Reshape (gathered, by_head)
  heads_first = Transpose <perm: ints = [0, 2, 1, 3]> (heads)
  over_row = Attention <scale: float = @scale>
    (heads_first, cross_key, cross_value, , , , source_lengths)
  attended = Transpose <perm: ints = [0, 2, 1, 3]> (over_row)
{_CROSS_ATTENTION_TAIL}"""

_CROSS_ATTENTION_REFERENCE = f"""{_CROSS_ATTENTION_HEAD}{_BY_SOURCE}
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
{_CROSS_ATTENTION_TAIL}"""

# The kernels of CrossAttention give no probabilities, so those that are asked for are computed
# again. Every row is a product of its own over the whole source row: its bits depend on no other.
# So is the mean over the heads, since ReduceMean of 16 heads changes bits with the number of rows.
# onnxruntime computes an output that nobody has bound (RunOptions.only_execute_path_to_fetches does
# nothing outside its training builds), so a branch that is not taken is what makes it free. A step
# of the Marian-base shape, 8 rows with sources of 25 in rows of 512, took of the CPU time of the
# same graph without the output: 0.99 unasked, 1.00 asked for one row, 1.07 for all eight
# (one thread, medians of 150 steps in turns; the plain graph twice: 1.00).
_CROSS_ALIGNMENT_HEAD = """
CrossAlignment <num_heads, head_dim, width, capacity, scale>
  (query, cross_key, source_lengths, alignment_idx, alignment_sources) => (alignment)
{"""

# The weights of the queries that are asked for, [M, num_heads, L], in float32.
_ALIGNMENT_WEIGHTS = """
      rest = Constant <value_ints: ints = [-1]> ()
      same = Constant <value_ints: ints = [0]> ()
      one = Constant <value_ints: ints = [1]> ()
      heads_scalar = Constant <value_int: int = @num_heads> ()
      heads_1d = Reshape (heads_scalar, one)
      head_dim_scalar = Constant <value_int: int = @head_dim> ()
      head_dim_1d = Reshape (head_dim_scalar, one)
      width_scalar = Constant <value_int: int = @width> ()
      width_1d = Reshape (width_scalar, one)
      by_query = Concat <axis: int = 0> (rest, width_1d)
      queries = Reshape (query, by_query)
      wanted_queries = Gather <axis: int = 0> (queries, alignment_idx)
      by_head = Concat <axis: int = 0> (same, heads_1d, head_dim_1d, one)
      columns = Reshape (wanted_queries, by_head)
      keys = Gather <axis: int = 0> (cross_key, alignment_sources)
      products_of_heads = MatMul (keys, columns)
      squeezed = Squeeze (products_of_heads, rest)
      products = Cast <to: int = 1> (squeezed)
      scale = Constant <value_float: float = @scale> ()
      scores = Mul (products, scale)
      zero = Constant <value_int: int = 0> ()
      step = Constant <value_int: int = 1> ()
      capacity = Constant <value_int: int = @capacity> ()
      positions = Range (zero, capacity, step)
      lengths = Gather <axis: int = 0> (source_lengths, alignment_sources)
      per_row = Constant <value_ints: ints = [-1, 1, 1]> ()
      limits = Reshape (lengths, per_row)
      is_real = Less (positions, limits)
      minus_infinity = Constant <value_float: float = -inf> ()
      masked = Where (is_real, scores, minus_infinity)
      weights = Softmax <axis: int = -1> (masked)
"""

_CROSS_ALIGNMENT = f"""{_CROSS_ALIGNMENT_HEAD}
  num_wanted = Shape (alignment_idx)
  is_wanted = Cast <to: int = 9> (num_wanted)
  alignment = If (is_wanted) <
    then_branch: graph = wanted () => (float[M, L] alignment_wanted) {{ {_ALIGNMENT_WEIGHTS}
      count = Cast <to: int = 1> (heads_1d)
      share = Reciprocal (count)
      one_row = Concat <axis: int = 0> (one, heads_1d)
      shares = Expand (share, one_row)
      mean = MatMul (shares, weights)
      alignment_wanted = Squeeze (mean, one)
    }},
    else_branch: graph = unwanted () => (float[M, L] nothing) {{
      nothing = Constant <value: tensor = float[0, 0] {{}}> ()
    }}
  >
}}"""

# The mean as a product: a reduction on CUDA asks for cuDNN, which nothing else here needs. Each
# query has shares of its own, for a product with M = 0 broadcasts to no batch.
_CROSS_ALIGNMENT_CUDA = f"""{_CROSS_ALIGNMENT_HEAD}{_ALIGNMENT_WEIGHTS}
      row_of_heads = Concat <axis: int = 0> (one, one, heads_1d)
      ones = ConstantOfShape <value: tensor = float[1] {{1.0}}> (row_of_heads)
      num_heads = Cast <to: int = 1> (heads_1d)
      share = Div (ones, num_heads)
      nothing = Constant <value_int: int = 0> ()
      zeros = Mul (limits, nothing)
      float_zeros = Cast <to: int = 1> (zeros)
      shares = Add (float_zeros, share)
      means = MatMul (shares, weights)
      alignment = Squeeze (means, one)
}}"""

_TEXTS: Mapping[str, Mapping[Body, str]] = MappingProxyType(
    {
        "CachedAttention": {
            "cpu": _CACHED_ATTENTION_CPU,
            "cuda": _CACHED_ATTENTION_CPU,
            "cuda-fp32": _CACHED_ATTENTION_REFERENCE,
            "reference": _CACHED_ATTENTION_REFERENCE,
        },
        "RotaryCachedAttention": {
            "cpu": _ROTARY_CACHED_ATTENTION_CPU,
            "cuda": _ROTARY_CACHED_ATTENTION_CPU,
            "cuda-fp32": _ROTARY_CACHED_ATTENTION_REFERENCE,
            "reference": _ROTARY_CACHED_ATTENTION_REFERENCE,
        },
        "Int8CachedAttention": {
            "cpu": _INT8_CACHED_ATTENTION_CPU,
            "cuda": _INT8_CACHED_ATTENTION_CPU,
        },
        "Int8RotaryCachedAttention": {
            "cpu": _INT8_ROTARY_CACHED_ATTENTION_CPU,
            "cuda": _INT8_ROTARY_CACHED_ATTENTION_CPU,
        },
        "CrossAttention": {
            "cpu": _cross_attention_cpu(),
            "cuda": _CROSS_ATTENTION_CUDA,
            "cuda-fp32": _CROSS_ATTENTION_CUDA,
            "reference": _CROSS_ATTENTION_REFERENCE,
        },
        "CrossAlignment": {
            "cpu": _CROSS_ALIGNMENT,
            "cuda": _CROSS_ALIGNMENT_CUDA,
            "cuda-fp32": _CROSS_ALIGNMENT_CUDA,
            "reference": _CROSS_ALIGNMENT,
        },
    }
)

# The operator that takes the place of one where the cache is int8.
INT8_OF = MappingProxyType(
    {name: f"Int8{name}" for name in ("CachedAttention", "RotaryCachedAttention")}
)


def attach_bodies(model: ir.Model, body: Body) -> None:
    """Give every operator of the domain that the graph uses its function, in place of any other."""
    model.functions.clear()
    for name in sorted({node.op_type for node in model.graph if node.domain == DOMAIN}):
        function = _function(name, body)
        model.functions[function.identifier()] = function
        model.opset_imports.update(function.opset_imports)


def _function(name: str, body: Body) -> ir.Function:
    text = _TEXTS[name][body]
    opsets = f'"": {OPSET}' + (f', "{_CONTRIB}": 1' if f"{_CONTRIB}." in text else "")
    proto = onnx.parser.parse_function(f'<domain: "{DOMAIN}", opset_import: [{opsets}]>{text}')
    return ir.from_proto(proto)
