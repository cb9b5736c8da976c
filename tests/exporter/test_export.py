"""A package appears whole, proven and clean, or not at all."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from engine.errors import CertificateError, CheckpointError, ConfigError, PackageError
from engine.package.graph_io import check_graphs, decoder_shape
from engine.package.package import load_package
from engine.session import create_session
from exporter import export
from exporter.checkpoint import load_checkpoint, save_checkpoint
from exporter.export import export_package
from exporter.graphs import package_graphs
from exporter.graphs.contracts import generation_contract
from exporter.graphs.package_graphs import write_graphs
from exporter.graphs.target import CPU, CUDA, Target
from exporter.graphs.torch_export import Graphs, build_graphs
from exporter.models import TransformerConfig, build_model
from exporter.verification import verify_package
from tests.fakes.traces import Trace

MakeCheckpoint = Callable[..., Path]
TinyGraphs = Callable[[str], tuple[Path, Graphs]]

LLAMA: dict[str, Any] = {
    "num_decoder_layers": 2,
    "num_kv_heads": 1,
    "key_dim": 16,
    "value_dim": 16,
    "attention.bias": False,
    "feed_forward.activation": "silu",
    "feed_forward.gated": True,
    "feed_forward.bias": False,
    "norm": "rms",
    "positions.kind": "rotary",
}
T5: dict[str, Any] = {
    "key_dim": 12,  # more than d_model / num_heads
    "value_dim": 12,
    "attention.bias": False,
    "attention.scale": 1.0,
    "positions.kind": "relative",
    "positions.relative_buckets": 8,
    "positions.relative_max_distance": 6,
    "feed_forward.activation": "gelu_tanh",
    "feed_forward.gated": True,
    "feed_forward.bias": False,
    "norm": "rms",
    "scale_embeddings": False,
    "output_bias": False,
}
OTHER_OPTIONS: list[Any] = [  # than the tiny models have
    (
        "encoder-decoder",
        {
            "num_encoder_layers": 1,
            "num_decoder_layers": 1,
            "key_dim": None,
            "value_dim": None,
            "norm_position": "last",
            "positions.kind": "sinusoidal_tensor2tensor",
            "positions.offset": 2,
            "embedding_norm": True,
            "source_vocab_size": 40,
            "share_embeddings": False,
            "tie_output": False,
            "output_bias": False,
            "attention.bias": False,
            "feed_forward.activation": "relu",
        },
    ),
    pytest.param(
        "gpt",
        {
            "num_decoder_layers": 1,
            "norm_position": "last",
            "positions.kind": "sinusoidal",
            "scale_embeddings": True,
        },
        marks=pytest.mark.long,
    ),
    # One head as wide as the model, and as no cache is: 20 is not a multiple of 8.
    ("gpt", {"d_model": 20, "num_heads": 1, "attention.output": False}),
    pytest.param(
        "encoder-decoder",
        {
            "d_model": 20,
            "num_heads": 1,
            "value_dim": None,
            "attention.output": False,
            "feed_forward.dropout": 0.1,
        },
        marks=pytest.mark.long,
    ),
    (
        "labeller",
        {
            "num_heads": 1,
            "attention.score": "dot",
            "attention.normalizer": "softmax",
            "attention.output": False,
        },
    ),
    # And additive scores.
    pytest.param("labeller", {"num_heads": 1}, marks=pytest.mark.long),
    pytest.param("encoder-decoder", T5, marks=pytest.mark.long),
    ("gpt", LLAMA),
    pytest.param(
        "gpt",
        {**LLAMA, "num_kv_heads": 2, "feed_forward.activation": "gelu", "attention.bias": True},
        marks=pytest.mark.long,
    ),
    (
        "labeller",
        {
            "max_source_len": 2,  # words, as few as a graph is traced with
            "num_encoder_layers": 1,
            "attention.score": "dot",
            "attention.normalizer": "softmax",
        },
    ),
]


@pytest.fixture
def export_tiny(
    tiny_graphs: TinyGraphs, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, Path], Path]:
    """Export a tiny checkpoint without tracing it again; return the checkpoint."""

    def make(family: str, out: Path) -> Path:
        checkpoint, graphs = tiny_graphs(family)
        monkeypatch.setattr(package_graphs, "build_graphs", lambda model, **_: graphs)
        export_package(checkpoint, out)
        return checkpoint

    return make


@pytest.mark.parametrize(("family", "options"), OTHER_OPTIONS)
def test_a_checkpoint_is_exported_with_a_certificate(
    family: str, options: dict[str, Any], make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    seen: list[tuple[int, int]] = []

    manifest = export_package(
        make_checkpoint(family, **options),
        tmp_path / "package",
        progress=lambda done, total, *_: seen.append((done, total)),
    )

    package = load_package(tmp_path / "package")
    certificate = package.manifest.certificate
    assert package.manifest == manifest
    assert certificate.cases >= 8
    assert certificate.tokens_equal == certificate.tokens_compared > 0
    judged = {one.what for one in certificate.judged}
    assert "logits" in judged and ("alignment" in judged) == (family == "encoder-decoder")
    assert certificate.batch_invariant
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1] > 0
    assert {"torch", "onnx"} <= set(manifest.toolchain)
    assert {"onnxruntime", "onnxruntime-gpu"} & set(manifest.toolchain)
    assert {"threads", "l2_bytes", "instruction_sets"} <= set(manifest.toolchain)
    assert os.listdir(tmp_path) == ["package"]


def test_a_certificate_covers_every_length_and_batch_size(
    export_tiny: Callable[[str, Path], Path], tmp_path: Path
) -> None:
    export_tiny("encoder-decoder", tmp_path / "package")

    certificate = load_package(tmp_path / "package").manifest.certificate

    assert certificate.covered["source_lengths"] == list(range(1, 10))
    assert certificate.covered["prompt_lengths"] == list(range(1, 8))
    assert certificate.covered["batch_sizes"] == [1, 2, 5, 8]
    assert certificate.covered["prefill_chunks"] == [0, 3]
    assert certificate.covered["steps"] == 7  # to the limit, which is below 32
    assert certificate.cases >= 8 * 9
    (alignment,) = (one for one in certificate.judged if one.what == "alignment")
    assert 0 < alignment.exported.largest < 1e-5
    assert certificate.covered["alignment_cases"] == 8


TOP = ["TopK", "LogSoftmax", "GatherElements"]


def test_a_decoder_layer_has_the_nodes_it_needs_and_no_more(tiny_graphs: TinyGraphs) -> None:
    _, graphs = tiny_graphs("gpt")

    ops = [node.op_type for node in graphs["decoder.onnx"].graph]

    layer = ["LayerNormalization", "MatMul", "Add", "CachedAttention", "MatMul", "Add", "Add"]
    layer += ["LayerNormalization", "MatMul", "Add", "Gelu", "MatMul", "Add", "Add"]
    head = ["LayerNormalization", "Reshape", "Gather", "Gemm", *TOP]
    assert ops == ["Gather", "Gather", "Add", *layer, *layer, *head]


def test_a_decoder_layer_of_llama_has_the_nodes_it_needs_and_no_more(
    tiny_graphs: TinyGraphs,
) -> None:
    _, graphs = tiny_graphs("gpt", **LLAMA)

    ops = [node.op_type for node in graphs["decoder.onnx"].graph]

    layer = ["RMSNormalization", "MatMul", "RotaryCachedAttention", "MatMul", "Add"]
    layer += ["RMSNormalization", "MatMul", "Split", "Sigmoid", "Mul", "Mul", "MatMul", "Add"]
    head = ["RMSNormalization", "Reshape", "Gather", "Gemm", *TOP]
    assert ops == ["Gather", *layer, *layer, *head]


@pytest.mark.parametrize(
    "vocab_size", [pytest.param(128 * 1024, marks=pytest.mark.long), 128 * 1024 + 7]
)
def test_many_small_numbers_beside_a_likely_token_are_summed_exactly(
    vocab_size: int, tmp_path: Path
) -> None:
    config = TransformerConfig(
        architecture="decoder",
        vocab_size=vocab_size,
        d_model=8,
        num_heads=1,
        d_ff=8,
        num_decoder_layers=1,
        max_target_len=4,
        bos_token_id=1,
        eos_token_id=2,
        output_bias=True,
        tie_output=False,
    )
    model = build_model(config).eval()
    with torch.no_grad():  # the bias is all that counts
        model.decoder.output.weight.zero_()
        model.decoder.output.bias.copy_(0.01 * torch.randn(vocab_size))
        model.decoder.output.bias[vocab_size // 2] = math.log(100 * vocab_size)
        model.decoder.output.bias[1000:2000] = -math.inf
    write_graphs(build_graphs(model), tmp_path)

    contract = generation_contract(config)
    assert contract is not None
    session = create_session(tmp_path / "decoder.onnx")
    check_graphs((session, decoder_shape(contract)))
    past = {
        name: np.zeros((2, *value.shape[1:]), np.float32)  # type: ignore[arg-type]
        for name, value in session.inputs.items()
        if name.startswith("past_")
    }
    found = session.run(
        {
            "input_ids": np.array([[3], [5]]),
            "position_ids": np.zeros((2, 1), np.int64),
            "logit_idx": np.arange(2),
            "num_top": np.array([5]),
            "seqlens_k": np.zeros(2, np.int32),
            "total_seq": np.array([1], np.int32),
            **past,
        }
    )

    expected = torch.from_numpy(found["logits"]).double().log_softmax(-1).numpy()
    expected = np.take_along_axis(expected, found["top_ids"], 1)
    assert expected[0, 0] == pytest.approx(math.log(0.99), abs=1e-3)
    np.testing.assert_allclose(found["top_logprobs"], expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("target", "factor"), [(CPU, 1.0), pytest.param(CUDA, 6**-0.5, marks=pytest.mark.long)]
)
def test_where_it_is_faster_weights_of_queries_carry_the_factor_of_scores(
    target: Target, factor: float, make_checkpoint: MakeCheckpoint, traced: Trace
) -> None:
    model = load_checkpoint(make_checkpoint("encoder-decoder")).model

    decoder = traced(model, target=target)["decoder.onnx"].graph

    scales = [n.attributes["scale"].as_float() for n in decoder if n.op_type == "CrossAttention"]
    assert scales == pytest.approx([factor, factor])


@pytest.mark.usefixtures("few_cases")
def test_weights_are_stored_once_beside_their_graph(
    export_tiny: Callable[[str, Path], Path], tmp_path: Path
) -> None:
    checkpoint = export_tiny("gpt", tmp_path / "package")

    model = load_checkpoint(checkpoint).model
    size = 4 * sum(weight.numel() for weight in model.parameters())
    graph = onnx.load(tmp_path / "package" / "decoder.onnx", load_external_data=False)
    files = {
        entry.value
        for tensor in graph.graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }
    assert files == {"decoder.onnx.data"}
    stored = sum((tmp_path / "package" / name).stat().st_size for name in files)
    assert stored <= size < stored + 2048  # the small ones are in the graph


@pytest.mark.usefixtures("few_cases")
def test_a_graph_tells_nothing_about_the_machine(
    export_tiny: Callable[[str, Path], Path], tmp_path: Path
) -> None:
    export_tiny("encoder-decoder", tmp_path / "package")

    for path in (tmp_path / "package").iterdir():
        content = path.read_bytes()
        assert str(Path(export.__file__).parent).encode() not in content
        assert b"site-packages" not in content
        assert str(tmp_path).encode() not in content


def test_layers_with_equal_biases_are_exported(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    checkpoint = load_checkpoint(make_checkpoint("gpt"))
    for name, weight in checkpoint.model.named_parameters():
        if name.endswith("_proj.bias"):
            weight.data.zero_()  # as in a model that was just built
    save_checkpoint(tmp_path / "equal", "tiny", checkpoint.model, checkpoint.tokenizer)

    manifest = export_package(tmp_path / "equal", tmp_path / "package")

    assert manifest.certificate.batch_invariant


def test_the_eager_model_is_left_as_it_was(make_checkpoint: MakeCheckpoint) -> None:
    options = {"num_decoder_layers": 1, "key_dim": 6, "value_dim": 5}
    checkpoint = load_checkpoint(make_checkpoint("gpt", **options))
    before = {name: weight.clone() for name, weight in checkpoint.model.state_dict().items()}

    package_graphs.build_graphs(checkpoint.model)

    after = checkpoint.model.state_dict()
    assert all(after[name].equal(weight) for name, weight in before.items())


@pytest.mark.usefixtures("few_cases")
def test_an_existing_package_is_replaced_when_the_new_one_is_proven(
    export_tiny: Callable[[str, Path], Path], tmp_path: Path
) -> None:
    export_tiny("vit", tmp_path / "package")

    export_tiny("gpt", tmp_path / "package")

    assert load_package(tmp_path / "package").manifest.task == "generate"
    assert os.listdir(tmp_path) == ["package"]


@pytest.mark.usefixtures("few_cases")
def test_an_existing_package_stays_when_the_new_one_is_refused(
    export_tiny: Callable[[str, Path], Path],
    tiny_graphs: TinyGraphs,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    checkpoint = export_tiny("gpt", tmp_path / "package")
    before = load_package(tmp_path / "package").manifest
    _, graphs = tiny_graphs("gpt")
    for node in graphs["decoder.onnx"].graph:
        if node.op_type == "Gelu":
            node.op_type = "Identity"
            node.attributes.clear()
    monkeypatch.setattr(package_graphs, "build_graphs", lambda model, **_: graphs)

    with pytest.raises(CertificateError):
        export_package(checkpoint, tmp_path / "package")

    assert load_package(tmp_path / "package").manifest == before
    assert os.listdir(tmp_path) == ["package"]


_INTERRUPTED = """
import signal
from exporter import export
from server.cli import main

def write(checkpoint, form, directory, **_):
    (directory / "decoder.onnx").write_text("half of it")
    print(directory.parent.name)
    signal.raise_signal({number})

export.write_package_graphs = write
main()
"""


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.long),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.long),
    ],
)
def test_the_command_leaves_nothing_when_a_signal_ends_it(
    number: signal.Signals, code: int, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    command = ("export", str(make_checkpoint("vit")), "--out", str(tmp_path / "package"))

    ended = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED.format(number=int(number)), *command],
        capture_output=True,
        text=True,
        timeout=240,
    )

    told = [
        line for line in ended.stderr.splitlines() if not line.startswith("Comparing")
    ]  # progress
    last = f"interrupted: nothing was written to {tmp_path / 'package'}"
    assert (ended.returncode, told) == (code, [last])
    assert ended.stdout.startswith(".package.export-"), "there was something to remove"
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_package_is_not_replaced(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint("vit")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_text("keep me")

    with pytest.raises(PackageError, match="is not a package"):
        export_package(checkpoint, tmp_path / "notes")

    assert (tmp_path / "notes" / "todo.txt").read_text() == "keep me"


@pytest.mark.usefixtures("few_cases")
def test_a_package_is_named_after_its_directory_unless_a_name_is_given(
    export_tiny: Callable[[str, Path], Path], tmp_path: Path
) -> None:
    checkpoint = export_tiny("gpt", tmp_path / ".my model")
    export_package(checkpoint, tmp_path / "other", name="poems", version="2026-11")

    unnamed = load_package(tmp_path / ".my model").manifest
    named = load_package(tmp_path / "other").manifest

    assert (unnamed.name, unnamed.version) == ("my-model", "1")
    assert (named.name, named.version) == ("poems", "2026-11")
    verified = verify_package(tmp_path / "other", checkpoint)
    assert verified.summary().startswith("other: poems 2026-11 matches ")


@pytest.mark.parametrize("field", ["name", "version"])
def test_a_name_or_version_that_no_package_can_have_is_refused_at_once(
    field: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"{field} 'a b'.*letters, digits"):
        export_package(tmp_path / "nowhere", tmp_path / "package", **{field: "a b"})


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        export_package(tmp_path / "nowhere", tmp_path / "package")

    assert os.listdir(tmp_path) == []


def test_a_directory_that_cannot_be_made_is_named(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint("vit")
    (tmp_path / "file").write_text("")

    with pytest.raises(PackageError, match="cannot write"):
        export_package(checkpoint, tmp_path / "file" / "package")


def test_nothing_of_cuda_is_imported_to_export_and_verify_for_a_cpu() -> None:
    code = (
        "import sys, exporter.export, exporter.verification, exporter.prover.digest\n"
        "sys.exit(str([name for name in sys.modules if name.startswith('engine.cuda')] or ''))"
    )

    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert found.stderr.strip() == ""
