"""Statistics against values worked out by hand."""

from __future__ import annotations

import pytest

from loadtest.metrics import Distribution, RequestRecord, distribution, summarize

STREAMED = RequestRecord(
    index=0,
    prompt=0,
    scheduled=1.0,
    sent=1.25,
    finished=4.0,
    status="OK",
    token_times=(2.0, 2.5, 3.5),
    first_tokens=2,
    input_tokens=7,
    output_tokens=6,
    server_queue=0.125,
    server_first_token=0.125,
    server_batch_size=3.0,
)
LATER = RequestRecord(
    index=1,
    prompt=1,
    scheduled=2.0,
    sent=2.0,
    finished=5.0,
    status="OK",
    token_times=(4.0,),
    first_tokens=1,
    input_tokens=5,
    output_tokens=1,
    server_queue=0.375,
    server_first_token=0.375,
    server_batch_size=5.0,
)
REFUSED = RequestRecord(
    index=2,
    prompt=0,
    scheduled=3.0,
    sent=3.0,
    finished=3.5,
    status="RESOURCE_EXHAUSTED",
    reason="QUEUE_FULL",
    message="full",
)


def test_latencies_of_a_request_count_from_when_it_was_due():
    assert STREAMED.time_to_first_token == 1.0
    assert STREAMED.end_to_end == 3.0
    assert STREAMED.inter_token_latencies == (0.5, 1.0)
    assert STREAMED.time_per_output_token == 0.5  # 2 s for the four tokens after the first two


def test_request_of_one_token_has_no_time_per_output_token():
    assert LATER.inter_token_latencies == ()
    assert LATER.time_per_output_token is None


def test_percentiles_interpolate_between_values():
    assert distribution([0.0, 1.0, 2.0, 3.0, 4.0, None]) == Distribution(
        count=5, mean=2.0, p50=2.0, p90=3.6, p95=3.8, p99=pytest.approx(3.96), max=4.0
    )


def test_distribution_of_nothing_is_none():
    assert distribution([None]) is None


def test_summary_of_good_and_bad_requests():
    summary = summarize([STREAMED, LATER, REFUSED])

    assert summary.duration == pytest.approx(5.0)
    assert summary.num_ok == 2
    assert summary.errors == {"RESOURCE_EXHAUSTED QUEUE_FULL": 1}
    assert summary.requests_per_second == pytest.approx(0.4)
    assert summary.output_tokens_per_second == pytest.approx(1.4)
    assert (summary.input_tokens, summary.output_tokens) == (12, 7)
    assert summary.max_in_flight == 3
    assert summary.time_to_first_token.mean == 1.5
    assert summary.inter_token_latency.count == 2
    assert summary.time_per_output_token.count == 1
    assert summary.end_to_end.mean == 3.0
    assert summary.send_delay.max == 0.25
    assert summary.server_queue.mean == 0.25
    assert summary.server_first_token.max == 0.375
    assert summary.mean_batch_size == 4.0


def test_summary_when_every_request_failed():
    summary = summarize([REFUSED])

    assert summary.num_ok == 0
    assert summary.requests_per_second == 0.0
    assert summary.end_to_end is None
    assert summary.mean_batch_size is None


def test_request_that_begins_when_another_ends_is_not_beside_it():
    second = RequestRecord(3, 0, scheduled=4.0, sent=4.0, finished=6.0, status="OK")

    assert summarize([STREAMED, second]).max_in_flight == 1
