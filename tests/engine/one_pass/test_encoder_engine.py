"""EncoderEngine: rows of equal length share a batch; every request gets an answer or an error."""

from __future__ import annotations

import asyncio
import io
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tokenizers
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from engine.config import EngineConfig, RequestLimits
from engine.errors import (
    Draining,
    EngineFailure,
    ExpiredInDecode,
    ExpiredInQueue,
    InvalidRequest,
    QueueFull,
    ReplicaLost,
    Starting,
    TokenBudgetFull,
)
from engine.lifecycle.lifecycle import WarmUpResult
from engine.one_pass.engine import EncoderEngine
from engine.one_pass.prediction import Prediction, PredictionItem
from engine.package.manifest import EncodingContract, ImageContract, Manifest
from engine.package.package import Package
from engine.requests.text import Side
from engine.session import create_session
from engine.text.tokenizer import Tokenizer
from server.worker.entities import find_entities
from tests.engine.watching import fail_once
from tests.fakes.clock import FakeClock
from tests.fakes.stand_in_certificate import certificate

VOCAB = 40
DIM = 16
LABELS = ("a", "b", "c")
WORDS = ("[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(VOCAB - 4)), "é")


class FakeGraph:
    """Answers with sums of the rows; may be held up or broken."""

    def __init__(self, *, label: bool = False) -> None:
        self.batches: list[NDArray[Any]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.fail: Callable[[NDArray[Any]], bool] = lambda values: False
        self._label = label

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        values = inputs["input_ids"] if "input_ids" in inputs else inputs["pixel_values"]
        self.batches.append(values)
        self.entered.set()
        assert self.gate.wait(60)
        if self.fail(values):
            raise RuntimeError("secret detail")
        flat = values.reshape(len(values), -1).astype(np.float32)
        rows = values if self._label else flat.sum(axis=1)
        return {
            "logits": np.repeat(rows[..., None], len(LABELS), axis=-1).astype(np.float32),
            "embedding": np.repeat(flat.sum(axis=1)[:, None], DIM, axis=1),
        }

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [batch.shape for batch in self.batches]


def make_package(task: str = "classify", *, max_len: int = 12, image: bool = False) -> Package:
    text = EncodingContract(vocab_size=VOCAB, max_len=max_len, pad_token_id=0, embedding_dim=DIM)
    picture = ImageContract(size=4, channels=1, mean=(0.5,), std=(0.5,), embedding_dim=DIM)
    manifest = Manifest(
        format_version=1,
        name="tiny",
        architecture="vision-encoder" if image else "encoder",
        task=task,
        target="cpu",
        layout=None,
        weights="fp32",
        encoding=None if image else text,
        image=picture if image else None,
        labels=LABELS,
        files={},
        toolchain={},
        certificate=certificate(task=task),
    )
    return Package(path=Path("tiny"), manifest=manifest, manifest_sha256=b"")


@pytest.fixture(scope="module")
def tokenizer(tokenizer_file: Path) -> Tokenizer:
    return Tokenizer(tokenizer_file)


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def added(token_id: int) -> dict[str, object]:
        flags = ("single_word", "lstrip", "rstrip", "normalized")
        return {"id": token_id, "content": WORDS[token_id], "special": True} | dict.fromkeys(
            flags, False
        )

    sep = {"SpecialToken": {"id": "[SEP]", "type_id": 0}}
    single = [
        {"SpecialToken": {"id": "[CLS]", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        sep,
    ]
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [added(1), added(2)],
                "pre_tokenizer": {"type": "WhitespaceSplit"},
                "post_processor": {
                    "type": "TemplateProcessing",
                    "single": single,
                    "pair": [*single, {"Sequence": {"id": "B", "type_id": 0}}, sep],
                    "special_tokens": {
                        name: {"id": name, "ids": [i], "tokens": [name]}
                        for i, name in ((1, "[CLS]"), (2, "[SEP]"))
                    },
                },
                "model": {
                    "type": "WordLevel",
                    "vocab": {word: i for i, word in enumerate(WORDS)},
                    "unk_token": "[UNK]",
                },
            }
        )
    )
    return path


@asynccontextmanager
async def running(
    graph: Any,
    tokenizer: Tokenizer | None = None,
    package: Package | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    **config: Any,
) -> AsyncIterator[EncoderEngine]:
    settings = EngineConfig(**config)
    engine = EncoderEngine(package or make_package(), graph, tokenizer, settings, clock=clock)
    await engine.start()
    try:
        yield engine
    finally:
        if isinstance(graph, FakeGraph):
            graph.gate.set()
        await engine.stop()


def ids(*lengths: int, token: int = 5) -> list[PredictionItem]:
    return [PredictionItem((token,) * length) for length in lengths]


def ask(
    engine: EncoderEngine, items: list[PredictionItem], name: str = "r", **options: Any
) -> asyncio.Task[Prediction]:
    options.setdefault("deadline", None)
    return asyncio.create_task(engine.predict(items, request_id=name, **options))


async def hold(engine: EncoderEngine, graph: FakeGraph) -> asyncio.Task[Prediction]:
    """Let a request occupy the engine until the gate opens."""
    graph.gate.clear()
    graph.entered.clear()
    task = ask(engine, ids(1), "holder")
    await asyncio.to_thread(graph.entered.wait, 60)
    return task


async def violations(engine: EncoderEngine, items: list[PredictionItem]) -> dict[str, str]:
    with pytest.raises(InvalidRequest) as caught:
        await engine.predict(items, request_id="r", deadline=None)
    return {v.field: v.description for v in caught.value.violations}


# Batches


async def test_waiting_rows_of_one_length_share_a_batch_and_the_oldest_length_goes_first(
    tokenizer: Tokenizer,
) -> None:
    graph = FakeGraph()
    async with running(graph, tokenizer) as engine:
        held = await hold(engine, graph)
        tasks = [ask(engine, ids(n), str(n)) for n in (3, 2, 3, 4, 2)]
        await asyncio.sleep(0)
        graph.gate.set()
        answers = await asyncio.gather(held, *tasks)

    assert graph.shapes == [(1, 1), (2, 3), (2, 2), (1, 4)]
    assert [answer.items[0].logits[0] for answer in answers] == [5, 15, 10, 15, 20, 10]


async def test_batch_keeps_within_rows_and_tokens(tokenizer: Tokenizer) -> None:
    graph = FakeGraph()
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 20, "prefill_chunk_size": 16}
    async with running(graph, tokenizer, **limits) as engine:
        held = await hold(engine, graph)
        tasks = [ask(engine, ids(*[2] * 6)), ask(engine, ids(*[8] * 3))]
        await asyncio.sleep(0)
        graph.gate.set()
        await asyncio.gather(held, *tasks)

    assert graph.shapes == [(1, 1), (4, 2), (2, 2), (2, 8), (1, 8)]


async def test_row_longer_than_the_token_budget_runs_alone(tokenizer: Tokenizer) -> None:
    graph = FakeGraph()
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 4, "prefill_chunk_size": 2}
    async with running(graph, tokenizer, **limits) as engine:
        await ask(engine, ids(9, 9))

    assert graph.shapes == [(1, 9), (1, 9)]


async def test_answers_stand_in_the_order_of_the_items(tokenizer: Tokenizer) -> None:
    async with running(FakeGraph(), tokenizer) as engine:
        answer = await ask(engine, ids(4, 1, 3, 1, 2))

    assert [item.logits[0] for item in answer.items] == [20, 5, 15, 5, 10]
    assert [item.input_tokens for item in answer.items] == [4, 1, 3, 1, 2]


async def test_timing_tells_queue_run_and_batch_size(tokenizer: Tokenizer) -> None:
    graph, clock = FakeGraph(), FakeClock()
    async with running(graph, tokenizer, clock=clock) as engine:
        held = await hold(engine, graph)
        tasks = [ask(engine, ids(3)), ask(engine, ids(3, 2))]
        await asyncio.sleep(0)
        clock.now += 2
        graph.gate.set()
        first, _, answer = await asyncio.gather(held, *tasks)

    timing = answer.timing
    assert (timing.queue, timing.prefill, timing.decode) == (2, 0, 0)
    assert timing.time_to_first_token == 2
    assert (timing.steps, timing.mean_batch_size) == (2, 1.5)
    assert (first.timing.queue, first.timing.prefill) == (0, 2)


async def test_many_requests_at_once_each_get_their_own_answer(tokenizer: Tokenizer) -> None:
    graph = FakeGraph()
    async with running(graph, tokenizer) as engine:
        numbers = np.random.default_rng(0).integers(1, 12, size=(200, 3))
        answers = await asyncio.gather(*(ask(engine, ids(*map(int, row))) for row in numbers))

    for row, answer in zip(numbers, answers, strict=True):
        assert [item.logits[0] for item in answer.items] == [5 * n for n in row]


# Real graphs


def _save_graph(path: Path, *, label: bool) -> Path:
    """Embedding, a hidden layer, sum over positions, head.

    The sum is a product with a row of ones: ReduceSum and ReduceMean over the positions add in
    another order for one row than for several, from nine positions on.
    """
    random = np.random.default_rng(1)
    weights = {
        "table": random.normal(size=(VOCAB, DIM)),
        "hidden": random.normal(size=(DIM, DIM)),
        "head": random.normal(size=(DIM, len(LABELS))),
    }
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["x"]),
        helper.make_node("MatMul", ["x", "hidden"], ["h"]),
        helper.make_node("Tanh", ["h"], ["t"]),
        helper.make_node("ReduceMax", ["t", "last"], ["top"], keepdims=1),  # (B, S, 1)
        helper.make_node("Greater", ["two", "top"], ["true"]),
        helper.make_node("Cast", ["true"], ["ones"], to=TensorProto.FLOAT),
        helper.make_node("Transpose", ["ones"], ["row"], perm=[0, 2, 1]),  # (B, 1, S)
        helper.make_node("MatMul", ["row", "t"], ["sum"]),  # (B, 1, DIM)
        helper.make_node("Squeeze", ["sum", "middle"], ["embedding"]),
        helper.make_node("MatMul", ["t" if label else "embedding", "head"], ["logits"]),
    ]
    shape = ["B", "S", len(LABELS)] if label else ["B", len(LABELS)]
    graph = helper.make_graph(
        nodes,
        "tiny",
        [
            helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["B", "S"]),
            helper.make_tensor_value_info("lengths", TensorProto.INT64, ["B"]),
        ],
        [
            helper.make_tensor_value_info("logits", TensorProto.FLOAT, shape),
            helper.make_tensor_value_info("embedding", TensorProto.FLOAT, ["B", DIM]),
        ],
        [
            numpy_helper.from_array(np.array([1], dtype=np.int64), "middle"),
            numpy_helper.from_array(np.array([2], dtype=np.int64), "last"),
            numpy_helper.from_array(np.float32(2), "two"),  # more than any tanh
            *(numpy_helper.from_array(w.astype(np.float32), n) for n, w in weights.items()),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, str(path))
    return path


@pytest.mark.parametrize("task", ["classify", "label"])
async def test_rows_of_a_graph_are_bit_equal_alone_and_among_others(
    tmp_path: Path, tokenizer: Tokenizer, task: str
) -> None:
    graph = _save_graph(tmp_path / "m.onnx", label=task == "label")
    session = create_session(graph, num_threads=1)
    random = np.random.default_rng(2)
    texts = [" ".join(random.choice(WORDS[3:], size=random.integers(1, 9))) for _ in range(60)]
    async with running(session, tokenizer, make_package(task)) as engine:
        alone = [(await ask(engine, [PredictionItem(text)])).items[0] for text in texts]
        crowd = await asyncio.gather(*(ask(engine, [PredictionItem(text)]) for text in texts))
        whole = await ask(engine, [PredictionItem(text) for text in texts])

    assert max(answer.timing.mean_batch_size for answer in crowd) > 1
    for solo, answer, item in zip(alone, crowd, whole.items, strict=True):
        for other in (answer.items[0], item):
            assert np.array_equal(solo.logits, other.logits)
            assert np.array_equal(solo.embedding, other.embedding)
            assert solo.spans == other.spans
            assert other.logits.base is None


async def test_labels_are_given_for_the_words_and_not_for_special_tokens(
    tokenizer: Tokenizer,
) -> None:
    async with running(FakeGraph(label=True), tokenizer, make_package("label")) as engine:
        answer = await ask(engine, [PredictionItem("é w0  w1")])

    (item,) = answer.items
    assert item.spans == ((0, 2), (3, 5), (7, 9))
    assert item.logits[:, 0].tolist() == [VOCAB - 1, 3, 4]
    assert item.input_tokens == 5
    assert engine.capabilities == ("label", "embed", "batch_invariant")


async def test_pair_is_one_row(tokenizer: Tokenizer) -> None:
    graph = FakeGraph()
    async with running(graph, tokenizer) as engine:
        await ask(engine, [PredictionItem("w0 w1", "w2")])

    assert graph.batches[0].tolist() == [[1, 3, 4, 2, 5, 2]]


def _png(value: int = 0, side: int = 4) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((side, side), value, dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


async def test_images_share_a_batch() -> None:
    graph = FakeGraph()
    async with running(graph, package=make_package(image=True)) as engine:
        answer = await ask(engine, [PredictionItem(_png(value)) for value in (0, 255)])

    assert graph.shapes == [(2, 1, 4, 4)]
    assert [item.logits[0] for item in answer.items] == [-16, 16]


# Refusals before the queue


async def test_every_wrong_item_is_named_at_once(tokenizer: Tokenizer) -> None:
    items = [
        PredictionItem("w0"),
        PredictionItem("w0"),
        PredictionItem("w0 " * 11),
        PredictionItem((1, 40, -1)),
        PredictionItem(()),
        PredictionItem(b"\x89PNG"),
        PredictionItem((1,) * 13),
        PredictionItem((1,), "pair"),
    ]
    async with running(FakeGraph(), tokenizer) as engine:
        found = await violations(engine, items)

    assert set(found) == {
        "items[2].text",
        "items[3].tokens.ids[1]",
        "items[3].tokens.ids[2]",
        "items[4].tokens.ids",
        "items[5].image",
        "items[6].tokens.ids",
        "items[7].text_pair",
    }
    assert "13 tokens are more than 12" in found["items[2].text"]
    assert "40 is outside the vocabulary, 0 to 39" in found["items[3].tokens.ids[1]"]


@pytest.mark.parametrize("task", ["classify", "label"])
async def test_a_blank_text_is_read_as_the_tokens_around_it(
    tokenizer: Tokenizer, task: str
) -> None:
    graph = FakeGraph(label=task == "label")
    items = [PredictionItem(text) for text in ("", " ", "\n\n")]
    async with running(graph, tokenizer, make_package(task)) as engine:
        answer = await ask(engine, items)

    assert graph.batches[0].tolist() == [[1, 2]] * 3
    for item in answer.items:
        assert (item.spans, item.logits.shape) == ((), (0, 3) if task == "label" else (3,))
        assert item.embedding.tolist() == [3.0] * DIM


@pytest.mark.parametrize(("side", "first"), [("right", 0), ("left", 10)])
async def test_a_text_that_is_too_long_is_cut_where_it_is_asked_for(
    tokenizer: Tokenizer, side: Side, first: int
) -> None:
    text = " ".join(WORDS[3:23])
    graph = FakeGraph(label=True)
    async with running(graph, tokenizer, make_package("label")) as engine:
        items = [PredictionItem(text, truncation=side), PredictionItem("w0 w1", truncation=side)]
        long, short = (await ask(engine, items)).items
        found = await violations(engine, [PredictionItem(text)])

    assert [batch.tolist() for batch in graph.batches] == [
        [[1, *range(3 + first, 13 + first), 2]], [[1, 3, 4, 2]]
    ]  # fmt: skip
    assert [text[start:end] for start, end in long.spans] == [*WORDS[3 + first : 13 + first]]
    assert (len(short.spans), long.input_tokens) == (2, 12)
    assert found["items[0].text"].startswith(
        "22 tokens are more than 12, the model's limit; shorten"
    )


class PlacedGraph(FakeGraph):
    """Labels a token with its id and its place in the row."""

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        ids = inputs["input_ids"]
        places = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
        logits = np.stack([ids, places, ids], axis=-1).astype(np.float32)
        return super().run(inputs) | {"logits": logits}


async def test_a_text_that_is_too_long_is_labelled_in_windows(tokenizer: Tokenizer) -> None:
    texts = ["w1", "é " + " ".join(WORDS[3:22]), "", " ".join(WORDS[3:9])]
    graph = PlacedGraph()
    async with running(graph, tokenizer, make_package("label", max_len=8)) as engine:
        answer = await ask(engine, [PredictionItem(text, stride=2) for text in texts])
        fits = (await ask(engine, [PredictionItem(texts[3])])).items[0]

    for text, item in zip(texts, answer.items, strict=True):
        words = text.split()
        assert [text.encode()[a:b].decode() for a, b in item.spans] == words
        assert item.logits[:, 0].tolist() == [WORDS.index(word) for word in words]
    # Windows begin at 0, 4, 8, 12 and 16; of the two tokens that two share each has one.
    own = [1, 2, 3, 4, 5, *[2, 3, 4, 5] * 3, 2, 3, 4]
    assert answer.items[1].logits[:, 1].tolist() == own
    assert [item.input_tokens for item in answer.items] == [3, 4 * 8 + 6, 2, 8]
    assert answer.items[3].logits.tobytes() == fits.logits.tobytes()


async def test_windows_are_those_of_the_tokenizer(
    tokenizer: Tokenizer, tokenizer_file: Path
) -> None:
    graph, expected = PlacedGraph(), []
    twin = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    async with running(graph, tokenizer, make_package("label", max_len=8)) as engine:
        for stride, length in product((0, 1, 2, 5), range(6, 20)):
            text = " ".join(WORDS[3 : 3 + length])
            twin.enable_truncation(8, stride=stride)
            found = twin.encode(text)
            expected += [found.ids, *(window.ids for window in found.overflowing)]
            (item,) = (await ask(engine, [PredictionItem(text, stride=stride)])).items
            assert item.logits[:, 0].tolist() == [*range(3, 3 + length)]

    assert [row.tolist() for batch in graph.batches for row in batch] == expected


async def test_a_word_that_two_windows_share_is_one_entity(tmp_path: Path) -> None:
    vocab = {"[UNK]": 0, "a": 1, "##b": 2}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    text = "a a" + "b" * 20 + " a"
    async with running(FakeGraph(label=True), tokenizer, make_package("label")) as engine:
        (item,) = (await ask(engine, [PredictionItem(text, stride=3)])).items

    scores = np.eye(3)[item.logits[:, 0].astype(int)]  # that its id is the label of a token
    found = find_entities(scores, item.spans, item.continues, ("O", "B-x", "I-y"), "first")
    assert [(entity.start, entity.end) for entity in found] == [(0, 1), (2, 23), (24, 25)]


async def test_a_window_that_is_not_finite_is_named_by_its_item(tokenizer: Tokenizer) -> None:
    class Overflowing(FakeGraph):
        def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
            outputs = super().run(inputs)
            outputs["logits"][inputs["input_ids"] == VOCAB - 1] = np.nan
            return outputs

    items = [PredictionItem("w0 " * 30 + last, stride=0) for last in ("w0", "é")]
    async with running(Overflowing(label=True), tokenizer, make_package("label")) as engine:
        with pytest.raises(EngineFailure, match="item 1 is not finite"):
            await ask(engine, items)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"stride": -1}, "-1 is outside 0 to 9; "),
        ({"stride": 10}, "10 is outside 0 to 9; windows hold 10 tokens of a text and share"),
        (
            {"stride": 2, "truncation": "left"},
            "windows keep the whole text, and truncation cuts it; give one",
        ),
    ],
)
async def test_a_stride_that_cannot_be_is_named_once(
    tokenizer: Tokenizer, given: dict[str, Any], problem: str
) -> None:
    async with running(FakeGraph(label=True), tokenizer, make_package("label")) as engine:
        found = await violations(engine, [PredictionItem("w0", **given)] * 2)

    assert [*found] == ["stride"] and found["stride"].startswith(problem)


async def test_windows_have_no_more_tokens_than_may_wait(tokenizer: Tokenizer) -> None:
    package, half, whole = make_package("label"), "w0 " * 15, "w0 " * 50
    async with running(FakeGraph(label=True), tokenizer, package, max_waiting_tokens=60) as engine:
        answer = await ask(engine, [PredictionItem(half, stride=0)] * 2)
        alone = await violations(engine, [PredictionItem(whole, stride=9)])
        together = await violations(engine, [PredictionItem(half, stride=0)] * 4)

    assert len(answer.items) == 2
    assert alone["items[0].text"].startswith("41 windows of 12 tokens are more than 60 tokens; ")
    assert [*together] == ["items"]  # so that our client divides them
    assert together["items"].startswith("76 tokens in windows are more than 60; send fewer")


async def test_of_a_pair_the_longer_text_is_cut(tokenizer: Tokenizer) -> None:
    graph = FakeGraph()
    async with running(graph, tokenizer) as engine:
        await ask(engine, [PredictionItem(" ".join(WORDS[3:23]), "w5 w6", "left")])

    assert graph.batches[0].tolist() == [[1, *range(16, 23), 2, 8, 9, 2]]


async def test_one_of_a_pair_may_be_empty(tokenizer: Tokenizer) -> None:
    graph = FakeGraph()
    async with running(graph, tokenizer) as engine:
        await ask(engine, [PredictionItem("w0", ""), PredictionItem("", "w0")])

    assert graph.batches[0].tolist() == [[1, 3, 2, 2], [1, 2, 3, 2]]


async def test_a_text_without_a_token_is_named(tmp_path: Path) -> None:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.save(str(tmp_path / "tokenizer.json"))
    async with running(FakeGraph(), Tokenizer(tmp_path / "tokenizer.json")) as engine:
        found = await violations(engine, [PredictionItem(" ")])

    assert found == {"items[0].text": "' ' has no token of this model; give words"}


async def test_labeller_takes_single_texts_only(tokenizer: Tokenizer) -> None:
    async with running(FakeGraph(label=True), tokenizer, make_package("label")) as engine:
        found = await violations(engine, [PredictionItem((1, 2)), PredictionItem("w0", "w1")])

    assert set(found) == {"items[0].tokens", "items[1].text_pair"}


async def test_vision_model_takes_images_only() -> None:
    items = [
        PredictionItem("x"),
        PredictionItem((1,)),
        PredictionItem(b"no"),
        PredictionItem(_png(), "x"),
    ]
    async with running(FakeGraph(), package=make_package(image=True)) as engine:
        found = await violations(engine, items)

    assert set(found) == {
        "items[0].text",
        "items[1].tokens",
        "items[2].image",
        "items[3].text_pair",
    }


async def test_number_of_items_has_bounds(tokenizer: Tokenizer) -> None:
    async with running(FakeGraph(), tokenizer, limits=RequestLimits(max_inputs=3)) as engine:
        assert "at least one" in (await violations(engine, []))["items"]
        assert "4 items are more than 3" in (await violations(engine, ids(1, 1, 1, 1)))["items"]


async def test_a_million_wrong_ids_are_not_all_listed(tokenizer: Tokenizer) -> None:
    package = make_package(max_len=10_000)
    async with running(FakeGraph(), tokenizer, package) as engine:
        assert len(await violations(engine, ids(10_000, token=99))) == 8


# Overload, deadlines, cancelling


async def test_full_queue_refuses_and_says_when_to_come_back(tokenizer: Tokenizer) -> None:
    graph = FakeGraph()
    async with running(graph, tokenizer, max_queue_size=2) as engine:
        held = await hold(engine, graph)
        waiting = [ask(engine, ids(2)), ask(engine, ids(3))]
        await asyncio.sleep(0)
        load = engine.load()

        with pytest.raises(QueueFull, match="2 requests") as caught:
            await ask(engine, ids(2))

        graph.gate.set()
        await asyncio.gather(held, *waiting)
        assert (await ask(engine, ids(2))).items
    assert 0.1 <= caught.value.retry_after <= 10
    assert (load.running, load.waiting, load.waiting_tokens) == (1, 2, 5)


async def test_too_many_waiting_tokens_are_refused_but_a_large_request_alone_is_not(
    tokenizer: Tokenizer,
) -> None:
    graph = FakeGraph()
    async with running(graph, tokenizer, max_waiting_tokens=10) as engine:
        held = await hold(engine, graph)
        large = ask(engine, ids(10, 10))
        await asyncio.sleep(0)

        with pytest.raises(TokenBudgetFull, match="20 tokens are waiting"):
            await ask(engine, ids(1))

        graph.gate.set()
        await asyncio.gather(held, large)


async def test_request_that_expires_while_it_waits_is_told_so(tokenizer: Tokenizer) -> None:
    graph, clock = FakeGraph(), FakeClock()
    async with running(graph, tokenizer, clock=clock) as engine:
        held = await hold(engine, graph)
        late, good = ask(engine, ids(2), "late", deadline=101), ask(engine, ids(2), deadline=102)
        await asyncio.sleep(0)
        clock.now = 101
        graph.gate.set()

        with pytest.raises(ExpiredInQueue, match="late"):
            await late
        with pytest.raises(ExpiredInQueue):
            await ask(engine, ids(2), deadline=101)
        assert (await good).timing.mean_batch_size == 1
        await held


async def test_request_that_expires_between_its_batches_is_told_so(tokenizer: Tokenizer) -> None:
    graph, clock = FakeGraph(), FakeClock()
    async with running(graph, tokenizer, clock=clock) as engine:
        graph.gate.clear()
        task = ask(engine, ids(2, 3), deadline=101)
        await asyncio.sleep(0)
        assert await asyncio.to_thread(graph.entered.wait, 60)
        clock.now = 101
        graph.gate.set()

        with pytest.raises(ExpiredInDecode):
            await task
    assert graph.shapes == [(1, 2)]


async def test_cancelled_request_leaves_the_queue_and_is_not_computed(
    tokenizer: Tokenizer,
) -> None:
    graph = FakeGraph()
    async with running(graph, tokenizer) as engine:
        held = await hold(engine, graph)
        gone, stays = ask(engine, ids(2, 3, 3)), ask(engine, ids(3))
        await asyncio.sleep(0)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        load = engine.load()
        graph.gate.set()
        await asyncio.gather(held, stays)

    assert (load.waiting, load.waiting_tokens) == (1, 3)
    assert graph.shapes == [(1, 1), (1, 3)]


async def test_request_cancelled_while_it_runs_does_not_disturb_the_engine(
    tokenizer: Tokenizer,
) -> None:
    graph = FakeGraph()
    async with running(graph, tokenizer) as engine:
        held = await hold(engine, graph)
        held.cancel()
        with pytest.raises(asyncio.CancelledError):
            await held
        graph.gate.set()

        assert (await ask(engine, ids(2))).items


# Failures and the end


async def test_failing_batch_reaches_every_request_in_it_and_the_engine_goes_on(
    tokenizer: Tokenizer,
) -> None:
    graph = FakeGraph()
    graph.fail = lambda values: values.shape[1] == 2
    async with running(graph, tokenizer) as engine:
        held = await hold(engine, graph)
        tasks = [ask(engine, ids(2), "one"), ask(engine, ids(2, 3), "two"), ask(engine, ids(3))]
        await asyncio.sleep(0)
        graph.gate.set()
        answers = await asyncio.gather(held, *tasks, return_exceptions=True)

        for name, failure in (("one", answers[1]), ("two", answers[2])):
            assert isinstance(failure, EngineFailure)
            assert name in str(failure) and "secret" not in str(failure)
        assert isinstance(answers[3], Prediction)
        assert engine.healthy
        assert engine.load().waiting == engine.load().waiting_tokens == 0


@pytest.mark.parametrize("output", ["logits", "embedding"])
async def test_answer_that_is_not_finite_fails_its_request_only(
    tokenizer: Tokenizer, output: str
) -> None:
    class Overflowing(FakeGraph):
        def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
            outputs = super().run(inputs)
            outputs[output][inputs["input_ids"][:, 0] == 9] = np.nan
            return outputs

    graph = Overflowing()
    async with running(graph, tokenizer) as engine:
        held = await hold(engine, graph)
        bad = ask(engine, [*ids(2), *ids(2, token=9)], "bad")
        good = ask(engine, ids(2), "good")
        await asyncio.sleep(0)
        graph.gate.set()
        failure, answer, _ = await asyncio.gather(bad, good, held, return_exceptions=True)

    assert graph.shapes == [(1, 1), (3, 2)]
    assert isinstance(failure, EngineFailure) and "bad" in str(failure)
    assert "item 1 is not finite" in str(failure)
    assert isinstance(answer, Prediction)


async def test_engine_is_not_healthy_while_every_batch_fails(tokenizer: Tokenizer) -> None:
    graph = FakeGraph()
    graph.fail = lambda values: values.shape[1] == 2
    async with running(graph, tokenizer) as engine:
        for _ in range(3):
            assert engine.healthy
            with pytest.raises(EngineFailure):
                await ask(engine, ids(2))
        assert not engine.healthy

        await ask(engine, ids(3))
        assert engine.healthy


async def test_graph_with_answers_of_the_wrong_shape_is_a_failure(tokenizer: Tokenizer) -> None:
    class Short(FakeGraph):
        def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
            return {name: value[:0] for name, value in super().run(inputs).items()}

    async with running(Short(), tokenizer) as engine:
        with pytest.raises(EngineFailure):
            await ask(engine, ids(2))


async def test_engine_takes_requests_between_start_and_stop_only(tokenizer: Tokenizer) -> None:
    engine = EncoderEngine(make_package(), FakeGraph(), tokenizer, EngineConfig())
    with pytest.raises(Starting):
        await ask(engine, ids(2))
    assert not engine.healthy

    await engine.start()
    await ask(engine, ids(2))
    await engine.stop()

    with pytest.raises(Draining):
        await ask(engine, ids(2))
    assert not engine.healthy


async def test_stop_lets_open_requests_finish_and_refuses_new_ones(tokenizer: Tokenizer) -> None:
    graph = FakeGraph()
    async with running(graph, tokenizer) as engine:
        held = await hold(engine, graph)
        waiting = ask(engine, ids(2))
        await asyncio.sleep(0)
        stopping = asyncio.create_task(engine.stop(grace=20))
        await asyncio.sleep(0)

        with pytest.raises(Draining):
            await ask(engine, ids(2))

        graph.gate.set()
        await stopping
        assert held.result().items and waiting.result().items


async def test_stop_ends_what_is_not_done_after_the_grace(tokenizer: Tokenizer) -> None:
    graph = FakeGraph()
    async with running(graph, tokenizer) as engine:
        held = await hold(engine, graph)
        waiting = ask(engine, ids(2))
        await asyncio.sleep(0)
        stopping = asyncio.create_task(engine.stop(grace=0.02))

        for task in (held, waiting):
            with pytest.raises(Draining):
                await task
        graph.gate.set()
        await stopping
    assert len(graph.batches) == 1


async def test_an_engine_whose_thread_has_died_fails_requests_and_refuses_new_ones(
    tokenizer: Tokenizer,
) -> None:
    is_broken = threading.Event()

    def clock() -> float:
        if is_broken.is_set() and threading.current_thread() is not threading.main_thread():
            raise RuntimeError("a bug")
        return 0.0

    async with running(FakeGraph(), tokenizer, clock=clock) as engine:
        is_broken.set()
        with pytest.raises(EngineFailure, match="r-1"):
            await ask(engine, ids(2), "r-1")
        with pytest.raises(ReplicaLost):  # so that a gateway asks another one
            await ask(engine, ids(2))
        assert not engine.healthy


async def test_the_model_is_tried_out_in_the_thread_that_will_run_it(tokenizer: Tokenizer) -> None:
    graph, threads = FakeGraph(), []
    graph.fail = lambda values: bool(threads.append(threading.current_thread()))

    def warm_up() -> WarmUpResult:
        threads.append(threading.current_thread())
        return WarmUpResult(is_batch_invariant=False)

    engine = EncoderEngine(make_package(), graph, tokenizer, EngineConfig(), warm_up=warm_up)
    await engine.start()
    await ask(engine, ids(2))
    await engine.stop()

    assert len(threads) == 2 and len(set(threads)) == 1
    assert "batch_invariant" not in engine.capabilities


async def test_a_batch_that_never_returns_ends_all_as_lost_and_the_engine_is_unhealthy(
    tokenizer: Tokenizer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    graph = FakeGraph()
    graph.gate.clear()
    async with running(graph, tokenizer, max_step_seconds=0.2) as engine, asyncio.timeout(60):
        asked = [engine.predict(ids(n), request_id="r", deadline=None) for n in (3, 4)]

        results = await asyncio.gather(*asked, return_exceptions=True)
        with pytest.raises(ReplicaLost):  # so that a gateway asks another one
            await engine.predict(ids(3), request_id="r", deadline=None)

        assert [type(result) for result in results] == [ReplicaLost, ReplicaLost]
        assert not engine.healthy
        await engine.stop(grace=5)
    assert "tiny has taken more than 0.2 s" in caplog.text


async def test_an_engine_is_watched_on_after_an_error_in_watching(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_once(monkeypatch)
    graph = FakeGraph()
    graph.gate.clear()
    async with running(graph, tokenizer, max_step_seconds=0.2) as engine, asyncio.timeout(60):
        with pytest.raises(ReplicaLost):
            await engine.predict(ids(3), request_id="r", deadline=None)
        await engine.stop()

    assert "watching encoder-engine has failed; it begins anew" in caplog.text
