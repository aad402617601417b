"""A receiver of OTLP/HTTP on loopback: what an OpenTelemetry Collector takes."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from support.threaded import ThreadedServer


class Received(NamedTuple):
    """A span that was received; ids are hexadecimal, ``parent`` is empty for a root."""

    name: str
    trace: str
    id: str
    parent: str
    start: int
    kind: str
    failed: bool
    attributes: dict[str, Any]
    resource: dict[str, Any]


class Collector(ThreadedServer):
    """Receives spans at `url`, which is what ``OTEL_EXPORTER_OTLP_ENDPOINT`` takes."""

    def __init__(self) -> None:
        super().__init__({"/v1/traces": self._receive})
        self.spans: list[Received] = []

    async def _receive(self, request: web.Request) -> web.Response:
        body = await request.read()
        if body[:2] == b"\x1f\x8b":
            body = gzip.decompress(body)
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = _values(group.resource.attributes)
            for scope in group.scope_spans:
                self.spans += [
                    Received(
                        each.name,
                        each.trace_id.hex(),
                        each.span_id.hex(),
                        each.parent_span_id.hex(),
                        each.start_time_unix_nano,
                        each.SpanKind.Name(each.kind).removeprefix("SPAN_KIND_").lower(),
                        each.status.code == each.status.STATUS_CODE_ERROR,
                        _values(each.attributes),
                        resource,
                    )
                    for each in scope.spans
                ]
        return web.Response(
            body=ExportTraceServiceResponse().SerializeToString(), content_type="application/x-protobuf"
        )


def tree(spans: Iterable[Received]) -> list[str]:
    """The names of the spans of one trace, indented below their parents, in the order in which they began."""
    spans = sorted(spans, key=lambda each: each.start)
    known = {each.id for each in spans}

    def lines(parent: str, depth: int) -> Iterator[str]:
        for each in spans:
            if (each.parent if each.parent in known else "") == parent:
                yield "  " * depth + each.name
                yield from lines(each.id, depth + 1)

    return list(lines("", 0))


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
