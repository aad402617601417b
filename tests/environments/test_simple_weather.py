import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gym_serve.environments.simple_weather as package
from gym_serve.environments.simple_weather import SimpleWeather, city_key, mentions, weather_in
from gym_serve.servers import Call, Reply, ServerRunner
from gym_serve.types.errors import GymError, InvalidRequest

FOLDER = Path(package.__file__).parent


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / name).read_text("utf-8").splitlines()]


class Episode:
    """One session of an environment."""

    def __init__(self) -> None:
        self.host = ServerRunner(SimpleWeather())
        self.session: str | None = None

    async def call(self, op: str, body: Any) -> Any:
        reply: Reply = await self.host.dispatch(Call(op, json.dumps(body).encode(), self.session))
        self.session = reply.session
        return reply.json()


async def verify(case: dict[str, Any]) -> Any:
    episode = Episode()
    await episode.call("seed_session", case["row"])
    for call in case["calls"]:
        await episode.call(f"tools/{call['name']}", call["arguments"])
    return await episode.call("verify", {**case["row"], "response": {"output": case["output"]}})


@pytest.mark.parametrize("case", lines("fixtures.jsonl"), ids=lambda case: case["name"])
async def test_fixture(case: dict[str, Any]) -> None:
    if case["error"]:
        with pytest.raises(GymError) as caught:
            await verify(case)
        assert caught.value.code == case["error"]
    else:
        assert await verify(case) == {"reward": case["reward"], **case["fields"]}


@pytest.mark.parametrize(
    "row", lines("data/example.jsonl"), ids=lambda row: row["responses_create_params"]["input"][0]["content"]
)
async def test_an_oracle_solves_the_example_row(row: dict[str, Any]) -> None:
    (declared,) = row["responses_create_params"]["tools"]
    offered = SimpleWeather.tools["get_weather"].openai()
    assert {**offered, "parameters": None, "strict": None} == {**declared, "parameters": None, "strict": None}
    assert declared["parameters"]["required"] == offered["parameters"]["required"]

    episode = Episode()
    await episode.call("seed_session", row)
    answer = ""
    for city in row.get("verifier_metadata", {}).get("cities", ["Quito"]):
        report = await episode.call("tools/get_weather", {"city": city})
        answer += report["weather_description"]
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": answer}]}
    verdict = await episode.call("verify", {**row, "response": {"output": [message]}})
    assert verdict == {"reward": 1.0, "not_asked": [], "not_reported": []}


async def test_sessions_do_not_share_their_calls() -> None:
    first, second = Episode(), Episode()
    second.host = first.host
    row = {"verifier_metadata": {"cities": ["Paris"]}}
    for episode in (first, second):
        await episode.call("seed_session", row)
    await first.call("tools/get_weather", {"city": "Paris"})
    message = {"type": "message", "role": "assistant", "content": " ".join(map(str, weather_in("Paris")))}
    body = {**row, "response": {"output": [message]}}
    assert (await first.call("verify", body))["reward"] == 1.0
    assert (await second.call("verify", body))["not_asked"] == ["Paris"]


async def test_the_report() -> None:
    report = await Episode().call("tools/get_weather", {"city": " Paris "})
    condition, temperature = weather_in("paris")
    assert report == {
        "city": "Paris",
        "weather_description": f"The weather in Paris is {condition}, {temperature} degrees Celsius.",
    }


@pytest.mark.parametrize(
    "arguments", [{}, {"city": ""}, {"city": "  "}, {"city": 5}, {"city": "x" * 101}, {"town": "x"}]
)
async def test_arguments_that_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        await Episode().call("tools/get_weather", arguments)


async def test_a_stored_response_cannot_be_scored_again() -> None:
    assert (await ServerRunner(SimpleWeather()).dispatch(Call("reverify_mode"))).json() == "unsupported"


def test_the_weather_never_changes() -> None:
    assert weather_in("Paris") == ("cloudy", 18)
    assert weather_in("Reykjavik") == ("sunny", 31)


@given(st.text())
def test_every_name_has_a_weather_that_its_report_mentions(city: str) -> None:
    weather = weather_in(city)
    assert (
        weather == weather_in(f"  {city.partition(',')[0].upper().lower()} , somewhere") or not city.isascii()
    )
    assert 0 <= weather.temperature <= 31
    assert mentions(f"It is {weather.condition.upper()}, {weather.temperature}°C.", weather)


@given(st.text(), st.text())
def test_a_city_is_known_by_what_stands_before_a_comma(city: str, region: str) -> None:
    assert city_key(f" {city},{region}") == city_key(city)
