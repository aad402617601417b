"""A caller who leaves while a session is being opened leaves none behind, whenever the reply comes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from support.waiting import until

from gym_serve import ResourcesServer, ServerRunner
from gym_serve.cluster.routing.rpc import Channel, Listener
from gym_serve.servers.clients import EnvironmentClient
from gym_serve.servers.context import current, time_limit, use
from gym_serve.servers.transport import Call
from gym_serve.transports import HttpTransport, InlineTransport
from gym_serve.types.errors import DeadlineExceeded

SECONDS = 0.3  # of a seed


class Slow(ResourcesServer):
    """Its sessions take a while to open."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.begun = 0

    async def seed(self, row: dict[str, Any], session: Any) -> None:
        self.begun += 1
        await asyncio.sleep(SECONDS)

    async def verify(self) -> float:
        return 1.0


async def over_http(runner: ServerRunner, stack: AsyncExitStack) -> HttpTransport:
    """A server that does not notice that a client has left, as those of other frameworks."""

    async def answer(request: web.Request) -> web.Response:
        op, session = request.path.removeprefix("/"), request.headers.get("x-session-id")
        call = Call(op, await request.read(), session, affinity="an episode")
        reply = await runner.dispatch(call)
        headers = {"x-session-id": reply.session or ""}
        return web.Response(body=reply.content, status=reply.status, headers=headers)

    app = web.Application()
    app.router.add_post("/{op}", answer)
    serving = web.AppRunner(app)
    await serving.setup()
    stack.push_async_callback(serving.cleanup)
    await web.TCPSite(serving, "127.0.0.1", 0).start()
    transport = HttpTransport("env", f"http://127.0.0.1:{serving.addresses[0][1]}")
    stack.push_async_callback(transport.close)
    return transport


async def over_channel(runner: ServerRunner, stack: AsyncExitStack) -> Any:
    """What two replicas have between them."""
    listener = Listener(runner.dispatch, runner.stream, lambda: 0)
    channel: Any = await Channel.open(await listener.start("127.0.0.1"))
    stack.push_async_callback(listener.stop)
    stack.push_async_callback(channel.close)
    channel.server = "env"
    return channel


async def inline(runner: ServerRunner, stack: AsyncExitStack) -> InlineTransport:
    return InlineTransport(runner)


@asynccontextmanager
async def client_of(server: Slow, transport: Any) -> AsyncIterator[EnvironmentClient]:
    async with AsyncExitStack() as stack:
        runner = ServerRunner(server)
        await runner.start()
        stack.push_async_callback(runner.stop)
        yield EnvironmentClient(await transport(runner, stack))


@pytest.mark.parametrize("transport", [inline, over_channel, over_http])
@pytest.mark.parametrize("ends", ["cancelled", "limit"])
async def test_a_seed_that_nobody_waits_for(transport: Any, ends: str) -> None:
    server = Slow(name="env")
    async with client_of(server, transport) as client:

        async def seed(limit: float | None) -> None:
            with use(current().within(limit)), time_limit(limit):
                await client.seed_session({"responses_create_params": {"input": "x"}})

        # Also about when the replies come: some of these sessions are open before their caller leaves.
        waits = [0.05, *(SECONDS + step / 500 for step in range(-4, 8))]
        seeds = [asyncio.create_task(seed(wait if ends == "limit" else None)) for wait in waits]
        if ends == "cancelled":
            await until(lambda: server.begun == len(waits))
            for wait, task in zip(waits, seeds, strict=True):
                asyncio.get_running_loop().call_later(wait, task.cancel)
        done = await asyncio.gather(*seeds, return_exceptions=True)
        assert {type(one) for one in done} <= {
            type(None),
            asyncio.CancelledError,
            TimeoutError,
            DeadlineExceeded,
        }
        kept = sum(one is None for one in done)
        await until(lambda: server.live_sessions == kept)
        await asyncio.sleep(2 * SECONDS)
        assert server.live_sessions == kept
