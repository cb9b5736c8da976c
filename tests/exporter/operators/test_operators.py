"""Each operator's bodies agree with each other and with the eager function they stand for."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

from engine.package.manifest import PackageFormat
from engine.session import create_session, usual_options
from exporter.certificate import prove
from exporter.checkpoint import load_checkpoint
from exporter.graphs.package_graphs import write_graphs
from exporter.graphs.torch_export import Graphs
from exporter.operators import bodies
from exporter.operators.bodies import attach_bodies
from exporter.operators.cached_attention import cached_attention
from exporter.operators.cross_alignment import cross_alignment_over_row
from exporter.operators.cross_attention import SourceRow, cross_attention_over_row
from exporter.operators.domain import DOMAIN
from tests.exporter.operators.reference_bodies import REFERENCE

TinyGraphs = Callable[[str], tuple[Path, Graphs]]
BODIES = {"cpu": bodies.CPU, "cuda": bodies.CUDA_HALF, "reference": REFERENCE}
FIXED = {"total_seq", "cos", "sin", "distance_bias"}  # inputs whose sizes are
HEADS, KV_HEADS, HEAD_DIM, CAPACITY, SCALE = 4, 2, 8, 12, 0.3
ROTARY_HEAD_DIM = 16  # the smallest that the kernel turns


class Cached(nn.Module):
    def __init__(self, softcap: float | None = None, window: int | None = None) -> None:
        super().__init__()
        self.softcap, self.window = softcap, window

    def forward(self, query, key, value, past_key, past_value, seqlens_k, total_seq, position_ids):  # type: ignore[no-untyped-def]
        return cached_attention(
            query,
            key,
            value,
            past_key,
            past_value,
            seqlens_k,
            total_seq,
            position_ids,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            scale=SCALE,
            softcap=self.softcap,
            window=self.window,
        )


class RotaryCached(nn.Module):
    def forward(  # type: ignore[no-untyped-def]
        self, query, key, value, past_key, past_value, seqlens_k, total_seq, position_ids, cos, sin
    ):
        return cached_attention(
            query,
            key,
            value,
            past_key,
            past_value,
            seqlens_k,
            total_seq,
            position_ids,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            scale=SCALE,
            rotary=(cos, sin),
        )


class BiasedCached(nn.Module):
    def forward(  # type: ignore[no-untyped-def]
        self,
        query,
        key,
        value,
        past_key,
        past_value,
        seqlens_k,
        total_seq,
        position_ids,
        distance_bias,
    ):
        return cached_attention(
            query,
            key,
            value,
            past_key,
            past_value,
            seqlens_k,
            total_seq,
            position_ids,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            scale=SCALE,
            distance_bias=distance_bias,
        )


class Cross(nn.Module):
    def forward(self, query, cross_key, cross_value, source_lengths, beam_rows, row_queries):  # type: ignore[no-untyped-def]
        source = SourceRow(cross_key, cross_value, source_lengths, beam_rows, row_queries)
        return cross_attention_over_row(query, source, num_heads=KV_HEADS, scale=SCALE)


class Alignment(nn.Module):
    def forward(self, query, cross_key, source_lengths, alignment_idx, alignment_sources):  # type: ignore[no-untyped-def]
        source = SourceRow.one_each(cross_key, cross_key, source_lengths)
        return cross_alignment_over_row(
            query, source, alignment_idx, alignment_sources, num_heads=KV_HEADS, scale=SCALE
        )


def cached_inputs(lengths: list[int], num_new: int, head_dim: int = HEAD_DIM) -> dict[str, Tensor]:
    batch = len(lengths)
    row = (batch, KV_HEADS, CAPACITY, head_dim)
    return {
        "query": torch.randn(batch, num_new, HEADS * head_dim),
        "key": torch.randn(batch, num_new, KV_HEADS * head_dim),
        "value": torch.randn(batch, num_new, KV_HEADS * head_dim),
        "past_key": torch.randn(row),
        "past_value": torch.randn(row),
        "seqlens_k": torch.tensor(lengths, dtype=torch.int32) - 1,
        "total_seq": torch.tensor([max(lengths)], dtype=torch.int32),
        "position_ids": torch.stack([_last(length, num_new) for length in lengths]),
    }


def _last(length: int, num_new: int) -> Tensor:
    """Return the last positions of a row; a first call may be padded on the right."""
    return max(length - num_new, 0) + torch.arange(num_new)


def rotary_inputs(lengths: list[int], num_new: int) -> dict[str, Tensor]:
    angles = torch.randn(CAPACITY, ROTARY_HEAD_DIM // 2)
    inputs = cached_inputs(lengths, num_new, ROTARY_HEAD_DIM)
    return {**inputs, "cos": angles.cos(), "sin": angles.sin()}


def biased_inputs(lengths: list[int], num_new: int) -> dict[str, Tensor]:
    return {**cached_inputs(lengths, num_new), "distance_bias": torch.randn(CAPACITY, HEADS)}


def cross_inputs(
    lengths: list[int], num_new: int, beams: list[list[int]] | None = None
) -> dict[str, Tensor]:
    """Return inputs for one source a length; `beams` are the rows of each, one by default."""
    beams = beams or [[row] for row in range(len(lengths))]
    row = (len(lengths), KV_HEADS, CAPACITY, HEAD_DIM)
    width = max(map(len, beams))
    beam_rows = [rows + [0] * (width - len(rows)) for rows in beams]
    places = {row: i * width + j for i, rows in enumerate(beams) for j, row in enumerate(rows)}
    return {
        "query": torch.randn(len(places), num_new, KV_HEADS * HEAD_DIM),
        "cross_key": torch.randn(row),
        "cross_value": torch.randn(row),
        "source_lengths": torch.tensor(lengths),
        "beam_rows": torch.tensor(beam_rows),
        "row_queries": torch.stack(
            [places[row] * num_new + torch.arange(num_new) for row in range(len(places))]
        ),
    }


def alignment_inputs(
    lengths: list[int], num_new: int, wanted: list[int], beams: list[list[int]] | None = None
) -> dict[str, Tensor]:
    """Return inputs that ask for the attention of some of the flattened queries."""
    inputs = cross_inputs(lengths, num_new, beams)
    idx = torch.tensor(wanted, dtype=torch.int64)
    num_queries = num_new * inputs["beam_rows"].shape[1]
    sources = inputs.pop("row_queries").flatten()[idx] // num_queries
    del inputs["cross_value"], inputs["beam_rows"]
    return {**inputs, "alignment_idx": idx, "alignment_sources": sources}


@pytest.fixture(scope="module")
def graphs() -> dict[str, ir.Model]:
    """Export each operator alone."""
    cases = {
        "CachedAttention": (Cached(), cached_inputs([4, 5], 3)),
        "RotaryCachedAttention": (RotaryCached(), rotary_inputs([4, 5], 3)),
        "BiasedCachedAttention": (BiasedCached(), biased_inputs([4, 5], 3)),
        "CrossAttention": (Cross(), cross_inputs([4, 5, 3], 3, [[1, 2], [0, 3], [4, 5]])),
        "CrossAlignment": (
            Alignment(),
            alignment_inputs([4, 5, 3], 3, [1, 2, 0, 2], [[1, 2], [0, 3], [4, 5]]),
        ),
    }
    return {name: _export(module, inputs) for name, (module, inputs) in cases.items()}


_OF_SOURCES = {f"{of}_{part}" for of in ("cross", "other") for part in ("key", "value")}


def _export(module: nn.Module, inputs: dict[str, Tensor]) -> ir.Model:
    open_sizes = {
        name: {0: "batch", 1: "tokens"} if tensor.ndim == 3 else {0: "batch"}
        for name, tensor in inputs.items()
        if name not in FIXED
    }
    fixed: dict[str, dict[int, str]] = {name: {} for name in inputs if name in FIXED}
    if "beam_rows" in inputs:
        open_sizes["beam_rows"] = {0: "sources", 1: "beams"}
    for name in inputs.keys() & {"source_lengths", *_OF_SOURCES}:
        open_sizes[name] = {0: "sources"}
    for name in inputs.keys() & {"position_ids", "row_queries"}:
        open_sizes[name] = {0: "batch", 1: "tokens"}
    for name in inputs.keys() & {"alignment_idx", "alignment_sources"}:
        open_sizes[name] = {0: "wanted"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells of its own use of deprecated functions
        program = torch.onnx.export(
            module,
            kwargs=inputs,
            dynamic_shapes={name: {**open_sizes, **fixed}[name] for name in inputs},
            opset_version=24,
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    return program.model


def run(graph: ir.Model, body: str, inputs: dict[str, Tensor], path: Path) -> list[np.ndarray]:
    attach_bodies(graph, BODIES[body])
    ir.save(graph, path / f"{body}.onnx")
    session = create_session(path / f"{body}.onnx", num_threads=1)
    outputs = session.run({name: tensor.numpy() for name, tensor in inputs.items()})
    return [outputs[name] for name in session.outputs]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(
    ("lengths", "num_new"), [([1], 1), ([12], 1), ([3, 12, 1], 1), ([5], 5), ([9], 4)]
)
def test_cached_attention_is_the_eager_function(
    body: str, lengths: list[int], num_new: int, graphs: dict[str, ir.Model], tmp_path: Path
) -> None:
    inputs = cached_inputs(lengths, num_new)

    output, present_key, present_value = run(graphs["CachedAttention"], body, inputs, tmp_path)

    expected = [tensor.numpy() for tensor in Cached()(**inputs)]
    np.testing.assert_allclose(output, expected[0], atol=2e-6)
    for row, length in enumerate(lengths):
        np.testing.assert_array_equal(present_key[row, :, :length], expected[1][row, :, :length])
        np.testing.assert_array_equal(present_value[row, :, :length], expected[2][row, :, :length])


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(
    ("lengths", "num_new"), [([1], 1), ([12], 1), ([3, 12, 1], 1), ([5], 5), ([9], 4)]
)
def test_rotary_cached_attention_is_the_eager_function(
    body: str, lengths: list[int], num_new: int, graphs: dict[str, ir.Model], tmp_path: Path
) -> None:
    inputs = rotary_inputs(lengths, num_new)

    outputs = run(graphs["RotaryCachedAttention"], body, inputs, tmp_path)

    expected = [tensor.numpy() for tensor in RotaryCached()(**inputs)]
    np.testing.assert_allclose(outputs[0], expected[0], atol=2e-6)
    for row, length in enumerate(lengths):
        for cache, wanted in zip(outputs[1:], expected[1:], strict=True):
            np.testing.assert_allclose(cache[row, :, :length], wanted[row, :, :length], atol=2e-6)


@pytest.mark.parametrize(("softcap", "window"), [(0.5, None), (None, 3), (0.5, 3)])
def test_windows_and_bounds_of_scores_are_those_of_the_eager_function(
    softcap: float | None, window: int | None, tmp_path: Path
) -> None:
    module = Cached(softcap, window)
    graph = _export(module, cached_inputs([4, 5], 3))
    calls = (([1], 1), ([12], 1), ([3, 12, 1], 1), ([5], 5), ([9], 4))
    for body, (lengths, num_new) in product(BODIES, calls):
        inputs = cached_inputs(lengths, num_new)

        output, *_ = run(graph, body, inputs, tmp_path)

        expected = module(**inputs)[0]
        np.testing.assert_allclose(output, expected, atol=2e-6)
        if lengths == [12]:
            assert np.abs(output - Cached()(**inputs)[0].numpy()).max() > 0.01


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(
    ("lengths", "num_new"), [([1], 1), ([12], 1), ([3, 12, 1], 1), ([5], 5), ([9], 4)]
)
def test_biased_cached_attention_is_the_eager_function(
    body: str, lengths: list[int], num_new: int, graphs: dict[str, ir.Model], tmp_path: Path
) -> None:
    inputs = biased_inputs(lengths, num_new)

    outputs = run(graphs["BiasedCachedAttention"], body, inputs, tmp_path)

    expected = [tensor.numpy() for tensor in BiasedCached()(**inputs)]
    np.testing.assert_allclose(outputs[0], expected[0], atol=2e-6)
    plain = Cached()(**{name: inputs[name] for name in inputs if name != "distance_bias"})[0]
    assert lengths == [1] or np.abs(expected[0] - plain.numpy()).max() > 0.01
    for row, length in enumerate(lengths):
        for cache, wanted in zip(outputs[1:], expected[1:], strict=True):
            np.testing.assert_array_equal(cache[row, :, :length], wanted[row, :, :length])


def test_biased_rows_are_bit_equal_alone_and_beside_longer_ones(
    graphs: dict[str, ir.Model], tmp_path: Path
) -> None:
    inputs = biased_inputs([3, 12, 1], 1)
    for row, length in enumerate([3, 12, 1]):
        inputs["past_key"][row, :, length:] = torch.nan
        inputs["past_value"][row, :, length:] = torch.nan
    together = run(graphs["BiasedCachedAttention"], "cpu", inputs, tmp_path)[0]

    for row, length in enumerate([3, 12, 1]):
        one = {
            name: tensor if name in FIXED else tensor[row : row + 1]
            for name, tensor in inputs.items()
        }
        one["total_seq"] = torch.tensor([length], dtype=torch.int32)
        alone = run(graphs["BiasedCachedAttention"], "cpu", one, tmp_path)[0]
        assert np.array_equal(together[row], alone[0])


def test_a_rotary_prompt_padded_on_the_right_is_turned_from_its_start(
    graphs: dict[str, ir.Model], tmp_path: Path
) -> None:
    inputs = rotary_inputs([2, 4], 4)

    outputs = run(graphs["RotaryCachedAttention"], "cpu", inputs, tmp_path)

    expected = [tensor.numpy() for tensor in RotaryCached()(**inputs)]
    for row, length in enumerate([2, 4]):
        np.testing.assert_allclose(outputs[0][row, :length], expected[0][row, :length], atol=2e-6)
        np.testing.assert_allclose(
            outputs[1][row, :, :length], expected[1][row, :, :length], atol=2e-6
        )


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(
    ("lengths", "num_new"), [([1], 1), ([12], 1), ([3, 12, 1], 1), ([2], 5), ([12, 1, 7], 4)]
)
def test_cross_attention_is_the_eager_function(
    body: str, lengths: list[int], num_new: int, graphs: dict[str, ir.Model], tmp_path: Path
) -> None:
    inputs = cross_inputs(lengths, num_new)

    (output,) = run(graphs["CrossAttention"], body, inputs, tmp_path)

    np.testing.assert_allclose(output, Cross()(**inputs).numpy(), atol=2e-6)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(
    "beams",
    [
        [[0, 1]],
        [[2, 0, 1], [3]],
        [[0], [4, 3, 2, 1], [5, 6]],
        [[7, 6, 5, 4, 3], [0, 1, 2]],
        [list(range(9))],
        [list(range(17)), [17]],
    ],
    ids=lambda beams: "-".join(str(len(rows)) for rows in beams),
)
def test_several_rows_attend_to_one_source(
    body: str, beams: list[list[int]], graphs: dict[str, ir.Model], tmp_path: Path
) -> None:
    inputs = cross_inputs([7, 12, 1][: len(beams)], 1, beams)

    (output,) = run(graphs["CrossAttention"], body, inputs, tmp_path)

    np.testing.assert_allclose(output, Cross()(**inputs).numpy(), atol=2e-6)


def test_cross_attention_does_not_see_a_nan_behind_the_source_when_it_decodes(
    graphs: dict[str, ir.Model], tmp_path: Path
) -> None:
    inputs = cross_inputs([3, 7], 1)
    expected = Cross()(**inputs).numpy()
    for row, length in enumerate([3, 7]):
        inputs["cross_key"][row, :, length:] = torch.nan
        inputs["cross_value"][row, :, length:] = torch.nan

    (output,) = run(graphs["CrossAttention"], "cpu", inputs, tmp_path)

    np.testing.assert_allclose(output, expected, atol=2e-6)


class Crosses(nn.Module):
    def forward(  # type: ignore[no-untyped-def]
        self,
        query,
        cross_key,
        cross_value,
        other_key,
        other_value,
        source_lengths,
        beam_rows,
        row_queries,
    ):
        for row in ((cross_key, cross_value), (other_key, other_value)):
            source = SourceRow(*row, source_lengths, beam_rows, row_queries)
            query = cross_attention_over_row(query, source, num_heads=KV_HEADS, scale=SCALE)
        return query


def test_what_does_not_depend_on_the_layer_is_computed_once(
    graphs: dict[str, ir.Model], tmp_path: Path
) -> None:
    inputs = cross_inputs([3, 7], 1)
    of_two = {**inputs, "other_key": inputs["cross_key"], "other_value": inputs["cross_value"]}

    one = _kinds(graphs["CrossAttention"], inputs, tmp_path / "one")
    two = _kinds(_export(Crosses(), of_two), of_two, tmp_path / "two")

    assert two["GroupQueryAttention"] == two["If"] == 2
    assert two.total() - one.total() == 6  # those two, Gather and Reshape before and behind


def _kinds(graph: ir.Model, inputs: dict[str, Tensor], path: Path) -> Counter[str]:
    """Return how many nodes of each kind onnxruntime runs."""
    path.mkdir()
    attach_bodies(graph, bodies.CPU)
    ir.save(graph, path / "graph.onnx")
    options = usual_options()
    options.enable_profiling, options.profile_file_prefix = True, str(path / "profile")
    session = ort.InferenceSession(path / "graph.onnx", options)
    session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
    events = json.loads(Path(session.end_profiling()).read_text())
    events = [event for event in events if event["cat"] == "Node"]
    kernels = [event for event in events if event["name"].endswith("_kernel_time")]
    return Counter(event["args"]["op_name"] for event in kernels)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(
    ("lengths", "num_new", "wanted", "beams"),
    [
        ([12], 1, [0], None),
        ([3, 12, 1], 1, [2, 0, 1], None),
        ([9], 5, [4, 1], None),
        ([7, 12], 1, [0, 3, 2], [[2, 0, 1], [3]]),
    ],
)
def test_alignment_is_the_eager_function(
    body: str,
    lengths: list[int],
    num_new: int,
    wanted: list[int],
    beams: list[list[int]] | None,
    graphs: dict[str, ir.Model],
    tmp_path: Path,
) -> None:
    inputs = alignment_inputs(lengths, num_new, wanted, beams)

    (alignment,) = run(graphs["CrossAlignment"], body, inputs, tmp_path)

    np.testing.assert_allclose(alignment, Alignment()(**inputs).numpy(), atol=1e-6)
    np.testing.assert_allclose(alignment.sum(axis=1), 1, atol=1e-6)


def test_alignment_is_the_same_alone_and_beside_others_and_does_not_see_a_nan_behind_the_source(
    graphs: dict[str, ir.Model], tmp_path: Path
) -> None:
    inputs = alignment_inputs([3, 12], 1, [0])
    (alone,) = run(graphs["CrossAlignment"], "cpu", inputs, tmp_path)
    inputs["cross_key"][0, :, 3:] = torch.nan

    both = {**inputs, "alignment_idx": torch.tensor([1, 0])}
    both["alignment_sources"] = both["alignment_idx"]
    (together,) = run(graphs["CrossAlignment"], "cpu", both, tmp_path)

    assert np.array_equal(together[1], alone[0])
    assert not alone[0, 3:].any()


def test_no_alignment_is_computed_if_none_is_wanted(
    graphs: dict[str, ir.Model], tmp_path: Path
) -> None:
    inputs = alignment_inputs([3, 12], 1, [])

    (alignment,) = run(graphs["CrossAlignment"], "cpu", inputs, tmp_path)

    assert alignment.size == 0


@pytest.mark.parametrize("family", [pytest.param("encoder-decoder", marks=pytest.mark.long), "gpt"])
def test_a_model_of_standard_operators_gets_the_certificate_too(
    family: str, tiny_graphs: TinyGraphs, tmp_path: Path
) -> None:
    path, graphs = tiny_graphs(family)
    checkpoint = load_checkpoint(path)
    for graph in graphs.values():
        attach_bodies(graph, REFERENCE)
    write_graphs(graphs, tmp_path)

    for_another_device = PackageFormat(target="cuda")  # no bits are promised
    certificate = prove(checkpoint, tmp_path, for_another_device)

    assert certificate.tokens_equal > 0
    for function in graphs["decoder.onnx"].functions.values():
        assert function.domain == DOMAIN
        assert set(function.opset_imports) == {""}
