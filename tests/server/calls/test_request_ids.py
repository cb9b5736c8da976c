"""The id of a request is the client's wherever it stands in the message."""

from __future__ import annotations

import pytest
from tokenweir.v1 import prediction_service_pb2

from server.gateway.request_head import head_of, request_id_of
from tests.fakes.calls import generate, stream

GENERATE = "/tokenweir.v1.GenerationService/Generate"
STREAM = "/tokenweir.v1.GenerationService/GenerateStream"
EMBED = "/tokenweir.v1.PredictionService/Embed"


def _request_id_in(method: str, data: bytes) -> str:
    return request_id_of(head_of(method, data))


def test_the_id_of_the_client_is_found_in_every_message() -> None:
    embed = prediction_service_pb2.EmbedRequest(request_id="mine")
    messages = {
        GENERATE: generate("a", request_id="mine"),
        STREAM: stream("a", request_id="mine"),
        EMBED: embed,
    }

    found = [_request_id_in(path, one.SerializeToString()) for path, one in messages.items()]

    assert found == ["mine"] * 3


@pytest.mark.parametrize(
    ("method", "data"),
    [
        (GENERATE, b"\xff\xff"),
        (GENERATE, b""),
        (GENERATE, generate("a", request_id="x" * 129).SerializeToString()),
        (GENERATE, generate("a", request_id="two\nlines").SerializeToString()),
        ("/tokenweir.v1.GenerationService/Unknown", b""),
        ("/tokenweir.v1.AdminService/GetLoad", b""),
    ],
)
def test_without_a_good_one_an_id_is_made(method: str, data: bytes) -> None:
    first, second = _request_id_in(method, data), _request_id_in(method, data)

    assert len(first) == len(second) == 36 and first != second
