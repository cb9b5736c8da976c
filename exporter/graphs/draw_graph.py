"""The graph that draws the next tokens of rows, each from its likeliest ones: `draw.onnx`.

It does what engine/sampling/sampler.py does where the number of columns is known, in the same
types: weights in float32, their sums in float64. Columns behind the last one of a row change
nothing, for what is read of sums and counts is what they are there. Nothing of it depends on the
model, or on how many of the likeliest tokens there are.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir

from exporter.operators.domain import OPSET

# Sums in place of counts: what reduces a row is computed by cuDNN on CUDA. The minimum is for rows
# that are not finite: an index behind the columns would be read all the same.
_TEXT = f"""
<ir_version: 10, opset_import: ["" : {OPSET}]>
draw (int64[rows, num_top] top_ids, float[rows, num_top] top_logits,
      float[rows, num_top] top_logprobs,
      int64[rows, 1] last_column, float[rows, 1] temperature, double[rows, 1] top_p,
      float[rows, 1] least_score, double[rows, 1] uniform)
  => (int64[rows, 1] drawn_ids, float[rows, 1] drawn_logprobs)
<int64[1] first = {{0}}, int64 axis = {{1}}, double none = {{0}}>
{{
    largest = Gather<axis = 1>(top_logits, first)
    shifted = Sub(top_logits, largest)
    scores = Div(shifted, temperature)
    exponentials = Exp(scores)
    weights = Cast<to = {onnx.TensorProto.DOUBLE}>(exponentials)
    sums = CumSum(weights, axis)
    before = Sub(sums, weights)
    total = GatherElements<axis = 1>(sums, last_column)
    needed = Mul(total, top_p)
    is_inside = Less(before, needed)
    is_likely = GreaterOrEqual(scores, least_score)
    may_be_drawn = And(is_inside, is_likely)
    drawn = Where(may_be_drawn, weights, none)
    drawn_sums = CumSum(drawn, axis)
    drawn_total = GatherElements<axis = 1>(drawn_sums, last_column)
    target = Mul(drawn_total, uniform)
    is_passed = LessOrEqual(drawn_sums, target)
    passed = Cast<to = {onnx.TensorProto.INT64}>(is_passed)
    counts = CumSum(passed, axis)
    count = GatherElements<axis = 1>(counts, last_column)
    column = Min(count, last_column)
    drawn_ids = GatherElements<axis = 1>(top_ids, column)
    drawn_logprobs = GatherElements<axis = 1>(top_logprobs, column)
}}
"""


def draw_graph() -> ir.Model:
    """Return the graph; its inputs are described by `draw_shape` of engine/package/graph_io.py."""
    return ir.from_proto(onnx.parser.parse_model(_TEXT))
