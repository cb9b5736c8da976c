"""Sums in other operators: the same numbers, and of a row the same bits alone and in a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn import functional as F

from exporter.examples.own_class import CONFIG, Counter
from exporter.graphs.sums import replace_sums
from exporter.models.own import Attend, OwnConfig
from exporter.own import export_own

X = np.random.default_rng(0).normal(size=(5, 7, 33)).astype(np.float32)


def replaced(*nodes: Any, **constants: np.ndarray) -> ir.Model:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "tokens", 33])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    weights = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(list(nodes), "graph", [x], [y], weights)
    opset = [helper.make_opsetid("", 23)]
    model = ir.from_proto(helper.make_model(graph, opset_imports=opset, ir_version=10))
    replace_sums(model)
    return model


def run_rows(model: ir.Model, x: np.ndarray) -> Any:
    """Return what a graph gives, and see that it gives the same for every row alone."""
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString())
    together = session.run(None, {"x": x})[0]
    alone = np.concatenate([session.run(None, {"x": row[None]})[0] for row in x])
    assert (together == alone).all()
    return together


@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("axis", [1, -2])
@pytest.mark.parametrize("kind", ["ReduceSum", "ReduceMean"])
def test_a_sum_over_rows_is_a_product_of_ones(kind: str, axis: int, keepdims: int) -> None:
    node = helper.make_node(kind, ["x", "axes"], ["y"], keepdims=keepdims)

    model = replaced(node, axes=np.array([axis]))

    assert kind not in [node.op_type for node in model.graph]
    wanted = (X.sum if kind == "ReduceSum" else X.mean)(axis=1, keepdims=bool(keepdims))
    np.testing.assert_allclose(run_rows(model, X), wanted, atol=1e-6)


@pytest.mark.parametrize("axes", [[2], [-1], [0], [1, 2]])
def test_other_sums_stay(axes: list[int]) -> None:
    node = helper.make_node("ReduceSum", ["x", "axes"], ["y"])

    model = replaced(node, axes=np.array(axes))

    assert [node.op_type for node in model.graph] == ["ReduceSum"]


def test_a_norm_without_weights_has_constant_ones() -> None:
    one = numpy_helper.from_array(np.ones(1, np.float32))

    model = replaced(
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("ConstantOfShape", ["shape"], ["ones"], value=one),
        helper.make_node("RMSNormalization", ["x", "ones"], ["y"], axis=-1, epsilon=1e-3),
    )

    (norm,) = (node for node in model.graph if node.op_type == "RMSNormalization")
    assert norm.inputs[1] is not None and norm.inputs[1].const_value is not None
    wanted = F.rms_norm(torch.from_numpy(X), (33,), eps=1e-3).numpy()
    np.testing.assert_allclose(run_rows(model, X), wanted, atol=1e-6)


class Classes(nn.Module):
    """The mean of what torch's own layers make of the real tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.output = nn.Embedding(10, 16), nn.Linear(16, 2)
        layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, input_ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.layers(self.token(input_ids), src_key_padding_mask=~mask)
        real = mask[..., None].float()
        return self.output((hidden * real).sum(1) / real.sum(1))


class Normed(Counter):
    """A decoder whose norms have no weights."""

    def blocks(self, hidden: Tensor, attend: Attend) -> Tensor:
        return F.rms_norm(super().blocks(F.rms_norm(hidden, (32,)), attend), (32,))


READER = OwnConfig.text_encoder(vocab_size=10, max_len=12, labels=("good", "bad"))


@pytest.mark.parametrize(
    ("kind", "config"), [pytest.param(Classes, READER, marks=pytest.mark.long), (Normed, CONFIG)]
)
def test_usual_means_and_norms_of_own_classes_are_certified(
    kind: type[nn.Module], config: OwnConfig, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(10)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()

    manifest = export_own(kind(), config, tmp_path / "own", tokenizer=tokenizer)

    assert manifest.certificate.batch_invariant
