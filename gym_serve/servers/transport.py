"""A transport carries a `Call` from one server to another, and its `Reply` back.

Bodies cross as JSON bytes that are encoded once. A failure crosses as a value too (a status of 400 or more
and an error body), so that all three kinds of transport, and HTTP clients, see the same.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, NamedTuple, Protocol

import orjson

from gym_serve.observe.timeline import TIMELINE
from gym_serve.types.errors import GymError, Unavailable, error_from_body
from gym_serve.types.exact import exact_bytes, foreign_json, no_json
from gym_serve.types.model_endpoint import ModelEndpoint
from gym_serve.types.timeline import TIMELINE_FIELD

CALLER_LEFT = 499  # the status of a call whose caller stopped waiting (nginx's); nobody gets it as an answer


def encode(value: Any) -> bytes:
    """``value`` as JSON. Halves of surrogate pairs, which models can produce, are `mended`."""
    return trimmed(exact_bytes(value))


def text_as_json(text: str | bytes) -> bytes:
    """A tool's answer as JSON: unchanged if it is JSON already, otherwise as a string."""
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))
    return text.encode() if isinstance(text, str) else text


def trimmed(data: bytes) -> bytes:
    """A copy that takes no more memory than needed: orjson's buffer has 4 or 8 KB however short the text
    is."""
    return bytes(memoryview(data))


class Call(NamedTuple):
    """One call to a server.

    Attributes:
        op: the operation, which is also its HTTP path below the server
            (``seed_session``, ``verify``, ``tools/{name}``, ``v1/responses``, ``run``, ...).
        request_id, affinity, traceparent: see `CallContext`.
        endpoint: where the policy of this rollout answers; None for the graph's own. It is for an agent, or
            for the model that the agent calls; it goes no further by itself.
        waited: seconds that it waited for its turn at the replica that runs it; no transport carries it.
    """

    op: str
    body: bytes = b""  # JSON, or empty for an operation without a body
    session: str | None = None  # id of its session; pins the call to the replica that holds the session
    request_id: str = ""
    affinity: str | None = None
    timeout: float | None = None  # seconds that the caller waits, None for no limit
    endpoint: ModelEndpoint | None = None
    traceparent: str | None = None
    waited: float = 0.0


class Reply(NamedTuple):
    """Its answer.

    Attributes:
        state: the state in which the call left its session, sealed (`gym_serve.servers.sessions`); None
            if the call cannot have changed it, or the server takes no snapshots. Never part of HTTP answers.
        notes: what only the server knows of the call (`gym_serve.observe.timeline`); None if there is nothing
            to tell. Never part of an HTTP answer either, but for the timeline of a rollout.
    """

    status: int
    body: bytes  # JSON; that of a rollout is without its timeline, see `content`
    session: str | None = None
    state: bytes | None = None
    notes: dict[str, Any] | None = None

    def json(self) -> Any:
        """The decoded body. Raises the `GymError` that this reply carries, or `Unavailable` if it is no
        JSON."""
        body: Any
        try:
            body = foreign_json(self.body) if self.body else None
        except ValueError as error:
            if self.status < 400:
                raise Unavailable(f"the answer is no JSON: {no_json(self.body, error)}") from None
            body = self.body[:2000].decode("utf-8", "replace")
        if self.status >= 400:
            raise error_from_body(self.status, body)
        if self.notes is not None and TIMELINE in self.notes:
            body[TIMELINE_FIELD] = self.notes[TIMELINE]
        return body

    @property
    def content(self) -> bytes:
        """The body as HTTP and files have it: what `json` returns."""
        if self.notes is None or TIMELINE not in self.notes:
            return self.body
        return b'%s,"%s":%s}' % (self.body[:-1], TIMELINE_FIELD.encode(), encode(self.notes[TIMELINE]))

    @classmethod
    def of(cls, body: Any, session: str | None = None) -> Reply:
        return cls(200, encode(body), session)

    @classmethod
    def failed(cls, error: GymError, session: str | None = None) -> Reply:
        return cls(error.status, encode(error.to_body()), session)


class Transport(Protocol):
    """One server, seen from a caller."""

    server: str  # name of the server in the graph

    async def call(self, call: Call) -> Reply:
        """Deliver a call and wait for its reply; cancelling the wait cancels the call.

        Raises:
            SessionLost: the replica that held ``call.session`` is gone.
            Unavailable: the call was not delivered, or its answer was lost.
            DeadlineExceeded: ``call.timeout`` passed.
        """
        ...

    def stream(self, call: Call) -> AsyncGenerator[bytes, None]:
        """Deliver a call and yield its answer as server-sent events, while the server produces them.

        They arrive in chunks of any size. The server waits for a slow reader, and closing the generator
        cancels the call. Raises as `call`, and every failure of the server itself, also after the first
        event.
        """
        ...

    async def close(self) -> None:
        """Release what the transport holds; it is not called again."""
        ...
