"""Stores the weights of a graph's products in 8 or 4 bits, and gives the products their kernels.

int8: every row of the input is rounded by its own largest value, once for all products of that
input, every column of the weights by its own; the sums are exact integers, so that a row does not
depend on its neighbours, nor on how a prompt is cut. int8-fixed: rows are rounded by the range that
the input has on a text, so that nothing looks for a largest value, and the kernel adds the bias,
too: a third of the nodes. int8-blocks and int4: MatMulNBits, a scale for every 32 inputs. The token
embedding gets 8 bits and a scale a token; all else stays float32.

Time of a call, as a share of fp32 in the same run (onnxruntime 1.31, 2 cores of Zen 5, medians of 7
interleaved rounds, 128 cached positions, other work on the machine):

|                             | int8 | int8-blocks | int4 |
|-----------------------------|------|-------------|------|
| GPT-2 124M, decode 1 row    | 0.32 | 0.40        | 0.28 |
| 8 rows                      | 0.54 | 0.64        | 0.57 |
| 32 rows                     | 0.52 | 0.86        | 0.87 |
| prefill of 128 tokens       | 0.32 | 0.99        | 1.07 |
| Marian base, decode 1 row   | 0.29 | 0.29        | 0.21 |
| 8 rows                      | 0.33 | 0.55        | 0.49 |
| 32 rows                     | 0.44 | 0.83        | 0.82 |
| encode a source of 25       | 0.46 | 0.77        | 0.83 |

The cost for a small GPT (4 layers, d_model 128) after 250 steps: int8 0.95 % other greedy
tokens on random prompts and 0.03 % perplexity, int8-blocks 1.3 % and 0.03 %, int4 9.9 % and 1.9 %.
Rows were bit-equal alone and in batches of 2 to 32 with each. Files of GPT-2: 498 MB in fp32,
166, 181 and 119. A processor without VNNI would saturate in int8; the engine asks onnxruntime for
exact sums there, which take 1.3 times as long at 32 rows. Kernels for AVX2 compute a lone row of
int4 in an order of its own: its bits differ from those in a batch there, as certificates say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from engine.package.graph_io import INPUT_IDS
from engine.package.manifest import PackageFormat, Precision
from exporter.graphs.constants import add_constant
from exporter.graphs.joined_products import sum_of
from exporter.graphs.target import target_of

BLOCK_SIZE = 32  # inputs of an output that share a scale

_DTYPES: dict[Precision, ir.DataType] = {
    "fp32": ir.DataType.FLOAT,
    "fp16": ir.DataType.FLOAT16,
    "bf16": ir.DataType.BFLOAT16,
}
_CONTRIB = "com.microsoft"
_TINY = np.float32(1e-8)  # in place of the largest value of a row of zeros
_ZERO_POINT = np.uint8(128)  # kernels are fast for unsigned inputs, 10 to 90 times slower otherwise

Matrix = NDArray[np.float32]


class FixedScale(NamedTuple):
    """The size of a step of an input in 8 bits, and which of the 256 numbers is 0."""

    scale: np.float32
    zero_point: np.uint8


Scales = Mapping[str, FixedScale]  # by the name of an input


def quantize(model: ir.Model, form: PackageFormat, fixed: Scales | None = None) -> None:
    """Rewrite every product with a weight matrix, and the token embedding, in place.

    Scales are of the type of the activations; where they are fixed, those of all inputs are given.
    """
    if form.weights == form.precision:
        return
    quantizer = _Quantizer(model.graph, form, fixed or {})
    for node in list(model.graph):
        if (product := _product(node)) is not None:
            quantizer.replace_product(node, product)
        elif node.op_type == "Gather":
            table, index = node.inputs
            assert table is not None and index is not None
            if table.const_value is not None and index.name == INPUT_IDS:
                quantizer.replace_embedding(node)
    model.opset_imports[_CONTRIB] = 1
    RemoveUnusedNodesPass()(model)


def inputs_of_products(graph: ir.Graph) -> list[str]:
    """Return the names of all that is multiplied by weights."""
    found = [_factors(node) for node in graph]
    return list(dict.fromkeys(str(one[0].name) for one in found if one is not None))


def quantize_columns(matrix: Matrix) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Return [K, N] in -127 to 127, and the scale of each column [N]."""
    scales = _scales(np.abs(matrix).max(axis=0), 127)
    return np.rint(matrix / scales).astype(np.int8), scales


def quantize_blocks(matrix: Matrix, bits: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return [K, N] as MatMulNBits reads it.

    The blocks [N, ceil(K / 32), 4 * bits], the first of two 4-bit values in the low half of a byte,
    and their scales [N, ceil(K / 32)].
    """
    K, N = matrix.shape
    largest, zero_point = 2 ** (bits - 1) - 1, 2 ** (bits - 1)
    padded = np.pad(matrix.T, ((0, 0), (0, -K % BLOCK_SIZE)))
    blocks = padded.reshape(N, -1, BLOCK_SIZE)
    scales = _scales(np.abs(blocks).max(axis=2), largest)
    values = (np.rint(blocks / scales[..., None]) + zero_point).astype(np.uint8)
    if bits == 4:
        values = values[..., 0::2] | values[..., 1::2] << 4
    return values, scales


def _scales(largest: Matrix, steps: int) -> NDArray[np.float32]:
    """Return the scales that put the largest values at `steps`; 1 where there are only zeros."""
    scales: NDArray[np.float32] = np.where(largest > 0, largest / steps, 1).astype(np.float32)
    return scales


class _Product(NamedTuple):
    """x @ matrix + bias."""

    x: ir.Value
    name: str
    matrix: Matrix  # [K, N]
    bias: ir.Value | None


def _factors(node: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """Return what a node multiplies by which weight matrix; None if it does not."""
    if node.op_type not in {"MatMul", "Gemm"}:
        return None
    x, weight = node.inputs[:2]
    assert x is not None and weight is not None
    if weight.const_value is None or len(weight.const_value.shape) != 2:
        return None
    return x, weight


def _product(node: ir.Node) -> _Product | None:
    """Return what a MatMul or Gemm computes; None unless it is with a weight matrix."""
    if (factors := _factors(node)) is None:
        return None
    x, weight = factors
    assert weight.name is not None and weight.const_value is not None
    matrix = weight.const_value.numpy().astype(np.float32)
    if "transB" in node.attributes and node.attributes["transB"].as_int():
        matrix = matrix.T
    return _Product(x, weight.name, matrix, node.inputs[2] if len(node.inputs) > 2 else None)


class _Quantizer:
    """Puts new nodes into a graph, and shares what several products have in common."""

    def __init__(self, graph: ir.Graph, form: PackageFormat, fixed: Scales) -> None:
        self._graph = graph
        self._fixed = fixed
        self._dtype = _DTYPES[form.precision]
        self._accuracy_level = target_of(form).accuracy_level
        self._rows: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
        self._constants: dict[str, ir.Value] = {}
        self._multiply: Callable[[ir.Node, _Product], ir.Value] = {
            "int8": self._multiply_rows,
            "int8-fixed": self._multiply_fixed,
            "int8-blocks": lambda node, product: self._multiply_blocks(node, product, 8),
            "int4": lambda node, product: self._multiply_blocks(node, product, 4),
        }[form.weights]

    def replace_product(self, node: ir.Node, product: _Product) -> None:
        """Replace x @ matrix + bias; with fixed scales one kernel adds a bias behind it, too."""
        behind = sum_of(node) if self._fixed and product.bias is None else None
        if behind is not None:
            product = product._replace(bias=behind.inputs[1])
        result = self._multiply(node, product)
        if product.bias is not None and not self._fixed:
            result = self._add(node, "Add", [result, product.bias])
        self._replace(behind or node, result)
        if behind is not None:
            self._graph.remove(node, safe=True)

    def replace_embedding(self, node: ir.Node) -> None:
        """Replace rows of a table by rows in 8 bits and their scales."""
        table, index = node.inputs[:2]
        assert table is not None and table.const_value is not None and table.name is not None
        values, scales = quantize_columns(table.const_value.numpy().T.astype(np.float32))
        rows = self._add(node, "Gather", [self._weight(f"{table.name}.rows", values.T), index])
        scale = self._add(
            node, "Gather", [self._weight(f"{table.name}.row_scales", scales[:, None]), index]
        )
        floats = self._add(node, "Cast", [rows], {"to": self._dtype})
        self._replace(node, self._add(node, "Mul", [floats, scale]))

    def _multiply_rows(self, node: ir.Node, product: _Product) -> ir.Value:
        rows, largest = self._quantized_rows(node, product.x)
        values, scales = quantize_columns(product.matrix)
        inputs = [
            rows,
            self._weight(f"{product.name}.int8", values),
            self._constant("one", np.float32(1)),
            self._weight(f"{product.name}.scales", scales / np.float32(127)),
            self._constant("zero_point", _ZERO_POINT),
        ]
        result = self._add(node, "MatMulIntegerToFloat", inputs, domain=_CONTRIB)
        return self._add(node, "Mul", [result, largest])

    def _quantized_rows(self, node: ir.Node, x: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return x [..., K] in 8 bits, and the largest value of each row [..., 1].

        A row's scale is its own: what else is in the batch changes nothing about it.
        """
        if x not in self._rows:
            last = self._constant("last_axis", np.array([-1]))
            size = self._add(node, "ReduceMax", [self._add(node, "Abs", [x]), last])
            largest = self._add(node, "Max", [size, self._constant("tiny", _TINY)])
            factor = self._add(node, "Div", [self._constant("steps", np.float32(127)), largest])
            scaled = self._add(node, "Mul", [x, factor])
            one, zero = (
                self._constant("one", np.float32(1)),
                self._constant("zero_point", _ZERO_POINT),
            )
            self._rows[x] = self._add(node, "QuantizeLinear", [scaled, one, zero]), largest
        return self._rows[x]

    def _multiply_fixed(self, node: ir.Node, product: _Product) -> ir.Value:
        """Return x @ matrix, with the bias, if there is one."""
        x, name = product.x, product.x.name
        assert name is not None
        scale = self._constant(f"{name}.scale", self._fixed[name].scale)
        zero = self._constant(f"{name}.zero_point", self._fixed[name].zero_point)
        if x not in self._rows:
            self._rows[x] = self._add(node, "QuantizeLinear", [x, scale, zero]), scale
        rows, _ = self._rows[x]
        values, scales = quantize_columns(product.matrix)
        inputs = [
            rows,
            self._weight(f"{product.name}.int8", values),
            scale,
            self._weight(f"{product.name}.scales", scales),
            zero,
            None,  # weights are symmetric
            product.bias,
        ]
        return self._add(node, "MatMulIntegerToFloat", inputs, domain=_CONTRIB)

    def _multiply_blocks(self, node: ir.Node, product: _Product, bits: int) -> ir.Value:
        values, scales = quantize_blocks(product.matrix, bits)
        K, N = product.matrix.shape
        inputs = [
            product.x,
            self._weight(f"{product.name}.int{bits}", values),
            self._weight(f"{product.name}.scales", scales),
        ]
        attributes = {
            "K": K,
            "N": N,
            "bits": bits,
            "block_size": BLOCK_SIZE,
            "accuracy_level": self._accuracy_level,
        }
        return self._add(node, "MatMulNBits", inputs, attributes, domain=_CONTRIB)

    def _add(
        self,
        before: ir.Node,
        op_type: str,
        inputs: list[ir.Value | None] | list[ir.Value],
        attributes: dict[str, int] | None = None,
        domain: str = "",
    ) -> ir.Value:
        node = ir.node(op_type, inputs, attributes or {}, domain=domain)
        self._graph.insert_before(before, node)
        return node.outputs[0]

    def _constant(self, name: str, array: NDArray[np.generic] | np.generic) -> ir.Value:
        if name not in self._constants:
            self._constants[name] = self._weight(f"quantize.{name}", np.asarray(array))
        return self._constants[name]

    def _weight(self, name: str, array: NDArray[np.generic]) -> ir.Value:
        while name in self._graph.initializers:  # a matrix that two products use
            name += "_"
        array = np.ascontiguousarray(array)
        if array.dtype == np.float32:
            array = array.astype(self._dtype.numpy())
        return add_constant(self._graph, name, array)

    def _replace(self, node: ir.Node, result: ir.Value) -> None:
        (old,) = node.outputs
        result.shape, result.type = old.shape, old.type
        name = old.name
        old.replace_all_uses_with(result, replace_graph_outputs=True)
        self._graph.remove(node, safe=True)
        result.name = name
