"""The client and the load test against the real worker, with engines that are fakes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tokenweir import (
    AsyncClient,
    Client,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    NotFound,
    NotSupported,
    ResourceExhausted,
    TokenweirClientError,
)

from engine.errors import QueueFull
from loadtest.arrival.arrival import ClosedLoop, OpenLoop
from loadtest.arrival.rates import Rates
from loadtest.config import LoadConfig
from loadtest.runner import LoadTest
from loadtest.work.ask import texts
from tests.fakes.engines import (
    OPTIONS,
    FakeGenerator,
    FakePredictor,
    generation_package,
    prediction_package,
    running_worker,
)

PNG = b"\x89PNG" + b"\0" * 20


@asynccontextmanager
async def client_of(*engines: FakeGenerator | FakePredictor) -> AsyncIterator[AsyncClient]:
    async with (
        running_worker(*engines) as (_, address),
        AsyncClient(address, timeout=60) as client,
    ):
        yield client


async def test_generate_and_stream_give_the_same():
    async with (
        running_worker(FakeGenerator()) as (worker, address),
        AsyncClient(address, timeout=60) as client,
    ):
        whole = await client.generate("dates", "the third of may")
        stream = client.stream("dates", "the third of may")
        pieces = [piece async for piece in stream]

    assert "".join(pieces) == whole.text == "the third of may "
    assert stream.result.sequences == whole.sequences
    assert stream.result.usage == whole.usage
    assert whole.provenance.replica_id == worker.replica_id


@pytest.fixture
def generator() -> FakeGenerator:
    generator = FakeGenerator()
    generator.capabilities = (*generator.capabilities, *OPTIONS)
    return generator


async def test_a_streamed_answer_holds_what_the_whole_one_holds(generator: FakeGenerator):
    async with client_of(generator) as client:
        whole = await client.generate(
            "dates", "a bb", logprobs=2, prompt_logprobs=0, alignment=True
        )
        stream = client.stream("dates", "a bb", logprobs=2, prompt_logprobs=0, alignment=True)
        pieces = [piece async for piece in stream]

    assert "".join(pieces) == whole.text == "a bb "
    assert stream.result.sequences == whole.sequences
    assert stream.result.prompt_logprobs == whole.prompt_logprobs
    assert [one.chosen.piece for one in whole.sequences[0].logprobs] == [b"<1>", b"<2>"]
    assert [token.rank for token in whole.sequences[0].logprobs[0].top] == [1, 2]
    assert whole.sequences[0].alignment == ((0.25, 0.75), (0.25, 0.75))
    assert len(whole.prompt_logprobs) == 1
    assert whole.provenance.determinism == "batch_invariant"


async def test_a_target_is_scored_by_both_clients(generator: FakeGenerator):
    def score(address: str):
        with Client(address, timeout=60) as client:
            return client.score("dates", "a", "b c", top_logprobs=1)

    async with (
        running_worker(generator) as (_, address),
        AsyncClient(address, timeout=60) as client,
    ):
        score_of_both = await client.score("dates", "a", "b c", top_logprobs=1)
        assert await asyncio.to_thread(score, address) == score_of_both

    assert score_of_both.sum_logprob == -1.0
    assert [(p.chosen.token_id, p.top[0].token_id) for p in score_of_both.positions] == [
        (3, 90)
    ] * 2


async def test_what_the_model_lacks_is_refused_by_name():
    async with client_of(FakeGenerator()) as client:
        with pytest.raises(NotSupported, match=r"decoding.beam, inputs\[0\].prefix_text"):
            await client.generate("dates", "a", beam=2, target_prefix="b")
        with pytest.raises(NotSupported, match="cannot score"):
            await client.score("dates", "a", "b")


async def test_sync_client_in_a_thread():
    def use(address: str) -> tuple[str, list[str], str]:
        with Client(address, timeout=60) as client, client.stream("dates", "a b") as stream:
            pieces = list(stream)
            return client.generate("dates", [1, 2]).text, pieces, client.health("dates")

    async with running_worker(FakeGenerator()) as (_, address):
        text, pieces, health = await asyncio.to_thread(use, address)

    assert (text, "".join(pieces), health) == ("1 2 ", "a b ", "SERVING")


async def test_one_pass_models():
    digits = FakePredictor(prediction_package("digits", task="classify"))
    async with client_of(FakePredictor(), digits) as client:
        labels = await client.label("tags", "où été")
        best = await client.classify("digits", PNG)
        every = await client.classify("digits", PNG, top=0)
        vector = await client.embed("tags", "a", normalize=True)

    assert [(span.text, span.label.label) for span in labels.spans] == [
        ("où", "DET"),
        ("été", "DET"),
    ]
    assert [label.label for label in best.labels] == ["DET"]
    assert len(every.labels) == 3
    assert vector.values == pytest.approx((0.6, 0.8))


async def test_many_items_in_one_call_get_what_each_gets_alone():
    digits = FakePredictor(prediction_package("digits", task="classify"))
    async with client_of(FakePredictor(), digits) as client:
        labels = await client.label_many("tags", ["où été", "a"])
        classes = await client.classify_many("digits", [PNG, PNG], top=0)
        vectors = await client.embed_many("tags", ["a", "b"])
        alone = [await client.label("tags", text) for text in ("où été", "a")]
        one = await client.classify("digits", PNG, top=0)
        vector = await client.embed("tags", "a")

    assert labels.results == tuple(found.spans for found in alone)
    assert classes.results == (one.labels,) * 2
    assert vectors.results[0] == vector.values


async def test_models_say_what_requests_get_that_leave_options_away():
    defaults = {
        "beam": 4,
        "length_penalty": 0.5,
        "banned_tokens": (3,),
        "banned_sequences": ((5, 6),),
    }
    engine = FakeGenerator(generation_package(**defaults))
    async with client_of(engine, FakePredictor()) as client:
        models = {model.model: model for model in await client.models()}

    assert models["dates"].defaults == {
        "beam": 4,
        "length_penalty": 0.5,
        "banned_tokens": (3,),
        "banned_sequences": ((5, 6),),
    }
    assert models["tags"].defaults == {}


async def test_models_say_what_they_can():
    async with client_of(FakeGenerator(), FakePredictor()) as client:
        models = {model.model: model for model in await client.models()}
        info = await client.server_info()
        loads = await client.load()

    assert models["dates"].state == "ready"
    dates, tags = models["dates"].parity, models["tags"].parity
    assert dates is not None and (dates.cases, dates.proof, dates.answers) == (12, "standard", None)
    (loss,) = dates.losses
    assert (loss.play, loss.what, loss.positions) == ("alone", "logits", 5000)
    assert loss.median == loss.eager_median == pytest.approx(1e-6)
    assert tags is not None and tags.answers is not None
    assert tags.answers.max_probability_diff == pytest.approx(2.5e-6)
    assert tags.answers.max_vector_loss is None
    assert models["dates"].capabilities == ("generate", "stream")
    assert (models["dates"].device, models["dates"].precision) == ("cpu", "fp32")
    assert models["dates"].architecture == "encoder-decoder"
    assert models["dates"].manifest_sha256 == "01" * 32
    assert models["dates"].limits.max_request_bytes == 1 << 20
    assert dates.batch_invariant and dates.tokens_equal == 96
    assert dates.toolchain == generation_package().manifest.toolchain
    assert models["tags"].labels == ("NOUN", "VERB", "DET")
    assert info.api_minor >= 0 and info.start_time.tzinfo is not None
    assert {load.model for load in loads} == {"dates", "tags"}


@pytest.mark.parametrize(
    ("model", "prompt", "options", "expected", "reason"),
    [
        ("dates", "", {}, InvalidArgument, "INVALID_FIELD"),
        ("dates", "a", {"top_p": 2.0}, InvalidArgument, "INVALID_FIELD"),
        ("nothing", "a", {}, NotFound, "MODEL_NOT_FOUND"),
        ("tags", "a", {}, NotSupported, "CAPABILITY_NOT_SUPPORTED"),
        ("dates", "HOLD", {"timeout": 0.2}, DeadlineExceeded, None),
        ("dates", "CRASH", {}, Internal, "INTERNAL"),
        ("dates", "FAIL", {}, ResourceExhausted, "QUEUE_FULL"),
    ],
)
async def test_what_goes_wrong_is_typed(
    model: str,
    prompt: str,
    options: dict[str, float],
    expected: type[TokenweirClientError],
    reason: str | None,
):
    generator = FakeGenerator()
    generator.error = QueueFull("256 requests wait, which is the limit", 0.25)
    async with (
        running_worker(generator, FakePredictor()) as (_, address),
        AsyncClient(address, timeout=60, max_attempts=1) as client,
    ):
        with pytest.raises(expected) as unary:
            await client.generate(model, prompt, **options)
        with pytest.raises(expected) as streamed:
            [piece async for piece in client.stream(model, prompt, **options)]

    assert type(unary.value) is type(streamed.value) is expected
    if reason is not None:
        assert unary.value.reason == streamed.value.reason == reason
    if expected is ResourceExhausted:
        assert unary.value.retry_after == 0.25
    assert "secret" not in str(unary.value)


async def test_closing_a_stream_early_frees_the_engine():
    generator = FakeGenerator()
    async with client_of(generator) as client:
        async with client.stream("dates", "one HOLD") as stream:
            assert await anext(stream) == "one "
            await generator.seen.wait()
        await asyncio.wait_for(generator.done.wait(), 60)

    assert len(generator.aborted) == 1


async def test_load_test_of_the_worker():
    async with running_worker(FakeGenerator(), FakePredictor()) as (_, address):
        streamed = LoadConfig(address, "dates", ClosedLoop(4), 20)
        labelled = LoadConfig(address, "tags", OpenLoop(Rates((200.0,))), 20)
        generation = await asyncio.to_thread(LoadTest(streamed, texts(("a SLOW b", "c"))).run)
        labels = await asyncio.to_thread(LoadTest(labelled, texts(("a b",))).run)

    assert generation.summary.errors == {} and generation.summary.num_ok == 20
    assert generation.summary.output_tokens == 10 * 3 + 10 * 1
    assert generation.summary.inter_token_latency.count == 10 * 2
    assert generation.summary.inter_token_latency.p50 > 0.005  # SLOW: 10 ms a token
    assert generation.versions["model"] == "7"
    assert labels.method == "label" and labels.summary.num_ok == 20
