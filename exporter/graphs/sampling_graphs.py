"""The graphs that draw the next tokens of rows: SAMPLING_GRAPHS of engine/package/graph_io.py.

They do what engine/sampling/sampler.py does, in the same types: weights in float32, their sums in
float64. The first one draws from the likeliest tokens. Columns behind the last one of a row change
nothing, for what is read of sums and counts is what they are there. The second one goes on to all
tokens, in the order of their ids; the third also finds the fewest likeliest ones that weigh a share
of all. Nothing of them depends on the model but the size of its vocabulary.

Reductions of a row are computed by cuDNN on CUDA, which packages do without. So a few numbers
are added up and counted by CumSum, which there takes a thread a number, and many by a product.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import onnx
import onnx_ir as ir

from engine.package.graph_io import SAMPLING_GRAPHS
from engine.sampling.plain import Scope
from exporter.operators.domain import OPSET

BLOCK = 512  # tokens whose weights are added up together

# The lowest score weighs nothing in float32, and all are below the highest. Halved so often, the
# numbers between them are one, or as good as one so near to the largest score: flat rows leave
# less to be halved, and the numbers that they have in it lie close.
_LOWEST, _HIGHEST, _NUM_HALVINGS = -110, 2.0**-20, 32
_MARGIN = 0.01  # difference of scores; rounding on the way to the lowest is less

_FLOAT, _DOUBLE = onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE
_INT = onnx.TensorProto.INT64

_WEIGHTS = f"""
    largest = Gather<axis = 1>(top_logits, first)
    shifted = Sub(top_logits, largest)
    scores = Div(shifted, temperature)
    exponentials = Exp(scores)
    weights = Cast<to = {_DOUBLE}>(exponentials)
    sums = CumSum(weights, axis)
    before = Sub(sums, weights)
    column_total = GatherElements<axis = 1>(sums, last_column)
"""


def sampling_graphs(vocab_size: int) -> dict[str, ir.Model]:
    """Return the graphs by name; `sampling_shapes` of engine/package/graph_io.py describes them."""
    all_tokens = _AllTokens(vocab_size)
    of_columns = _WEIGHTS + _from_columns("column_total", "drawn_ids", "drawn_logprobs")
    from_columns = _from_columns("column_total", "column_ids", "column_logprobs")
    from_share = _from_columns("total", "column_ids", "column_logprobs")
    of_all = _WEIGHTS + from_columns + all_tokens.weights() + all_tokens.draws("are_likely")
    of_nucleus = _WEIGHTS + all_tokens.weights() + all_tokens.nucleus() + from_share
    of_nucleus += all_tokens.draws("may_any_be_drawn")
    models = _model(of_columns), _model(of_all, all_tokens), _model(of_nucleus, all_tokens)
    return dict(zip(SAMPLING_GRAPHS, models, strict=True))


def _from_columns(total: str, ids: str, logprobs: str) -> str:
    """Draw from the columns of each row; a share is one of the `total` weight.

    The minimum is for rows that are not finite: an index behind the columns would be read all the
    same.
    """
    return f"""
    needed = Mul({total}, top_p)
    is_inside = Less(before, needed)
    is_likely = GreaterOrEqual(scores, least_score)
    may_be_drawn = And(is_inside, is_likely)
    drawn = Where(may_be_drawn, weights, none)
    drawn_sums = CumSum(drawn, axis)
    drawn_total = GatherElements<axis = 1>(drawn_sums, last_column)
    target = Mul(drawn_total, uniform)
    is_passed = LessOrEqual(drawn_sums, target)
    passed = Cast<to = {_INT}>(is_passed)
    counts = CumSum(passed, axis)
    count = GatherElements<axis = 1>(counts, last_column)
    column = Min(count, last_column)
    {ids} = GatherElements<axis = 1>(top_ids, column)
    found_logprobs = GatherElements<axis = 1>(top_logprobs, column)
    {logprobs} = Cast<to = {_DOUBLE}>(found_logprobs)
"""


class _AllTokens:
    """Text about all tokens of a row, in whole blocks: what fills the last one weighs nothing."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._num_blocks = -(-vocab_size // BLOCK)
        self._num_behind = self._num_blocks * BLOCK - vocab_size

    def weights(self) -> str:
        """Weigh all tokens of each row."""
        return f"""
    all_shifted = Sub(logits, largest)
    all_tempered = Div(all_shifted, temperature)
    all_scores = Pad(all_tempered, behind, nothing)
    all_exponentials = Exp(all_scores)
    all_weights = Cast<to = {_DOUBLE}>(all_exponentials)
    are_likely = GreaterOrEqual(all_scores, least_score)
    best = Gather<axis = 1>(top_logprobs, first)
    best_logprobs = Cast<to = {_DOUBLE}>(best)
"""

    def draws(self, which: str) -> str:
        """Draw from the tokens that `which` allows, where the columns are not all there are."""
        return f"""
    all_drawn = Where({which}, all_weights, none)
    {_in_blocks("row", "all_drawn")}
    row_total = Gather<axis = 1>(row_ends, last_block)
    row_target = Mul(row_total, uniform)
    {_found("row", "row_target", "LessOrEqual")}
    row_logits = GatherElements<axis = 1>(logits, row_found)
    row_shifted = Sub(row_logits, largest)
    row_differences = Cast<to = {_DOUBLE}>(row_shifted)
    row_logprobs = Add(row_differences, best_logprobs)
    is_last_drawn = GatherElements<axis = 1>(may_be_drawn, last_column)
    may_go_on = Equal(scope, go_on)
    goes_on = And(may_go_on, is_last_drawn)
    drawn_ids = Where(goes_on, row_found, column_ids)
    drawn_logprobs = Where(goes_on, row_logprobs, column_logprobs)
"""

    def nucleus(self) -> str:
        """Find the likeliest tokens that weigh top_p of all, of equals at the border the first.

        Those whose score is not below `high` weigh too little, those not below `low` enough: what
        is not at the share's end or above weighs less than the rest of all, were it every token.
        """
        halvings = "".join(_halving(number) for number in range(_NUM_HALVINGS))
        last = _NUM_HALVINGS
        return f"""
    {_weight_of("all_total", "all_weights")}
    all_needed = Mul(all_total, top_p)
    all_id_blocks = Add(block_starts, places)
    all_ids = Reshape(all_id_blocks, whole_row)
    rest = Sub(all_total, all_needed)
    some_rest = Max(rest, least_rest)
    rest_score = Log(some_rest)
    token_score = Sub(rest_score, of_all_tokens)
    low_0 = Cast<to = {_FLOAT}>(token_score)
    {halvings}
    are_above = GreaterOrEqual(all_scores, high_{last})
    weights_above = Where(are_above, all_weights, none)
    {_weight_of("total_above", "weights_above")}
    are_not_below = GreaterOrEqual(all_scores, low_{last})
    are_not_above = Not(are_above)
    are_at_border = And(are_not_below, are_not_above)
    border_weights = Where(are_at_border, all_weights, none)
    border_needed = Sub(all_needed, total_above)
    {_in_blocks("border", "border_weights")}
    {_found("border", "border_needed", "Less")}
    are_first = LessOrEqual(all_ids, border_found)
    are_first_at_border = And(are_at_border, are_first)
    are_in_nucleus = Or(are_above, are_first_at_border)
    may_any_be_drawn = And(are_in_nucleus, are_likely)
    minus_best_logprobs = Neg(best_logprobs)
    own_total = Exp(minus_best_logprobs)
    is_untempered = Equal(temperature, untempered)
    row_weight = Where(is_untempered, own_total, all_total)
    weighs_all = Less(nothing_further, scope)
    total = Where(weighs_all, row_weight, column_total)
"""

    def constants(self) -> dict[str, tuple[str, Iterable[float]]]:
        """Return numbers that the text names, each with its type."""
        n = self._num_blocks
        return {
            "behind": ("int64[4]", (0, 0, 0, self._num_behind)),
            "nothing": ("float", (-1e30,)),
            "block_shape": ("int64[3]", (0, n, BLOCK)),
            "row_shape": ("int64[2]", (0, n)),
            "place_shape": ("int64[2]", (0, BLOCK)),
            "one_block": ("int64[3]", (0, 1, 1)),
            "whole_row": ("int64[2]", (1, n * BLOCK)),
            "last_block": ("int64[1]", (n - 1,)),
            "last_place": ("int64[1]", (BLOCK - 1,)),
            "block_size": ("int64", (BLOCK,)),
            "no_places": (f"int64[1, 1, {BLOCK}]", [0] * BLOCK),
            "places": (f"int64[1, {BLOCK}]", range(BLOCK)),
            "block_starts": (f"int64[{n}, 1]", range(0, n * BLOCK, BLOCK)),
            "block_ones": (f"double[{BLOCK}, 1]", [1] * BLOCK),
            "row_ones": (f"double[{n}, 1]", [1] * n),
            "go_on": ("int64", (Scope.GO_ON,)),
            "nothing_further": ("int64", (Scope.NOTHING,)),
            "untempered": ("float", (1,)),
            "half": ("float", (0.5,)),
            "least_rest": ("double", (self.vocab_size * math.exp(_LOWEST),)),
            "of_all_tokens": ("double", (math.log(self.vocab_size) + _MARGIN,)),
            "high_0": ("float[1, 1]", (_HIGHEST,)),
        }


def _halving(number: int) -> str:
    """See whether the tokens not below the middle of two scores weigh enough."""
    return f"""
    ends_{number} = Add(low_{number}, high_{number})
    middle_{number} = Mul(ends_{number}, half)
    are_inside_{number} = GreaterOrEqual(all_scores, middle_{number})
    weights_{number} = Where(are_inside_{number}, all_weights, none)
    {_weight_of(f"total_{number}", f"weights_{number}")}
    is_enough_{number} = GreaterOrEqual(total_{number}, all_needed)
    low_{number + 1} = Where(is_enough_{number}, middle_{number}, low_{number})
    high_{number + 1} = Where(is_enough_{number}, high_{number}, middle_{number})
"""


def _weight_of(total: str, weights: str) -> str:
    """Add up the weights of each row."""
    return f"""
    {total}_blocks = Reshape({weights}, block_shape)
    {total}_products = MatMul({total}_blocks, block_ones)
    {total}_of_blocks = Reshape({total}_products, row_shape)
    {total} = MatMul({total}_of_blocks, row_ones)
"""


def _in_blocks(name: str, weights: str) -> str:
    """Add up the weights of each block, and those before it."""
    return f"""
    {name}_blocks = Reshape({weights}, block_shape)
    {name}_products = MatMul({name}_blocks, block_ones)
    {name}_of_blocks = Reshape({name}_products, row_shape)
    {name}_ends = CumSum({name}_of_blocks, axis)
    {name}_starts = CumSum<exclusive = 1>({name}_of_blocks, axis)
"""


def _found(name: str, target: str, before: str) -> str:
    """Find the first token of each row up to which the sum of weights is not `before` the target.

    The sums of a block and of what is in it may round differently: it ends with its last token that
    weighs something.
    """
    return f"""
    {_count(f"{name}_block", before, f"{name}_ends", target, "last_block")}
    {name}_block = Min({name}_block_count, last_block)
    {name}_start = GatherElements<axis = 1>({name}_starts, {name}_block)
    {name}_block_row = Reshape({name}_block, one_block)
    {name}_block_rows = Add({name}_block_row, no_places)
    {name}_inside_block = GatherElements<axis = 1>({name}_blocks, {name}_block_rows)
    {name}_inside = Reshape({name}_inside_block, place_shape)
    {name}_sums = CumSum({name}_inside, axis)
    {name}_left = Sub({target}, {name}_start)
    {_count(f"{name}_place", before, f"{name}_sums", f"{name}_left", "last_place")}
    {name}_whole = Gather<axis = 1>({name}_sums, last_place)
    {_count(f"{name}_last", "Less", f"{name}_sums", f"{name}_whole", "last_place")}
    {name}_place = Min({name}_place_count, {name}_last_count)
    {name}_first = Mul({name}_block, block_size)
    {name}_found = Add({name}_first, {name}_place)
"""


def _count(name: str, compare: str, numbers: str, limit: str, last: str) -> str:
    return f"""
    {name}_are_before = {compare}({numbers}, {limit})
    {name}_before = Cast<to = {_INT}>({name}_are_before)
    {name}_counts = CumSum({name}_before, axis)
    {name}_count = Gather<axis = 1>({name}_counts, {last})
"""


def _model(body: str, all_tokens: _AllTokens | None = None) -> ir.Model:
    constants: dict[str, tuple[str, Iterable[float]]] = {
        "first": ("int64[1]", (0,)),
        "axis": ("int64", (1,)),
        "none": ("double", (0,)),
    }
    further = ""
    if all_tokens is not None:
        named = set(re.findall(r"\w+", body))
        found = all_tokens.constants().items()
        constants |= {name: constant for name, constant in found if name in named}
        further = f"float[rows, {all_tokens.vocab_size}] logits, int64[rows, 1] scope,"
    declared = ", ".join(
        f"{kind} {name} = {{{', '.join(map(str, numbers))}}}"
        for name, (kind, numbers) in constants.items()
    )
    text = f"""
<ir_version: 10, opset_import: ["" : {OPSET}]>
draw (int64[rows, num_top] top_ids, float[rows, num_top] top_logits,
      float[rows, num_top] top_logprobs, {further}
      int64[rows, 1] last_column, float[rows, 1] temperature, double[rows, 1] top_p,
      float[rows, 1] least_score, double[rows, 1] uniform)
  => (int64[rows, 1] drawn_ids, double[rows, 1] drawn_logprobs)
<{declared}>
{{ {body} }}
"""
    return ir.from_proto(onnx.parser.parse_model(text))
