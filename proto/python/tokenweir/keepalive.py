"""The options with which one end of a connection notices that the other is gone without a word."""

from __future__ import annotations


def keepalive_options(pause: float, patience: float) -> tuple[tuple[str, int], ...]:
    """Return options that send a ping after `pause` seconds without data.

    The connection is lost, and its calls with it, if nothing comes back for `patience` seconds.
    """
    return (
        ("grpc.keepalive_time_ms", round(pause * 1000)),
        # The wait for an answer: gRPC ignores grpc.keepalive_timeout_ms, and would wait a minute.
        ("grpc.http2.ping_timeout_ms", round(patience * 1000)),
        ("grpc.http2.max_pings_without_data", 0),  # as many as it takes
    )
