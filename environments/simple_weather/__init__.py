"""`SimpleWeather`: one tool, a session that records its calls, and a verifier that uses both.

Only the session proves that a tool was called. The weather is derived from a hash of the city's name, so it
is the same everywhere, and a model cannot know it without asking.
"""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from gym_serve.servers import ResourcesServer, Response, Verdict, VerifyRequest, tool

City = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=100)]


class WeatherReport(BaseModel):
    """What the tool answers."""

    city: str  # the city as it was asked for
    weather_description: str  # a sentence with the condition and the temperature


class WeatherMetadata(BaseModel):
    """``verifier_metadata`` of a row; further keys are ignored."""

    model_config = ConfigDict(extra="allow")

    cities: Annotated[list[City], Field(min_length=1)] | None = None
    """The cities that the prompt asks about; None if the row does not say."""


class WeatherRequest(VerifyRequest):
    """A weather row with the response to it."""

    verifier_metadata: WeatherMetadata | None = None  # what a right answer has to tell


class WeatherVerdict(Verdict):
    """The reward, and the row's cities that it failed on."""

    not_asked: list[str]  # cities for which the tool was not called
    not_reported: list[str]  # cities whose condition or temperature the final answer lacks


class SimpleWeather(ResourcesServer):
    """Questions about the weather: reward 1.0 for asking the tool and telling what it said."""

    reverify_mode: ClassVar[Literal["unsupported"]] = "unsupported"
    restorable: ClassVar[bool] = True

    class Session(BaseModel):
        asked: list[str] = []  # keys of the cities that `get_weather` was called for, each once

    @tool
    async def get_weather(self, city: City, session: Session) -> WeatherReport:
        """Get the current weather of a city.

        Args:
            city: Name of the city, e.g. "Paris".
        """
        if (key := city_key(city)) not in session.asked:
            session.asked.append(key)
        condition, temperature = weather_in(city)
        description = f"The weather in {city} is {condition}, {temperature} degrees Celsius."
        return WeatherReport(city=city, weather_description=description)

    async def verify(self, request: WeatherRequest, session: Session) -> WeatherVerdict:
        """Check the calls and the final answer: for all of the row's cities, or for any city at all."""
        answer = _final_answer(request.response)
        cities = request.verifier_metadata.cities if request.verifier_metadata else None
        if cities is None:
            reason = None if session.asked else "the tool was not asked"
            reason = reason if answer.strip() else "there is no final answer"
            return WeatherVerdict(reward=float(reason is None), reason=reason, not_asked=[], not_reported=[])
        not_asked = [city for city in cities if city_key(city) not in session.asked]
        not_reported = [city for city in cities if not mentions(answer, weather_in(city))]
        faults = {"not asked for: ": not_asked, "not in the final answer: the weather in ": not_reported}
        reason = "; ".join(what + ", ".join(cities) for what, cities in faults.items() if cities) or None
        reward = float(reason is None)
        return WeatherVerdict(reward=reward, reason=reason, not_asked=not_asked, not_reported=not_reported)


def _final_answer(response: Response) -> str:
    # A message before the last call may announce an answer, but is not one.
    if response.messages and response.output[-1] is response.messages[-1]:
        return response.last_text
    return ""


_CONDITIONS = (("snowy", 0), ("foggy", 4), ("rainy", 8), ("windy", 12), ("cloudy", 16), ("sunny", 22))
_TEMPERATURES = 10


class Weather(NamedTuple):
    """The weather of one city."""

    condition: str  # one English word
    temperature: int  # degrees Celsius, never below 0


def city_key(city: str) -> str:
    """What identifies a city: its name without case, extra white space, and what follows a comma."""
    return " ".join(city.partition(",")[0].casefold().split())


def weather_in(city: str) -> Weather:
    """The weather of a city; any name has one."""
    digest = hashlib.sha256(city_key(city).encode("utf-8", "replace")).digest()
    condition, lowest = _CONDITIONS[digest[0] % len(_CONDITIONS)]
    return Weather(condition, lowest + digest[1] % _TEMPERATURES)


def mentions(text: str, weather: Weather) -> bool:
    """Whether ``text`` holds the condition as a word and the temperature as a number of its own."""
    number = rf"(?<![\d−-])(?<!\d[.,]){weather.temperature}(?![.,]?\d)"
    return (
        re.search(rf"\b{weather.condition}\b", text, re.IGNORECASE) is not None
        and re.search(number, text) is not None
    )
