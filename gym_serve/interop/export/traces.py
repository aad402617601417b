"""Traces of whole episodes: ATIF trajectories and verifiers traces. Failed rollouts are exported as well.

**ATIF** is the Agent Trajectory Interchange Format of Harbor (RFC 0001), one JSON file a rollout. A step is a
message of the system or the user, or one model call with its tool calls, their results and its tokens.
Nothing is left out: ``extra`` holds what has no field of its own.

**verifiers** (0.4): the ``traces.jsonl`` of a run, one episode with one trace a line. A trace is a graph of
messages, each with the tokens that it adds; the new prompt tokens of a call stand with its assistant message.
A failed rollout is a trace that is not ``ok``; a masked one is not ``trainable``. Trainers skip both.

Invariant of the graph: the tokens on the path from the root to an assistant message are exactly the call's
prompt and generation. If a call's prompt does not continue the path, a branch starts at the last message that
still agrees; the messages after it are repeated on the branch, as given to the model.
"""

from __future__ import annotations

import math
from datetime import datetime, timezone
from typing import Any
from urllib.parse import urlsplit

from gym_serve.interop.export.chat_messages import Step, decoded_arguments, prompt_messages, steps, tools_of
from gym_serve.training.rollout import Bundle, NotExportable, Rollout, number
from gym_serve.types.requests import JSON

_VERSION = "ATIF-v1.7"  # the first with every field that is used here
_SOURCES = {"system": "system", "developer": "system", "user": "user", "assistant": "agent"}
_OF_CALL = (
    *("duration", "queued", "time_to_first_token", "retries"),
    *("server", "replica", "endpoint", "version", "finish_reason"),
)
_IMAGES = {ending: f"image/{ending}" for ending in ("png", "jpeg", "gif", "webp")} | {"jpg": "image/jpeg"}


def atif_trajectory(rollout: Rollout) -> JSON:
    """A rollout as an ATIF trajectory. Raises NotExportable: an item that chat has no form for, or malformed
    tokens.
    """
    began = rollout.timeline.began if rollout.timeline else None
    prompt_steps = _steps(list(map(Step, prompt_messages(rollout))), began)
    for step in prompt_steps:
        if step["source"] == "agent":
            step["is_copied_context"] = True  # Harbor does not train on steps of the prompt
    all_steps = prompt_steps + _steps(steps(rollout), began)
    numbered = [{"step_id": number, **step} for number, step in enumerate(all_steps, 1)]
    agent = {"name": rollout.agent, "version": "unknown", "model_name": rollout.model}
    trajectory = {
        "schema_version": _VERSION,
        "session_id": rollout.id,
        "trajectory_id": rollout.id,
        "agent": _present({**agent, "tool_definitions": tools_of(rollout) or None}),
        "steps": numbered,
        "final_metrics": {**_final_metrics(rollout.response.get("usage")), "total_steps": len(numbered)},
        "extra": rollout.extras,
    }
    if branches := [atif_trajectory(branch) for branch in rollout.conversations() if branch is not rollout]:
        trajectory["subagent_trajectories"] = branches
    return trajectory


def _steps(messages: list[Step], began: float | None) -> list[JSON]:
    atif_steps: list[JSON] = []
    for step in messages:
        if step.message["role"] != "tool":
            atif_steps.append(_step(step, began))
            continue
        # Results belong to the step that made the calls; an orphan's step is the system's.
        if not atif_steps or (atif_steps[-1]["source"] != "agent" and "observation" not in atif_steps[-1]):
            atif_steps.append({"source": "system", "message": ""})
        results = atif_steps[-1].setdefault("observation", {"results": []})["results"]
        results.append(_result(step.message, atif_steps[-1]))
    return atif_steps


def _step(step: Step, began: float | None) -> JSON:
    message = step.message
    content, media = _content(message["content"])
    atif_step: JSON = {"source": _SOURCES[message["role"]], "message": content}
    if began is not None and (step.call or message["role"] != "assistant"):
        moment = datetime.fromtimestamp(began + (step.call.end if step.call else 0.0), timezone.utc)
        atif_step["timestamp"] = moment.isoformat(timespec="microseconds")
    if message.get("reasoning_content"):
        atif_step["reasoning_content"] = message["reasoning_content"]
    if message.get("tool_calls"):
        atif_step["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    if step.tokens is not None or step.call is not None:
        atif_step["llm_call_count"] = 1
        atif_step["metrics"] = _step_metrics(step)
    if media:
        atif_step["extra"] = {"media": media}
    return atif_step


def _step_metrics(step: Step) -> JSON:
    """The tokens of a model call, and in ``extra`` what else its timeline tells."""
    metrics: JSON = {}
    if (call := step.call) is not None:
        metrics = {"prompt_tokens": call.input_tokens, "completion_tokens": call.output_tokens}
        metrics = _present({**metrics, "cached_tokens": call.cached_tokens})
        metrics["extra"] = _present({name: getattr(call, name) for name in _OF_CALL})
    if step.tokens is not None:
        metrics |= {
            "prompt_tokens": len(step.tokens.prompt),
            "completion_tokens": len(step.tokens.generation),
            "prompt_token_ids": step.tokens.prompt,
            "completion_token_ids": step.tokens.generation,
            "logprobs": step.tokens.logprobs,
        }
    return metrics


def _call(call: JSON) -> JSON:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    decoded = decoded_arguments(arguments)
    atif_call: JSON = {"tool_call_id": call["id"], "function_name": name}
    if isinstance(decoded, dict):
        return {**atif_call, "arguments": decoded}
    return {**atif_call, "arguments": {}, "extra": {"raw_arguments": arguments}}


def _result(message: JSON, step: JSON) -> JSON:
    content, media = _content(message["content"])
    result: JSON = {"content": content}
    extra: JSON = {"media": media} if media else {}
    call_id = message["tool_call_id"]
    if any(call["tool_call_id"] == call_id for call in step.get("tool_calls", ())):
        result["source_call_id"] = call_id
    else:
        extra["tool_call_id"] = call_id
    return {**result, "extra": extra} if extra else result


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
            parts.append({"type": "image", "source": {"media_type": kind, "path": part["image_url"]["url"]}})
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


def _final_metrics(usage: Any) -> JSON:
    """Final metrics from the usage of a Response, summed over its calls."""
    usage = usage if isinstance(usage, dict) else {}
    details = usage.get("input_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    totals = {"prompt": usage.get("input_tokens"), "completion": usage.get("output_tokens"), "cached": cached}
    return {f"total_{kind}_tokens": value for kind, value in totals.items() if type(value) is int}


def _present(values: JSON) -> JSON:
    return {key: value for key, value in values.items() if value is not None}


class MessageGraph:
    """A graph in the making: ``tools`` are kept on each root, a node's ``parent`` is an index into ``nodes``,
    and ``timestamp`` is that of the messages that are added from now on.
    """

    def __init__(self, tools: list[JSON], timestamp: float) -> None:
        self.nodes: list[JSON] = []
        self.timestamp = timestamp
        self._tools = tools
        self._path: list[int] = []

    def begin(self) -> None:
        """Begin another conversation, from a root of its own."""
        self._path = []

    def add_sampled(self, message: JSON, tokens: Bundle | None) -> int:
        """A message that the model produced; its index."""
        if tokens is None:
            return self.add(message, sampled=True)
        start = self._agree(tokens.prompt)
        new = tokens.prompt[start:]
        return self.add(
            message,
            sampled=True,
            token_ids=new + tokens.generation,
            mask=[False] * len(new) + [True] * len(tokens.generation),
            logprobs=tokens.logprobs,
        )

    def _agree(self, prompt: list[int]) -> int:
        """Branch where the path leaves ``prompt``; the number of tokens that agree."""
        start = 0
        for place, index in enumerate(self._path):
            ids = self.nodes[index].get("token_ids", [])
            if prompt[start : start + len(ids)] != ids:
                again = [self.nodes[i]["message"] for i in self._path[place:]]
                del self._path[place:]
                for message in again:
                    self.add(message)
                break
            start += len(ids)
        return start

    def add(self, message: JSON, **fields: object) -> int:
        """Add a message, one that the model was given if ``fields`` say nothing else; its index."""
        node: JSON = {"message": message, "timestamp": self.timestamp, **fields}
        if self._path:
            node["parent"] = self._path[-1]
        elif self._tools:
            node["tools"] = self._tools
        self.nodes.append(node)
        self._path.append(len(self.nodes) - 1)
        return self._path[-1]


_TRACE_VERSION = 1
_VERIFIERS = "0.4.0"  # the version whose schema this is
_SAMPLING = {"temperature": "temperature", "top_p": "top_p", "max_output_tokens": "max_tokens"}


def verifiers_episode(rollout: Rollout) -> JSON:
    """A rollout as a verifiers episode. Raises NotExportable: an item or medium that verifiers has no form
    for, malformed tokens, or no reward.
    """
    prompt = [_message(message, {}) for message in prompt_messages(rollout)]
    task: JSON = {"type": "Task", "data": {"id": rollout.task, "prompt": prompt}, "key": rollout.task}
    if rollout.task_index is not None:
        task["data"]["idx"] = rollout.task_index
    trace = _trace(rollout, task)
    return {
        "id": rollout.id,
        "env": {"id": rollout.agent},
        "task": task,
        "group": {"id": rollout.task},
        **{key: trace[key] for key in ("ok", "is_timeout")},
        "errors": [],
        "traces": [trace],
    }


def _trace(rollout: Rollout, task: JSON) -> JSON:
    failed = rollout.failure_class
    tools = [_tool(tool["function"]) for tool in tools_of(rollout)]
    began = rollout.created_at if rollout.timeline is None else rollout.timeline.began
    graph = MessageGraph(tools, began)
    calls: list[JSON] = []
    for conversation in rollout.conversations():
        graph.begin()
        for message in prompt_messages(conversation):
            graph.add(_message(message, {}))
        calls += _add_episode(graph, steps(conversation), conversation, began)
    timed_out = bool(failed and failed.endswith("_timeout"))
    sampling = _present({theirs: number(rollout.params.get(ours)) for ours, theirs in _SAMPLING.items()})
    config = {"model": rollout.model, "sampling": sampling}
    return {
        "version": _TRACE_VERSION,
        "id": rollout.id,
        "verifiers": {"version": _VERIFIERS},
        "task": task,
        "agent": {"config": config, "name": rollout.agent, "trainable": not rollout.masked},
        "tools": tools,
        "nodes": graph.nodes,
        "calls": calls,
        "rewards": _rewards(rollout),
        "metrics": _metrics(rollout),
        "info": {"rollout": rollout.extras, "usage": rollout.response.get("usage")},
        "is_completed": True,
        "ok": not failed,
        "stop_condition": "agent_completed" if not failed else failed if timed_out else "error",
        "is_timeout": timed_out,
        "errors": [_error(rollout)] if failed else [],
        "extra_usage": [],
        "timing": {"start": began},
    }


def _add_episode(graph: MessageGraph, episode: list[Step], rollout: Rollout, began: float) -> list[JSON]:
    calls: list[JSON] = []
    names: dict[str, str] = {}
    for step in episode:
        message = _message(step.message, names)
        if step.call is not None:
            graph.timestamp = began + step.call.end
        if message["role"] != "assistant":
            graph.add(message)
            continue
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        call: JSON = {"node": graph.add_sampled(message, step.tokens), "finish_reason": finish}
        if rollout.model is not None:
            call["model"] = rollout.model
        if step.call is not None:
            call["time"] = {"start": began + step.call.start, "end": began + step.call.end}
        if usage := _usage(step):
            call["usage"] = usage
        calls.append(call)
    details = rollout.response.get("incomplete_details")
    if calls and isinstance(details, dict) and details.get("reason") == "max_output_tokens":
        calls[-1]["finish_reason"] = "length"
    return calls


def _usage(step: Step) -> JSON | None:
    """The usage of a model call; ``prompt_tokens`` are those that no cache answered."""
    call = step.call
    if call is not None and call.input_tokens is not None and call.output_tokens is not None:
        cached = call.cached_tokens or 0
        return {
            "prompt_tokens": max(call.input_tokens - cached, 0),
            "completion_tokens": call.output_tokens,
            "cached_input_tokens": cached,
        }
    if step.tokens is None:
        return None
    return {"prompt_tokens": len(step.tokens.prompt), "completion_tokens": len(step.tokens.generation)}


def _message(message: JSON, names: dict[str, str]) -> JSON:
    """A chat message as verifiers has it; ``names`` collects the tools that were called, by call id."""
    role, content = message["role"], message["content"]
    if role == "assistant":
        calls = [{"id": call["id"], **call["function"]} for call in message.get("tool_calls", ())]
        names.update((call["id"], call["name"]) for call in calls)
        fields = {"role": role, "content": content, "reasoning_content": message.get("reasoning_content")}
        return _present({**fields, "tool_calls": calls or None})
    parts = [_part(part) for part in content] if isinstance(content, list) else content
    if role != "tool":
        return {"role": "user" if role == "user" else "system", "content": parts}
    call_id = message["tool_call_id"]
    fields = {"role": role, "tool_call_id": call_id, "content": parts}
    return fields | _present({"name": names.get(call_id)})


def _part(part: JSON) -> JSON:
    if part["type"] == "text":
        return {"type": "text", "text": part["text"]}
    if part["type"] == "image_url":
        return {"type": "image_url", "image_url": {"url": part["image_url"]["url"]}}
    raise NotExportable("media", f"verifiers has no form for a part of type {part['type']!r}")


def _tool(function: JSON) -> JSON:
    text = function.get("description")
    parameters = function.get("parameters")
    return {
        "name": function["name"],
        "description": text if isinstance(text, str) else "",
        "parameters": parameters if isinstance(parameters, dict) else {},
    }


def _rewards(rollout: Rollout) -> JSON:
    """The components where they add up to the reward, as verifiers adds them; else the reward."""
    if rollout.failure_class:
        return {"reward": None}
    components = rollout.raw.get("reward_components")
    if isinstance(components, dict) and components:
        scores = _present({name: number(score) for name, score in components.items()})
        is_sum = math.isclose(sum(scores.values()), rollout.reward, rel_tol=1e-5, abs_tol=1e-6)
        if len(scores) == len(components) and is_sum:
            return {name: {"score": score} for name, score in scores.items()}
    return {"reward": {"score": rollout.reward}}


def _metrics(rollout: Rollout) -> JSON:
    own = ("reward", "mask_sample")
    values = {n: number(v) for n, v in rollout.extras.items() if n[:1] != "_" and n not in own}
    return _present(values)


def _error(rollout: Rollout) -> JSON:
    failure = rollout.raw.get("failure")
    failure = failure if isinstance(failure, dict) else {}
    status = failure.get("status")
    error: JSON = {"type": rollout.failure_class, "message": str(failure.get("detail") or "")}
    return {**error, "status_code": status} if type(status) is int else error
