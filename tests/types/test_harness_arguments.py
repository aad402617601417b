"""What a model wrote into a call is what it reads again, whichever protocol its harness speaks."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gym_serve.servers import Call, ModelServer, ServerRunner
from gym_serve.types.protocols import (
    chat_to_params,
    message_to_params,
    response_to_chat,
    response_to_message,
)

JSON = dict[str, Any]

VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-1e6, 1e6) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
OBJECT = st.dictionaries(st.sampled_from(["x", "y", "INVALID_JSON"]), VALUE, max_size=2)
FORMS = st.sampled_from([{}, {"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": False}])
WRITTEN = st.builds(lambda value, form: json.dumps(value, **form), OBJECT | VALUE, FORMS)
ARGUMENTS = WRITTEN | WRITTEN.map(lambda text: text[:-1]) | st.text(max_size=8)


def call(arguments: str) -> JSON:
    return {"type": "function_call", "id": "c", "call_id": "c", "name": "f", "arguments": arguments}


def answer(arguments: str) -> JSON:
    return {"output": [call(arguments)], "created_at": 1.0, "model": "m", "status": "completed"}


def sent_back(value: Any) -> Any:
    """What a harness in JavaScript makes of a value: its numbers are doubles, and 1.0 is written 1."""
    if isinstance(value, dict):
        return {key: sent_back(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [sent_back(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


@given(ARGUMENTS)
@example('{"INVALID_JSON": "{oops"}')
@example('{"INVALID_JSON": 1}')
@example("")
def test_arguments_that_are_no_object_come_back_byte_for_byte(arguments: str) -> None:
    (block,) = response_to_message(answer(arguments), {})["content"]
    assert isinstance(block["input"], dict)
    message = {"role": "assistant", "content": [json.loads(json.dumps(block))]}
    (item,) = message_to_params({"messages": [message]})["input"]
    try:
        is_object = isinstance(json.loads(arguments), dict)
    except ValueError:
        is_object = not arguments
    if is_object:
        assert json.loads(item["arguments"]) == json.loads(arguments or "{}")
    else:
        assert item["arguments"] == arguments


class Scripted(ModelServer):
    """Calls a tool, then ends; keeps what it was asked."""

    arguments = ""
    asked: JSON

    async def responses(self, body: JSON) -> JSON:
        self.asked = body
        return answer(self.arguments)


@given(ARGUMENTS)
@example('{ "a": 1.0, "b": 1e3, "a": 2}')
@example('{"zero": -0.0}')
@example('{"a": ' * 300 + "1" + "}" * 300)
@pytest.mark.parametrize("protocol", ["responses", "chat/completions", "messages"])
async def test_a_captured_model_reads_its_own_words(protocol: str, arguments: str) -> None:
    model = Scripted(name="policy", replica="r")
    model.arguments = arguments
    host = ServerRunner(model)
    session = (await host.dispatch(Call("rollouts"))).session

    async def ask(body: JSON) -> JSON:
        reply = await host.dispatch(Call(f"rollouts/v1/{protocol}", json.dumps(body).encode(), session))
        told: JSON = reply.json()
        return told

    user = {"role": "user", "content": "Hi"}
    if protocol == "responses":
        output = (await ask({"input": [user]}))["output"]
        result = {"type": "function_call_output", "call_id": "c", "output": "1"}
        await ask({"input": [user, *output, result]})
    elif protocol == "chat/completions":
        message = (await ask({"messages": [user]}))["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": "c", "content": "1"}
        await ask({"messages": [user, message, result]})
    else:
        content = sent_back((await ask({"messages": [user]}))["content"])
        result = {"type": "tool_result", "tool_use_id": "c", "content": "1"}
        said = {"role": "assistant", "content": content}
        await ask({"messages": [user, said, {"role": "user", "content": [result]}]})
    _, told, _ = model.asked["input"]
    assert told["arguments"] == arguments
    (trajectory,) = (await host.dispatch(Call("rollouts/trajectories", b"", session))).json()["trajectories"]
    assert trajectory["calls"] == 2


def test_chat_has_the_arguments_as_they_are() -> None:
    completion = response_to_chat(answer("{oops"))
    (item,) = chat_to_params({"messages": [completion["choices"][0]["message"]]})["input"]
    assert item["arguments"] == "{oops"
