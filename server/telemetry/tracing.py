"""Spans of calls, for OpenTelemetry: the gateway's, then the worker's with its parts.

Without an endpoint nothing of it is imported; with one, the extra `otel` is needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from server.calls.call_server import ServerCall
from server.settings import Tracing as TracingSettings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

# W3C Trace Context: the trace that a call belongs to, in its metadata.
TRACEPARENT = "traceparent"
_IDS = r"-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
_FORM = re.compile(rf"00{_IDS}|(?!00|ff)[0-9a-f]{{2}}{_IDS}(-.*)?")  # later versions may have more
_NANOSECONDS = 1_000_000_000
Attributes = Mapping[str, str | int | float]


class Tracing:
    """Makes spans of one process, and sends them in the background."""

    def __init__(self, exporter: SpanExporter, resource: Attributes, sample_ratio: float) -> None:
        """`resource` says whose the spans are; a call whose client decides is as that says."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = TracerProvider(
            sampler=ParentBasedTraceIdRatio(sample_ratio),
            resource=Resource.create(resource),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("tokenweir")
        self._propagator = TraceContextTextMapPropagator()

    def span(
        self,
        name: str,
        traceparent: str,
        start: float,
        attributes: Attributes | None = None,
    ) -> Span:
        """Begin a span of a server, at `start` seconds since 1970."""
        from opentelemetry.trace import SpanKind

        return self._tracer.start_span(
            name,
            context=self._propagator.extract({TRACEPARENT: traceparent}),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=_nanoseconds(start),
        )

    def add_part(self, parent: Span, name: str, start: float, end: float) -> None:
        """Add a span within another one; seconds since 1970."""
        from opentelemetry.trace import set_span_in_context

        context = set_span_in_context(parent)
        part = self._tracer.start_span(name, context=context, start_time=_nanoseconds(start))
        part.end(_nanoseconds(end))

    @contextmanager
    def relaying(self, call: ServerCall, start: float) -> Iterator[Span]:
        """Open a span while a call is relayed; those of its worker are within."""
        from opentelemetry.trace import set_span_in_context

        traceparent = traceparent_in(call.invocation_metadata())
        span = self.span(call.method.lstrip("/"), traceparent, start)
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span))
        call.replace_metadata(TRACEPARENT, carrier[TRACEPARENT])
        try:
            yield span
        finally:
            span.end()

    def close(self) -> None:
        """Send what was not sent yet; it blocks for a moment."""
        self._provider.shutdown()


def end_span(span: Span, seconds: float) -> None:
    """End a span at so many seconds since 1970."""
    span.end(_nanoseconds(seconds))


def set_status(span: Span, code: str) -> None:
    """Set the status of a span by the gRPC code of its call."""
    from opentelemetry.trace import StatusCode

    span.set_attribute("rpc.response.status_code", code)
    if code != "OK":
        span.set_status(StatusCode.ERROR)


def make_tracing(config: TracingSettings, name: str) -> Tracing | None:
    """Return what makes the spans of a gateway of a service; None without an endpoint.

    Raises ModuleNotFoundError without the extra `otel`.
    """
    if config.endpoint is None:
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    exporter = OTLPSpanExporter(endpoint=f"{config.endpoint.rstrip('/')}/v1/traces")
    resource = {"service.name": name, "tokenweir.role": "gateway"}
    return Tracing(exporter, resource, config.sample_ratio)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * _NANOSECONDS)


def traceparent_in(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Return the `traceparent` of a call; "" without a good one."""
    for key, value in metadata or ():
        if key == TRACEPARENT and isinstance(value, str) and _FORM.fullmatch(value):
            return value
    return ""


def trace_id_in(traceparent: str) -> str:
    """Return the id of the trace, 32 hexadecimal digits; "" of none."""
    return traceparent[3:35]
