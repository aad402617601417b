"""What a model writes into the arguments of a call is what the tool gets, whatever it is."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.environments import Scripted, called

from gym_serve import ResourcesServer, Verdict, VerifyRequest, tool
from gym_serve.deployments.simple_agent import SimpleAgent
from gym_serve.rollouts.files import RecordFile, read_records
from gym_serve.servers import EnvironmentClient, ServerRunner
from gym_serve.transports import InlineTransport
from gym_serve.types.exact import exact_json
from gym_serve.types.protocols.messages import tool_input

LARGEST = 10**4300 - 1  # as Python reads them
integers = st.one_of(
    st.integers(),
    st.integers(-LARGEST, LARGEST),
    st.integers(61, 66).flatmap(lambda bits: st.integers(2**bits - 2, 2**bits + 2)),
    st.integers(16, 22).flatmap(lambda digits: st.integers(10**digits - 1, 10**digits)),
)
scalars = st.one_of(
    integers,
    integers.map(lambda number: -number),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.none(),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.from_regex(r"[0-9]{17,25}", fullmatch=True),
)
keys = st.text("ab1", max_size=3)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=3)),
    max_leaves=6,
)


class Notary(ResourcesServer):
    @tool
    async def note(self, value: Any) -> str:
        """Note a value."""
        self.noted = value
        return repr(value)[:50]

    @tool
    async def double(self, number: int) -> int:
        """Double a number."""
        return 2 * number

    async def verify(self, request: VerifyRequest) -> Verdict:
        return Verdict(reward=1.0)


def caller(name: str, arguments: str) -> Scripted:
    """A model that makes one call, and then says that it is done."""
    return Scripted([called(name, arguments)], "done")


async def output_of(notary: Notary, name: str, arguments: str) -> str:
    """What the model is shown of a call."""
    resources = EnvironmentClient(InlineTransport(ServerRunner(notary)))
    agent = SimpleAgent(model=caller(name, arguments), resources=resources)
    rollout = await agent.run({"responses_create_params": {"input": "go"}})
    output: str = rollout["response"]["output"][1]["output"]
    return output


@given(values)
def test_a_tool_gets_the_value_that_the_model_wrote(value: Any) -> None:
    notary = Notary()
    asyncio.run(output_of(notary, "note", json.dumps({"value": value})))
    assert repr(notary.noted) == repr(value)


@given(st.integers(-(10**4000), 10**4000))
def test_integers_have_all_of_their_digits_both_ways(number: int) -> None:
    assert asyncio.run(output_of(Notary(), "double", f'{{"number": {number}}}')) == str(2 * number)


@pytest.mark.parametrize("digits", [4301, 100_000])
async def test_a_number_that_python_does_not_read_is_told_to_the_model(digits: int) -> None:
    output = await output_of(Notary(), "double", f'{{"number": {"9" * digits}}}')
    assert "Invalid tool call arguments: ValueError('Exceeds the limit" in output


@given(values)
def test_what_is_read_is_what_was_written(value: Any) -> None:
    text = json.dumps(value)
    for given_text in (text, text.encode()):
        assert repr(exact_json(given_text)) == repr(value)


@pytest.mark.parametrize("digits", [20, 309, 4299])
async def test_a_verifier_may_tell_such_a_number(digits: int, tmp_path: Path) -> None:
    """What it tells is read by the agent, and by whoever reads the file of rollouts."""

    class Clerk(Notary):
        async def verify(self, request: VerifyRequest) -> Verdict:
            return Verdict(reward=1.0, noted=self.noted)

    resources = EnvironmentClient(InlineTransport(ServerRunner(clerk := Clerk())))
    agent = SimpleAgent(model=caller("note", f'{{"value": [{"9" * digits}]}}'), resources=resources)
    rollout = await agent.run({"responses_create_params": {"input": "go"}})
    assert clerk.noted == [10**digits - 1]
    assert rollout["noted"] == [10**digits - 1]
    with RecordFile(tmp_path / "out.jsonl") as file:
        file.append(rollout)
    assert list(read_records(tmp_path / "out.jsonl")) == [rollout]


@given(values)
def test_exact_json_reads_what_orjson_refuses(value: Any) -> None:
    assert exact_json(json.dumps([value, LARGEST]).encode()) == [value, LARGEST]


@pytest.mark.parametrize(
    "text", [b"", b"[1,]", b"1e999", b"9" * 5000, b"[NaN]", b"[1e999, " + b"9" * 400 + b"]"]
)
def test_exact_json_refuses_what_is_none(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        exact_json(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1,]",
        "1" * 5000,
        "[" * 3000 + "1" * 20 + "]" * 3000,
        f"[NaN, {'1' * 20}]",
        f"[1e999, {'1' * 20}]",
        '"\ud800"',
        b"\xff",
    ],
)
def test_what_is_no_json_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        exact_json(text)


def test_a_client_of_the_messages_api_is_told_the_same_number() -> None:
    assert tool_input('{"n": 123456789012345678901234567890}') == {"n": 123456789012345678901234567890}
