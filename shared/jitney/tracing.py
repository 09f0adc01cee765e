"""Traces, for whoever has named a collector; for nobody else is anything of OpenTelemetry set up.

A job carries its trace context (`traceparent`, W3C Trace Context) through the queue, so that what worker and API record
belongs to the trace of whoever asked. No span holds a prompt, an answer, a tenant or a key.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from jitney.errors import SettingsError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""OpenTelemetry's own variables: one of them is what turns traces on. Its others (headers, sampling) hold as well."""

LAST_EXPORT_MS: Final = 2_000

Kind = Literal["server", "consumer", "internal"]
Attribute = str | bool | int | float | tuple[str, ...]

_TRACEPARENT: Final = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")

current_traceparent: ContextVar[str | None] = ContextVar("jitney_traceparent", default=None)
"""Of the request that is being served: jobs which name no other one get it."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A span that is over. Times are Unix seconds. error: the code of what it ended with."""

    name: str
    began: float
    ended: float
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    parts: tuple[Stretch, ...] = ()
    error: str | None = None


def traces_wanted(environment: Mapping[str, str] | None = None) -> bool:
    """Whether somebody has named a collector, and has not switched it off."""
    given = os.environ if environment is None else environment
    is_off = given.get("OTEL_SDK_DISABLED", "").lower() == "true" or given.get("OTEL_TRACES_EXPORTER") == "none"
    return not is_off and any(given.get(name) for name in ENDPOINTS)


def traces_if_wanted(service: str) -> Traces | None:
    """Raises SettingsError if a collector is named and the library is missing: nobody would notice otherwise."""
    if not traces_wanted():
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ModuleNotFoundError as error:
        named = next(name for name in ENDPOINTS if os.environ.get(name))
        raise SettingsError(
            f"{named} asks for traces, and {error.name} is not installed: pip install 'jitney[otel]'"
        ) from None
    return Traces(service, OTLPSpanExporter())


def valid_traceparent(value: str | None) -> str | None:
    """`value` if it is one; a wrong one is no reason to refuse anything. Source: W3C Trace Context, section 3.2."""
    return value if value is not None and _TRACEPARENT.fullmatch(value) else None


class Traces:
    """One process' spans, on their way to a collector. A thread of the library's sends them: nobody waits for it.

    at_once: each when it ends, on the thread that ends it; for tests.
    """

    def __init__(self, service: str, exporter: SpanExporter, *, at_once: bool = False) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor

        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say more, or something else.
        named = {} if os.environ.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: service}
        # Ours alone: a program that embeds us has a provider of its own.
        self._provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
        self._provider.add_span_processor((SimpleSpanProcessor if at_once else BatchSpanProcessor)(exporter))
        self._tracer = self._provider.get_tracer("jitney")

    def begin(self, name: str, kind: Kind, traceparent: str | None) -> Span:
        """A span that goes on; whoever began it ends it."""
        from opentelemetry.trace import SpanKind

        return self._tracer.start_span(name, _context_of(traceparent), SpanKind[kind.upper()])

    def record(self, stretch: Stretch, kind: Kind, traceparent: str | None) -> None:
        """What is over already, with its parts."""
        self._record(stretch, kind, _context_of(traceparent))

    def _record(self, stretch: Stretch, kind: Kind, context: Context) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        attributes: dict[str, Any] = dict(stretch.attributes)
        if stretch.error is not None:
            attributes["error.type"] = stretch.error
        span = self._tracer.start_span(
            stretch.name, context, SpanKind[kind.upper()], attributes, start_time=_nanoseconds(stretch.began)
        )
        for part in stretch.parts:
            self._record(part, "internal", set_span_in_context(span))
        if stretch.error is not None:
            span.set_status(Status(StatusCode.ERROR))
        span.end(_nanoseconds(max(stretch.began, stretch.ended)))

    def close(self) -> None:
        """What is still here is sent, for two seconds at most; blocks."""
        self._provider.force_flush(LAST_EXPORT_MS)
        self._provider.shutdown()


def traceparent_of(span: Span) -> str:
    """For the job that is made on behalf of the span."""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def _context_of(traceparent: str | None) -> Context:
    """The remote parent that it names; a new trace where it names none."""
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    if valid_traceparent(traceparent) is None:
        return Context()
    assert traceparent is not None
    _, trace_id, span_id, flags = traceparent.split("-")
    parent = SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16)))
    return set_span_in_context(NonRecordingSpan(parent), Context())


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
