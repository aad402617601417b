"""Traces: what happened in one rollout, in order, over all processes (OpenTelemetry).

A *span* is a piece of work with a start, an end and a parent. One rollout is one trace: its attempts, the
episode, and each call in it, seen by who calls and by who answers. `span` makes one; who sends a call sends
the span's `Span.traceparent` along (W3C Trace Context), as an HTTP header or as a field of the call, and who
answers it makes its own spans below that.

The root of a trace decides whether it is recorded, and everyone below keeps to that. So a rollout that is
not recorded makes no objects of OpenTelemetry at all, and a process that never called `start` does not
import it: `span` returns the constant `OFF`. Where spans are sent, and how, is set by OpenTelemetry's own
variables (``OTEL_EXPORTER_OTLP_ENDPOINT``, ...).

No text of a prompt, an answer or a tool's arguments is recorded: that is in the rollout.
"""

from __future__ import annotations

import os
import random
import re
import secrets
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from gym_serve.types.errors import GymError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import Tracer

REQUIREMENT = "gym-serve[otel]"
"""What a process that records traces needs to have installed."""

Kind = Literal["internal", "client", "server"]
"""Work of this process; a call, seen by who makes it; a call, seen by who answers it."""

_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_LONGEST_MESSAGE = 500
_dice = random.Random()  # its own: a trainer's seed stays what it is


class Span:
    """A span that is not recorded; `_Recorded` is one that is.

    Use it in a ``with`` statement: an exception that leaves the block makes it a failed span.
    """

    __slots__ = ("traceparent",)

    recording = False
    """Whether anybody will see its attributes, which cost time to make."""

    def __init__(self, traceparent: str | None = None) -> None:
        self.traceparent = traceparent

    def name(self, name: str) -> None:
        """Replace its name."""

    def set(self, attributes: Mapping[str, Any]) -> None:
        """Add attributes; those that are None are left out."""

    def fail(self, kind: str, message: str) -> None:
        """Mark it as failed, for failures that are values."""

    def end(self, error: BaseException | None = None) -> None:
        """End it, where there is no ``with`` statement. Safe to call twice."""

    def __enter__(self) -> Span:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(error)


OFF = Span()
"""The span of all work that belongs to no trace."""


def span(name: str, parent: str | None, kind: Kind = "internal", *, sampling: float | None = None) -> Span:
    """Begin a span.

    Args:
        parent: the ``traceparent`` of the work that it is a part of.
        sampling: without a parent, the probability that a trace begins here, from 0 to 1; None for never.

    Returns:
        the span; one that is not recorded has the parent's ``traceparent``, so that it crosses this process.
    """
    tracer = _process.tracer
    if parent is None:
        if sampling is None or tracer is None:
            return OFF
        if _dice.random() >= sampling:  # whoever is called must not decide again
            return Span(f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00")
    elif tracer is None or not int(parent[-2:], 16) & 1:
        return Span(parent)
    return _Recorded(tracer, name, parent, kind)


def checked_parent(traceparent: str | None) -> str | None:
    """A ``traceparent`` header of a client, or None if it is none (W3C Trace Context, version 00)."""
    parent = (traceparent or "").strip()
    return parent if _TRACEPARENT.fullmatch(parent) else None


class _Recorded(Span):
    __slots__ = ("_span",)

    recording = True

    def __init__(self, tracer: Tracer, name: str, parent: str | None, kind: Kind) -> None:
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        above = Context() if parent is None else _context_of(parent)
        self._span: OtelSpan = tracer.start_span(name, above, SpanKind[kind.upper()])
        own = self._span.get_span_context()
        super().__init__(f"00-{own.trace_id:032x}-{own.span_id:016x}-{own.trace_flags:02x}")

    def name(self, name: str) -> None:
        self._span.update_name(name)

    def set(self, attributes: Mapping[str, Any]) -> None:
        self._span.set_attributes({key: value for key, value in attributes.items() if value is not None})

    def fail(self, kind: str, message: str) -> None:
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attribute("error.type", kind)
        self._span.set_status(Status(StatusCode.ERROR, message[:_LONGEST_MESSAGE]))

    def end(self, error: BaseException | None = None) -> None:
        if isinstance(error, GymError):
            self.fail(error.code, error.message)
        elif error is not None:
            self.fail(type(error).__name__, str(error))
            if isinstance(error, Exception):
                self._span.record_exception(error)
        self._span.end()


def _context_of(parent: str) -> Context:
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    _, trace_id, span_id, flags = parent.split("-")
    above = SpanContext(int(trace_id, 16), int(span_id, 16), True, TraceFlags(int(flags, 16)))
    return set_span_in_context(NonRecordingSpan(above), Context())


class _Process:
    """What this process records with; nothing before `start`."""

    tracer: Tracer | None = None
    provider: TracerProvider | None = None
    owns_provider = False


_process = _Process()


def start(resource: Mapping[str, str] | None = None, exporter: SpanExporter | None = None) -> None:
    """Record spans from now on; a second call changes nothing.

    A process that set up OpenTelemetry itself, such as a trainer, keeps its provider, which gets our spans.

    Args:
        resource: attributes of the process, besides those of ``OTEL_RESOURCE_ATTRIBUTES``.
        exporter: where spans go; by default over OTLP/HTTP, as OpenTelemetry's variables say.

    Raises:
        ModuleNotFoundError: the extra ``otel`` is not installed; says so.
    """
    if _process.tracer is not None:
        return
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON

        provider = trace.get_tracer_provider()
        _process.owns_provider = exporter is not None or not isinstance(provider, TracerProvider)
        if _process.owns_provider:
            if exporter is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

                exporter = OTLPSpanExporter()
            about = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "gym_serve"), **(resource or {})}
            _process.provider = TracerProvider(ALWAYS_ON, Resource.create(about))  # roots decide, in `span`
            _process.provider.add_span_processor(BatchSpanProcessor(exporter))
        elif isinstance(provider, TracerProvider):
            _process.provider = provider
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}: traces need pip install '{REQUIREMENT}'") from error
    assert _process.provider is not None
    _process.tracer = _process.provider.get_tracer("gym_serve")


def flush(seconds: float = 5.0) -> None:
    """Send what has been recorded, blocking for so long at most."""
    if _process.provider is not None:
        _process.provider.force_flush(int(1000 * seconds))


def stop() -> None:
    """Send what has been recorded, and record nothing more. Blocks while the receiver is slow."""
    provider, _process.provider, _process.tracer = _process.provider, None, None
    if provider is not None and _process.owns_provider:
        provider.shutdown()
    elif provider is not None:
        provider.force_flush()
