"""Tool schemas from signatures, and the validation of what a model sends."""

import asyncio
import enum
from typing import Annotated, Any, Literal

import orjson
import pytest
from pydantic import BaseModel, Field

from gym_serve import ResourcesServer, ServerRunner, Verdict, VerifyRequest, tool
from gym_serve.servers.transport import Call


class Unit(enum.Enum):
    CELSIUS = "celsius"
    KELVIN = "kelvin"


class Place(BaseModel):
    city: str
    country: str | None = None


class Office(ResourcesServer):
    class Session(BaseModel):
        calls: int = 0

    @tool
    async def forecast(
        self,
        place: Place,
        days: Annotated[int, Field(ge=1, le=7)],
        unit: Unit = Unit.CELSIUS,
        mode: Literal["short", "long"] = "short",
        tags: list[str] | None = None,
        *,
        session: Session,
    ) -> dict[str, object]:
        """Forecast the weather.

        It looks a week ahead at most.

        Args:
            place: where.
            days: how many days ahead.
        """
        session.calls += 1
        return {"city": place.city, "days": days, "unit": unit.value, "mode": mode, "tags": tags}

    @tool
    def add(self, a: int, b: int = 1) -> int:
        """Add two numbers."""
        return a + b

    @tool
    def broken(self) -> str:
        raise RuntimeError("out of paper")

    async def verify(self, request: VerifyRequest, session: Session) -> Verdict:
        return Verdict(reward=float(session.calls))


async def call(host: ServerRunner, name: str, arguments: object, session: str | None = None):
    return await host.dispatch(Call(f"tools/{name}", orjson.dumps(arguments), session))


def test_schema_has_types_defaults_descriptions_and_no_session() -> None:
    described = Office.tools["forecast"].openai()
    assert described["name"] == "forecast"
    assert described["description"] == "Forecast the weather.\n\nIt looks a week ahead at most."
    schema = described["parameters"]
    assert set(schema["properties"]) == {"place", "days", "unit", "mode", "tags"}
    assert schema["required"] == ["place", "days"]
    assert schema["additionalProperties"] is False
    assert schema["properties"]["days"] == {
        "type": "integer", "minimum": 1, "maximum": 7, "description": "how many days ahead.",
    }  # fmt: skip
    assert schema["properties"]["mode"]["enum"] == ["short", "long"]
    assert schema["$defs"]["Unit"]["enum"] == ["celsius", "kelvin"]
    assert schema["$defs"]["Place"]["required"] == ["city"]
    assert {"type": "null"} in schema["properties"]["tags"]["anyOf"]


def test_mcp_entry_has_the_same_schema() -> None:
    spec = Office.tools["add"]
    assert spec.mcp() == {"name": "add", "description": "Add two numbers.", "inputSchema": spec.parameters}


async def test_arguments_become_python_values() -> None:
    reply = await call(
        ServerRunner(Office()), "forecast", {"place": {"city": "Oslo"}, "days": 2, "unit": "kelvin"}
    )
    assert reply.json() == {"city": "Oslo", "days": 2, "unit": "kelvin", "mode": "short", "tags": None}


async def test_sync_tools_work_too() -> None:
    assert (await call(ServerRunner(Office()), "add", {"a": 2})).json() == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "place: Field required; days: Field required"),
        ({"place": {"city": "Oslo"}, "days": 9}, "days"),
        ({"place": "Oslo", "days": "many"}, "place"),
        ([], "arguments"),
        (None, "arguments"),
    ],
)
async def test_bad_arguments_are_refused_with_every_problem(arguments: object, said: str) -> None:
    reply = await call(ServerRunner(Office()), "forecast", arguments)
    assert reply.status == 422
    error = orjson.loads(reply.body)["error"]
    assert error["code"] == "invalid_request"
    assert said in error["message"]


async def test_arguments_that_a_tool_does_not_have_are_left_out() -> None:
    host = ServerRunner(Office())
    made_up = {"place": {"city": "Oslo"}, "days": 1, "session": {"calls": 9}, "self": 1, "wind": "W"}
    reply = await call(host, "forecast", made_up)
    assert reply.json()["city"] == "Oslo"
    assert host.server.sessions.get(reply.session).state.calls == 1


async def test_a_class_may_refuse_them() -> None:
    class Strict(Office):
        extra_arguments = "forbid"

    assert Strict.tools["add"].parameters == Office.tools["add"].parameters
    reply = await call(ServerRunner(Strict()), "add", {"a": 1, "c": 2, "d": 3})
    assert reply.status == 422
    assert orjson.loads(reply.body)["error"]["message"] == (
        "invalid arguments: c: Extra inputs are not permitted; d: Extra inputs are not permitted"
    )
    assert (await call(ServerRunner(Strict()), "add", {"a": 1})).json() == 2


async def test_a_tool_that_breaks_says_so() -> None:
    reply = await call(ServerRunner(Office()), "broken", {})
    error = orjson.loads(reply.body)["error"]
    assert (reply.status, error["code"]) == (422, "tool_failed")
    assert "RuntimeError: out of paper" in error["message"]


async def test_a_time_out_of_its_own_is_a_failure_like_any_other() -> None:
    """Of the tool, or of the verifier: the deadline of the call itself has not passed."""

    class Slow(ResourcesServer):
        @tool
        async def look(self) -> str:
            return await asyncio.wait_for(asyncio.sleep(60, "there"), 0.01)

        async def verify(self, request: VerifyRequest) -> Verdict:
            raise TimeoutError("the grader did not answer")

    host = ServerRunner(Slow())
    reply = await call(host, "look", {})
    assert (reply.status, orjson.loads(reply.body)["error"]["code"]) == (422, "tool_failed")
    reply = await host.dispatch(Call("verify", b'{"response": {"output": []}}'))
    error = orjson.loads(reply.body)["error"]
    assert (reply.status, error["code"]) == (503, "unavailable")
    assert "the grader did not answer" in error["message"]


async def test_an_unknown_tool_names_the_nearest_and_no_route() -> None:
    reply = await call(ServerRunner(Office()), "forcast", {})
    assert reply.status == 404
    assert "did you mean 'forecast'" in orjson.loads(reply.body)["error"]["message"]
    assert "seed_session" not in reply.body.decode()


@pytest.mark.parametrize("kind", [dict, int, Any, BaseModel])
def test_no_model_supplies_the_row(kind: Any) -> None:
    def look(self: Any, row: Any) -> str:
        return "seen"

    look.__annotations__["row"] = kind
    with pytest.raises(TypeError, match=r"Peeking\.look: argument `row` would come from the model"):
        type("Peeking", (ResourcesServer,), {"look": tool(look)})


def test_a_tool_without_types_is_an_error_where_it_is_written() -> None:
    with pytest.raises(TypeError, match=r"Untyped\.look: argument `x` needs a type annotation"):

        class Untyped(ResourcesServer):
            @tool
            def look(self, x):
                return x


@pytest.mark.parametrize("name", ["verify", "seed_session", "close_session", "reverify_mode"])
def test_no_tool_can_take_the_name_of_a_route(name: str) -> None:
    def method(self: object) -> str:
        return ""

    with pytest.raises(TypeError, match=name):
        type("Clash", (ResourcesServer,), {name: tool(method)})


def test_tools_are_inherited_and_can_be_overridden() -> None:
    class Branch(Office):
        @tool
        def add(self, a: int) -> int:
            return a

        @tool
        def extra(self) -> None: ...

    assert set(Branch.tools) == {"forecast", "add", "broken", "extra"}
    assert set(Branch.tools["add"].parameters["properties"]) == {"a"}
    assert set(Office.tools) == {"forecast", "add", "broken"}
