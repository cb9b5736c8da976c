"""Many inputs in one call: each gets what it gets alone, and the server is asked once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tokenweir import AsyncClient, BrokenStream, Client
from tokenweir.v1 import common_pb2, generation_service_pb2, prediction_service_pb2

from tests.server.scripted_server import ScriptedServer, scripted_server

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
    labels = client.label_many("m", TEXTS)
    vectors = client.embed_many("m", TEXTS, normalize=True)

    assert len(server.requests) == 4
    assert [one.sum_logprob for one in scores.results] == [-2, -1]
    assert scores.usage.input_tokens == 2
    assert [one.label for (one,) in classes.results] == ["a!", "été!", "[5, 6]!"]
    assert classes.request_id == "mine"
    assert [span.text for (span,) in labels.results] == ["a", "été", ""]
    assert vectors.results == ((1.0, 1.0), (3.0, 1.0), (0.0, 1.0))


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


def test_another_number_of_answers_is_seen(server: ScriptedServer, client: Client) -> None:
    server.answers["Embed"] = lambda *_: prediction_service_pb2.EmbedResponse()
    server.answers["Score"] = lambda *_: generation_service_pb2.ScoreResponse()

    with pytest.raises(BrokenStream, match="0 results came back for 3 items"):
        client.embed_many("m", TEXTS)
    with pytest.raises(BrokenStream, match="0 results came back for 1 items"):
        client.score_many("m", [("a", "b")])


def test_what_is_no_list_is_refused(client: Client) -> None:
    for call in (client.classify_many, client.label_many, client.embed_many, client.score_many):
        with pytest.raises(TypeError, match=r"(items|texts|pairs)='abc' is one text; give a list"):
            call("m", "abc")
    with pytest.raises(TypeError, match=r"pairs\[1\] is not a source and its target"):
        client.score_many("m", [("a", "b"), ("a", "b", "c")])
