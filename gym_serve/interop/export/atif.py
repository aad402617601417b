"""ATIF: the Agent Trajectory Interchange Format of Harbor (RFC 0001), one JSON file a rollout.

A step is a message of the system or the user, or one model call with its tool calls, what they
returned, and its tokens. Nothing is left out: failed rollouts are trajectories as well (``extra`` holds
the reward, the failure and every further key of the rollout), and what has no field of its own is in
the ``extra`` of its step: arguments that are no JSON object, and media that are not at a URL. The branches
of a harness's rollout are ``subagent_trajectories``, each a trajectory of its own.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from gym_serve.interop.export.conversation import Step, decoded_arguments, prompt_messages, steps, tools_of
from gym_serve.interop.export.rollout import Rollout
from gym_serve.types.requests import JSON

__all__ = ["atif_trajectory"]

_VERSION = "ATIF-v1.7"  # the first with every field that is used here
_SOURCES = {"system": "system", "developer": "system", "user": "user", "assistant": "agent"}
_IMAGES = {ending: f"image/{ending}" for ending in ("png", "jpeg", "gif", "webp")} | {"jpg": "image/jpeg"}


def atif_trajectory(rollout: Rollout) -> JSON:
    """A rollout as an ATIF trajectory.

    Raises:
        NotExportable: an item that chat has no form for, or malformed tokens.
    """
    # Harbor keeps steps of the prompt apart from the agent's own: they are not to be trained on.
    given = [_copied(made) for made in _steps([Step(message) for message in prompt_messages(rollout)])]
    made = given + _steps(steps(rollout))
    numbered = [{"step_id": number, **step} for number, step in enumerate(made, 1)]
    agent = {"name": rollout.agent, "version": "unknown", "model_name": rollout.model}
    trajectory = {
        "schema_version": _VERSION,
        "session_id": rollout.id,
        "trajectory_id": rollout.id,
        "agent": _present({**agent, "tool_definitions": tools_of(rollout) or None}),
        "steps": numbered,
        "final_metrics": {**_usage(rollout.response.get("usage")), "total_steps": len(numbered)},
        "extra": rollout.extras,
    }
    if branches := [atif_trajectory(branch) for branch in rollout.conversations() if branch is not rollout]:
        trajectory["subagent_trajectories"] = branches
    return trajectory


def _steps(messages: list[Step]) -> list[JSON]:
    made: list[JSON] = []
    for step in messages:
        if step.message["role"] != "tool":
            made.append(_step(step))
            continue
        # Results belong to the step that made the calls; an orphan's step is the system's.
        if not made or (made[-1]["source"] != "agent" and "observation" not in made[-1]):
            made.append({"source": "system", "message": ""})
        results = made[-1].setdefault("observation", {"results": []})["results"]
        results.append(_result(step.message, made[-1]))
    return made


def _step(step: Step) -> JSON:
    message = step.message
    content, media = _content(message["content"])
    made: JSON = {"source": _SOURCES[message["role"]], "message": content}
    if message.get("reasoning_content"):
        made["reasoning_content"] = message["reasoning_content"]
    if message.get("tool_calls"):
        made["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    if step.tokens is not None:
        made["llm_call_count"] = 1
        made["metrics"] = {
            "prompt_tokens": len(step.tokens.prompt),
            "completion_tokens": len(step.tokens.generation),
            "prompt_token_ids": step.tokens.prompt,
            "completion_token_ids": step.tokens.generation,
            "logprobs": step.tokens.logprobs,
        }
    if media:
        made["extra"] = {"media": media}
    return made


def _copied(step: JSON) -> JSON:
    return {**step, "is_copied_context": True} if step["source"] == "agent" else step


def _call(call: JSON) -> JSON:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    decoded = decoded_arguments(arguments)
    made: JSON = {"tool_call_id": call["id"], "function_name": name}
    if isinstance(decoded, dict):
        return {**made, "arguments": decoded}
    return {**made, "arguments": {}, "extra": {"raw_arguments": arguments}}


def _result(message: JSON, step: JSON) -> JSON:
    content, media = _content(message["content"])
    made: JSON = {"content": content}
    extra: JSON = {"media": media} if media else {}
    call_id = message["tool_call_id"]
    if any(call["tool_call_id"] == call_id for call in step.get("tool_calls", ())):
        made["source_call_id"] = call_id
    else:
        extra["tool_call_id"] = call_id
    return {**made, "extra": extra} if extra else made


def _content(content: Any) -> tuple[Any, list[JSON]]:
    """A message's content in ATIF, and the media that it has no place for."""
    if not isinstance(content, list):
        return content or "", []
    parts, media = [], []
    for part in content:
        kind = _image_type(part)
        if part["type"] == "text":
            parts.append({"type": "text", "text": part["text"]})
        elif kind:
            source = {"media_type": kind, "path": part["image_url"]["url"]}
            parts.append({"type": "image", "source": source})
        else:
            media.append(part)
    return parts, media


def _image_type(part: JSON) -> str | None:
    """The MIME type of an image at a URL, where its name shows one that ATIF knows."""
    if part["type"] != "image_url" or "://" not in part["image_url"]["url"]:
        return None
    try:
        path = urlsplit(part["image_url"]["url"]).path
    except ValueError:
        return None
    return _IMAGES.get(path.rpartition(".")[2].lower())


def _usage(usage: Any) -> JSON:
    """Final metrics from the usage of a Response, summed over its calls."""
    usage = usage if isinstance(usage, dict) else {}
    details = usage.get("input_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    totals = {
        "total_prompt_tokens": usage.get("input_tokens"),
        "total_completion_tokens": usage.get("output_tokens"),
        "total_cached_tokens": cached,
    }
    return {key: value for key, value in totals.items() if type(value) is int}


def _present(values: JSON) -> JSON:
    return {key: value for key, value in values.items() if value is not None}
