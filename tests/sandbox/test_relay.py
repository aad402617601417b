"""`ModelRelay`: what it passes on to a model, what it refuses, and what hostile programs cannot do to it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web
from pydantic import SecretStr

from gym_serve.sandbox.relay import ModelRelay, model_variables


class Model:
    """A model that answers what it was sent, in two parts."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None, bytes]] = []
        self.left = asyncio.Event()

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        self.asked.append((request.raw_path, request.headers.get("authorization"), body))
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "set-cookie": "a=b"})
        await response.prepare(request)
        await response.write(b"first ")
        if body == b"wait":
            try:
                await asyncio.sleep(60)
            finally:
                self.left.set()
        await response.write(body)
        return response


@pytest.fixture
async def model() -> AsyncIterator[tuple[Model, str]]:
    model = Model()
    server = await asyncio.get_running_loop().create_server(
        web.Server(model.answer, handler_cancellation=True), "127.0.0.1", 0
    )
    yield model, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/policy/rollouts/1/v1"
    server.close()


def relay_to(url: str) -> ModelRelay:
    return ModelRelay(socket.create_server(("127.0.0.1", 0)), url, SecretStr("the-token"))


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
async def test_what_is_passed_on(model: tuple[Model, str], header: str) -> None:
    async with relay_to(model[1]) as relay, aiohttp.ClientSession() as client:
        key = relay.key if header == "x-api-key" else f"Bearer {relay.key}"
        url = f"{relay.base_url}/messages?beta=true"
        async with client.post(url, data=b"text", headers={header: key, "cookie": "c=d"}) as answer:
            assert (answer.status, await answer.read()) == (200, b"first text")
            assert answer.headers["content-type"] == "text/event-stream"
            assert "set-cookie" not in answer.headers
        assert model[0].asked == [("/policy/rollouts/1/v1/messages?beta=true", "Bearer the-token", b"text")]


@pytest.mark.parametrize(
    ("method", "path", "key", "status"),
    [
        ("POST", "/v1/responses", "wrong", 401),
        ("POST", "/v1/responses", "", 401),
        ("POST", "/v1/responses", "ü", 401),
        ("POST", "/graph", None, 404),
        ("POST", "/v1", None, 404),
        ("POST", "/v1/../../graph", None, 404),
        ("POST", "/v1/%2e%2e/graph", None, 404),
        ("POST", "/v1//evil.example/a", None, 404),
        ("POST", "http://127.0.0.1:1/v1/responses", None, 404),
        ("DELETE", "/v1/responses", None, 404),
        ("CONNECT", "127.0.0.1:1", None, 404),
    ],
)
async def test_what_is_refused(
    model: tuple[Model, str], method: str, path: str, key: str | None, status: int
) -> None:
    async with relay_to(model[1]) as relay:
        port = int(relay.base_url.rpartition(":")[2].removesuffix("/v1"))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        shown = relay.key if key is None else key
        lines = f"{method} {path} HTTP/1.1\r\nhost: a\r\nx-api-key: {shown}\r\nconnection: close\r\n\r\n"
        writer.write(lines.encode())
        answer = await reader.read()
        writer.close()
    assert int(answer.split()[1]) == status, answer
    assert model[0].asked == []


async def test_a_program_that_leaves_ends_its_call(model: tuple[Model, str]) -> None:
    async with relay_to(model[1]) as relay, aiohttp.ClientSession() as client:
        headers = {"x-api-key": relay.key}
        async with client.post(f"{relay.base_url}/responses", data=b"wait", headers=headers) as answer:
            assert await answer.content.read(6) == b"first "
        await asyncio.wait_for(model[0].left.wait(), 10)


async def test_connections_are_few(model: tuple[Model, str]) -> None:
    async with relay_to(model[1]) as relay:
        port = int(relay.base_url.rpartition(":")[2].removesuffix("/v1"))
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(200)]
        await asyncio.sleep(0.2)
        assert relay.connections == 64
        for _, writer in opened:
            writer.close()


async def test_a_model_that_cannot_be_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    async with relay_to(f"http://127.0.0.1:{port}/v1") as relay, aiohttp.ClientSession() as client:
        headers = {"x-api-key": relay.key}
        async with client.post(f"{relay.base_url}/responses", data=b"a", headers=headers) as answer:
            assert answer.status == 503
        assert relay.failure is not None


def test_the_variables_of_clients() -> None:
    assert model_variables("http://a/v1", "k")["ANTHROPIC_BASE_URL"] == "http://a"
