"""Calls fall to versions by share and request id, the same way every time."""

from __future__ import annotations

import json

import pytest

from engine.errors import InvalidRequest, ModelNotFound, ModelVersionNotFound
from server.gateway.traffic import ModelVersion, Traffic

OLD, NEW = ModelVersion("dates", "1"), ModelVersion("dates", "2")
IDS = [f"request {number}".encode() for number in range(4000)]


def two_versions(share: float = 0.0) -> Traffic:
    traffic = Traffic()
    traffic.update([OLD])
    traffic.open(NEW, share)
    return traffic


def of_new(traffic: Traffic) -> set[bytes]:
    return {key for key in IDS if traffic.candidates("dates", "", key)[0] == NEW}


def test_the_first_version_of_a_model_has_all_calls() -> None:
    traffic = Traffic()

    traffic.update([OLD])

    assert traffic.share(OLD) == 100
    assert traffic.candidates("dates", "", b"a") == (OLD,)


@pytest.mark.parametrize("share", [0, 5, 50, 100])
def test_a_version_gets_about_its_share(share: float) -> None:
    found = len(of_new(two_versions(share))) / len(IDS)

    assert abs(found * 100 - share) < 2.5
    assert share not in (0, 100) or found * 100 == share


def test_a_request_goes_the_same_way_again_and_stays_there_when_the_share_is_raised() -> None:
    traffic = two_versions(5)
    before = of_new(traffic)
    assert before

    for share in (25, 60, 100):
        traffic.set_share(NEW, share)
        now = of_new(traffic)
        assert before < now == of_new(traffic)
        assert (traffic.share(NEW), traffic.share(OLD)) == (share, 100 - share)
        before = now


def test_two_models_do_not_send_the_same_requests_to_their_new_versions() -> None:
    traffic = two_versions(50)
    traffic.open(ModelVersion("digits", "1"))
    traffic.open(ModelVersion("digits", "2"), 50)

    others = {k for k in IDS if traffic.candidates("digits", "", k)[0].version == "2"}

    assert len(others & of_new(traffic)) < 0.7 * len(others)


def test_a_request_that_names_a_version_gets_that_one_and_no_other() -> None:
    traffic = two_versions(0)

    assert {traffic.candidates("dates", "2", key) for key in IDS[:9]} == {(NEW,)}
    assert {traffic.candidates("dates", "", key) for key in IDS[:9]} == {(OLD, NEW)}


def test_a_closed_version_gets_nothing_and_its_share_goes_to_the_others() -> None:
    traffic = two_versions(30)

    assert traffic.close(OLD) == 70

    assert traffic.share(NEW) == 100
    assert traffic.candidates("dates", "1", b"a") == ()
    assert {traffic.candidates("dates", "", key) for key in IDS[:9]} == {(NEW,)}
    traffic.update([OLD, NEW])  # its workers are there until they have drained
    assert not traffic.is_open(OLD)


def test_a_version_that_is_closed_before_it_is_seen_gets_nothing_until_it_is_opened() -> None:
    traffic = Traffic()
    traffic.close(NEW)

    traffic.update([OLD, NEW])

    assert traffic.versions("dates") == (OLD,)
    traffic.open(NEW, 10)
    assert traffic.versions("dates") == (NEW, OLD)
    assert (traffic.share(NEW), traffic.share(OLD)) == (10, 90)


def test_what_is_left_is_divided_as_it_was() -> None:
    traffic = two_versions(25)
    newest = ModelVersion("dates", "3")

    traffic.open(newest, 20)

    assert [traffic.share(one) for one in (newest, NEW, OLD)] == [20, 20, 60]
    traffic.set_share(newest, 100)
    traffic.set_share(newest, 40)
    assert [traffic.share(one) for one in (newest, NEW, OLD)] == [40, 30, 30]


@pytest.mark.parametrize("share", [-1, 100.5, float("nan")])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(InvalidRequest, match="0 to 100"):
        two_versions().set_share(NEW, share)


def test_the_only_version_keeps_all_calls() -> None:
    traffic = Traffic()
    traffic.update([OLD])

    with pytest.raises(InvalidRequest, match="dates 1 is the only one"):
        traffic.set_share(OLD, 50)


def test_an_unknown_model_or_version_is_named_with_those_that_serve() -> None:
    traffic = two_versions()
    traffic.update([ModelVersion("digits", "1")])

    with pytest.raises(ModelNotFound, match="no model 'date' here; served: dates, digits"):
        traffic.refuse(ModelVersion("date", ""))
    with pytest.raises(ModelVersionNotFound, match="no version '3' of model dates; served: 1, 2"):
        traffic.set_share(ModelVersion("dates", "3"), 5)


def test_a_version_that_is_forgotten_may_come_again() -> None:
    traffic = two_versions(100)

    traffic.forget(OLD)
    traffic.update([OLD, NEW])

    assert (traffic.share(NEW), traffic.share(OLD)) == (100, 0)


def test_another_gateway_divides_calls_alike() -> None:
    traffic, other = two_versions(30), Traffic()
    traffic.close(ModelVersion("dates", "3"))

    other.apply(json.loads(json.dumps(traffic.state())))

    assert of_new(other) == of_new(traffic)
    assert other.is_closed(ModelVersion("dates", "3"))
    assert other.state() == traffic.state()
