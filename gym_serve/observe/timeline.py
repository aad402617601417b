"""`Recorder`: records the timeline of a rollout while it runs (docs/formats.md, Timeline).

It costs a clock reading and a small list per step: what a step holds is known when it ends, and is written as
the rollout has it.

An agent has a recorder for each episode. An environment has one for each session, for the calls of judges
and other models, and hands its steps to the agent with each reply (`take`, `take_notes`). A server tells with
each reply what only it knows (its replica, the endpoint), in `Reply.notes`.

What the policy was asked and answered is in the rollout's response. What a judge was asked and answered would
be nowhere, so the recorder of an environment keeps both as texts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import orjson

from gym_serve.types.protocols.content import content_text

Json = dict[str, Any]

REPLICA = "replica"
"""Note of a reply: the replica that answered."""
QUEUED = "queued"
"""Note: microseconds that the call waited for its turn there."""
OCCUPIED = "occupied"
"""Note: seconds that the call waited for another call of its own session."""
ENDPOINT = "endpoint"
"""Note of a model: the URL of the endpoint that answered."""
RETRIES = "retries"
"""Note of a model: requests to endpoints that failed before."""
TTFT = "ttft"
"""Note of a model: microseconds until the first token."""
USAGE = "usage"
"""Note of a model, for its own metrics: the usage of an answer that came as a stream."""
TIMELINE = "timeline"
"""Note of an agent: the timeline of the rollout in its reply, as JSON has it."""
MODEL_CALLS = "model_calls"
"""Note of an environment: the model calls that it made; see `Recorder.take`."""

_BEGINS_AT, _SERVER_AT = 1, 4
"""Positions in a step."""
_NO_TOKENS = (None, None, None)
_FINISH = {"max_output_tokens": "length"}
_LONGEST = 64  # characters of a name that a backend wrote
_LONGEST_TEXT = 100_000  # characters of a prompt or an answer


def microseconds(seconds: float) -> int:
    """The unit of timelines."""
    return int(seconds * 1e6)


class Recorder:
    """Records steps.

    Args:
        began: `time.monotonic` moment from which steps are timed.
        texts: whether the steps of model calls have the prompt and the answer.

    Attributes:
        steps: the steps so far, as a rollout has them (docs/formats.md).
        text_size: characters of the prompts and answers of judges, as an environment has told them.
    """

    __slots__ = ("_began", "_endpoints", "_queued", "_servers", "_texts", "steps", "text_size")

    def __init__(self, began: float = 0.0, *, texts: bool = False) -> None:
        self.steps: list[list[Any]] = []
        self.text_size = 0
        self._began = began
        self._texts = texts
        self._queued = 0
        self._servers: dict[str, int] = {}
        self._endpoints: dict[str, int] = {}

    def server(self, place: str) -> int:
        """The index of a server. ``place``: its name, with the replica after ``/`` if that is known."""
        return self._servers.setdefault(place, len(self._servers))

    def add(self, kind: str, begun: float, server: int, columns: tuple[Any, ...], status: int) -> None:
        """Record a step that ends now, other than a model call. ``begun``: `time.monotonic` moment of its
        beginning."""
        ended = time.monotonic()
        start, duration = int((begun - self._began) * 1e6), int((ended - begun) * 1e6)
        step = [kind, start, duration, self._queued, server, *columns]
        if status != 200:
            step.append({"status": status})
        self._queued = 0
        self.steps.append(step)

    def add_model_call(
        self,
        stage: str,
        begun: float,
        server: str,
        answer: Any,
        *,
        request: Any = None,
        status: int = 200,
        tokens: tuple[int, int, int] | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        """Record a model call that ends now. ``begun``: `time.monotonic` moment of its beginning; ``answer``:
        its decoded body: a Response, a ChatCompletion, or anything else; None if it failed; ``tokens``: of
        the prompt, those of them that were cached, and of the answer; None if unknown."""
        ended = time.monotonic()
        finish: str | None = None
        few: Json = {}
        if type(answer) is dict:
            finish, version = _ending(answer)
            if version is not None:
                few["version"] = str(version)[:_LONGEST]
        if stage != "model" or status != 200 or self._texts:
            few |= self._of_few(stage, status, request, answer)
        place, queued = server, 0
        for key, value in notes.items() if notes else ():
            if key == REPLICA:
                place = f"{server}/{value}"
            elif key == QUEUED:
                queued = value
            elif key == ENDPOINT:
                few[ENDPOINT] = self._endpoints.setdefault(value, len(self._endpoints))
            elif key in (TTFT, RETRIES):
                few[key] = value
        index = self._servers.setdefault(place, len(self._servers))
        start, duration = int((begun - self._began) * 1e6), int((ended - begun) * 1e6)
        prompt, cached, sampled = tokens or _NO_TOKENS
        step = ["model", start, duration, queued, index, prompt, cached, sampled, finish]
        if few:
            step.append(few)
        self.steps.append(step)

    def _of_few(self, stage: str, status: int, request: Any, answer: Any) -> Json:
        """What only calls of an environment have, and those that failed."""
        few: Json = {}
        if stage != "model":
            few["stage"] = stage
        if status != 200:
            few["status"] = status
        if self._texts:
            few["prompt"] = _kept(_prompt_of(request))
            if answer is not None:
                few["answer"] = _kept(_answer_of(answer))
        return few

    def take(self) -> Json:
        """The steps so far, for `take_notes` in another process; they are forgotten here."""
        taken: Json = {
            "age": microseconds(time.monotonic() - self._began),
            "servers": list(self._servers),
            "endpoints": list(self._endpoints),
            "steps": self.steps,
        }
        self.steps, self._servers, self._endpoints = [], {}, {}
        return taken

    def take_notes(self, notes: Mapping[str, Any]) -> None:
        """Record what an environment tells with its reply: of the next step that is added, and its calls."""
        self._queued = notes.get(QUEUED, 0)
        if MODEL_CALLS in notes:
            self._merge(notes[MODEL_CALLS])

    def _merge(self, taken: Any) -> None:
        """Add the steps of another recorder, which were taken now."""
        shift = microseconds(time.monotonic() - self._began) - taken["age"]
        servers = [self._servers.setdefault(name, len(self._servers)) for name in taken["servers"]]
        endpoints = [self._endpoints.setdefault(name, len(self._endpoints)) for name in taken["endpoints"]]
        for step in taken["steps"]:
            step[_BEGINS_AT] += shift
            step[_SERVER_AT] = servers[step[_SERVER_AT]]
            more = step[-1]
            if type(more) is dict:
                if ENDPOINT in more:
                    more[ENDPOINT] = endpoints[more[ENDPOINT]]
                self.text_size += len(more.get("prompt", "")) + len(more.get("answer", ""))
            self.steps.append(step)

    def to_json(self, agent: str, notes: Mapping[str, Any], wall: float, now: float) -> Json:
        """The timeline of a rollout. ``now``: `time.monotonic` moment of the end."""
        timeline: Json = {
            "began": wall,
            "dur": int((now - self._began) * 1e6),
            "agent": f"{agent}/{notes[REPLICA]}" if REPLICA in notes else agent,
            "servers": list(self._servers),
            "steps": self.steps,
        }
        if QUEUED in notes:
            timeline[QUEUED] = notes[QUEUED]
        if self._endpoints:
            timeline["endpoints"] = list(self._endpoints)
        return timeline


def _ending(answer: Json) -> tuple[str | None, Any]:
    """Why a model stopped, and the version of its weights, as far as its answer tells."""
    output, version = answer.get("output"), answer.get("weight_version")
    if type(output) is not list:
        return _finish_of_chat(answer), version
    finish = "stop"
    for item in output:
        if type(item) is dict:
            if item.get("type") == "function_call":
                finish = "tool_calls"
            if "weight_version" in item:
                version = item["weight_version"]
    if cut := answer.get("incomplete_details"):
        reason = cut.get("reason") if isinstance(cut, dict) else None
        return (_FINISH.get(reason, reason[:_LONGEST]) if isinstance(reason, str) else None), version
    return finish, version


def _finish_of_chat(answer: Json) -> str | None:
    choices = answer.get("choices")
    if not (isinstance(choices, list) and choices and isinstance(choices[0], dict)):
        return None
    finish = choices[0].get("finish_reason")
    return finish[:_LONGEST] if isinstance(finish, str) else None


def _prompt_of(request: Any) -> str:
    """The text of a request to a model: of its only message, or of each under its role."""
    if not isinstance(request, dict):
        return _as_json(request)
    prompt = request.get("input", request.get("messages"))
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not (
        isinstance(prompt, list) and all(isinstance(item, dict) and "content" in item for item in prompt)
    ):
        return _as_json(request)
    if instructions := request.get("instructions"):
        prompt = [{"role": "system", "content": instructions}, *prompt]
    texts = [(item.get("role"), content_text(item["content"])) for item in prompt]
    return texts[0][1] if len(texts) == 1 else "\n\n".join(f"{role}: {text}" for role, text in texts)


def _answer_of(answer: Any) -> str:
    """The text of an answer; one without a text, such as scores, as JSON."""
    parts: list[Any] = []
    if isinstance(answer, dict):
        output, choices = answer.get("output"), answer.get("choices")
        if isinstance(output, list):
            parts = [item.get("content") for item in output if isinstance(item, dict)]
        elif isinstance(choices, list) and choices and isinstance(choices[0], dict):
            message = choices[0].get("message")
            parts = [message.get("content")] if isinstance(message, dict) else []
        elif "content" in answer:
            parts = [answer["content"]]
    return "".join(map(content_text, parts)) or _as_json(answer)


def _as_json(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except TypeError:  # a lone surrogate, or an integer over 64 bits
        return repr(value)


def _kept(text: str) -> str:
    """A text as every encoder takes it, and no longer than anybody reads."""
    text = text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
