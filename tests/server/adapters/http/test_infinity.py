"""Clients of Infinity and of Cohere get ranks and classes without naming a model."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from engine.one_pass.prediction import ItemPrediction, PredictionItem
from tests.fakes.engines import FakePredictor, prediction_package, running_worker
from tests.fakes.http_calls import Caller, http_server

QUERY = {"query": "where is Munich?", "documents": ["the sky", "Munich is in Germany", "no"]}


class Ranker(FakePredictor):
    """Finds a document the better, the longer it is."""

    def __init__(self) -> None:
        super().__init__(prediction_package("ranker", task="classify", takes="text", labels=["is"]))

    def _predict(self, item: PredictionItem) -> ItemPrediction:
        self.logits = (float(len(item.text_pair or "")) / 10,)
        return super()._predict(item)


@asynccontextmanager
async def serving(*predictors: FakePredictor) -> AsyncIterator[Caller]:
    async with running_worker(*predictors) as (_, address), http_server(address) as caller:
        yield caller


async def posted(caller: Caller, path: str, **body: object) -> tuple[int, Any]:
    async with caller.session.post(f"{caller.url}{path}", json=body) as found:
        return found.status, await found.json()


async def test_documents_are_ranked_by_the_class_of_each_behind_the_query():
    ranker = Ranker()
    async with serving(ranker) as caller:
        status, found = await posted(caller, "/rerank", **QUERY, model="default/not-specified")
        _, best = await posted(caller, "/v1/rerank", **QUERY, top_n=1, return_documents=True)

    assert (status, found["object"], found["model"]) == (200, "rerank", "ranker")
    assert [one["index"] for one in found["results"]] == [1, 0, 2]
    assert found["results"][0]["relevance_score"] == pytest.approx(1 / (1 + math.exp(-2.0)))
    assert found["usage"] == {"prompt_tokens": 15, "total_tokens": 15}
    assert [(one["index"], one["document"]) for one in best["results"]] == [
        (1, QUERY["documents"][1])
    ]
    assert {item.content for item in ranker.items} == {QUERY["query"]}


async def test_classes_come_best_first():
    classifier = FakePredictor(prediction_package("m", task="classify", takes="text"))
    async with serving(classifier) as caller:
        status, found = await posted(caller, "/classify", input=["a", "b"], truncate=True)

    assert (status, found["object"], found["model"]) == (200, "classify", "m")
    assert [[one["label"] for one in each] for each in found["data"]] == [
        ["DET", "VERB", "NOUN"]
    ] * 2
    assert [item.truncation for item in classifier.items] == ["right"] * 2


async def test_models_are_listed_as_its_client_reads_them():
    async with serving(FakePredictor()) as caller:
        async with caller.session.get(f"{caller.url}/models") as found:
            (model,) = (await found.json())["data"]

    assert (model["id"], model["stats"]) == ("tags", {})


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/rerank", {**QUERY, "model": "m"}, "m has 3 classes; to rank takes a model of one"),
        ("/rerank", {**QUERY, "documents": []}, "documents: List should have at least 1 item"),
        ("/rerank", {**QUERY, "top_n": 0}, "top_n: Input should be greater than 0"),
        ("/rerank", {**QUERY, "raw_scores": True}, "raw_scores is not an option of this server"),
        ("/rerank", {**QUERY, "model": "x"}, "no model 'x' is served here"),
        ("/classify", {"input": "a"}, "input: Input should be a valid array"),
        ("/classify", {"input": ["a"] * 2049}, "input: List should have at most 2048 items"),
    ],
)
async def test_a_wrong_request_is_told_why(path: str, body: dict[str, Any], said: str):
    classifier = FakePredictor(prediction_package("m", task="classify", takes="text"))
    async with serving(classifier) as caller:
        status, found = await posted(caller, path, **body)

    assert status in (400, 404)
    assert found["error"]["message"].startswith(said)
