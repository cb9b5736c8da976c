"""Sessions of the engine on the emulated device: what they take, refuse and run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from exporter.graphs.package_graphs import write_graphs
from exporter.graphs.torch_export import build_graphs
from exporter.models import TransformerConfig, build_model
from tests.emulated.conftest import Export, RunScript
from tests.emulated.models import MODELS

pytestmark = [pytest.mark.emulated, pytest.mark.timeout(600)]


def foreign(path: Path) -> str:
    """Write a graph with one node that has no kernel on CUDA; return its path."""
    shape = ["batch", 4]
    nodes = [
        helper.make_node("Relu", ["x"], ["y"], name="first"),
        helper.make_node("Det", ["square"], ["det"], name="foreign"),
        helper.make_node("Add", ["y", "det"], ["z"], name="last"),
    ]
    graph = helper.make_graph(
        nodes,
        "foreign",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, shape),
            helper.make_tensor_value_info("square", TensorProto.FLOAT, [2, 2]),
        ],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, shape)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, path)
    return str(path)


def export_for_cpu(name: str, directory: Path) -> str:
    directory.mkdir()
    model = build_model(TransformerConfig.of({**MODELS[name], "num_decoder_layers": 1})).eval()
    write_graphs(build_graphs(model), directory)
    return str(directory / "decoder.onnx")


def test_a_node_without_a_kernel_on_the_device_fails_the_load_with_its_name(
    export: Export, on_device: RunScript, tmp_path: Path
) -> None:
    named, of_cpu = foreign(tmp_path / "named.onnx"), export_for_cpu("gpt2", tmp_path / "gpt2")
    (whole,) = export("gpt2", "fp16")

    looks = on_device("look_at_graph.py", named, of_cpu, whole)

    found = {path: look["refused"] for path, look in looks.items()}
    assert found[whole] is None
    assert found[named].startswith(f"PackageError: {named}: onnxruntime ")
    assert "on the CPU beside CUDA: Det 'foreign';" in found[named]
    assert "on the CPU beside CUDA: GroupQueryAttention without a name;" in found[of_cpu]
    assert found[of_cpu].endswith(
        "export the model again with --target cuda, or serve it with --device cpu"
    )


def test_a_provider_that_cannot_be_loaded_is_no_fault_of_the_graph(
    device: Path, on_device: RunScript, tmp_path: Path
) -> None:
    for library in device.glob("lib*"):
        if library.name != "libcuda.so.1":  # that the driver brings
            (tmp_path / library.name).symlink_to(library)
    path = foreign(tmp_path / "model.onnx")

    found = on_device("look_at_graph.py", path, libraries=tmp_path)[path]["refused"]

    assert found.startswith(f"DeviceError: {path}: onnxruntime ")
    assert "cannot load its provider for CUDA" in found


def test_what_is_no_graph_is_refused_as_it_is_on_the_cpu(
    on_device: RunScript, tmp_path: Path
) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"no graph")

    found = on_device("look_at_graph.py", str(path))[str(path)]["refused"]

    assert found.startswith(f"PackageError: {path}: onnxruntime ")
    assert found.endswith("export the model again")


@pytest.mark.parametrize(
    ("num_bytes", "told"),
    [(200_000, "of whose 200 kB"), (0, "of whose 0 bytes")],  # weights, and before them cuBLAS
)
def test_a_device_without_room_is_told_from_a_graph_that_is_wrong(
    num_bytes: int, told: str, export: Export, on_device: RunScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = export("gpt2", "fp16")
    monkeypatch.setenv("EMU_MEMORY", str(num_bytes))

    found = on_device("look_at_graph.py", path)[path]["refused"]

    assert found.startswith(f"OutOfDeviceMemory: {path}: its weights have no room on EMULATED")
    assert told in found and "--weights int8-blocks or int4" in found


@pytest.fixture(
    scope="module",
    params=[
        "gpt2-fp16",
        *(
            pytest.param(case, marks=pytest.mark.long)
            for case in ("gpt2-fp32", "gpt2-bf16", "llama-fp32", "llama-fp16")
        ),
    ],
)
def bound(request: pytest.FixtureRequest, export: Export, on_device: RunScript) -> Any:
    """That of Llama reads no positions: rotary ones are those of the lengths."""
    (path,) = export(*request.param.split("-"))
    return on_device("bind_memory.py", path)


def test_a_decoder_runs_on_memory_of_the_device_and_is_replayed(bound: Any) -> None:
    first, *later = bound["eager"]
    assert first["launches"] > 0 and all(run["launches"] == first["launches"] for run in later)
    assert all(run["syncs"] == run["hostcopies"] == 0 for run in later)
    assert bound["captured"][0]["hostcopies"] == 0
    assert bound["captured"][1:] == [{"launches": 0, "graphs": 1, "syncs": 0, "hostcopies": 0}] * 2
    assert bound["host array"] == "input input_ids is to lie on the device; bind an array there"
    assert bound["host output"] == "output top_ids is to lie on the device; bind an array there"
    assert bound["device array"] == "input num_top is to lie on the host; bind an array there"


def test_kernels_are_on_our_stream_and_those_that_give_equal_bits_again(bound: Any) -> None:
    """The options that the provider took, not those it was told: their names are its own."""
    told = bound["told"]
    assert told["user_compute_stream"] == bound["stream"] and told["has_user_compute_stream"] == "1"
    assert (told["sdpa_kernel"], told["use_tf32"], told["enable_cuda_graph"]) == ("1", "0", "1")
    assert told["arena_extend_strategy"] == "kSameAsRequested"
    assert bound["is deterministic"]


@pytest.mark.parametrize(
    ("name", "precision"),
    [("gpt2", "fp16"), pytest.param("marian", "fp32", marks=pytest.mark.long)],
)
def test_weights_of_what_generates_lie_on_the_device_once(
    name: str, precision: str, export: Export, on_device: RunScript
) -> None:
    """One table is read by tokens and is the last product's factor."""
    paths = export(name, precision, num_decoder_layers=2, vocab_size=50_257)  # as in test_placement

    found = on_device("look_at_graph.py", *paths)

    for path in paths:
        weights = Path(f"{path}.data").stat().st_size
        assert 2_000_000 < weights <= found[path]["taken"] < 1.1 * weights


def test_a_call_that_finds_no_memory_is_told_from_one_that_is_wrong(
    export: Export, on_device: RunScript
) -> None:
    (path,) = export("gpt2", "fp16")

    found = on_device("fill_memory.py", path)

    assert re.match(r"OutOfDeviceMemory: kernels want \d.* of EMULATED sm_90, of whose ", found)
