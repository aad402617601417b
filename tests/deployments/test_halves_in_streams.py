"""Halves of surrogate pairs in streams: whoever reads one gets whole characters only."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gym_serve.deployments.chat_streams import Whole, joined, response_stream, whole_events
from gym_serve.types.protocols import chat_to_response

JSON = dict[str, Any]
HIGH, LOW, BOTH, NONE = "\ud83d", "\ude00", "\U0001f600", "\ufffd"


def call(index: int, arguments: str) -> JSON:
    return {"index": index, "id": f"call_{index}", "function": {"name": "f", "arguments": arguments}}


STREAMS: dict[str, tuple[list[JSON], list[str]]] = {
    "whole": ([{"content": "a"}, {"content": BOTH}], ["a" + BOTH]),
    "cut": ([{"content": "a" + HIGH}, {"content": LOW + "b"}], ["a" + BOTH + "b"]),
    "cut, with nothing between": ([{"content": HIGH}, {}, {"content": ""}, {"content": LOW}], [BOTH]),
    "the first half alone": ([{"content": "a" + HIGH}, {"content": "b"}], ["a" + NONE + "b"]),
    "the second half alone": ([{"content": LOW + "b"}], [NONE + "b"]),
    "two first halves": ([{"content": HIGH}, {"content": HIGH}, {"content": LOW}], [NONE + BOTH]),
    "a half at the end": ([{"content": "a"}, {"content": HIGH}], ["a" + NONE]),
    "reasoning": ([{"reasoning_content": HIGH}, {"reasoning_content": LOW}], [BOTH]),
    "beside an empty text": ([{"reasoning": HIGH, "content": ""}, {"reasoning": LOW}], [BOTH]),
    "a refusal": ([{"refusal": HIGH}, {"refusal": LOW}], [BOTH]),
    "halves of two texts": ([{"reasoning": "a" + HIGH}, {"content": LOW}], ["a" + NONE, NONE]),
    "an argument": ([{"tool_calls": [call(0, HIGH)]}, {"tool_calls": [call(0, LOW)]}], [BOTH]),
    "a text, then a call": ([{"content": HIGH}, {"tool_calls": [call(0, "{}")]}], [NONE, "{}"]),
    "two calls": ([{"tool_calls": [call(0, HIGH)]}, {"tool_calls": [call(1, LOW)]}], [NONE, NONE]),
}
"""Deltas of a chat stream, and the texts of the items that they are."""


async def _each(items: list[Any]) -> AsyncIterator[Any]:
    for item in items:
        yield item


def _texts(response: JSON) -> list[str]:
    """Of every item; all of them have to be Unicode."""
    json.dumps(response, ensure_ascii=False).encode()
    parts = [
        part for item in response["output"] for part in item.get("summary") or item.get("content") or [item]
    ]
    return [part.get("text") or part.get("refusal") or part.get("arguments") for part in parts]


def _joined_deltas(events: list[JSON]) -> list[str]:
    texts: dict[int, str] = {}
    for event in events:
        json.dumps(event, ensure_ascii=False).encode()
        if isinstance(delta := event.get("delta"), str):
            texts[event["output_index"]] = texts.get(event["output_index"], "") + delta
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return [texts[index] for index in sorted(texts) if texts[index]]


@pytest.mark.parametrize(("deltas", "texts"), STREAMS.values(), ids=STREAMS)
async def test_a_chat_stream(deltas: list[JSON], texts: list[str]) -> None:
    chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in [*deltas, {}]]
    chunks[-1]["choices"][0]["finish_reason"] = "stop"
    *whole, last = [item async for item in joined(_each(chunks))]
    assert isinstance(last, Whole)
    assert _texts(chat_to_response(last.answer, {"model": "m"}, parse_think=False)) == texts
    for chunk in whole:
        json.dumps(chunk, ensure_ascii=False).encode()

    stream = response_stream(
        _each([*whole, last]),
        lambda completion: chat_to_response(completion or {}, {"model": "m"}, parse_think=False),
        {"model": "m"},
        parse_think=False,
    )
    events = [event async for event in stream]
    assert _texts(events[-1]["response"]) == _joined_deltas(events) == texts


@pytest.mark.parametrize(("deltas", "texts"), STREAMS.values(), ids=STREAMS)
async def test_a_stream_of_responses(deltas: list[JSON], texts: list[str]) -> None:
    events: list[JSON] = [{"type": "response.created", "response": {}}]
    places: list[Any] = []
    for delta in deltas:
        for key, value in delta.items():
            for piece in value if isinstance(value, list) else [value]:
                place = key, piece["index"] if isinstance(piece, dict) else None
                if place not in places:
                    places.append(place)
                event = {"type": f"response.{key}.delta", "output_index": places.index(place)}
                text = piece["function"]["arguments"] if isinstance(piece, dict) else piece
                events.append({**event, "sequence_number": 7, "delta": text})
    events.append({"type": "response.output_text.done", "text": deltas[-1].get("content", HIGH)})
    assert _joined_deltas([event async for event in whole_events(_each(events))]) == texts
