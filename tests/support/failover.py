"""Environments whose verdict tells every call, and a transport to replicas that die at chosen calls."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel

from gym_serve import ResourcesServer, ServerRunner, SessionLost, Verdict, VerifyRequest, tool
from gym_serve.servers.sessions import replica_of
from gym_serve.servers.transport import Call, Reply

Death = Literal["before", "after", "noticed"]
"""The replica dies before it gets the call, or after it ran it, before its answer is through; or it had
died, and another one that gets the call says so."""


class Chain(ResourcesServer):
    """Each call is hashed onto all calls before it: one that is lost, doubled or late changes the verdict."""

    restorable: ClassVar[bool] = True

    class Session(BaseModel):
        digest: str = ""
        calls: int = 0

    closed: ClassVar[list[str]] = []

    def link(self, session: Session, what: str) -> str:
        session.digest = hashlib.sha256(f"{session.digest} {what}".encode()).hexdigest()
        session.calls += 1
        return session.digest

    async def seed(self, row: dict[str, Any], session: Session) -> None:
        self.link(session, f"seed {row.get('number')}")

    @tool
    async def add(self, what: str, session: Session) -> str:
        return self.link(session, what)

    @tool
    def add_in_thread(self, what: str, session: Session) -> str:
        return self.link(session, what)

    @tool
    async def add_and_fail(self, what: str, session: Session) -> str:
        self.link(session, what)
        raise ValueError(f"{what} came too far")

    @tool
    async def echo(self, what: str) -> str:
        return what

    async def verify(self, request: VerifyRequest, session: Session) -> Verdict:
        self.link(session, "verify")
        return Verdict(reward=int(session.digest[:4], 16) / 65536, digest=session.digest, calls=session.calls)

    async def close(self, session: Session) -> None:
        self.closed.append(session.digest)


class JsonChain(Chain):
    """With a snapshot of its own that is JSON, by plain methods."""

    def snapshot(self, session: Chain.Session) -> Any:  # type: ignore[override]
        return [session.digest, session.calls]

    def restore(self, state: Any) -> Chain.Session:  # type: ignore[override]
        return self.Session(digest=state[0], calls=state[1])


class BytesChain(Chain):
    """With a snapshot of its own that is bytes."""

    async def snapshot(self, session: Chain.Session) -> bytes:
        return b"\x00\xff" + f"{session.digest} {session.calls}".encode()

    async def restore(self, state: bytes) -> Chain.Session:
        digest, calls = state[2:].decode().split(" ")
        return self.Session(digest=digest, calls=int(calls))


class MortalEdge:
    """One replica at a time, replaced by a new one when it dies.

    Args:
        server: constructs the server of a replica.
        deaths: by number of the call (seeds do not count), how the replica dies.
    """

    def __init__(
        self, server: Callable[..., ResourcesServer], deaths: Mapping[int, Death] | None = None
    ) -> None:
        self.server = "env"
        self.deaths = dict(deaths or {})
        self.calls: list[str] = []
        self.replicas = 0
        self._server = server
        self.host = self._new()

    async def call(self, call: Call) -> Reply:
        number = len(self.calls)
        if call.op == "seed_session":
            return await self.host.dispatch(call)
        self.calls.append(call.op)
        death = self.deaths.pop(number, None)
        if death is not None:
            dying, self.host = self.host, self._new()
            if death == "after":
                await dying.dispatch(call)
        if death != "noticed" and call.session and replica_of(call.session) != f"r{self.replicas}":
            raise SessionLost(f"{replica_of(call.session)} died", server=self.server)
        return await self.host.dispatch(call)

    async def close(self) -> None:
        pass

    def _new(self) -> ServerRunner:
        self.replicas += 1
        return ServerRunner(self._server(name=self.server, replica=f"r{self.replicas}"))
