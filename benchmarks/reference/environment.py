"""The environment of the reference: sessions in a dictionary."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import FastAPI

from benchmarks.reference import serve
from gym_serve.environments.simple_weather import city_key, mentions, weather_in

app = FastAPI()
sessions: dict[str, list[str]] = {}


@app.post("/seed_session")
async def seed_session(row: dict[str, Any]) -> dict[str, Any]:
    session = uuid.uuid4().hex
    sessions[session] = []
    return {"session": session}


@app.post("/sessions/{session}/get_weather")
async def get_weather(session: str, arguments: dict[str, Any]) -> dict[str, Any]:
    city = arguments["city"]
    sessions[session].append(city_key(city))
    condition, temperature = weather_in(city)
    description = f"The weather in {city} is {condition}, {temperature} degrees Celsius."
    return {"city": city, "weather_description": description}


@app.post("/sessions/{session}/verify")
async def verify(session: str, row: dict[str, Any]) -> dict[str, Any]:
    answer = row["response"]["output"][-1]["content"][0]["text"]
    cities = row["verifier_metadata"]["cities"]
    asked = all(city_key(city) in sessions[session] for city in cities)
    return {"reward": float(asked and all(mentions(answer, weather_in(city)) for city in cities))}


@app.post("/sessions/{session}/close")
async def close(session: str) -> dict[str, Any]:
    sessions.pop(session, None)
    return {}


if __name__ == "__main__":
    serve(app)
