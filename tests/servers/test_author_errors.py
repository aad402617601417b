"""What an author's mistake becomes: a typed failure that names the file and line of the author's code."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel
from support.author import Careless, CarelessAgent, CarelessModel, Exiting

from gym_serve import (
    AgentFailed,
    AgentServer,
    CompareFailed,
    GymError,
    InvalidRequest,
    ModelFailed,
    ResourcesServer,
    Response,
    SeedFailed,
    Unavailable,
    Verdict,
    VerifyFailed,
    tool,
)
from gym_serve.servers import Call, ServerRunner
from gym_serve.testing import TestClient
from gym_serve.types.rows import with_prompt

RESPONSE = {"output": []}


@pytest.mark.parametrize(
    ("mistake", "failure", "said"),
    [
        ("seed", SeedFailed, r"`seed` of Careless failed at .*author\.py:\d+ in seed: KeyError: 'opening'"),
        ("helper", VerifyFailed, r"author\.py:\d+ in _score: ZeroDivisionError"),
        ("library", VerifyFailed, r"author\.py:\d+ in verify: JSONDecodeError"),
        (
            "nothing",
            VerifyFailed,
            r"author\.py:\d+: ValueError: it must return a number or a Verdict, got NoneType",
        ),
        ("nan", VerifyFailed, r"author\.py:\d+: ValidationError: .*finite"),
        ("exits", VerifyFailed, r"author\.py:\d+ in verify: RuntimeError: it raised SystemExit: 3"),
        ("stops", VerifyFailed, r"author\.py:\d+ in verify: RuntimeError: it raised StopIteration"),
        ("unspeakable", VerifyFailed, r"author\.py:\d+ in verify: _Unspeakable: its text cannot be made"),
    ],
)
def test_a_mistake_is_named_with_its_line_and_is_terminal(
    mistake: str, failure: type[Exception], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with TestClient(Careless()) as client, caplog.at_level(logging.ERROR, "gym_serve"):
        with pytest.raises(failure, match=f"(?s){said}") as caught:
            client.episode(mistake=mistake).verify()
        assert caught.value.retryable is False  # type: ignore[attr-defined]
        assert caught.value.server == "Careless"  # type: ignore[attr-defined]
    (record,) = caplog.records
    assert record.exc_info is not None  # the replica's log has the traceback


@pytest.mark.parametrize(
    ("mistake", "failure", "said"),
    [
        ("exits", VerifyFailed, r"author\.py:\d+ in verify: RuntimeError: it raised SystemExit: 3"),
        ("number", SeedFailed, r"author\.py:\d+: TypeError: it must return a mapping or None, got int"),
        pytest.param(
            "cancels",
            VerifyFailed,
            r"author\.py:\d+ in verify: RuntimeError: it raised CancelledError",
            marks=pytest.mark.skipif(
                sys.version_info < (3, 11), reason="a task does not say who cancelled it"
            ),
        ),
    ],
)
def test_a_coroutine_ends_its_call_alone(mistake: str, failure: type[Exception], said: str) -> None:
    with TestClient(Exiting()) as client, pytest.raises(failure, match=said):
        client.episode(mistake=mistake).verify()


def test_a_session_without_defaults_is_refused_where_it_is_defined() -> None:
    with pytest.raises(
        TypeError, match=r"test_author_errors\.py:\d+: Needing.Session: user must have defaults"
    ):

        class Needing(Careless):
            class Session(BaseModel):
                user: str


async def test_a_verdict_sets_neither_the_rollout_nor_its_failure() -> None:
    class Meddling(CarelessAgent):
        async def act(self, episode: Any) -> None:
            pass

        async def verdict(self, episode: Any) -> Any:
            return {"reward": 1.0, "failure": {"kind": "x"}, "_ng_task_index": 7}

    body = b'{"prompt": "go", "_ng_task_index": 2}'
    rollout = (await ServerRunner(Meddling.over(Careless())).dispatch(Call("run", body))).json()
    assert (rollout["reward"], rollout["_ng_task_index"]) == (1.0, 2)
    assert "failure" not in rollout


@pytest.mark.parametrize("mistake", ["busy"])
def test_what_the_author_raises_on_purpose_keeps_its_meaning(mistake: str) -> None:
    with TestClient(Careless()) as client, pytest.raises(Unavailable, match="the judge is down"):
        client.episode(mistake=mistake).verify()


@pytest.mark.parametrize(("rewards", "said"), [([1.0], "must return 2 rewards"), ("x", "ValidationError")])
def test_compare(rewards: Any, said: str) -> None:
    class Comparing(Careless):
        async def compare(self, request: Any) -> Any:
            return {"rewards": rewards}

    with TestClient(Comparing()) as client:
        body = {"conversation_history": [], "response_objs": [RESPONSE, RESPONSE]}
        with pytest.raises(CompareFailed, match=said):
            client.call("compare", body).json()


async def test_an_agent() -> None:
    row = {"responses_create_params": {"input": "go"}}
    reply = await ServerRunner(CarelessAgent.over(Careless())).dispatch(Call("run", b'{"prompt": "go"}'))
    failure = reply.json()["failure"]
    assert (failure["kind"], failure["retryable"]) == (AgentFailed.code, False)
    assert "author.py" in failure["detail"]
    assert "in act: IndexError" in failure["detail"]
    assert reply.json()["_ng_failure_terminal"] is True
    assert reply.json()["responses_create_params"] == row["responses_create_params"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("op", ["v1/responses", "v1/chat/completions", "v1/messages"])
async def test_a_model(op: str, stream: bool) -> None:
    messages = [{"role": "user", "content": "hi"}]
    key = "input" if op == "v1/responses" else "messages"
    call = Call(op, json.dumps({key: messages, "max_tokens": 9, "stream": stream}).encode())

    async def failure(**settings: Any) -> GymError:
        host = ServerRunner(CarelessModel(name="faq", **settings))
        try:
            if stream:
                async for _ in host.stream(call):
                    pytest.fail("it has no event")
            (await host.dispatch(call)).json()
        except GymError as error:
            return error
        return GymError("none")

    mistake = await failure()
    assert (type(mistake), mistake.server) == (ModelFailed, "faq")
    said = r"`chat_completions` of faq failed at .*author\.py:\d+ in chat_completions: TypeError: unsupp"
    assert re.match(said, mistake.message)
    assert type(await failure(lost=True)) is Unavailable


def test_a_class_without_verify_is_refused_where_it_is_defined() -> None:
    with pytest.raises(TypeError, match=r"test_author_errors\.py:\d+: Forgetful must define `verify`"):

        class Forgetful(ResourcesServer):
            pass


def test_an_unknown_parameter_of_verify_is_refused_where_it_is_defined() -> None:
    with pytest.raises(TypeError, match=r"errors\.py:\d+: Odd\.verify: unknown parameter `answer`"):

        class Odd(ResourcesServer):
            def verify(self, row: Any, answer: str) -> float:
                return 0.0


def test_an_agent_without_act_is_refused_where_it_is_defined() -> None:
    with pytest.raises(TypeError, match=r"test_author_errors\.py:\d+: Idle must define `act`"):

        class Idle(AgentServer):
            pass


class Opaque:
    """A type that pydantic has no schema for."""


@pytest.mark.parametrize(
    ("hints", "said"),
    [
        ({"x": Opaque}, "argument `x` is of type .*Opaque"),
        ({"x": Callable[[], int]}, "argument `x` is of type .*Callable"),
        ({"x": int, "return": Opaque}, "its result is of type .*Opaque"),
        ({"x": "Nowhere"}, "name 'Nowhere' is not defined"),
        ({}, "argument `x` needs a type annotation"),
    ],
)
def test_a_tool_that_cannot_be_described_is_refused_with_its_line(hints: dict[str, Any], said: str) -> None:
    def look(self: Any, x: Any) -> Any:
        return x

    look.__annotations__ = hints
    with pytest.raises(TypeError, match=rf"test_author_errors\.py:\d+: .*Curious\.look: {said}"):
        type("Curious", (Account,), {"look": tool(look)})


def test_a_wrong_annotation_of_seed_is_refused_with_its_line() -> None:
    with pytest.raises(TypeError, match=r"errors\.py:\d+: Odd\.seed: name 'Nowhere' is not defined"):

        class Odd(Account):
            async def seed(self, row: Nowhere, session: Any) -> None: ...  # type: ignore[name-defined]  # noqa: F821


class Account(ResourcesServer):
    """The row's own keys are typed once, and read in seed, a tool and verify."""

    class Row(BaseModel):
        opening: int
        closing: int
        payee: str = "Ada"

    class Session(BaseModel):
        balance: int = 0

    restorable = True

    async def seed(self, row: Row, session: Session) -> None:
        session.balance = row.opening

    @tool
    async def pay(self, amount: int, row: Row, session: Session) -> str:
        """Pay the payee."""
        session.balance -= amount
        return f"Paid {amount} to {row.payee}."

    async def verify(self, row: Row, response: Response, session: Session) -> bool:
        return session.balance == row.closing and bool(response.last_text)


def test_the_row_is_typed_in_seed_tools_and_verify() -> None:
    with TestClient(Account()) as client:
        assert list(client.tools["pay"]["parameters"]["properties"]) == ["amount"]
        with client.episode(opening=9, closing=5, payee="Bob") as episode:
            assert episode.call("pay", amount=4, row={"payee": "Eve"}) == "Paid 4 to Bob."
            assert [episode.verify("Done").reward, episode.verify("").reward] == [1.0, 0.0]
        with pytest.raises(InvalidRequest, match=r"closing: Field required; payee: .*valid string"):
            client.episode(opening=9, payee=1)
        with pytest.raises(InvalidRequest, match="/seed_session first"):
            client.call("tools/pay", {"amount": 1}).json()


def test_the_row_goes_with_a_session_to_another_replica() -> None:
    import base64

    with TestClient(Account()) as one, TestClient(Account(replica="other")) as other:
        seeded = one.call("seed_session", {"opening": 9, "closing": 5, "payee": "Bob"})
        assert seeded.state is not None
        moved = other.call("restore_session", {"state": base64.b64encode(seeded.state).decode()})
        assert other.call("tools/pay", {"amount": 4}, session=moved.session).json() == "Paid 4 to Bob."


def test_numbers_of_any_library_are_rewards() -> None:
    numpy = pytest.importorskip("numpy")

    class Half(ResourcesServer):
        def verify(self) -> Any:
            return numpy.float32(0.5)

    with TestClient(Half()) as client:
        verdict = client.episode().verify()
    assert isinstance(verdict, Verdict)
    assert verdict.reward == 0.5


@pytest.mark.parametrize(
    ("row", "given"),
    [
        ({"prompt": "Hi"}, "Hi"),
        ({"prompt": [{"role": "user", "content": "Hi"}]}, [{"role": "user", "content": "Hi"}]),
        ({"prompt": "Hi", "responses_create_params": {"input": "Ho"}}, "Ho"),
    ],
)
def test_a_row_may_be_a_prompt(row: dict[str, Any], given: Any) -> None:
    made = with_prompt(row)
    assert made["responses_create_params"]["input"] == given
    assert made["prompt"] == row["prompt"]


def test_a_prompt_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="`prompt` must be a text or a list of messages, got int"):
        with_prompt({"prompt": 5})
