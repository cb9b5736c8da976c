"""Weights that are read where their file is mapped."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from engine.errors import PackageError
from engine.mapped_weights import MappedWeights
from engine.session import Session, create_session

MAPS = Path("/proc/self/smaps")
NUM_TOKENS, WIDTH = 20_000, 512  # 41 MB
needs_maps = pytest.mark.skipif(not MAPS.exists(), reason="the system does not tell")


def resident(path: Path) -> int:
    """Return how many bytes of a mapped file are resident in this process."""
    mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", MAPS.read_text(), flags=re.MULTILINE)
    own = [mapping for mapping in mappings if f" {path}\n" in mapping]
    return sum(int(size) for one in own for size in re.findall(r"^Rss: +(\d+)", one, re.M)) * 1024


@pytest.fixture(scope="module")
def table() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((NUM_TOKENS, WIDTH), np.float32)


@pytest.fixture(scope="module")
def graph(table: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An embedding that is tied to the output: read by row, and packed for the product."""
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("Gemm", ["rows", "table"], ["logits"], transB=1),
    ]
    inputs = [helper.make_tensor_value_info("ids", TensorProto.INT64, ["N"])]
    outputs = [
        helper.make_tensor_value_info("rows", TensorProto.FLOAT, ["N", WIDTH]),
        helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", NUM_TOKENS]),
    ]
    weights = [onnx.numpy_helper.from_array(table, "table")]
    proto = helper.make_model(
        helper.make_graph(nodes, "tied", inputs, outputs, weights),
        opset_imports=[helper.make_opsetid("", 20)],
        ir_version=10,
    )
    path = tmp_path_factory.mktemp("graph") / "decoder.onnx"
    onnx.save(proto, path, save_as_external_data=True, location="decoder.onnx.data")
    return path


@pytest.fixture(scope="module")
def session(graph: Path) -> Session:
    return create_session(graph, num_threads=1)


@needs_maps
def test_weights_that_are_packed_are_not_kept_as_pages_of_their_file(
    session: Session, graph: Path, table: np.ndarray
) -> None:
    assert resident(graph.with_suffix(".onnx.data")) < table.nbytes / 50


@needs_maps
def test_rows_that_were_read_are_given_back(
    session: Session, graph: Path, table: np.ndarray
) -> None:
    binding = session.bind()
    ids = np.zeros(16, np.int64)
    rows, logits = np.empty((16, WIDTH), np.float32), np.empty((16, NUM_TOKENS), np.float32)
    binding.input("ids", ids)
    binding.output("rows", rows)
    binding.output("logits", logits)

    for i in range(80):  # rows everywhere: the system brings in those beside what is read, too
        ids[:] = (np.arange(16) + 16 * i) * NUM_TOKENS // 1280
        binding.run()
        np.testing.assert_array_equal(rows, table[ids])

    assert resident(graph.with_suffix(".onnx.data")) < table.nbytes * 0.7


def test_a_binding_keeps_the_weights_that_it_reads(graph: Path, table: np.ndarray) -> None:
    binding = create_session(graph, num_threads=1).bind()  # nobody else has the session
    rows, logits = np.empty((1, WIDTH), np.float32), np.empty((1, NUM_TOKENS), np.float32)
    binding.input("ids", np.array([NUM_TOKENS - 1]))
    binding.output("rows", rows)
    binding.output("logits", logits)

    binding.run()

    np.testing.assert_array_equal(rows, table[-1:])


def test_nothing_is_computed_with_weights_that_were_written_to(graph: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(graph.parent, tmp_path / "package") / graph.name
    session = create_session(copy, num_threads=1)
    binding, rows = session.bind(), np.empty((1, WIDTH), np.float32)
    binding.input("ids", np.array([7]))
    binding.output("rows", rows)
    binding.output("logits", np.empty((1, NUM_TOKENS), np.float32))
    binding.run()

    with copy.with_suffix(".onnx.data").open("r+b") as file:  # as cp does it
        file.write(bytes(WIDTH * 4 * 8))

    for run in (binding.run, lambda: session.run({"ids": np.array([7])})):
        with pytest.raises(PackageError, match=r"decoder\.onnx\.data was written to while"):
            run()


def test_a_package_may_be_replaced_by_another_while_it_is_used(
    graph: Path, table: np.ndarray, tmp_path: Path
) -> None:
    place = shutil.copytree(graph.parent, tmp_path / "package")
    session = create_session(place / graph.name, num_threads=1)

    place.rename(tmp_path / "old")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "decoder.onnx.data").write_bytes(b"another")
    shutil.rmtree(tmp_path / "old")

    np.testing.assert_array_equal(session.run({"ids": np.array([7])})["rows"], table[[7]])


def test_pages_are_given_back_by_the_tokens_that_were_read(
    graph: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = MappedWeights.of(graph)
    given: list[int] = []
    monkeypatch.setattr(weights, "_give_back", lambda: given.append(1))

    found = []
    for _ in range(2 * 256 // 4):  # four sequences, a token each
        weights.have_been_read(4)
        found.append(len(given))

    assert [found.count(number) for number in range(3)] == [63, 64, 1]
