"""Tenant, priority, model and id are read from the bytes of a request; the first two, written."""

from __future__ import annotations

import pytest
from tokenweir.v1 import generation_service_pb2 as pb
from tokenweir.v1 import prediction_service_pb2

from server.gateway.share import Share, share_of, stamped
from tests.fakes.calls import generate, stream

GENERATE = "/tokenweir.v1.GenerationService/Generate"
STREAM = "/tokenweir.v1.GenerationService/GenerateStream"


def test_tenant_and_priority_are_found() -> None:
    scheduling = pb.Scheduling(tenant="a", priority=-2, adapter="x")

    unary = generate("one", "two", scheduling=scheduling).SerializeToString()
    streamed = stream("one", scheduling=scheduling, tokens_per_message=3).SerializeToString()

    found = Share("a", -2, model="dates")
    assert share_of(GENERATE, unary) == share_of(STREAM, streamed) == found


def test_those_of_a_score_are_found_too() -> None:
    request = pb.ScoreRequest(request_id="r", scheduling={"tenant": "a", "priority": 4})

    found = share_of("/tokenweir.v1.GenerationService/Score", request.SerializeToString())

    assert found == Share("a", 4, "r")


def test_without_them_or_in_other_calls_the_defaults_count() -> None:
    assert share_of(GENERATE, generate("one").SerializeToString()) == Share(model="dates")
    assert share_of(STREAM, b"") == Share()
    assert share_of("/tokenweir.v1.AdminService/ListModels", b"\x00") == Share()


def test_of_a_prediction_its_model_and_id_are_found() -> None:
    request = prediction_service_pb2.LabelRequest(model="tags", request_id="r")

    found = share_of("/tokenweir.v1.PredictionService/Label", request.SerializeToString())

    assert found == Share(request_id="r", model="tags")


def test_malformed_bytes_are_known_as_such() -> None:
    assert share_of(GENERATE, b"\xff\xff") == Share(is_readable=False)


@pytest.mark.parametrize("said", [None, pb.Scheduling(tenant="b", priority=-4, adapter="x")])
def test_what_is_stamped_counts_whatever_the_message_says(said: pb.Scheduling | None) -> None:
    unary = generate("one", scheduling=said, request_id="r")
    streamed = stream("one", scheduling=said, tokens_per_message=3)
    share = Share("a", 0)

    read = pb.GenerateRequest.FromString(stamped(GENERATE, unary.SerializeToString(), share))
    read_stream = pb.GenerateStreamRequest.FromString(
        stamped(STREAM, streamed.SerializeToString(), share)
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

    found = share_of(GENERATE, request.SerializeToString())

    assert 128 < len(found.tenant) < 1024  # a worker refuses it
