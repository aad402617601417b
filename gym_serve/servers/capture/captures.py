"""`Captures`: the model calls of external harnesses, recorded by the replica that answers them.

A capture is a session of a model server: its id names the replica that opened it, every call below
``/{model}/rollouts/{id}/v1`` goes to that replica and to no other one, and a replica with open captures
drains before it stops. So the calls of a rollout are in one place, however many replicas and gateways there
are. A replica that dies takes its captures with it: `SessionLost`, and the rollout starts again.

What is recorded are whole answers. A call that failed, or that its harness gave up before the answer was
whole (it hung up in the middle of a stream, which ends the generation), is in no trajectory: nobody knows
what the model would have said. It is counted as ``unfinished``. Where the last call failed, and not because
of what the harness asked, the capture tells that ``failure``: what the harness made of it is nobody's score.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from gym_serve.servers.capture.trajectories import trajectories_of
from gym_serve.servers.capture.tree import CallTree, with_bundle, without_tokens
from gym_serve.servers.context import current, use
from gym_serve.servers.sessions import OpenSession, SessionTable
from gym_serve.types.errors import BadRequest, GymError, OperatorError, Overloaded, Retryable
from gym_serve.types.requests import JSON, input_items

__all__ = ["Captures"]

_MAX_CALLS = 10_000  # of one capture: a harness that runs wild must not take all memory


@dataclass
class _Capture:
    affinity: str | None
    tree: CallTree = field(default_factory=CallTree)
    unfinished: int = 0
    failure: GymError | None = None


class Captures:
    """The captures of one model server.

    Args:
        replica: name of this instance, without a dot.
        ttl: seconds without a call after which a capture is dropped.
        most: how many may be open.
        clock: gives the moment, in seconds.
    """

    def __init__(
        self, replica: str, ttl: float, most: int = 10_000, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._table: SessionTable[_Capture] = SessionTable(replica, ttl)
        self._most = most
        self._clock = clock

    def __len__(self) -> int:
        """How many captures are open."""
        self._expire()
        return len(self._table)

    def open(self) -> str:
        """Open a capture; its id. The model calls in it have the affinity of this call.

        Raises:
            Overloaded: too many are open.
        """
        self._expire()
        if len(self._table) >= self._most:
            raise Overloaded(f"{self._most} captures are open (max_captures): close some, or wait")
        return self._table.open(_Capture(current().affinity), self._clock()).id

    async def call(self, params: JSON, ask: Callable[[JSON], Awaitable[JSON]]) -> JSON:
        """The Response for a call of the current session, once it is recorded.

        Args:
            params: the Responses body of the call.
            ask: the model: Response for a Responses body.

        Raises:
            SessionLost, SessionNotFound: there is no such capture (any more).
            BadRequest: the request relies on state of the server, or the capture is full.
            GymError: the model failed; the call is not recorded.
        """
        session = self._current()
        capture = session.state
        tree = capture.tree
        if len(tree.nodes) + session.running >= _MAX_CALLS:
            raise BadRequest(f"a capture holds {_MAX_CALLS} calls at most")
        if params.get("previous_response_id") is not None:
            raise BadRequest("previous_response_id: send the whole conversation, this server keeps none")
        instructions = params.get("instructions")
        head: list[JSON] = [{"role": "system", "content": str(instructions)}] if instructions else []
        items = [*head, *_items(params["input"])]
        parent, begins = tree.parent_of(items)
        affinity = capture.affinity or session.id
        session.running += 1
        capture.unfinished += 1
        try:
            with use(replace(current(), affinity=affinity, session=None)):
                response = await ask({**params, "input": with_bundle(items, parent, begins)[len(head) :]})
        except (OperatorError, Retryable) as error:
            capture.failure = error
            raise
        finally:
            session.running -= 1
            session.used = self._clock()
        tree.add(items, response, parent, begins)
        capture.unfinished -= 1
        capture.failure = None
        return response

    def trajectories(self) -> JSON:
        """What the capture of the current session holds; see `trajectories_of`.

        Raises:
            SessionLost, SessionNotFound: there is no such capture (any more).
        """
        session = self._current()
        nodes, failure = session.state.tree.nodes, session.state.failure
        return {
            "id": session.id,
            "calls": len(nodes),
            "unfinished": session.state.unfinished,
            "failure": None if failure is None else failure.to_body()["error"],
            "trajectories": trajectories_of(nodes),
        }

    def check(self) -> None:
        """Whether the capture of the current session is there.

        Raises:
            SessionLost, SessionNotFound: there is no such capture (any more).
        """
        self._current()

    def close(self) -> None:
        """Drop the capture of the current session; safe to call twice."""
        self._table.pop(current().session or "")

    def _current(self) -> OpenSession[_Capture]:
        self._expire()
        session_id = current().session
        if session_id is None:
            raise BadRequest("the path names no rollout: POST /{model}/rollouts opens one and tells its id")
        return self._table.get(session_id, self._clock())

    def _expire(self) -> None:
        for session_id in self._table.expired(self._clock()):
            self._table.pop(session_id)


def _items(given: str | list[Any]) -> list[JSON]:
    """The input as items; a harness has no token ids to give."""
    items = input_items(given)
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise BadRequest(f"input[{index}]: an item is an object, not {type(item).__name__}")
    return list(map(without_tokens, items))
