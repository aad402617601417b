import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gym_serve.environments.simple_weather as package
from gym_serve.environments.simple_weather import SimpleWeather, city_key, mentions, weather_in
from gym_serve.testing import TestClient
from gym_serve.types.errors import InvalidRequest

FOLDER = Path(package.__file__).parent


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / name).read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(SimpleWeather()) as client:
        yield client


@pytest.mark.parametrize(
    "row", lines("data/example.jsonl"), ids=lambda row: row["responses_create_params"]["input"][0]["content"]
)
def test_an_oracle_solves_the_example_row(client: TestClient, row: dict[str, Any]) -> None:
    (declared,) = row["responses_create_params"]["tools"]
    offered = client.tools["get_weather"]
    assert {**offered, "parameters": None, "strict": None} == {**declared, "parameters": None, "strict": None}
    assert declared["parameters"]["required"] == offered["parameters"]["required"]

    with client.episode(row) as episode:
        answer = ""
        for city in row.get("verifier_metadata", {}).get("cities", ["Quito"]):
            answer += episode.call("get_weather", city=city)["weather_description"]
        verdict = episode.verify(answer).model_dump()
    assert verdict == {"reward": 1.0, "not_asked": [], "not_reported": []}


def test_sessions_do_not_share_their_calls(client: TestClient) -> None:
    row = {"verifier_metadata": {"cities": ["Paris"]}}
    with client.episode(row) as first, client.episode(row) as second:
        first.call("get_weather", city="Paris")
        answer = " ".join(map(str, weather_in("Paris")))
        assert first.verify(answer).reward == 1.0
        assert second.verify(answer).model_dump()["not_asked"] == ["Paris"]


def test_the_report(client: TestClient) -> None:
    report = client.episode().call("get_weather", city=" Paris ")
    condition, temperature = weather_in("paris")
    assert report == {
        "city": "Paris",
        "weather_description": f"The weather in Paris is {condition}, {temperature} degrees Celsius.",
    }


@pytest.mark.parametrize(
    "arguments", [{}, {"city": ""}, {"city": "  "}, {"city": 5}, {"city": "x" * 101}, {"town": "x"}]
)
def test_arguments_that_are_refused(client: TestClient, arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        client.episode().call("get_weather", **arguments)


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
