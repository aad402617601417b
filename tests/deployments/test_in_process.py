"""Calls of an application in the same process."""

import asyncio
import json
from typing import Any

import pytest

from gym_serve.deployments.chat_streams import Whole
from gym_serve.deployments.vllm_engine.transport import InProcess
from gym_serve.types.errors import BadRequest, Unavailable


class App:
    """Answers with what it was sent, or as its path says."""

    def __init__(self) -> None:
        self.waits = asyncio.Event()
        self.hung_up = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        path = scope["path"]
        if path == "/wait":
            self.waits.set()
            assert await receive() == {"type": "http.disconnect"}
            self.hung_up.set()
            return
        if path == "/raise":
            raise OSError("no more memory")
        if path in ("/stream", "/break"):
            headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            for piece in (b'data: {"n"', b': 1}\n\ndata: {"n": 2}\n\n', b"data: [DONE]\n\n"):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            if path == "/break":
                raise OSError("no more memory")
            assert await receive() == {"type": "http.disconnect"}
            self.hung_up.set()
            return
        refusal = {
            "error": {
                "message": "maximum context length is 8" if path in ("/long", "/room") else "no such field"
            }
        }
        status = (
            200 if path in {"/echo", "/events"} or (path == "/room" and b"max_tokens" not in body) else 400
        )
        if path == "/events":
            events = [(b"content-type", b"text/event-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": events})
            await send({"type": "http.response.body", "body": b"data: %b\n\ndata: [DONE]\n\n" % body})
            return
        await send({"type": "http.response.start", "status": status, "headers": []})
        answer = body if status == 200 else json.dumps(refusal).encode()
        await send({"type": "http.response.body", "body": answer[:3], "more_body": True})
        await send({"type": "http.response.body", "body": answer[3:]})


async def test_an_answer() -> None:
    assert await InProcess(App()).post("/echo", {"a": ["é"]}) == {"a": ["é"]}


async def test_a_prompt_that_is_too_long_is_an_answer() -> None:
    assert await InProcess(App()).post("/long", {}) is None


async def test_a_prompt_that_leaves_less_room_than_was_asked_for_is_answered_in_it() -> None:
    body = {"n": 1, "max_tokens": 9}
    assert await InProcess(App()).post("/room", body) == {"n": 1}
    assert [event async for event in InProcess(App()).stream("/room", body)] == [Whole({"n": 1})]
    assert await InProcess(App()).post("/long", body) is None


async def test_refusals_and_failures() -> None:
    with pytest.raises(BadRequest, match="no such field"):
        await InProcess(App()).post("/refuse", {})
    with pytest.raises(Unavailable, match="no more memory"):
        await InProcess(App()).post("/raise", {})


async def test_a_cancelled_call_hangs_up() -> None:
    app = App()
    call = asyncio.create_task(InProcess(app).post("/wait", {}))
    await app.waits.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await app.hung_up.wait()


async def test_a_stream_is_read_while_it_comes_and_hung_up() -> None:
    app, seen, second = App(), [], asyncio.Event()

    async def read() -> None:
        async for event in InProcess(app).stream("/stream", {}):
            seen.append(event)
            if len(seen) == 2:
                second.set()

    call = asyncio.create_task(read())
    await second.wait()
    assert not app.hung_up.is_set()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await app.hung_up.wait()
    assert seen == [{"n": 1}, {"n": 2}]


async def test_a_stream_that_breaks_off_and_one_that_is_refused() -> None:
    async def read(path: str) -> list[Any]:
        return [event async for event in InProcess(App()).stream(path, {})]

    with pytest.raises(Unavailable, match="no more memory"):
        await read("/break")
    with pytest.raises(BadRequest, match="no such field"):
        await read("/refuse")
    assert await read("/long") == [Whole(None)]


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ({"message": "This model's maximum context length is 8 tokens", "code": 400}, None),
        (
            {"message": "EngineCore encountered an issue", "type": "InternalServerError", "code": 500},
            Unavailable,
        ),
        ({"message": "the grammar is wrong", "type": "BadRequestError", "code": 400}, BadRequest),
    ],
)
async def test_an_error_inside_a_200_or_a_stream_means_what_it_says(said: Any, kind: Any) -> None:
    app, body = InProcess(App()), {"error": said}
    if kind is None:
        assert await app.post("/echo", body) is None
        assert [event async for event in app.stream("/events", body)] == [Whole(None)]
        return
    with pytest.raises(kind, match=said["message"]):
        await app.post("/echo", body)
    with pytest.raises(kind, match=said["message"]):
        [event async for event in app.stream("/events", body)]
