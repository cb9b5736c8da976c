"""Tenant, priority, model and id are read from the bytes of a request; the first two, written."""

from __future__ import annotations

import pytest
from tokenweir.v1 import generation_service_pb2 as pb
from tokenweir.v1 import prediction_service_pb2

from server.gateway.request_head import RequestHead, head_of, stamped
from tests.fakes.calls import generate, stream

GENERATE = "/tokenweir.v1.GenerationService/Generate"
STREAM = "/tokenweir.v1.GenerationService/GenerateStream"


def test_tenant_and_priority_are_found() -> None:
    scheduling = pb.Scheduling(tenant="a", priority=-2, adapter="x")

    unary = generate("one", "two", scheduling=scheduling).SerializeToString()
    streamed = stream("one", scheduling=scheduling, tokens_per_message=3).SerializeToString()

    found = RequestHead("a", -2, model="dates")
    assert head_of(GENERATE, unary) == head_of(STREAM, streamed) == found


def test_those_of_a_score_are_found_too() -> None:
    request = pb.ScoreRequest(request_id="r", scheduling={"tenant": "a", "priority": 4})

    found = head_of("/tokenweir.v1.GenerationService/Score", request.SerializeToString())

    assert found == RequestHead("a", 4, "r")


def test_without_them_or_in_other_calls_the_defaults_count() -> None:
    assert head_of(GENERATE, generate("one").SerializeToString()) == RequestHead(model="dates")
    assert head_of(STREAM, b"") == RequestHead()
    assert head_of("/tokenweir.v1.AdminService/ListModels", b"\x00") == RequestHead()


def test_of_a_prediction_its_model_and_id_are_found() -> None:
    request = prediction_service_pb2.LabelRequest(model="tags", request_id="r")

    found = head_of("/tokenweir.v1.PredictionService/Label", request.SerializeToString())

    assert found == RequestHead(request_id="r", model="tags")


def test_malformed_bytes_are_known_as_such() -> None:
    assert head_of(GENERATE, b"\xff\xff") == RequestHead(is_readable=False)


@pytest.mark.parametrize("said", [None, pb.Scheduling(tenant="b", priority=-4, adapter="x")])
def test_what_is_stamped_counts_whatever_the_message_says(said: pb.Scheduling | None) -> None:
    unary = generate("one", scheduling=said, request_id="r")
    streamed = stream("one", scheduling=said, tokens_per_message=3)
    head = RequestHead("a", 0)

    read = pb.GenerateRequest.FromString(stamped(GENERATE, unary.SerializeToString(), head))
    read_stream = pb.GenerateStreamRequest.FromString(
        stamped(STREAM, streamed.SerializeToString(), head)
    )

    for request, sent in ((read, unary), (read_stream.request, streamed.request)):
        assert (request.scheduling.tenant, request.scheduling.priority) == ("a", 0)
        assert request.scheduling.adapter == sent.scheduling.adapter
        request.ClearField("scheduling")
        sent.ClearField("scheduling")
        assert request == sent
    assert read_stream.tokens_per_message == 3


def test_of_a_tenant_that_is_too_long_no_more_is_kept_than_tells_it_from_others() -> None:
    request = generate("one", scheduling=pb.Scheduling(tenant="a" * 2**20))

    found = head_of(GENERATE, request.SerializeToString())

    assert 128 < len(found.tenant) < 1024  # a worker refuses it
