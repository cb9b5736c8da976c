"""The slot runner against a plain numpy Transformer, on tiny graphs made here node by node."""

from __future__ import annotations

import weakref
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from engine.config import EngineConfig
from engine.errors import PackageError
from engine.factory import core_on_slots
from engine.generation.core import EngineCore
from engine.package.manifest import CacheShape, GenerationContract
from engine.requests.request import SamplingParams
from engine.scheduling.output import FinishedOutput, TokensOutput
from engine.scheduling.sequence import TokenRequest
from engine.slots.batch import Encode, PrefillChunk, RowOp, ScheduledBatch
from engine.slots.runner import SlotModelRunner
from tests.engine.row_steps import decode, prefill

VOCAB, WIDTH, HEADS, DIM, LAYERS, MAX_LEN, MAX_SOURCE = 23, 16, 2, 8, 2, 40, 12
SELF_CACHE = CacheShape(num_layers=LAYERS, num_kv_heads=HEADS, max_len=MAX_LEN, head_dim=DIM)
CROSS_CACHE = SELF_CACHE.model_copy(update={"max_len": MAX_SOURCE})

Array = NDArray[np.float32]


class TinyModel:
    """Random weights, a numpy forward pass, and the same as graphs.

    A layer adds attention over the sequence and, of an encoder-decoder, over the source. The
    encoder is one projection of the source's embeddings.
    """

    def __init__(self, seed: int, *, has_encoder: bool, vocab_size: int = VOCAB) -> None:
        rng = np.random.default_rng(seed)
        self.has_encoder, self.vocab_size = has_encoder, vocab_size

        def weight(*shape: int) -> Array:
            return rng.normal(0, 0.3, shape).astype(np.float32)

        self.tokens, self.positions = weight(vocab_size, WIDTH), weight(MAX_LEN, WIDTH)
        self.qkv = [weight(WIDTH, 3 * WIDTH) for _ in range(LAYERS)]
        self.out = [weight(WIDTH, WIDTH) for _ in range(LAYERS)]
        self.cross_q = [weight(WIDTH, WIDTH) for _ in range(LAYERS)]
        self.cross_kv = [weight(WIDTH, 2 * WIDTH) for _ in range(LAYERS)]
        self.head = weight(WIDTH, vocab_size)

    @property
    def contract(self) -> GenerationContract:
        return GenerationContract(
            vocab_size=self.vocab_size,
            num_heads=HEADS,
            cache=SELF_CACHE,
            cross_cache=CROSS_CACHE if self.has_encoder else None,
            decoder_start_token_id=1 if self.has_encoder else None,
            eos_token_ids=(0,),
        )

    def logits(self, ids: list[int], source: list[int] | None = None) -> Array:
        """Return the logits behind every token, [T, V], without any cache."""
        T = len(ids)
        x = self.tokens[ids] + self.positions[:T]
        causal = np.tril(np.ones((T, T), bool))
        for i in range(LAYERS):
            query, key, value = np.split(x @ self.qkv[i], 3, axis=1)
            x = x + _attend(query, key, value, causal) @ self.out[i]
            if source is not None:
                key, value = np.split(self.tokens[source] @ self.cross_kv[i], 2, axis=1)
                everything = np.ones((T, len(source)), bool)
                x = x + _attend(x @ self.cross_q[i], key, value, everything)
        return x @ self.head

    def write(self, directory: Path) -> tuple[Path, Path | None]:
        """Write decoder and encoder graph; return where they are."""
        _write_decoder(self, directory / "decoder.onnx")
        if not self.has_encoder:
            return directory / "decoder.onnx", None
        _write_encoder(self, directory / "encoder.onnx")
        return directory / "decoder.onnx", directory / "encoder.onnx"


@pytest.fixture
def decoder(tmp_path: Path) -> tuple[TinyModel, SlotModelRunner]:
    return _load(TinyModel(1, has_encoder=False), tmp_path)


@pytest.fixture
def encoder_decoder(tmp_path: Path) -> tuple[TinyModel, SlotModelRunner]:
    return _load(TinyModel(2, has_encoder=True), tmp_path)


Loaded = tuple[TinyModel, SlotModelRunner]


def test_prefill_in_chunks_then_decoding_gives_the_logits_of_the_whole_sequence(
    decoder: Loaded,
) -> None:
    model, runner = decoder
    ids = _random_ids(seed=3, length=20)

    found = [prefill(runner, 0, ids[:8])[0].copy(), prefill(runner, 0, ids[8:16])[0].copy()]
    found += [decode(runner, [token])[0].copy() for token in ids[16:]]

    np.testing.assert_allclose(found, model.logits(ids)[[7, 15, 16, 17, 18, 19]], atol=2e-5)


def test_rows_of_different_lengths_are_bit_equal_alone_and_in_a_batch(decoder: Loaded) -> None:
    _, runner = decoder
    prompts = [_random_ids(seed=n, length=n + 2) for n in range(5)]
    alone = []
    for prompt in prompts:
        runner.reset()
        prefill(runner, 0, prompt)
        alone.append([decode(runner, [token])[0].copy() for token in (4, 5, 6)])

    runner.reset()
    for row, prompt in enumerate(prompts):
        prefill(runner, row, prompt)
    together = [decode(runner, [token] * 5).copy() for token in (4, 5, 6)]

    assert np.array_equal(np.swapaxes(together, 0, 1), alone)


def test_encoder_decoder_attends_to_its_own_source_whatever_its_length(
    encoder_decoder: Loaded,
) -> None:
    model, runner = encoder_decoder
    sources = [_random_ids(seed=n, length=length) for n, length in enumerate((12, 3, 7))]
    for row, source in enumerate(sources):
        runner.encode(row, source)

    first = decode(runner, [1, 1, 1]).copy()
    second = decode(runner, [5, 6, 7]).copy()

    for row, source in enumerate(sources):
        wanted = model.logits([1, 5 + row], source)
        np.testing.assert_allclose([first[row], second[row]], wanted, atol=2e-5)


def test_a_step_runs_row_changes_encodes_decodes_and_chunks_and_orders_logits(
    decoder: Loaded,
) -> None:
    model, runner = decoder
    decoding, chunked, prompt = (_random_ids(seed=n, length=9) for n in range(3))
    prefill(runner, 2, decoding[:8])

    logits = runner.run(
        ScheduledBatch(
            row_ops=(RowOp("move", 2, 0),),
            encodes=(),
            decode_ids=(decoding[8],),
            chunks=(
                PrefillChunk(1, tuple(chunked[:4]), num_logits=0),
                PrefillChunk(1, tuple(chunked[4:]), num_logits=1),
                PrefillChunk(2, tuple(prompt), num_logits=3),
            ),
            num_top=4,
        )
    )

    wanted = [model.logits(ids)[-1] for ids in (decoding, chunked)]
    wanted += [*model.logits(prompt)[-3:]]
    np.testing.assert_allclose(logits.logits, wanted, atol=2e-5)
    order = np.argsort(-logits.logits, kind="stable")[:, :4]
    np.testing.assert_array_equal(logits.top_ids, order)
    np.testing.assert_array_equal(
        logits.top_logits, np.take_along_axis(logits.logits, order, axis=1)
    )
    total = np.log(np.exp(logits.logits).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(logits.top_logprobs, logits.top_logits - total, atol=1e-5)


def test_more_logits_than_rows_are_made_room_for(decoder: Loaded) -> None:
    model, runner = decoder
    ids = _random_ids(seed=3, length=30)
    chunk = PrefillChunk(0, tuple(ids), num_logits=30)

    found = runner.run(ScheduledBatch((), (), chunks=(chunk,), decode_ids=()))

    np.testing.assert_allclose(found.logits, model.logits(ids), atol=2e-5)
    np.testing.assert_allclose(decode(runner, [4])[0], model.logits([*ids, 4])[-1], atol=2e-5)


def test_room_for_more_logits_than_rows_is_given_back_by_the_next_step(decoder: Loaded) -> None:
    _, runner = decoder
    chunk = PrefillChunk(0, tuple(_random_ids(seed=3, length=30)), num_logits=30)
    found = runner.run(ScheduledBatch((), (), chunks=(chunk,), decode_ids=()))
    room = weakref.ref(found.logits.base)
    del found

    runner.run(ScheduledBatch((), (), chunks=(), decode_ids=(4,)))

    assert room() is None


def test_beams_attend_to_their_sentence_and_count_padding(encoder_decoder: Loaded) -> None:
    model, runner = encoder_decoder
    sources = [_random_ids(seed=n, length=length) for n, length in enumerate((7, 7, 4))]
    encodes = tuple(Encode(row, tuple(source)) for row, source in enumerate(sources))
    runner.run(ScheduledBatch((), encodes, chunks=(), decode_ids=()))
    of_row = (2, 0, 2, 2, 1)

    found = runner.run(
        ScheduledBatch((), (), (), decode_ids=(5, 6, 7, 8, 9), decode_sources=of_row)
    )

    for row, source in enumerate(of_row):
        wanted = model.logits([5 + row], sources[source])[-1]
        np.testing.assert_allclose(found.logits[row], wanted, atol=2e-5)
    assert runner.num_padding == 3 * 4 - 5


def test_as_many_beams_as_there_are_slots_attend_to_any_source(tmp_path: Path) -> None:
    model, runner = _load(TinyModel(2, has_encoder=True), tmp_path, num_slots=40)
    source, last = _random_ids(seed=1, length=7), 39
    runner.run(ScheduledBatch((), (Encode(last, tuple(source)),), (), decode_ids=()))

    found = runner.run(
        ScheduledBatch((), (), (), decode_ids=(5,) * 40, decode_sources=(last,) * 40)
    )

    wanted = model.logits([5], source)[[-1] * 40]
    np.testing.assert_allclose(found.logits, wanted, atol=2e-5)


def test_a_copy_from_where_rows_differ_gives_the_row(decoder: Loaded) -> None:
    model, runner = decoder
    one, other = [4, 5, 6, 7, 8], [4, 5, 6, 9, 10]
    for row, ids in enumerate((one, other)):
        prefill(runner, row, ids)

    runner.cache.apply([RowOp("copy", 0, 1, start=3)])
    found = decode(runner, [11, 12])

    wanted = [model.logits([*one, token])[-1] for token in (11, 12)]
    np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_encode_and_first_decoder_token_share_a_step(encoder_decoder: Loaded) -> None:
    model, runner = encoder_decoder
    source = _random_ids(seed=9, length=6)

    logits = runner.run(ScheduledBatch((), (Encode(0, tuple(source)),), decode_ids=(1,), chunks=()))

    np.testing.assert_allclose(logits.logits, model.logits([1], source), atol=2e-5)


def test_the_cache_may_be_filled_to_the_last_position(decoder: Loaded) -> None:
    model, runner = decoder
    ids = _random_ids(seed=5, length=MAX_LEN)

    prefill(runner, 0, ids[:-1])
    logits = decode(runner, ids[-1:])

    np.testing.assert_allclose(logits[0], model.logits(ids)[-1], atol=2e-5)


def test_a_reused_slot_gives_the_bits_of_a_fresh_one_even_after_nan(
    encoder_decoder: Loaded,
) -> None:
    _, runner = encoder_decoder
    runner.encode(0, _random_ids(seed=1, length=4))
    fresh = decode(runner, [1])[0].copy()
    runner.reset()
    runner.encode(0, _random_ids(seed=2, length=12))
    for token in range(8):
        decode(runner, [token])
    for layer in (*runner.cache.layers, *runner.cache.cross_layers):
        layer.key[0, :, :8] = layer.value[0, :, :8] = np.nan

    runner.cache.apply([RowOp("clear", 0, 0), RowOp("clear_source", 0, 0)])
    runner.encode(0, _random_ids(seed=1, length=4))

    assert np.array_equal(decode(runner, [1])[0], fresh)


@pytest.mark.parametrize(
    ("change", "of_cache", "of_sources", "problems"),
    [
        ({}, {"num_layers": LAYERS + 1}, {}, ["missing input past_key_values.2.key and 1 like it"]),
        ({"vocab_size": VOCAB + 1}, {}, {}, ["output logits is float32 [N, 23]"]),
        (
            {"vocab_size": VOCAB - 2},
            {"max_len": 2 * MAX_LEN, "dtype": "int8"},
            {"max_len": MAX_SOURCE - 1, "num_kv_heads": 1, "head_dim": 16},
            [
                "decoder.onnx: input past_key_values.0.key and 3 like it is "
                "float32 [B, 2, 40, 8], the manifest's int8 [batch, 2, 80, 8]",
                "output present.0.key and 3 like it is float32 [B, 2, 40, 8]",
                "output logits is float32 [N, 23], the manifest's float32 [num_logits, 21]",
                "input cross_key_values.0.key and 3 like it is float32 [C, 2, 12, 8]",
                "encoder.onnx: input past_cross_key_values.0.key and 3 like it",
                "output present_cross_key_values.0.key and 3 like it",
            ],
        ),
        ({"alignment": True}, {}, {}, ["missing input alignment_idx, int64 [num_alignments]"]),
    ],
    ids=["layers", "vocabulary", "everything", "alignment"],
)
def test_graphs_that_are_not_as_the_manifest_says_are_refused_with_every_difference(
    tmp_path: Path,
    change: dict[str, object],
    of_cache: dict[str, object],
    of_sources: dict[str, object],
    problems: list[str],
) -> None:
    model = TinyModel(2, has_encoder=True)
    shapes = {
        "cache": SELF_CACHE.model_copy(update=of_cache),
        "cross_cache": CROSS_CACHE.model_copy(update=of_sources),
    }
    contract = model.contract.model_copy(update=shapes | change)

    with pytest.raises(PackageError) as caught:
        SlotModelRunner.load(contract, *model.write(tmp_path), num_slots=2)

    for problem in problems:
        assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("name", "kind", "shape", "problem"),
    [
        ("position_ids", TensorProto.INT32, ["B", "S"], "is int32 [B, S], the manifest's int64"),
        ("position_ids", TensorProto.INT64, [1, "S"], "is int64 [1, S], the manifest's int64"),
        ("logit_idx", TensorProto.INT64, ["N", 1], "is int64 [N, 1], the manifest's int64 [num_"),
    ],
    ids=["type", "fixed batch", "rank"],
)
def test_an_input_of_another_type_or_size_is_refused(
    tmp_path: Path, name: str, kind: int, shape: list[str | int], problem: str
) -> None:
    model = TinyModel(1, has_encoder=False)
    path, _ = model.write(tmp_path)
    graph = onnx.load(path)
    (value,) = (value for value in graph.graph.input if value.name == name)
    value.CopyFrom(helper.make_tensor_value_info(name, kind, shape))
    for output in graph.graph.output:  # their sizes follow from the inputs
        output.type.tensor_type.ClearField("shape")
    onnx.save(graph, path)

    with pytest.raises(PackageError) as caught:
        SlotModelRunner.load(model.contract, path, None, num_slots=2)

    assert f"decoder.onnx: input {name} {problem}" in str(caught.value)


def test_a_file_that_is_no_graph_is_a_package_error(tmp_path: Path) -> None:
    (tmp_path / "decoder.onnx").write_bytes(b"no graph")
    contract = TinyModel(1, has_encoder=False).contract

    with pytest.raises(PackageError, match="export the model again"):
        SlotModelRunner.load(contract, tmp_path / "decoder.onnx", None, num_slots=2)


@pytest.mark.parametrize("has_encoder", [False, True], ids=["decoder", "encoder-decoder"])
def test_an_engine_gives_each_of_many_requests_the_tokens_of_the_eager_model(
    tmp_path: Path, has_encoder: bool
) -> None:
    model = TinyModel(4, has_encoder=has_encoder)
    _, runner = _load(model, tmp_path)
    config = EngineConfig(
        max_num_seqs=5, prefill_chunk_size=4, max_num_batched_tokens=12, reuse_prefixes=False
    )
    core = core_on_slots(config, model.contract, runner)
    prompts = [_random_ids(seed=n, length=n % 11 + 1) for n in range(17)]
    params = SamplingParams(max_new_tokens=9, ignore_eos=True)
    for key, ids in enumerate(prompts):
        core.scheduler.add(TokenRequest(key, "", tuple(ids), params, seed=0, arrival=0.0))

    tokens: dict[int, list[int]] = {}
    while core.scheduler.has_work:
        for output in core.step():
            if isinstance(output, TokensOutput):
                tokens.setdefault(output.key, []).extend(output.token_ids)

    for key, ids in enumerate(prompts):
        assert tokens[key] == _greedy(model, ids, count=9)
    assert not runner.cache.lengths.any() and not runner.cache.source_lengths.any()


def _greedy(model: TinyModel, prompt: list[int], *, count: int) -> list[int]:
    ids, source = ([1], prompt) if model.has_encoder else (list(prompt), None)
    start = len(ids)
    for _ in range(count):
        ids.append(int(model.logits(ids, source)[-1].argmax()))
    return ids[start:]


def _load(model: TinyModel, directory: Path, *, num_slots: int = 5) -> Loaded:
    return model, SlotModelRunner.load(
        model.contract, *model.write(directory), num_slots=num_slots, num_threads=1
    )


def _random_ids(*, seed: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(2, VOCAB, length)]


def _attend(query: Array, key: Array, value: Array, mask: NDArray[np.bool_]) -> Array:
    heads = []
    for h in range(HEADS):
        part = slice(h * DIM, (h + 1) * DIM)
        scores = query[:, part] @ key[:, part].T / np.sqrt(DIM)  # (T, S)
        weights = np.exp(np.where(mask, scores, -np.inf))
        heads.append(weights / weights.sum(axis=1, keepdims=True) @ value[:, part])
    return np.concatenate(heads, axis=1).astype(np.float32)


class _Graph:
    """Collects nodes and weights; a method call adds a node and returns its output's name."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def constant(self, value: NDArray[np.generic]) -> str:
        self.weights.append(numpy_helper.from_array(value, f"w{len(self.weights)}"))
        return self.weights[-1].name

    def add(
        self, op: str, *inputs: str, outputs: list[str] | None = None, **options: object
    ) -> str:
        outputs = outputs or [f"{op}_{len(self.nodes)}"]
        domain = "com.microsoft" if op == "GroupQueryAttention" else ""
        self.nodes.append(helper.make_node(op, inputs, outputs, domain=domain, **options))
        return outputs[0]

    def shape(self, *sizes: int) -> str:
        return self.constant(np.asarray(sizes, np.int64))

    def write(self, path: Path, inputs: dict[str, tuple], outputs: dict[str, tuple]) -> None:
        def values(described: dict[str, tuple]) -> list[onnx.ValueInfoProto]:
            return [helper.make_tensor_value_info(n, *how) for n, how in described.items()]

        graph = helper.make_graph(self.nodes, "tiny", values(inputs), values(outputs), self.weights)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)


def _write_decoder(model: TinyModel, path: Path) -> None:
    g = _Graph()
    embedded = g.add("Gather", g.constant(model.tokens), "input_ids")
    x = g.add("Add", embedded, g.add("Gather", g.constant(model.positions), "position_ids"))
    inputs: dict[str, tuple] = {
        "input_ids": (TensorProto.INT64, ["B", "S"]),
        "position_ids": (TensorProto.INT64, ["B", "S"]),
        "logit_idx": (TensorProto.INT64, ["N"]),
        "num_top": (TensorProto.INT64, [1]),
        "seqlens_k": (TensorProto.INT32, ["B"]),
        "total_seq": (TensorProto.INT32, [1]),
    }
    outputs: dict[str, tuple] = {"logits": (TensorProto.FLOAT, ["N", model.vocab_size])}
    row = (TensorProto.FLOAT, ["B", HEADS, MAX_LEN, DIM])
    for i in range(LAYERS):
        past = [f"past_key_values.{i}.key", f"past_key_values.{i}.value"]
        present = [f"present.{i}.key", f"present.{i}.value"]
        inputs |= dict.fromkeys(past, row)
        outputs |= dict.fromkeys(present, row)
        attended = g.add(
            "GroupQueryAttention",
            g.add("MatMul", x, g.constant(model.qkv[i])),
            *("", "", *past, "seqlens_k", "total_seq"),
            outputs=[f"attended_{i}", *present],
            num_heads=HEADS,
            kv_num_heads=HEADS,
        )
        x = g.add("Add", x, g.add("MatMul", attended, g.constant(model.out[i])))
        if model.has_encoder:
            x = g.add("Add", x, _cross_attention(g, model, i, x))
            inputs |= {f"cross_key_values.{i}.{part}": _CROSS_ROW for part in ("key", "value")}
    if model.has_encoder:
        inputs["source_lengths"] = (TensorProto.INT64, ["C"])
        inputs["beam_rows"] = (TensorProto.INT64, ["C", "G"])
        inputs["row_queries"] = (TensorProto.INT64, ["B", "S"])
    flat = g.add("Reshape", x, g.shape(-1, WIDTH))
    last = g.add("Gather", flat, "logit_idx")
    g.add("MatMul", last, g.constant(model.head), outputs=["logits"])
    g.add("TopK", "logits", "num_top", outputs=["top_logits", "top_ids"])
    logprobs = g.add("LogSoftmax", "logits", axis=-1)
    g.add("GatherElements", logprobs, "top_ids", outputs=["top_logprobs"], axis=1)
    outputs["top_ids"] = (TensorProto.INT64, ["N", "k"])
    outputs |= dict.fromkeys(("top_logits", "top_logprobs"), (TensorProto.FLOAT, ["N", "k"]))
    g.write(path, inputs, outputs)


_CROSS_ROW = (TensorProto.FLOAT, ["C", HEADS, MAX_SOURCE, DIM])


def _cross_attention(g: _Graph, model: TinyModel, i: int, x: str) -> str:
    """Attend to the first source_lengths positions of the row's source."""
    group = g.add("Shape", "beam_rows", start=1, end=2)
    queries = g.add("Mul", group, g.add("Shape", "row_queries", start=1, end=2))  # per source
    first = g.add("Gather", "row_queries", g.constant(np.asarray(0, np.int64)), axis=1)
    source = g.add("Div", first, queries)  # (B)
    keys = g.add("Gather", f"cross_key_values.{i}.key", source)
    values = g.add("Gather", f"cross_key_values.{i}.value", source)
    lengths = g.add("Gather", "source_lengths", source)
    query = g.add("MatMul", x, g.constant(model.cross_q[i] / np.float32(np.sqrt(DIM))))
    split = g.add("Reshape", query, g.shape(0, 0, HEADS, DIM))
    query = g.add("Transpose", split, perm=[0, 2, 1, 3])  # (B, heads, S, dim)
    key = g.add("Transpose", keys, perm=[0, 1, 3, 2])
    positions = g.constant(np.arange(MAX_SOURCE, dtype=np.int64)[None])
    real = g.add("Less", positions, g.add("Unsqueeze", lengths, g.shape(1)))
    mask = g.add("Unsqueeze", real, g.shape(1, 2))  # (B, 1, 1, source)
    closed = g.constant(np.asarray(-1e30, np.float32))
    scores = g.add("Where", mask, g.add("MatMul", query, key), closed)
    weights = g.add("Softmax", scores, axis=-1)
    heads = g.add("MatMul", weights, values)
    joined = g.add("Transpose", heads, perm=[0, 2, 1, 3])
    return g.add("Reshape", joined, g.shape(0, 0, WIDTH))


def _write_encoder(model: TinyModel, path: Path) -> None:
    g = _Graph()
    embedded = g.add("Gather", g.constant(model.tokens), "input_ids")  # (C, S, width)
    inputs: dict[str, tuple] = {"input_ids": (TensorProto.INT64, ["C", "S"])}
    outputs: dict[str, tuple] = {}
    for i in range(LAYERS):
        halves = np.split(model.cross_kv[i], 2, axis=1)
        for part, weight in zip(("key", "value"), halves, strict=True):
            projected = g.add("MatMul", embedded, g.constant(np.ascontiguousarray(weight)))
            split = g.add("Reshape", projected, g.shape(0, 0, HEADS, DIM))
            states = g.add("Transpose", split, perm=[0, 2, 1, 3])  # (C, heads, S, dim)
            past, present = (f"{when}_cross_key_values.{i}.{part}" for when in ("past", "present"))
            length = g.add("Shape", "input_ids", start=1, end=2)
            rest = g.add(
                "Slice", past, length, g.shape(MAX_SOURCE), g.shape(2), outputs=[f"rest_{past}"]
            )
            g.add("Concat", states, rest, outputs=[present], axis=2)
            inputs[past] = outputs[present] = _CROSS_ROW
    g.write(path, inputs, outputs)


@pytest.mark.parametrize("has_encoder", [False, True], ids=["decoder", "encoder-decoder"])
def test_what_is_reused_gives_the_bits_of_an_engine_that_has_computed_nothing_before(
    tmp_path: Path, has_encoder: bool
) -> None:
    model, runner = _load(TinyModel(5, has_encoder=has_encoder), tmp_path)
    config = EngineConfig(max_num_seqs=3, prefill_chunk_size=4, max_num_batched_tokens=12)
    beginning = _random_ids(seed=1, length=9)
    prompts = [beginning[:9] + _random_ids(seed=2 + n % 3, length=1 + n % 3) for n in range(9)]

    def ask(core: EngineCore, key: int) -> tuple[list[tuple[int, float]], int]:
        params = SamplingParams(max_new_tokens=5, ignore_eos=True)
        core.scheduler.add(TokenRequest(key, f"r-{key}", tuple(prompts[key]), params, 0, 0.0))
        found, cached = [], 0
        while core.scheduler.has_work:
            for output in core.step():
                if isinstance(output, TokensOutput):
                    found.append((*output.token_ids, output.sum_logprob))
                if isinstance(output, FinishedOutput):
                    cached = output.cached_tokens
        return found, cached

    cold = []
    for key in range(len(prompts)):
        runner.reset()
        cold.append(ask(core_on_slots(config, model.contract, runner), key)[0])
    runner.reset()
    core = core_on_slots(config, model.contract, runner)
    warm, cached = zip(*(ask(core, key) for key in range(len(prompts))), strict=True)

    assert list(warm) == cold
    assert cached[0] == 0 and (min(cached[1:]) >= 8 or has_encoder)
    assert max(cached) >= 8
