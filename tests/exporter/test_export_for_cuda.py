"""Packages for CUDA are proven on a CPU: in float32 as all are, in float16 to its own bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from engine.errors import CertificateError, ConfigError
from engine.package.graph_io import SAMPLING_GRAPHS
from engine.package.manifest import CacheDtype, PackageFormat, Precision, Weights
from engine.package.package import load_package
from engine.session import create_session
from exporter import certificate
from exporter.checkpoint import load_checkpoint, save_checkpoint
from exporter.export import export_package
from exporter.graphs.fuse import fuse
from exporter.graphs.package_graphs import check_format, write_graphs
from exporter.graphs.target import CUDA
from exporter.graphs.torch_export import build_graphs
from exporter.graphs.weights import quantize
from exporter.models import TransformerConfig, build_model
from exporter.prover.loss import LossLimits
from server.cli.app import run
from tests.exporter.conftest import MakeCheckpoint, TinyGraphs
from tests.exporter.graphs.test_nodes_for_cuda import WANTS_CUDNN
from tests.fakes.traces import Trace

pytestmark = pytest.mark.usefixtures("few_cases")

LLAMA = {
    "positions.kind": "rotary",
    "num_kv_heads": 1,
    "key_dim": 16,
    "value_dim": 16,
    "norm": "rms",
    "norm_position": "first",
    "feed_forward.activation": "silu",
    "feed_forward.gated": True,
}
SHORT_LLAMA = {**LLAMA, "max_target_len": 6}
T5 = {"positions.kind": "relative", "norm": "rms", "attention.bias": False, "attention.scale": 1.0}
SHORT_T5 = {
    **T5,
    **{"max_source_len": 5, "num_encoder_layers": 1, "max_target_len": 4, "num_decoder_layers": 1},
}
SHORT_BERT = {"max_source_len": 7, "num_encoder_layers": 1}
GEMMA = {
    **LLAMA,
    "attention.window": 4,
    "attention.windowed_layers": (0,),
    "attention.softcap": 2.0,
}
ANY_LOSS = LossLimits(1.0, 100.0, 100.0, 1.0)
IR_DTYPES: dict[Precision, ir.DataType] = {
    "fp32": ir.DataType.FLOAT,
    "fp16": ir.DataType.FLOAT16,
    "bf16": ir.DataType.BFLOAT16,
}


@pytest.mark.parametrize(
    ("family", "precision", "options"),
    [
        pytest.param("encoder-decoder", "fp16", {}, marks=pytest.mark.long),
        pytest.param("encoder-decoder", "fp32", T5, marks=pytest.mark.long),
        ("encoder-decoder", "fp16", SHORT_T5),
        pytest.param("encoder-decoder", "bf16", T5, marks=pytest.mark.long),
        ("gpt", "fp32", SHORT_LLAMA),
        pytest.param("gpt", "fp32", GEMMA, marks=pytest.mark.long),
        pytest.param("gpt", "fp32", {"attention.window": 4}, marks=pytest.mark.long),
        ("gpt", "bf16", SHORT_LLAMA),
        ("bert", "fp16", SHORT_BERT),
        pytest.param(
            "bert",
            "fp16",
            {"head.pooling": "max", "head.pooler": "none", "head.normalize": True},
            marks=pytest.mark.long,
        ),
        pytest.param("vit", "fp16", {}, marks=pytest.mark.long),
    ],
)
def test_a_package_for_cuda_has_the_certificate_of_its_graphs(
    family: str,
    precision: Precision,
    options: dict[str, object],
    make_checkpoint: MakeCheckpoint,
    tmp_path: Path,
) -> None:
    checkpoint = make_checkpoint(family, **options)

    export_package(checkpoint, tmp_path / "p", target="cuda", precision=precision)

    manifest = load_package(tmp_path / "p").manifest
    found = manifest.certificate
    assert manifest.format == PackageFormat.of("cuda", precision)
    assert found.tokens_equal == found.tokens_compared
    assert all(one.eager.largest < 1e-4 for one in found.judged), "in float32"
    assert not found.batch_invariant, "a device shows that itself"
    assert bool(found.half) == (precision == "fp16")
    assert all(one.eager.median > 1e-5 for one in found.half), "in float16"
    for path in (tmp_path / "p").glob("*.onnx"):
        graph = ir.load(path).graph
        assert not {node.op_type for node in graph.all_nodes()} & WANTS_CUDNN
        if path.name not in SAMPLING_GRAPHS:
            largest = max(graph.initializers.values(), key=lambda value: np.prod(value.shape))
            assert largest.dtype == IR_DTYPES[precision]


@pytest.mark.long
def test_a_model_of_one_label_goes_to_a_gpu_in_float16(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """Within a position its logit has no deviation."""
    checkpoint = make_checkpoint("bert", labels=("score",))

    export_package(checkpoint, tmp_path / "p", target="cuda", precision="fp16")

    found = load_package(tmp_path / "p").manifest.certificate
    assert found.tokens_compared == 0
    assert {one.what for one in found.half} == {"logits", "vectors"}


def test_the_command_exports_for_a_gpu_in_the_precision_and_with_the_weights_that_it_is_told(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    form = ("--target", "cuda", "--precision", "fp16", "--weights", "int8-blocks")
    limits = "--max-token-loss 1 --max-logit-loss 100 --max-perplexity-loss 100".split()
    out = str(tmp_path / "p")

    code = run(["export", str(make_checkpoint("gpt", **SHORT_LLAMA)), "--out", out, *form, *limits])

    assert code == 0
    manifest = load_package(tmp_path / "p").manifest
    assert manifest.format == PackageFormat.of("cuda", "fp16", "int8-blocks")
    assert manifest.certificate.dtype == "int8-blocks in fp16"
    assert manifest.certificate.covered["draws"], "what draws is compared with the sampler"
    assert scales_of(ir.load(tmp_path / "p" / "decoder.onnx")) == {ir.DataType.FLOAT16}


@pytest.mark.parametrize(
    ("precision", "weights", "expected"),
    [
        ("bf16", "int4", ir.DataType.BFLOAT16),
        ("fp16", "int4", ir.DataType.FLOAT16),
        ("fp32", "int8-blocks", ir.DataType.FLOAT),
    ],
)
def test_weights_in_blocks_have_scales_of_the_precision(
    precision: Precision,
    weights: Weights,
    expected: ir.DataType,
    make_checkpoint: MakeCheckpoint,
    traced: Trace,
) -> None:
    model = load_checkpoint(make_checkpoint("gpt", **SHORT_LLAMA)).model
    graph = traced(model, target=CUDA, precision=precision)["decoder.onnx"]

    quantize(graph, PackageFormat.of("cuda", precision, weights))

    assert scales_of(graph) == {expected}


def scales_of(model: ir.Model) -> set[ir.DataType | None]:
    """Return the types of the scales of all products with rounded weights, of which some are."""
    products = [node for node in model.graph if node.op_type == "MatMulNBits"]
    assert products
    return {scales.dtype for node in products if (scales := node.inputs[2]) is not None}


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (PackageFormat.of("cuda", "fp16", "int8"), "int8-blocks has"),
        (PackageFormat.of("cpu", "fp16"), "fp16 is for the target cuda"),
        (PackageFormat.of("cuda", "fp16", "bf16"), "bf16 does not go with precision fp16"),
        (PackageFormat.of("cuda", "fp32", None, "int8"), "int8 needs precision fp16 or bf16"),
        (PackageFormat.of("cuda", "fp16", None, "int8"), "4, 8, 16, 32 query heads share"),
    ],
)
def test_a_format_that_does_not_go_together_is_refused(
    form: PackageFormat, message: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        export_package(
            make_checkpoint("gpt"),
            tmp_path / "p",
            target=form.target,
            precision=form.precision,
            weights=form.weights,
            kv_cache=form.kv_cache,
        )

    assert not (tmp_path / "p").exists()


SHAPES: dict[str, tuple[str, dict[str, object]]] = {
    "gpt": ("gpt", {}),
    "llama": ("gpt", {**LLAMA, "num_heads": 4, "key_dim": 64, "value_dim": 64}),
    "marian": ("encoder-decoder", {"feed_forward.activation": "silu", "norm_position": "last"}),
}
ROUNDED = [
    (name, precision, weights, kv_cache)
    for name in SHAPES
    for precision in ("fp16", "bf16")
    for weights, kv_cache in (("int8-blocks", None), ("int4", None), (None, "int8"))
    if kv_cache is None or name == "llama"
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "precision", "weights", "kv_cache"), ROUNDED)
def test_what_rounds_in_half_precision_is_near_the_eager_model(
    name: str,
    precision: Precision,
    weights: Weights | None,
    kv_cache: CacheDtype | None,
    make_checkpoint: MakeCheckpoint,
    tmp_path: Path,
) -> None:
    """In bf16, for which a CPU has no kernels, it is the twin that rounds the same weights."""
    family, options = SHAPES[name]

    manifest = export_package(
        make_checkpoint(family, **options),
        tmp_path / "p",
        target="cuda",
        precision=precision,
        weights=weights,
        kv_cache=kv_cache,
        limits=ANY_LOSS,
    )

    found = manifest.certificate
    share = 0.25 if weights == "int4" else 0.1  # share of tokens
    assert found.loss is not None and not found.half
    assert found.tokens_compared - found.tokens_equal < share * found.tokens_compared
    assert 0 < found.loss.mean_abs_logit_diff < share * found.loss.logit_std
    assert found.dtype == str(manifest.format)


@pytest.mark.parametrize("weights", ["fp16", pytest.param("int4", marks=pytest.mark.long)])
def test_tokens_that_are_never_written_are_not_in_float16_either(
    weights: Weights, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """An import keeps them by a bias of -1e30, which float16 does not have."""
    path = make_checkpoint("gpt", output_bias=True, num_decoder_layers=1)
    checkpoint = load_checkpoint(path)
    bias = checkpoint.model.decoder.output.bias  # type: ignore[union-attr]
    with torch.no_grad():
        bias[[4, 7]] = -1e30  # type: ignore[index]
    tokenizer = checkpoint.tokenizer
    save_checkpoint(tmp_path / "c", "tiny", checkpoint.model, tokenizer)
    limits = None if weights == "fp16" else ANY_LOSS

    export_package(
        tmp_path / "c",
        tmp_path / "p",
        target="cuda",
        precision="fp16",
        weights=weights,
        limits=limits,
    )

    assert _step(tmp_path / "p")[:, [4, 7]].max() < -1e29


def higher_bias(graph: ir.Graph) -> None:
    name = next(name for name in graph.initializers if name.endswith("classifier.bias"))
    value = graph.initializers[name]
    assert value.const_value is not None
    value.const_value = ir.tensor(value.const_value.numpy() + np.float16(0.05), name=name)


def longer_vector(graph: ir.Graph) -> None:
    """Make the embedding of the same logits longer."""
    cast = next(value for value in graph.outputs if value.name == "embedding").producer()
    assert cast is not None and cast.op_type == "Cast"
    factor = ir.Value(name="factor", const_value=ir.tensor(np.float16([1.02]), name="factor"))
    graph.register_initializer(factor)
    product = ir.Node("", "Mul", [cast.inputs[0], factor])
    graph.insert_before(cast, product)
    cast.replace_input_with(0, product.outputs[0])


@pytest.mark.parametrize(("spoil", "what"), [(higher_bias, "logits"), (longer_vector, "vectors")])
def test_a_graph_in_float16_that_is_wrong_is_refused(
    spoil: Callable[[ir.Graph], None],
    what: str,
    make_checkpoint: MakeCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Its twin in float32 is right."""
    graphs = certificate._graphs

    @contextmanager
    def spoiled(*given: Any) -> Iterator[Path]:
        with graphs(*given) as directory:
            if given[-1].precision == "fp16":
                model = ir.load(directory / "model.onnx")
                spoil(model.graph)
                write_graphs({"model.onnx": model}, directory)
            yield directory

    monkeypatch.setattr(certificate, "_graphs", spoiled)

    with pytest.raises(CertificateError, match=f"^in float16: .* {what} are .* times"):
        export_package(make_checkpoint("vit"), tmp_path / "p", target="cuda", precision="fp16")

    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("options", [{}, LLAMA], ids=["gpt", "llama"])
def test_fused_nodes_give_what_their_parts_give(
    options: dict[str, object], tiny_graphs: TinyGraphs, tmp_path: Path
) -> None:
    plain, fused = tmp_path / "plain", tmp_path / "fused"
    _, graphs = tiny_graphs("gpt", **options)
    plain.mkdir()
    fused.mkdir()
    write_graphs(graphs, plain)
    num_nodes = len(graphs["decoder.onnx"].graph)
    fuse(graphs["decoder.onnx"])
    write_graphs(graphs, fused)

    outputs = [_step(directory) for directory in (plain, fused)]

    np.testing.assert_allclose(outputs[1], outputs[0], rtol=1e-4, atol=1e-5)
    assert len(graphs["decoder.onnx"].graph) < num_nodes
    kinds = {node.op_type for node in graphs["decoder.onnx"].graph}
    assert kinds & {"SkipLayerNormalization", "SkipSimplifiedLayerNormalization"}


def _step(directory: Path) -> np.ndarray:
    session = create_session(directory / "decoder.onnx", num_threads=1)
    inputs: dict[str, np.ndarray] = {
        "input_ids": np.array([[1, 2, 3]]),
        "position_ids": np.array([[0, 1, 2]]),
        "logit_idx": np.array([0, 1, 2]),
        "num_top": np.array([1]),
        "seqlens_k": np.array([2], np.int32),
        "total_seq": np.array([3], np.int32),
    }
    for name, value in session.inputs.items():
        if name.startswith("past_"):
            inputs[name] = np.zeros((1, *value.shape[1:]), value.dtype)  # type: ignore[arg-type]
    return session.run(inputs)["logits"]


@pytest.mark.parametrize(("width", "wide"), [(16, 16), (60, 64), (64, 64), (96, 96), (256, 256)])
def test_an_int8_cache_without_a_fast_kernel_for_the_width_of_heads_is_refused(
    width: int, wide: int, make_checkpoint: MakeCheckpoint
) -> None:
    """Heads are widened to a multiple of 8 before they reach a kernel."""
    heads = {"num_heads": 4, "num_kv_heads": 1, "key_dim": width, "value_dim": width}
    checkpoint = load_checkpoint(make_checkpoint("gpt", **heads))
    form = PackageFormat.of("cuda", "fp16", None, "int8")

    if wide in (64, 128, 256):
        check_format(form, checkpoint)
        return
    with pytest.raises(ConfigError, match=f"heads are 64, 128, 256 wide, here {wide}; choose"):
        check_format(form, checkpoint)


def test_an_int8_cache_without_a_fast_kernel_for_scores_with_a_bound_is_refused(
    make_checkpoint: MakeCheckpoint,
) -> None:
    heads = {"num_heads": 4, "num_kv_heads": 1, "key_dim": 64, "value_dim": 64}
    checkpoint = load_checkpoint(make_checkpoint("gpt", **heads, **{"attention.softcap": 50.0}))

    with pytest.raises(ConfigError, match="where scores have no bound"):
        check_format(PackageFormat.of("cuda", "fp16", None, "int8"), checkpoint)
    check_format(PackageFormat.of("cpu", "fp32", None, "int8"), checkpoint)


def test_rows_of_a_long_vocabulary_are_summed_from_the_same_place_on(tmp_path: Path) -> None:
    config = TransformerConfig(
        architecture="decoder",
        vocab_size=1027,  # a softmax of a block, whose rows begin nowhere in particular
        d_model=16,
        num_heads=1,
        d_ff=16,
        num_decoder_layers=1,
        max_target_len=8,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    graphs = build_graphs(build_model(config).eval(), target=CUDA)
    (softmax,) = (n for n in graphs["decoder.onnx"].graph if n.op_type == "LogSoftmax")
    assert softmax.inputs[0] is not None and softmax.inputs[0].shape is not None
    assert softmax.inputs[0].shape[-1] == 1028
    write_graphs(graphs, tmp_path)

    session = create_session(tmp_path / "decoder.onnx")
    found = session.run(
        {
            "input_ids": np.array([[5, 1026, 7]]),
            "position_ids": np.arange(3)[None],
            "logit_idx": np.arange(3),
            "num_top": np.array([1027]),
            "seqlens_k": np.array([2], np.int32),
            "total_seq": np.array([3], np.int32),
            **{
                name: np.zeros((1, *value.shape[1:]), np.float32)  # type: ignore[arg-type]
                for name, value in session.inputs.items()
                if name.startswith("past_")
            },
        }
    )

    expected = torch.from_numpy(found["logits"]).double().log_softmax(-1).numpy()
    expected = np.take_along_axis(expected, found["top_ids"], 1)
    np.testing.assert_allclose(found["top_logprobs"], expected, atol=1e-5)
