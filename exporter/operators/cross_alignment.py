"""The attention to the source behind some of a decoder's queries, computed where it is wanted."""

from __future__ import annotations

import torch
from torch import Tensor

from exporter.operators.cross_attention import SourceRow
from exporter.operators.domain import DOMAIN, VERSION, Functions
from exporter.operators.heads import split_heads

_NAME = "CrossAlignment"


def cross_alignment_over_row(
    query: Tensor,
    source: SourceRow,
    alignment_idx: Tensor,
    alignment_sources: Tensor,
    *,
    num_heads: int,
    scale: float,
) -> Tensor:
    """Return how much queries attend to each position of their source, the mean over the heads.

    query (B, S, num_heads * D); alignment_idx int64 (M,) into the flattened B*S, alignment_sources
    int64 (M,) the source of each. Returns float32 (M, max_len), 0 beyond the end of a source. A
    graph computes nothing with M = 0, and gives [0, 0] or [0, max_len].
    """
    if torch.onnx.is_in_onnx_export():
        wanted = (alignment_idx, alignment_sources)
        return _emit(query, source, wanted, num_heads=num_heads, scale=scale)
    chosen = query.flatten(0, 1)[alignment_idx, None]  # (M, 1, num_heads * D)
    scores = split_heads(chosen, num_heads) @ source.key[alignment_sources].mT  # (M, h, 1, L)
    allowed = (
        torch.arange(scores.shape[-1]) < source.source_lengths[alignment_sources, None]
    )  # (M, L)
    masked = (scores * scale).masked_fill(~allowed[:, None, None], -torch.inf)
    return masked.softmax(dim=-1).mean(dim=(1, 2))


def _emit(
    query: Tensor,
    source: SourceRow,
    wanted: tuple[Tensor, Tensor],
    *,
    num_heads: int,
    scale: float,
) -> Tensor:
    head_dim, capacity = source.key.shape[3], source.key.shape[2]
    return torch.onnx.ops.symbolic(
        f"{DOMAIN}::{_NAME}",
        (query, source.key, source.source_lengths, *wanted),
        {
            "num_heads": num_heads,
            "head_dim": head_dim,
            "width": num_heads * head_dim,
            "capacity": capacity,
            "scale": scale,
        },
        dtype=torch.float32,
        shape=(wanted[0].shape[0], capacity),
        version=VERSION,
    )


# The kernels of CrossAttention give no probabilities, so those that are asked for are computed
# again. Every row is a product of its own over the whole source row: its bits depend on no other.
# So is the mean over the heads, since ReduceMean of 16 heads changes bits with the number of rows.
# onnxruntime computes an output that nobody has bound (RunOptions.only_execute_path_to_fetches does
# nothing outside its training builds), so a branch that is not taken is what makes it free. A
# step of the Marian-base shape, 8 rows with sources of 25 in rows of 512, took this share of the
# CPU time of the same graph without the output: 0.99 unasked, 1.00 asked for one row, 1.07 for
# all eight (one thread, medians of 150 steps in turns; the plain graph twice: 1.00).
_HEAD = """
CrossAlignment <num_heads, head_dim, width, capacity, scale>
  (query, cross_key, source_lengths, alignment_idx, alignment_sources) => (alignment)
{"""

# The weights of the queries that are asked for, [M, num_heads, L], in float32.
_WEIGHTS = """
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

_IF_WANTED = f"""{_HEAD}
  num_wanted = Shape (alignment_idx)
  is_wanted = Cast <to: int = 9> (num_wanted)
  alignment = If (is_wanted) <
    then_branch: graph = wanted () => (float[M, L] alignment_wanted) {{ {_WEIGHTS}
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
_ALWAYS = f"""{_HEAD}{_WEIGHTS}
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

IF_WANTED: Functions = {_NAME: _IF_WANTED}
ALWAYS: Functions = {_NAME: _ALWAYS}
