"""Verifier fixtures: reading them, and what running them finds wrong with a verifier."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from gym_serve import (
    EnvironmentClient,
    InvalidRequest,
    ModelClient,
    ResourcesServer,
    Unavailable,
    Verdict,
    VerifyRequest,
    tool,
)
from gym_serve.testing import Fixture, FixtureResult, check_fixtures, load_fixtures, missing_kinds

ROW = {"responses_create_params": {"input": "Say yes."}}


def said(text: str) -> list[dict[str, Any]]:
    return [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}]


def case(name: str = "full: yes", text: str = "yes", **expected: Any) -> Fixture:
    if "error" not in expected:
        expected.setdefault("reward", 1.0)
    return Fixture.model_validate({"name": name, "row": ROW, "output": said(text), **expected})


class Yes(ResourcesServer):
    """Reward 1.0 for yes."""

    class Config(ResourcesServer.Config):
        word: str = "yes"

    config: Config

    class Session(BaseModel):
        marks: list[str] = []

    @tool
    async def mark(self, name: str, session: Session) -> str:
        """Mark."""
        session.marks.append(name)
        return name

    async def verify(self, request: VerifyRequest, session: Session) -> Verdict:
        text = request.response.last_text
        if text == "broken":
            raise InvalidRequest("broken")
        if text == "crash":
            raise RuntimeError("crash")
        return Verdict(reward=float(text == self.config.word), marks=session.marks)


async def check(fixture: Fixture, environment: type[ResourcesServer] = Yes, **settings: Any) -> FixtureResult:
    (result,) = await check_fixtures(environment, [fixture], settings, timeout=10)
    return result


@pytest.mark.parametrize(
    "fixture",
    [
        case(),
        case(text="no", reward=0.0),
        case(text="broken", error="invalid_request"),
        case(text="crash", error="verify_failed"),
        case(calls=[{"name": "mark", "arguments": {"name": "a"}}], fields={"marks": ["a"]}),
        case(calls=[{"name": "nope"}, {"name": "mark", "arguments": {}}], fields={"marks": []}),
    ],
    ids=lambda fixture: fixture.output[0]["content"][0]["text"],
)
async def test_what_is_expected_passes(fixture: Fixture) -> None:
    assert (await check(fixture)).problems == ()


@pytest.mark.parametrize(
    ("fixture", "problem"),
    [
        (case(text="no"), "reward: 1.0 was expected, not 0.0"),
        (case(fields={"marks": ["a"]}), "marks: ['a'] was expected, not []"),
        (case(fields={"other": 1}), "other: 1 was expected, not None"),
        (case(text="broken"), "the reward 1.0 was expected, not the error 'invalid_request'"),
        (case(error="invalid_request"), "the error 'invalid_request' was expected, not the reward 1.0"),
        (case(text="crash", error="invalid_request"), "was expected, not the error 'verify_failed'"),
        (case(judge=["unused"]), "the judge was not asked for 1 of its replies"),
    ],
)
async def test_what_differs_is_said(fixture: Fixture, problem: str) -> None:
    result = await check(fixture)
    assert not result.passed
    assert problem in result.problems[0]


async def test_settings() -> None:
    assert (await check(case(text="oui"), word="oui")).passed
    with pytest.raises(InvalidRequest, match="settings of Yes: wrd: unknown setting; did you mean 'word'"):
        await check(case(), wrd="oui")


class Moody(ResourcesServer):
    """Remembers earlier episodes, which a verifier must not."""

    calls = 0

    async def verify(self, request: VerifyRequest) -> Verdict:
        self.calls += 1
        return Verdict(reward=1.0, calls=self.calls)


async def test_a_verdict_that_changes_is_found() -> None:
    result = await check(case(), Moody)
    assert len(result.problems) == 1
    assert result.problems[0].startswith("not deterministic: first {'reward': 1.0, 'calls': 1}, then")


class Asking(ResourcesServer):
    """Asks a model."""

    class Config(ResourcesServer.Config):
        judge: ModelClient
        chat: ModelClient | None = None

    config: Config

    async def verify(self, request: VerifyRequest) -> Verdict:
        response = await self.config.judge.responses({"input": "?"})
        said = response["output"][0]["content"][0]["text"]
        if request.response.last_text == "chat":
            assert self.config.chat is not None
            completion = await self.config.chat.chat_completions({"messages": []})
            said += completion["choices"][0]["message"]["content"]
        if response.get("status") == "failed":
            raise Unavailable("the judge failed")
        return Verdict(reward=float("yes" in said), said=said)


@pytest.mark.parametrize(
    ("fixture", "problems"),
    [
        (case(judge=["yes"], fields={"said": "yes"}), ()),
        (case(judge=[said("no")], reward=0.0), ()),
        (case(text="chat", judge=["no ", "yes"], fields={"said": "no yes"}), ()),
        (case(judge=[{"output": said(""), "status": "failed"}], error="unavailable"), ()),
        (
            case(),
            (
                "the reward 1.0 was expected, not the error 'bad_request'",
                "the fixture's judge has no reply left",
                "the judge was asked more than 0 times",
            ),
        ),
    ],
)
async def test_the_judge_answers_from_the_fixture(fixture: Fixture, problems: tuple[str, ...]) -> None:
    assert (await check(fixture, Asking)).problems == problems


class Nested(ResourcesServer):
    """Needs another environment."""

    class Config(ResourcesServer.Config):
        other: EnvironmentClient

    def verify(self) -> float:
        return 0.0


async def test_other_servers_than_models_have_to_be_given() -> None:
    with pytest.raises(InvalidRequest, match="other: a required setting is missing"):
        await check(case(), Nested)


def test_kinds_come_from_the_name_else_from_what_is_expected() -> None:
    kinds = [
        case("full: x", reward=0.2).kind,
        case("Zero : x", reward=0.0).kind,
        case("adversarial: x").kind,
        case("plain").kind,
        case("plain", reward=0.0).kind,
        case("plain", reward=0.5).kind,
        case("plain", error="invalid_request").kind,
    ]
    assert kinds == ["full", "zero", "other", "full", "zero", "other", "malformed"]
    assert missing_kinds([case()]) == ["zero", "malformed"]


def test_files_with_problems_name_every_line(tmp_path: Path) -> None:
    path = tmp_path / "fixtures.jsonl"
    good = {"name": "full: x", "row": {}, "output": [], "reward": 1.0}
    both = {**good, "error": "x"}
    lines = [json.dumps(line) for line in (good, both, {**good, "rewrad": 1}, {"name": 1})]
    path.write_text("\n".join([*lines, "{"]))
    with pytest.raises(InvalidRequest) as caught:
        load_fixtures(path)
    assert [line.removeprefix(f"{path}:") for line in caught.value.message.splitlines()] == [
        "2: the case: either a reward or an error is expected",
        "3: rewrad: Extra inputs are not permitted",
        "4: name: must be a valid string",
        "4: row: Field required",
        "4: output: Field required",
        "5: not JSON: unexpected end of data at column 2",
    ]
    path.write_text("\n")
    with pytest.raises(InvalidRequest, match="no fixtures"):
        load_fixtures(path)
