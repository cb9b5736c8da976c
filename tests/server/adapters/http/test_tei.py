"""Clients of text-embeddings-inference get vectors and classes without naming a model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from huggingface_hub import AsyncInferenceClient
from huggingface_hub.errors import HfHubHTTPError

from engine.errors import FieldViolation, InvalidRequest
from engine.one_pass.prediction import Prediction, PredictionItem
from tests.fakes.engines import (
    FakeGenerator,
    FakePredictor,
    generation_package,
    prediction_package,
    running_worker,
)
from tests.fakes.http_calls import Caller, http_server
from tests.server.adapters.conftest import client_of


class Served:
    """A classifier, and a model for vectors, behind the HTTP server."""

    def __init__(self, caller: Caller, classifier: FakePredictor, embedder: FakePredictor) -> None:
        self.caller, self.classifier, self.embedder = caller, classifier, embedder

    async def post(self, path: str, **body: object) -> tuple[int, Any]:
        async with self.caller.session.post(f"{self.caller.url}{path}", json=body) as found:
            return found.status, await found.json()


@asynccontextmanager
async def serving() -> AsyncIterator[Served]:
    classifier = FakePredictor(prediction_package(task="classify", takes="text"))
    embedder = FakePredictor(prediction_package("embedder", task="embed"))
    async with running_worker(classifier, embedder) as (_, address):
        async with http_server(address) as caller:
            yield Served(caller, classifier, embedder)


async def test_vectors_are_those_of_the_model_that_only_embeds():
    async with serving() as served:
        one = await served.post("/embed", inputs="a")
        raw = await served.post("/embed", inputs=["a", "b"], normalize=False, truncate=True)
        left = {"truncate": True, "truncation_direction": "Left"}
        named = await served.post("/embed", inputs=[[1, 2]], model="tags", **left)

    assert one == (200, [pytest.approx([0.6, 0.8])])
    assert raw == (200, [[3.0, 4.0]] * 2)
    assert named == one
    assert [item.truncation for item in served.embedder.items] == [None, "right", "right"]
    assert [item.truncation for item in served.classifier.items] == ["left"]


async def test_a_prompt_of_the_model_is_named_as_each_protocol_names_it():
    async with serving() as served, client_of(served.caller) as client:
        async with AsyncInferenceClient(model=served.caller.url) as hugging_face:
            await hugging_face.feature_extraction("a", prompt_name="query")
        for body in ({"prompt_name": "query"}, {"input_type": "passage"}, {"prompt_name": ""}, {}):
            await client.embeddings.create(model="embedder", input="a", extra_body=body)
        twice = {"model": "embedder", "input": "a", "prompt_name": "a", "input_type": "b"}
        status, found = await served.post("/v1/embeddings", **twice)

    names = ["query", "query", "passage", "", None]
    assert [item.prompt_name for item in served.embedder.items] == names
    assert (status, found["error"]["param"]) == (400, "input_type")


class WithoutPrompts(FakePredictor):
    async def predict(self, items: Sequence[PredictionItem], **options: Any) -> Prediction:
        raise InvalidRequest([FieldViolation("prompt_name", "x is no prompt of this model")])


async def test_a_prompt_that_is_not_known_is_named_as_it_was_sent():
    async with running_worker(WithoutPrompts(prediction_package("m", task="embed"))) as (
        _,
        address,
    ):
        async with http_server(address) as caller:
            _, found = await caller.post("embeddings", model="m", input="a", input_type="x")

    assert found["error"]["message"] == "input_type: x is no prompt of this model"
    assert found["error"]["param"] == "input_type"


async def test_classes_are_of_a_text_a_pair_or_many():
    async with serving() as served:
        status, one = await served.post("/predict", inputs="a")
        _, pair = await served.post("/predict", inputs=["a", "b"])
        _, many = await served.post("/predict", inputs=[["a", "x"], ["b"], ["c", "x"]])

    assert status == 200
    assert [sorted(each) for each in one] == [["label", "score"]] * 3
    assert one[0]["score"] > one[1]["score"] > one[2]["score"]
    assert (pair, many) == (one, [one] * 3)
    sent = [(item.content, item.text_pair) for item in served.classifier.items]
    assert sent == [("a", None), ("a", "b"), ("a", "x"), ("b", None), ("c", "x")]  # as they came


@pytest.mark.parametrize("task", ["embed", "classify"])
async def test_the_model_is_described(task: str):
    predictor = FakePredictor(prediction_package("m", task=task, takes="text"))
    async with running_worker(FakeGenerator(), predictor) as (_, address):
        async with http_server(address) as caller:
            async with caller.session.get(f"{caller.url}/info") as found:
                info = await found.json()

    assert (info["model_id"], info["max_input_length"]) == ("m", 32)
    kinds = {"embed": "embedding", "classify": "classifier"}
    assert [*info["model_type"]] == [kinds[task]]


async def test_the_client_of_hugging_face_is_answered():
    async with serving() as served:
        async with AsyncInferenceClient(model=served.caller.url) as client:
            vectors = await client.feature_extraction("a", normalize=True)

    assert vectors.tolist() == [pytest.approx([0.6, 0.8])]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [("/embed", {"inputs": []}, "inputs: give a text or token ids"),
     ("/embed", {"inputs": "a", "prompts_name": "q"}, "prompts_name is not an option of this"),
     ("/embed", {"inputs": "a", "model": "x"}, "no model 'x' is served here"),
     ("/predict", {"inputs": "a", "model": "embedder"}, "model embedder cannot classify; take"),
     ("/predict", {"inputs": [["a", "b", "c"]]}, "inputs: give a text, a pair"),
     ("/predict", {"inputs": [["a"]] * 2049}, "inputs: 2,049 are more than 2,048; send fewer"),
     ("/predict", {"inputs": "a", "raw_scores": True}, "raw_scores is not an option")],
)  # fmt: skip
async def test_a_wrong_request_is_told_why(path: str, body: dict[str, Any], said: str):
    async with serving() as served:
        status, found = await served.post(path, **body)

    assert status in (400, 404)
    assert found["error"].startswith(said)
    assert found["error_type"] == "Validation"


async def test_a_server_without_such_a_model_says_so():
    async with running_worker(FakeGenerator(generation_package())) as (_, address):
        async with http_server(address) as caller:
            async with caller.session.post(f"{caller.url}/embed", json={"inputs": "a"}) as found:
                said = await found.json()

    assert said["error"] == "no model here can embed; /v1/models lists them"


async def test_an_error_has_the_form_that_its_clients_read():
    async with serving() as served, AsyncInferenceClient(model=served.caller.url) as client:
        with pytest.raises(HfHubHTTPError) as refused:
            await client.feature_extraction("a", truncation_direction="Up")  # type: ignore[arg-type]
    async with http_server("127.0.0.1:1") as caller:
        async with caller.session.get(f"{caller.url}/info") as found:
            away = found.status, (await found.json())["error_type"]

    assert "truncation_direction: Input should be 'Left', 'Right'" in str(refused.value)
    assert away == (503, "Unhealthy")
