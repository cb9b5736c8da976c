"""Weights in 8 and 4 bits: how near they are, what the certificate tells, what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from engine.errors import CertificateError, ConfigError
from engine.package.manifest import Manifest, PackageFormat, Weights
from engine.package.package import Package, load_package
from engine.session import create_session
from exporter.checkpoint import load_checkpoint
from exporter.compare import scored_text
from exporter.compare.quality import measure_text
from exporter.compare.scored_text import read_text
from exporter.export import export_package
from exporter.graphs import package_graphs
from exporter.graphs.contracts import generation_contract
from exporter.graphs.package_graphs import write_graphs
from exporter.graphs.torch_export import Graphs
from exporter.graphs.weights import quantize, quantize_blocks, quantize_columns
from exporter.models.layers import OUTPUT_BIAS
from exporter.prover.loss import DEFAULT_LIMITS, LossLimits
from exporter.verification import verify_package
from tests.exporter.conftest import try_few_cases

pytestmark = pytest.mark.usefixtures("few_cases")

TinyGraphs = Callable[[str], tuple[Path, Graphs]]
ExportTiny = Callable[..., Manifest]

ANY_LOSS = LossLimits(max_token_loss=1, max_logit_loss=100, max_perplexity_loss=100)
FORMATS: list[Weights] = ["int8", "int8-blocks", "int4"]
MATRIX = np.random.default_rng(0).normal(size=(70, 5)).astype(np.float32)


@pytest.fixture(scope="module")
def export_tiny(tiny_graphs: TinyGraphs) -> ExportTiny:
    """Export a tiny checkpoint without tracing it again; its cache is not rounded."""

    def make(family: str, out: Path, weights: Weights, **options: object) -> Manifest:
        checkpoint, _ = tiny_graphs(family)
        options = {"limits": ANY_LOSS, "kv_cache": "fp32", **options}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(package_graphs, "build_graphs", lambda model, **_: tiny_graphs(family)[1])
            return export_package(checkpoint, out, weights=weights, **options)  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="module")
def rounded(
    export_tiny: ExportTiny, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Package]:
    """Export a tiny checkpoint in a format, once for all who only read the package."""

    @cache
    def make(family: str, weights: Weights) -> Package:
        out = tmp_path_factory.mktemp("rounded") / "package"
        with pytest.MonkeyPatch.context() as patch:
            try_few_cases(patch)
            export_tiny(family, out, weights)
        return load_package(out)

    return make


def test_a_column_is_rounded_by_half_a_127th_of_its_largest_weight() -> None:
    values, scales = quantize_columns(MATRIX)

    error = np.abs(values * scales - MATRIX)
    assert (error <= np.abs(MATRIX).max(axis=0) / 127 / 2 + 1e-6).all()


@pytest.mark.parametrize(("bits", "steps"), [(8, 127), (4, 7)])
def test_a_block_is_rounded_by_half_a_step_of_its_largest_weight(bits: int, steps: int) -> None:
    values, scales = quantize_blocks(MATRIX, bits)

    if bits == 4:
        values = np.stack([values & 15, values >> 4], axis=-1).reshape(5, 3, 32)
    restored = (values.astype(np.float32) - 2 ** (bits - 1)) * scales[..., None]  # [5, 3, 32]
    restored = restored.reshape(5, 96).T
    assert (np.abs(restored[:70] - MATRIX) <= scales.max() / 2 + 1e-6).all()
    assert (restored[70:] == 0).all()
    assert scales.max() == pytest.approx(np.abs(MATRIX).max() / steps)


def test_weights_that_are_all_zero_stay_zero() -> None:
    zeros = np.zeros((40, 3), np.float32)

    columns, column_scales = quantize_columns(zeros)
    blocks, block_scales = quantize_blocks(zeros, 8)

    assert not (columns * column_scales).any()
    assert not ((blocks.astype(np.float32) - 128) * block_scales[..., None]).any()


def test_products_of_one_input_share_its_rounded_rows(tiny_graphs: TinyGraphs) -> None:
    _, graphs = tiny_graphs("encoder-decoder")
    encoder = graphs["encoder.onnx"]
    num_products = sum(node.op_type == "MatMul" for node in encoder.graph)

    quantize(encoder, PackageFormat(weights="int8"))

    ops = Counter(node.op_type for node in encoder.graph)
    assert ops["MatMulIntegerToFloat"] == num_products
    assert ops["MatMul"] == 0
    # A layer's query, key and value read one input; all cross keys and values another.
    assert ops["QuantizeLinear"] == 2 * 4 + 1


def test_sums_of_the_largest_weights_are_exact_on_every_processor(tmp_path: Path) -> None:
    """Without VNNI the fast kernel for signed weights adds two products in 16 bits."""
    inputs = np.ones((3, MATRIX.shape[0]), np.float32)
    ones = np.ones_like(MATRIX)

    found = _product_of(ones, "int8", tmp_path)(inputs)

    np.testing.assert_allclose(found, inputs @ ones, rtol=1e-6)


def _product_of(
    matrix: NDArray[np.float32], weights: Weights, folder: Path
) -> Callable[[NDArray[np.float32]], NDArray[np.float32]]:
    """Return what multiplies rows [M, K] by a matrix [K, N] in 8 or 4 bits, as the engine does."""
    sizes = ["M", matrix.shape[0]], ["M", matrix.shape[1]]
    proto = helper.make_model(
        helper.make_graph(
            [helper.make_node("MatMul", ["x", "matrix"], ["y"])],
            "product",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, sizes[0])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, sizes[1])],
            [onnx.numpy_helper.from_array(matrix, "matrix")],
        ),
        opset_imports=[helper.make_opsetid("", 23)],
        ir_version=10,
    )
    model = ir.from_proto(proto)
    quantize(model, PackageFormat(weights=weights))
    ir.save(model, path := folder / f"{weights}.onnx", external_data=f"{weights}.onnx.data")
    session = create_session(path, num_threads=1)
    return lambda x: session.run({"x": x})["y"]


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("family", ["gpt", pytest.param("encoder-decoder", marks=pytest.mark.long)])
def test_the_certificate_tells_what_a_format_loses(
    family: str, weights: Weights, rounded: Callable[..., Package], tmp_path: Path
) -> None:
    manifest = rounded(family, weights).manifest

    certificate = manifest.certificate
    assert manifest.weights == certificate.dtype == weights
    assert certificate.loss is not None
    assert 0 < certificate.loss.mean_abs_logit_diff < certificate.loss.logit_std
    assert certificate.loss.mean_abs_logit_diff < certificate.max_abs_logit_diff
    assert certificate.max_abs_logit_diff < certificate.tolerance
    assert certificate.tokens_equal > certificate.tokens_compared / 2
    assert certificate.batch_invariant is _rows_are_independent(weights, tmp_path)
    assert certificate.loss.perplexity is None


def _rows_are_independent(weights: Weights, folder: Path) -> bool:
    """Return whether a row alone has the same bits as beside another one, in a product alone.

    The kernels for AVX2 compute a lone row of 4 bits in an order of its own.
    """
    multiply = _product_of(MATRIX, weights, folder)
    rows = np.random.default_rng(1).normal(size=(2, MATRIX.shape[0])).astype(np.float32)
    is_equal = np.array_equal(multiply(rows[:1]), multiply(rows)[:1])
    assert is_equal or weights == "int4"
    return is_equal


@pytest.mark.parametrize("family", ["bert", "labeller", "vit"])
def test_a_one_pass_model_is_rounded_too(
    family: str, export_tiny: ExportTiny, tmp_path: Path
) -> None:
    manifest = export_tiny(family, tmp_path / "package", "int8")

    assert manifest.certificate.loss is not None
    assert manifest.certificate.loss.mean_abs_logit_diff > 0
    assert manifest.certificate.batch_invariant


def test_8_bits_lose_less_than_4(rounded: Callable[..., Package]) -> None:
    losses = []
    for weights in FORMATS:
        loss = rounded("gpt", weights).manifest.certificate.loss
        assert loss is not None
        losses.append(loss.mean_abs_logit_diff)

    assert max(losses[:2]) < losses[2] / 4


def test_verify_repeats_the_certificate_of_a_format_with_loss(
    rounded: Callable[..., Package], tiny_graphs: TinyGraphs
) -> None:
    package = rounded("gpt", "int8")

    again = verify_package(package.path, tiny_graphs("gpt")[0])

    assert again.certificate == package.manifest.certificate


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (LossLimits(1, 0.01, 1), r"largest logit difference .* allowed 0.01; .*--max-logit-loss"),
        (LossLimits(0, 100, 1), r"greedy tokens .* allowed 0; .*--max-token-loss"),
    ],
)
def test_a_format_that_loses_more_than_allowed_is_refused_and_leaves_nothing(
    limits: LossLimits, message: str, export_tiny: ExportTiny, tmp_path: Path
) -> None:
    with pytest.raises(CertificateError, match=message):
        export_tiny("gpt", tmp_path / "package", "int4", limits=limits)

    assert list(tmp_path.iterdir()) == []


def test_perplexity_is_measured_on_a_text(export_tiny: ExportTiny, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("w1 w2 w3 w4 w5 w6 w7 w8 w9 w10 w11 w12 w13 w14 w15 w16")

    loss = export_tiny("gpt", tmp_path / "package", "int8", text=text).certificate.loss

    assert loss is not None and loss.perplexity is not None and loss.eager_perplexity is not None
    assert loss.text_tokens == 11 + 3  # pieces of 12 and 4 tokens
    assert loss.perplexity == pytest.approx(loss.eager_perplexity, rel=0.2)
    assert loss.perplexity != loss.eager_perplexity


@pytest.mark.parametrize(
    ("family", "content"),
    [("gpt", "w3 w4 w5 w6 w7"), ("encoder-decoder", "w3 w4\tw5 w6\n\nw7 w8 w9\tw5\n")],
)
def test_both_sides_give_a_text_the_same_perplexity_in_fp32(
    family: str, content: str, tiny_graphs: TinyGraphs, tmp_path: Path
) -> None:
    path, graphs = tiny_graphs(family)
    write_graphs(graphs, tmp_path)
    checkpoint = load_checkpoint(path)
    contract = generation_contract(checkpoint.config.model)
    assert contract is not None and checkpoint.tokenizer is not None
    (tmp_path / "text.txt").write_text(content)

    text = read_text(tmp_path / "text.txt", checkpoint)
    found = measure_text(checkpoint.model, contract, tmp_path, text)

    assert found.text_tokens == (4 if family == "gpt" else 3 + 2)
    assert found.perplexity == pytest.approx(found.eager_perplexity, rel=1e-5)


def test_a_text_with_a_token_that_the_model_never_writes_has_no_perplexity(
    tiny_graphs: TinyGraphs, tmp_path: Path
) -> None:
    path, graphs = tiny_graphs("encoder-decoder")
    write_graphs(graphs, tmp_path)
    checkpoint = load_checkpoint(path)
    checkpoint.model.get_parameter(OUTPUT_BIAS).data[6] = -1e30
    contract = generation_contract(checkpoint.config.model)
    assert contract is not None
    (tmp_path / "text.txt").write_text("w3 w4\tw5 w6\n")
    text = read_text(tmp_path / "text.txt", checkpoint)

    with pytest.raises(ConfigError, match="never writes token 6, .* leave .* out of --text"):
        measure_text(checkpoint.model, contract, tmp_path, text)


@pytest.mark.parametrize(
    ("family", "content", "message"),
    [
        ("gpt", b"", "text.txt has no text to measure; give a file with two tokens or more"),
        ("gpt", b"w1 \xff w2", "text.txt is not UTF-8 at its byte 3"),
        ("gpt", b"w1 w2 \xe2\x82", "text.txt is not UTF-8 at its byte 6"),
        (
            "encoder-decoder",
            b" \n\tw1 w2\n",
            "give a file with lines of a source, or of source, tab, target",
        ),
        ("bert", b"w1 w2", "only a model that generates has a perplexity; leave out --text"),
    ],
    ids=["empty", "another code", "cut off", "no sources", "no perplexity"],
)
def test_a_text_that_cannot_be_measured_is_refused_before_anything_is_compared(
    family: str, content: bytes, message: str, export_tiny: ExportTiny, tmp_path: Path
) -> None:
    text, compared = tmp_path / "text.txt", []
    text.write_bytes(content)

    with pytest.raises(ConfigError, match=message):
        export_tiny(
            family, tmp_path / "package", "int8", text=text, progress=lambda *n: compared.append(n)
        )

    assert compared == []
    assert list(tmp_path.iterdir()) == [text]


def test_a_text_that_is_not_there_is_refused_before_anything_is_compared(
    export_tiny: ExportTiny, tmp_path: Path
) -> None:
    compared: list[object] = []

    with pytest.raises(FileNotFoundError):
        export_tiny(
            "gpt",
            tmp_path / "package",
            "int8",
            text=tmp_path / "missing",
            progress=lambda *n: compared.append(n),
        )

    assert compared == []


def test_verify_refuses_a_text_before_anything_is_compared(
    rounded: Callable[..., Package], tiny_graphs: TinyGraphs, tmp_path: Path
) -> None:
    compared: list[object] = []
    (tmp_path / "text.txt").write_text("")

    with pytest.raises(ConfigError, match="no text to measure"):
        verify_package(
            rounded("gpt", "int8").path,
            tiny_graphs("gpt")[0],
            text=tmp_path / "text.txt",
            progress=lambda *n: compared.append(n),
        )

    assert compared == []


def test_a_long_text_may_be_cut_within_a_letter(
    tiny_graphs: TinyGraphs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scored_text, "_MAX_BYTES", 7)
    (tmp_path / "text.txt").write_text("w1 w2 \N{EURO SIGN}")

    text = read_text(tmp_path / "text.txt", load_checkpoint(tiny_graphs("gpt")[0]))

    assert [len(tokens) for _, tokens in text.pieces] == [1]


@pytest.mark.parametrize("limit", [float("nan"), float("inf"), -0.1])
def test_a_limit_that_is_no_limit_is_refused_before_anything_runs(limit: float) -> None:
    with pytest.raises(ConfigError, match="max_token_loss"):
        replace(DEFAULT_LIMITS["int8"], max_token_loss=limit)
