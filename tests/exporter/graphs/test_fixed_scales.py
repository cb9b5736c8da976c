"""Scales of inputs that are fixed at export: what they come from, and where they are refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper
from torch import Tensor
from torch.nn import functional

from engine.errors import ConfigError
from engine.package.manifest import Manifest, PackageFormat
from engine.package.package import load_package
from engine.session import create_session
from exporter.checkpoint import load_checkpoint
from exporter.compare import scored_text
from exporter.compare.scored_text import read_text
from exporter.export import MIN_TOKENS, export_package
from exporter.graphs import package_graphs
from exporter.graphs.contracts import generation_contract
from exporter.graphs.input_scales import Passage, fixed_scales
from exporter.graphs.torch_export import Graphs
from exporter.graphs.weights import FixedScale, inputs_of_products, quantize
from exporter.models import GPT, EncoderDecoder
from exporter.prover.generation_cases import Case
from exporter.prover.loss import LossLimits
from exporter.samples import Tokens
from exporter.verification import verify_package

pytestmark = pytest.mark.usefixtures("few_cases")

TinyGraphs = Callable[[str], tuple[Path, Graphs]]
ExportFixed = Callable[..., Manifest]

ANY_LOSS = LossLimits(max_token_loss=1, max_logit_loss=100, max_perplexity_loss=100)
FIXED = PackageFormat(weights="int8-fixed")
JUDGED = MIN_TOKENS  # tokens of a text in these tests
MATRIX = np.random.default_rng(0).normal(size=(70, 5)).astype(np.float32)
BIAS = np.random.default_rng(1).normal(size=5).astype(np.float32)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text of any tiny model that generates: 400 lines of a source, tab, target."""
    path, rng = tmp_path / "text.tsv", np.random.default_rng(0)
    words = [[f"w{i}" for i in rng.integers(3, 31, 8)] for _ in range(400)]
    path.write_text("".join(f"{' '.join(w[:4])}\t{' '.join(w[4:])}\n" for w in words))
    return path


@pytest.fixture
def export_fixed(tiny_graphs: TinyGraphs, monkeypatch: pytest.MonkeyPatch) -> ExportFixed:
    """Export a tiny checkpoint without tracing it again, judged by the beginning of a text."""

    def make(family: str, out: Path, **options: Any) -> Manifest:
        checkpoint, _ = tiny_graphs(family)
        monkeypatch.setattr(scored_text, "MAX_TOKENS", JUDGED)
        monkeypatch.setattr(
            package_graphs, "build_graphs", lambda model, **_: tiny_graphs(family)[1]
        )
        options = {"weights": "int8-fixed", "limits": ANY_LOSS, "kv_cache": "fp32", **options}
        return export_package(checkpoint, out, **options)

    return make


def product(folder: Path, form: str, scale: FixedScale) -> Callable[[Any], NDArray[np.float32]]:
    """Return what multiplies rows by MATRIX and adds BIAS, with an input of a fixed scale."""
    weights = [onnx.numpy_helper.from_array(BIAS, "bias")]
    if form == "Gemm":
        weights.append(onnx.numpy_helper.from_array(MATRIX.T.copy(), "matrix"))
        nodes = [helper.make_node("Gemm", ["x", "matrix", "bias"], ["y"], transB=1)]
    else:
        weights.append(onnx.numpy_helper.from_array(MATRIX, "matrix"))
        nodes = [
            helper.make_node("MatMul", ["x", "matrix"], ["product"]),
            helper.make_node("Add", ["product", "bias"], ["y"]),
        ]
    values = (("x", MATRIX.shape[0]), ("y", MATRIX.shape[1]))
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["M", size]) for n, size in values)
    model = ir.from_proto(
        helper.make_model(
            helper.make_graph(nodes, "product", [x], [y], weights),
            opset_imports=[helper.make_opsetid("", 23)],
            ir_version=10,
        )
    )
    quantize(model, FIXED, {"x": scale})
    assert [n.op_type for n in model.graph] == ["QuantizeLinear", "MatMulIntegerToFloat"]
    ir.save(model, path := folder / f"{form}.onnx", external_data=f"{form}.onnx.data")
    session = create_session(path, num_threads=1)
    return lambda rows: session.run({"x": rows})["y"]


@pytest.mark.parametrize("form", ["Gemm", "MatMul"])
def test_a_product_is_as_near_as_its_steps_and_a_row_does_not_see_its_neighbours(
    form: str, tmp_path: Path
) -> None:
    rows = np.random.default_rng(2).uniform(-1, 3, (4, MATRIX.shape[0])).astype(np.float32)
    multiply = product(tmp_path, form, FixedScale(np.float32(4 / 255), np.uint8(64)))

    found = multiply(rows)

    of_input = 4 / 255 / 2 * np.abs(MATRIX).sum(axis=0)
    of_weights = np.abs(MATRIX).max(axis=0) / 127 / 2 * np.abs(rows).sum(axis=1, keepdims=True)
    assert (np.abs(found - (rows @ MATRIX + BIAS)) <= 1.1 * (of_input + of_weights)).all()
    np.testing.assert_array_equal(multiply(rows[1:2]), found[1:2])


def test_what_is_beyond_the_range_counts_as_its_end(tmp_path: Path) -> None:
    multiply = product(tmp_path, "MatMul", FixedScale(np.float32(0.01), np.uint8(100)))
    ones = np.ones((1, MATRIX.shape[0]), np.float32)

    np.testing.assert_array_equal(multiply(9 * ones), multiply(1.55 * ones))
    np.testing.assert_array_equal(multiply(-9 * ones), multiply(-ones))


def test_nothing_of_a_graph_looks_for_a_largest_value_or_adds_a_bias(
    tiny_graphs: TinyGraphs,
) -> None:
    _, graphs = tiny_graphs("encoder-decoder")
    decoder = graphs["decoder.onnx"]
    before = Counter(node.op_type for node in decoder.graph)
    names = inputs_of_products(decoder.graph)

    quantize(decoder, FIXED, dict.fromkeys(names, FixedScale(np.float32(0.1), np.uint8(128))))

    ops = Counter(node.op_type for node in decoder.graph)
    assert ops["QuantizeLinear"] == len(names)
    assert ops["MatMulIntegerToFloat"] == before["MatMul"] + before["Gemm"]
    assert ops["MatMul"] == ops["Gemm"] == ops["Abs"] == ops["Div"] == 0
    assert ops["Mul"] == before["Mul"] + 1  # the scale of a token
    # The sums that are left have a residual or positions.
    assert ops["Add"] < before["Add"] - 4


@pytest.mark.parametrize("family", ["gpt", "encoder-decoder"])
def test_a_scale_is_that_of_the_range_in_the_eager_model(
    family: str, tiny_graphs: TinyGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, graphs = tiny_graphs(family)
    model = load_checkpoint(path).model
    assert isinstance(model, GPT | EncoderDecoder)
    contract = generation_contract(model.config)
    assert contract is not None
    sources = [(3, 4, 5), (9,)] if contract.cross_cache else [(), ()]
    text = list(zip(sources, [(1, 6, 7, 8), (1, 30)], strict=True))
    seen: dict[int, tuple[float, float]] = {}
    multiply = functional.linear

    def watch(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        least, largest = seen.get(id(weight), (0.0, 0.0))
        seen[id(weight)] = min(least, float(x.min())), max(largest, float(x.max()))
        return multiply(x, weight, bias)

    found = fixed_scales(graphs, contract, text)
    monkeypatch.setattr(functional, "linear", watch)
    with torch.inference_mode():
        for source, target in text:
            model(*[torch.tensor([ids]) for ids in (source, target) if ids])

    scales = {scale for graph in found.values() for scale in graph.values()}
    ranges = np.array(sorted({end for ends in seen.values() for end in ends}))
    ends = [(-float(s.zero_point) * s.scale, (255 - float(s.zero_point)) * s.scale) for s in scales]
    widths = np.array([largest - least for least, largest in seen.values()])
    assert len(scales) >= 9
    for scale, (least, largest) in zip(scales, ends, strict=True):
        assert np.isclose(255 * scale.scale, widths, rtol=1e-4).any()
        assert np.abs(ranges - least).min() <= scale.scale
        assert np.abs(ranges - largest).min() <= scale.scale
    assert all(np.isclose([255 * s.scale for s in scales], w, rtol=1e-4).any() for w in widths)


def test_a_graph_is_not_changed_by_being_watched(tiny_graphs: TinyGraphs) -> None:
    path, graphs = tiny_graphs("gpt")
    contract = generation_contract(load_checkpoint(path).config.model)
    assert contract is not None
    before = ir.to_proto(graphs["decoder.onnx"]).SerializeToString()

    fixed_scales(graphs, contract, [((), (3, 4, 5))])

    assert ir.to_proto(graphs["decoder.onnx"]).SerializeToString() == before


@pytest.mark.parametrize("family", ["gpt", pytest.param("encoder-decoder", marks=pytest.mark.long)])
def test_a_package_says_what_it_is_and_is_verified(
    family: str, text: Path, export_fixed: ExportFixed, tiny_graphs: TinyGraphs, tmp_path: Path
) -> None:
    export_fixed(family, tmp_path / "package", text=text, kv_cache=None)

    manifest = load_package(tmp_path / "package").manifest
    certificate, loss = manifest.certificate, manifest.certificate.loss
    assert manifest.weights == "int8-fixed"
    assert certificate.dtype == "int8-fixed, int8 KV cache"
    assert certificate.batch_invariant
    assert loss is not None and loss.text_tokens >= JUDGED
    assert 0 < loss.mean_abs_logit_diff < loss.logit_std / 4
    again = verify_package(tmp_path / "package", tiny_graphs(family)[0], text=text)
    assert again.certificate == certificate


@pytest.mark.parametrize("family", ["gpt", "encoder-decoder"])
def test_scales_come_from_what_does_not_judge_them(
    family: str, text: Path, tiny_graphs: TinyGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = load_checkpoint(tiny_graphs(family)[0])
    everything = [passage_of(*piece) for piece in read_text(text, checkpoint).pieces]
    monkeypatch.setattr(scored_text, "MAX_TOKENS", JUDGED)

    found = read_text(text, checkpoint)

    judged = [passage_of(*piece) for piece in found.pieces]
    start = max(len(judged), len(found.lines))
    assert judged == everything[: len(judged)]
    assert found.behind == everything[start : start + len(found.behind)]
    assert found.num_behind >= JUDGED
    assert not {line.case.source for line in found.lines} & {source for source, _ in found.behind}


def passage_of(case: Case, tokens: Tokens) -> Passage:
    return case.source, (*case.prompt, *tokens)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("gpt", {}, "fixes scales on a text; give --text, or take --weights int8"),
        (
            "gpt",
            {"text": "w3 w4 w5 w6 " * 9},
            f"{MIN_TOKENS} tokens or more .* here [0-9]+; give a longer",
        ),
        ("bert", {}, "int8-fixed is for models that generate; int8 is for all"),
        ("gpt", {"target": "cuda"}, "int8-fixed has no kernel for the target cuda; int8-blocks"),
    ],
    ids=["no text", "short text", "no writer", "cuda"],
)
def test_what_scales_cannot_be_fixed_for_is_refused_before_anything_is_compared(
    family: str,
    options: dict[str, Any],
    message: str,
    export_fixed: ExportFixed,
    tmp_path: Path,
) -> None:
    compared: list[object] = []
    if content := options.pop("text", None):
        (path := tmp_path / "short").write_text(content)
        options["text"] = path

    with pytest.raises(ConfigError, match=message):
        export_fixed(
            family, tmp_path / "package", progress=lambda *n: compared.append(n), **options
        )

    assert compared == []
    assert not (tmp_path / "package").exists()
