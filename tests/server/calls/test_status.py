"""Every error has its status, and the details that a client needs."""

from __future__ import annotations

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from engine import errors
from server.calls.status import DETAILS_KEY, PUSHBACK_KEY, STATUS_CODES, call_status


def _classes(root: type[errors.TokenweirError]) -> set[type[errors.TokenweirError]]:
    below = {c for child in root.__subclasses__() for c in _classes(child)}
    return below | {root}


def _details(status_bytes: object) -> list[Message]:
    status = status_pb2.Status.FromString(status_bytes)  # type: ignore[arg-type]
    kinds = {
        kind.DESCRIPTOR.full_name: kind
        for kind in (
            error_details_pb2.ErrorInfo,
            error_details_pb2.BadRequest,
            error_details_pb2.RetryInfo,
        )
    }
    return [kinds[d.TypeName()].FromString(d.value) for d in status.details]


def test_the_table_has_every_class_of_the_tree() -> None:
    declared = {c for c in _classes(errors.TokenweirError) if c.__module__ == errors.__name__}

    assert {c for c in declared if not c.__name__.startswith("_")} == set(STATUS_CODES)


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (errors.ModelNotFound("x"), grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND"),
        (errors.Unauthenticated("x"), grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"),
        (errors.PermissionDenied("x"), grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED"),
        (errors.QueueFull("x", 0.3), grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
        (errors.ExpiredInQueue("x"), grpc.StatusCode.DEADLINE_EXCEEDED, "EXPIRED_IN_QUEUE"),
        (errors.CannotMeet("x", 0.3), grpc.StatusCode.DEADLINE_EXCEEDED, "CANNOT_MEET"),
        (errors.CannotMeet("x", None), grpc.StatusCode.DEADLINE_EXCEEDED, "CANNOT_MEET"),
        (errors.Draining("x", 0.3), grpc.StatusCode.UNAVAILABLE, "DRAINING"),
        (errors.RequestAborted("x"), grpc.StatusCode.ABORTED, "ABORTED_BY_OPERATOR"),
        (errors.EngineFailure("x"), grpc.StatusCode.INTERNAL, "INTERNAL"),
    ],
)
def test_an_error_has_its_code_and_exactly_one_error_info(
    error: errors.TokenweirError, code: grpc.StatusCode, reason: str
) -> None:
    status = call_status(error, "call-1")

    infos = [
        detail
        for detail in _details(dict(status.trailing_metadata)[DETAILS_KEY])
        if isinstance(detail, error_details_pb2.ErrorInfo)
    ]
    assert status.code is code
    assert [(i.reason, i.domain, i.metadata["request_id"]) for i in infos] == [
        (reason, "tokenweir", "call-1")
    ]


def test_a_refusal_says_when_to_come_back() -> None:
    status = call_status(errors.TokenBudgetFull("full", 0.25), "call-1")

    trailing = dict(status.trailing_metadata)
    (retry,) = [
        d for d in _details(trailing[DETAILS_KEY]) if isinstance(d, error_details_pb2.RetryInfo)
    ]
    assert retry.retry_delay.ToMilliseconds() == 250
    assert trailing[PUSHBACK_KEY] == "250"


@pytest.mark.parametrize(("retry_after", "sent"), [(1.5, ["1500"]), (None, [])])
def test_a_deadline_that_cannot_be_met_says_when_it_could_if_ever(
    retry_after: float | None, sent: list[str]
) -> None:
    status = call_status(errors.CannotMeet("too late", retry_after), "call-1")

    trailing = dict(status.trailing_metadata)
    retries = [
        d for d in _details(trailing[DETAILS_KEY]) if isinstance(d, error_details_pb2.RetryInfo)
    ]
    assert [str(retry.retry_delay.ToMilliseconds()) for retry in retries] == sent
    assert trailing.get(PUSHBACK_KEY) == (sent[0] if sent else None)


def test_a_subclass_of_somebody_else_is_answered_as_its_base() -> None:
    class Stranger(errors.QueueFull):
        pass

    assert call_status(Stranger("x", 1.0), "id").code is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(("num_wrong", "more"), [(12, None), (20, "8 more fields are wrong")])
def test_an_answer_that_does_not_name_every_wrong_field_says_so(
    num_wrong: int, more: str | None
) -> None:
    violations = [errors.FieldViolation(f"f{i}", "is wrong") for i in range(num_wrong)]

    trailing = dict(call_status(errors.InvalidRequest(violations), "id").trailing_metadata)

    (bad_request,) = [
        d for d in _details(trailing[DETAILS_KEY]) if isinstance(d, error_details_pb2.BadRequest)
    ]
    found = [(v.field, v.description) for v in bad_request.field_violations]
    assert found[:12] == [(f"f{i}", "is wrong") for i in range(12)]
    assert [field for field, _ in found[12:]] == ([] if more is None else ["request"])
    assert more is None or more in found[12][1]


def test_details_stay_below_the_limit_of_metadata_whatever_a_request_echoes() -> None:
    violations = [errors.FieldViolation("é" * 500, "😀" * 10_000) for _ in range(1_000)]

    status = call_status(errors.InvalidRequest(violations), "😀" * 10_000)

    sent = sum(len(key) + len(value) * 4 / 3 for key, value in status.trailing_metadata)
    assert sent + 3 * len(status.message) < 8192
    assert status.message.isascii()


@pytest.mark.parametrize("request_id", ["", "r", "x" * 127, "é\n" * 90])
@pytest.mark.parametrize("retry_after", [None, 0.1, 1.0, 4_000_000.0])
def test_details_are_the_same_whatever_the_length_of_an_id(
    request_id: str, retry_after: float | None
) -> None:
    status = call_status(errors.CannotMeet("too late", retry_after), request_id)

    whole = status_pb2.Status.FromString(dict(status.trailing_metadata)[DETAILS_KEY])  # type: ignore[arg-type]
    info, *retries = _details(dict(status.trailing_metadata)[DETAILS_KEY])
    assert (whole.code, whole.message) == (status.code.value[0], "too late")
    assert isinstance(info, error_details_pb2.ErrorInfo)
    shown = request_id.encode("ascii", "backslashreplace").decode().replace("\n", " ")
    assert info.metadata["request_id"][:150] == shown[:150]
    assert (info.reason, info.domain, len(info.metadata)) == ("CANNOT_MEET", "tokenweir", 1)
    delays = [one.retry_delay.ToMilliseconds() for one in retries]  # type: ignore[attr-defined]
    assert delays == ([] if retry_after is None else [round(1000 * retry_after)])
