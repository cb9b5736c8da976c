"""Many inputs: each gets what it gets alone, and the server is asked as seldom as it allows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2
from tokenweir import AsyncClient, BrokenStream, Client, InvalidArgument
from tokenweir.v1 import common_pb2, generation_service_pb2, prediction_service_pb2

from tests.fakes.scripted_server import ScriptedServer, fail, scripted_server

TEXTS = ["a", "été", [5, 6]]


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as running:
        running.answers.update(Score=score, Classify=classify, Label=label, Embed=embed)
        yield running


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[Client]:
    with Client(server.address, timeout=60) as opened:
        yield opened


def score(request, context):
    scores = [
        generation_service_pb2.ScoreResponse.Score(sum_logprob=-len(one.prefix_text))
        for one in request.inputs
    ]
    usage = common_pb2.Usage(input_tokens=len(scores))
    return generation_service_pb2.ScoreResponse(scores=scores, usage=usage)


def classify(request, context):
    answer = prediction_service_pb2.ClassifyResponse(request_id=request.request_id)
    for one in request.items:
        name = one.text or str(list(one.tokens.ids))
        answer.results.add(labels=[prediction_service_pb2.ScoredLabel(label=name + one.text_pair)])
    return answer


def label(request, context):
    answer = prediction_service_pb2.LabelResponse()
    for one in request.items:
        answer.results.add().spans.add(start_byte=0, end_byte=len(one.text.encode()))
    return answer


def embed(request, context):
    answer = prediction_service_pb2.EmbedResponse()
    for one in request.items:
        answer.vectors.add(values=[len(one.text), float(request.normalize)])
    return answer


def test_many_items_are_one_call(server: ScriptedServer, client: Client) -> None:
    scores = client.score_many("m", [("a", "xy"), ([1], "z")], top_logprobs=1)
    classes = client.classify_many("m", TEXTS, text_pair="!", request_id="mine")
    pairs = client.classify_many("m", [("a", "b"), "c", ("d", "")])
    labels = client.label_many("m", TEXTS)
    vectors = client.embed_many("m", TEXTS, normalize=True)

    assert len(server.requests) == 5
    assert [one.sum_logprob for one in scores.results] == [-2, -1]
    assert scores.usage.input_tokens == 2
    assert [one.label for (one,) in classes.results] == ["a!", "été!", "[5, 6]!"]
    assert classes.request_id == "mine"
    assert [one.label for (one,) in pairs.results] == ["ab", "c", "d"]
    assert [span.text for (span,) in labels.results] == ["a", "été", ""]
    assert vectors.results == ((1.0, 1.0), (3.0, 1.0), (0.0, 1.0))


def test_a_pair_has_its_second_text_once(client: Client) -> None:
    with pytest.raises(ValueError, match=r"items\[1\] is a pair already; leave text_pair out"):
        client.classify_many("m", ["a", ("b", "c")], text_pair="d")


def test_answers_and_vectors_are_sequences(client: Client) -> None:
    vectors, vector = client.embed_many("m", TEXTS), client.embed("m", "été", normalize=True)

    assert (len(vectors), vectors[1], vectors[-2:], len(vector), vector[0]) == (
        *(3, (3.0, 0.0), ((3.0, 0.0), (0.0, 0.0))),
        *(2, 3.0),
    )
    np.testing.assert_array_equal(np.asarray(vectors), [[1, 0], [3, 0], [0, 0]])
    np.testing.assert_array_equal(np.asarray(vector), [3, 1])


async def test_many_items_are_one_call_of_the_async_client(server: ScriptedServer) -> None:
    pairs = [("a", "xy"), ("b", "z")]
    with Client(server.address, timeout=60) as client:
        async with AsyncClient(server.address, timeout=60) as other:
            found = [
                (await other.score_many("m", pairs)).results,
                (await other.classify_many("m", TEXTS, top=0)).results,
                (await other.label_many("m", TEXTS, aggregation="first")).results,
                (await other.embed_many("m", TEXTS)).results,
            ]

        assert found == [
            client.score_many("m", pairs).results,
            client.classify_many("m", TEXTS, top=0).results,
            client.label_many("m", TEXTS, aggregation="first").results,
            client.embed_many("m", TEXTS).results,
        ]


def test_more_items_than_a_call_has_are_several_calls_and_one_answer(
    server: ScriptedServer, client: Client
) -> None:
    texts = ["a" * (1 + number % 9) for number in range(150)]

    vectors = client.embed_many("m", texts, request_id="mine")
    scores = client.score_many("m", [(text, text) for text in texts])

    assert [len(one.items) for one in server.requests[:3]] == [64, 64, 22]
    assert {one.request_id for one in server.requests[:3]} == {"mine"}
    assert vectors.results == tuple((float(len(text)), 0.0) for text in texts)
    assert [one.sum_logprob for one in scores.results] == [-len(text) for text in texts]
    assert scores.usage.input_tokens == 150


async def test_more_items_than_a_call_has_are_several_calls_of_the_async_client(
    server: ScriptedServer,
) -> None:
    async with AsyncClient(server.address, timeout=60) as client:
        found = await client.classify_many("m", ["a"] * 65)

    assert (len(server.requests), len(found.results)) == (2, 65)


def test_items_that_are_large_together_are_several_calls(
    server: ScriptedServer, client: Client
) -> None:
    found = client.embed_many("m", [b"x" * 400_000] * 5 + [b"x" * 3_000_000])

    assert [len(one.items) for one in server.requests] == [2, 2, 1, 1]
    assert len(found.results) == 6


def test_a_call_that_is_too_large_for_its_server_is_made_in_halves(
    server: ScriptedServer, client: Client
) -> None:
    def at_most_three(request, context):
        if len(request.items) > 3:
            wrong = error_details_pb2.BadRequest()
            wrong.field_violations.add(field="items", description="more than 3")
            fail(context, grpc.StatusCode.INVALID_ARGUMENT, "items: more than 3", wrong)
        return embed(request, context)

    def large(request, context):
        if len(request.items) > 2:
            message = "Sent message larger than max (17000000 vs. 16777216)"
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        return embed(request, context)

    for answer in (at_most_three, large):
        server.answers["Embed"] = answer
        found = client.embed_many("m", ["a" * size for size in range(1, 12)])
        assert [size for size, _ in found.results] == [*range(1, 12)]


def test_what_is_wrong_is_named_by_its_place_among_all(
    server: ScriptedServer, client: Client
) -> None:
    def refuse_long_ones(request, context):
        wrong = error_details_pb2.BadRequest()
        for place, one in enumerate(request.items):
            if len(one.text) > 1:
                wrong.field_violations.add(field=f"items[{place}].text", description="too long")
        if wrong.field_violations:
            said = [f"{one.field}: {one.description}" for one in wrong.field_violations]
            fail(context, grpc.StatusCode.INVALID_ARGUMENT, "; ".join(said), wrong)
        answer = label if isinstance(request, prediction_service_pb2.LabelRequest) else embed
        return answer(request, context)

    server.answers |= dict.fromkeys(("Embed", "Label"), refuse_long_ones)
    texts = ["a"] * 80 + ["long", "a", "long"]

    with pytest.raises(InvalidArgument, match=r"items\[80\].text: too long; items\[82\]") as error:
        client.embed_many("m", texts)

    assert [one.field for one in error.value.violations] == ["items[80].text", "items[82].text"]
    assert error.value.others == {place: (1.0, 0.0) for place in (*range(80), 81)}

    with pytest.raises(InvalidArgument, match=r"items\[0\].text: too long; items\[70\]") as error:
        client.label_many("m", ["long", *"ab" * 34, "c", "long"])
    assert error.value.others[69][0].text == "c" and len(error.value.others) == 69

    server.requests.clear()
    with pytest.raises(InvalidArgument, match=r"items\[1\].text: too long$") as error:
        client.embed_many("m", ["a", "long"] + ["a"] * 99, answer_others=False)
    with pytest.raises(InvalidArgument) as all_of_them:
        client.embed_many("m", ["long"] * 2)
    assert (error.value.others, all_of_them.value.others, len(server.requests)) == ({}, {}, 2)


def test_what_is_wrong_with_all_inputs_ends_it(server: ScriptedServer, client: Client) -> None:
    def refuse(request, context):
        wrong = error_details_pb2.BadRequest()
        for field in ("items[0].text", "normalize"):
            wrong.field_violations.add(field=field, description="no")
        fail(context, grpc.StatusCode.INVALID_ARGUMENT, "no", wrong)

    server.answers["Embed"] = refuse

    with pytest.raises(InvalidArgument):
        client.embed_many("m", ["a", "b"])

    assert len(server.requests) == 1


def test_one_deadline_and_one_seed_are_those_of_all_calls(
    server: ScriptedServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(100)  # each look a second later
    monkeypatch.setattr("tokenweir._errors.time", SimpleNamespace(monotonic=lambda: next(clock)))
    left = []

    def generate(request, context):
        left.append(context.time_remaining())
        results = [
            generation_service_pb2.Result(sequences=[generation_service_pb2.Sequence(text="a")])
            for _ in request.inputs
        ]
        timing = common_pb2.Timing(steps=3, mean_batch_size=2.0)
        timing.queue.FromMilliseconds(len(request.inputs))
        return generation_service_pb2.GenerateResponse(
            results=results, provenance=common_pb2.Provenance(seed=11), timing=timing
        )

    server.answers["Generate"] = generate

    found = client.generate_many("m", ["a"] * 70, temperature=0.5, timeout=50)

    assert [one.decoding.sampling.seed for one in server.requests] == [0, 11]
    assert left[0] > left[1] + 1
    assert (found.texts, found.provenance.seed) == (("a",) * 70, 11)
    assert (found.timing.queue, found.timing.mean_batch_size) == (0.064, 2.0)


def test_another_number_of_answers_is_seen(server: ScriptedServer, client: Client) -> None:
    server.answers["Embed"] = lambda *_: prediction_service_pb2.EmbedResponse()
    server.answers["Score"] = lambda *_: generation_service_pb2.ScoreResponse()

    with pytest.raises(BrokenStream, match="0 results came back for 3 items"):
        client.embed_many("m", TEXTS)
    with pytest.raises(BrokenStream, match="0 results came back for 1 inputs"):
        client.score_many("m", [("a", "b")])


def test_what_is_no_list_is_refused(client: Client) -> None:
    for call in (client.classify_many, client.label_many, client.embed_many, client.score_many):
        with pytest.raises(TypeError, match=r"(items|texts|pairs)='abc' is one text; give a list"):
            call("m", "abc")
    with pytest.raises(TypeError, match=r"pairs\[1\] is not a source and its target"):
        client.score_many("m", [("a", "b"), ("a", "b", "c")])
