"""Which functions compute the operators of a graph: a set a kind of device.

`CPU` is made of the fastest kernels of onnxruntime there. Those for CUDA have no control flow and
no node that onnxruntime keeps off the device (Shape), so that a call can be captured as a CUDA
graph: sizes are attributes. `CUDA_HALF` has the kernel of `CPU` for a decoder's own row; there that
kernel takes neither float32 nor a bias, so `CUDA_FLOAT`, and both for relative positions, have
TensorScatter and Attention. Attention to the source is Attention with the lengths of the sources in
both.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir

from exporter.operators import cached_attention, cross_alignment, cross_attention
from exporter.operators.domain import DOMAIN, OPSET, Functions

_CONTRIB = "com.microsoft"

CPU: Functions = {
    **cached_attention.GROUP_QUERY,
    **cross_attention.BRANCHES,
    **cross_alignment.IF_WANTED,
}
CUDA_HALF: Functions = {
    **cached_attention.GROUP_QUERY,
    cached_attention.BIASED: cached_attention.STANDARD[cached_attention.BIASED],
    **cross_attention.ONE_ATTENTION,
    **cross_alignment.ALWAYS,
}
CUDA_FLOAT: Functions = {
    **cached_attention.STANDARD,
    **cross_attention.ONE_ATTENTION,
    **cross_alignment.ALWAYS,
}


def attach_bodies(model: ir.Model, functions: Functions) -> None:
    """Give every operator of the domain that the graph uses its function, in place of any other."""
    model.functions.clear()
    for name in sorted({node.op_type for node in model.graph if node.domain == DOMAIN}):
        text = functions[name]
        opsets = f'"": {OPSET}' + (f', "{_CONTRIB}": 1' if f"{_CONTRIB}." in text else "")
        function: ir.Function = ir.from_proto(
            onnx.parser.parse_function(f'<domain: "{DOMAIN}", opset_import: [{opsets}]>{text}')
        )
        model.functions[function.identifier()] = function
        model.opset_imports.update(function.opset_imports)
