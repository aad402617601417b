"""`genrm_model`: messages of its own roles, by Responses and by Chat Completions."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.upstream import ChatEndpoint

from gym_serve.deployments.genrm_model import GenrmModel
from gym_serve.servers import Call, ServerRunner
from gym_serve.types.errors import BadRequest

HISTORY = [{"role": "user", "content": "Write."}]
PAIR: list[dict[str, Any]] = [
    {"role": "principle", "content": "Be brief."},
    {"role": "response_1", "content": [{"type": "input_text", "text": "A"}]},
    {"role": "response_2", "content": "B"},
]


@pytest.fixture
async def genrm() -> AsyncIterator[tuple[ChatEndpoint, ServerRunner]]:
    with ChatEndpoint("scores") as endpoint:
        host = ServerRunner(GenrmModel(name="genrm", base_url=endpoint.url, model="m"))
        await host.start()
        yield endpoint, host
        await host.stop()


async def asked(host: ServerRunner, op: str, body: dict[str, Any]) -> Any:
    return (await host.dispatch(Call(op, json.dumps(body).encode()))).json()


async def test_the_pair_follows_the_conversation(genrm: tuple[ChatEndpoint, ServerRunner]) -> None:
    endpoint, host = genrm
    response = await asked(host, "v1/responses", {"input": [*HISTORY, *PAIR], "max_output_tokens": 9})
    assert response["output"][0]["content"][0]["text"] == "scores"
    assert response["usage"]["output_tokens"] == 2
    (body,) = endpoint.requests
    assert [(m["role"], m["content"]) for m in body["messages"]] == [
        ("user", "Write."),
        ("principle", "Be brief."),
        ("response_1", "A"),
        ("response_2", "B"),
    ]
    assert body["max_tokens"] == 9


async def test_chat_takes_any_role(genrm: tuple[ChatEndpoint, ServerRunner]) -> None:
    endpoint, host = genrm
    messages = [*HISTORY, {"role": "response_1", "content": "A"}]
    await asked(host, "v1/chat/completions", {"messages": messages})
    assert endpoint.requests[0]["messages"] == messages


async def test_input_without_a_pair(genrm: tuple[ChatEndpoint, ServerRunner]) -> None:
    endpoint, host = genrm
    await asked(host, "v1/responses", {"input": "Hi"})
    assert [m["role"] for m in endpoint.requests[0]["messages"]] == ["user"]
    for given in ([*PAIR, *HISTORY], [PAIR[0], *HISTORY, PAIR[1]], [{"role": "response_3", "content": "C"}]):
        with pytest.raises(BadRequest):
            await asked(host, "v1/responses", {"input": given})
