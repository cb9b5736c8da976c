"""Tenant and priority are read from the bytes of a request, and nothing else is."""

from __future__ import annotations

from tokenweir.v1 import generation_service_pb2 as pb

from server.gateway.share import Share, share_of
from tests.server.calls import generate, stream

GENERATE = "/tokenweir.v1.GenerationService/Generate"
STREAM = "/tokenweir.v1.GenerationService/GenerateStream"


def test_tenant_and_priority_are_found() -> None:
    scheduling = pb.Scheduling(tenant="a", priority=-2, adapter="x")

    unary = generate("one", "two", scheduling=scheduling).SerializeToString()
    streamed = stream("one", scheduling=scheduling, tokens_per_message=3).SerializeToString()

    assert share_of(GENERATE, unary) == share_of(STREAM, streamed) == Share("a", -2)


def test_those_of_a_score_are_found_too() -> None:
    request = pb.ScoreRequest(request_id="r", scheduling={"tenant": "a", "priority": 4})

    found = share_of("/tokenweir.v1.GenerationService/Score", request.SerializeToString())

    assert found == Share("a", 4, "r")


def test_without_them_or_in_other_calls_the_defaults_count() -> None:
    assert share_of(GENERATE, generate("one").SerializeToString()) == Share()
    assert share_of(STREAM, b"") == Share()
    assert share_of("/tokenweir.v1.PredictionService/Label", b"\x00") == Share()


def test_malformed_bytes_are_left_to_the_worker() -> None:
    assert share_of(GENERATE, b"\xff\xff") == Share()
