"""Requests that need not name a model are made on behalf of whoever sends them."""

from __future__ import annotations

import grpc
import pytest
from tokenweir.v1 import admin_service_pb2

from tests.fakes.http_calls import http_server
from tests.fakes.scripted_server import fail, scripted_server


@pytest.mark.parametrize(
    ("path", "body", "rpc", "capability"),
    [
        ("/embed", {"inputs": "a"}, "Embed", "embed"),
        ("/predict", {"inputs": "a"}, "Classify", "classify"),
        ("/classify", {"input": ["a"]}, "Classify", "classify"),
        ("/rerank", {"query": "a", "documents": ["b"]}, "Classify", "classify"),
        ("/tokenize", {"prompt": "a"}, "Generate", "generate"),
        ("/detokenize", {"tokens": [1]}, "Generate", "generate"),
    ],
)
async def test_tokens_and_quotas_are_those_of_other_calls(
    path: str, body: dict[str, object], rpc: str, capability: str
):
    ready = admin_service_pb2.MODEL_STATE_READY
    model = admin_service_pb2.ModelInfo(
        model="m", state=ready, capabilities=[capability], labels=["is"]
    )
    models = admin_service_pb2.ListModelsResponse(models=[model])
    with scripted_server() as script:
        script.answers["ListModels"] = lambda _request, _context: models
        script.answers[rpc] = lambda _, context: fail(
            context, grpc.StatusCode.RESOURCE_EXHAUSTED, "the quota is used up"
        )
        async with http_server(script.address) as caller:
            url, headers = f"{caller.url}{path}", {"Authorization": "Bearer theirs"}
            async with caller.session.post(url, json=body, headers=headers) as found:
                status, said = found.status, await found.text()

    assert [dict(one)["authorization"] for one in script.metadata] == ["Bearer theirs"] * 2
    assert status == 429 and "the quota is used up" in said
