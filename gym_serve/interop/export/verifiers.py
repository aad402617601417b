"""Verifiers traces (verifiers 0.4): the ``traces.jsonl`` of a run, one episode with one trace a line.

A trace is a graph of messages, each with the tokens that it adds; as with a provider that returns token
ids but no spans of messages, the new prompt tokens of a call stand with its assistant message. Where a
prompt does not go on from the tokens before, the graph branches, as verifiers branches it, so that
every path holds just what the model saw. Each further conversation of a harness's rollout is a path from a
root of its own.

Failed rollouts are traces that are not ``ok``, with their error and no reward; a rollout that its
environment masks is not ``trainable``. Trainers skip both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from gym_serve.interop.export.conversation import Step, prompt_messages, steps, tools_of
from gym_serve.interop.export.message_graph import MessageGraph
from gym_serve.interop.export.report import Tally
from gym_serve.interop.export.rollout import NotExportable, Rollout, number
from gym_serve.interop.export.tokens import Bundle
from gym_serve.types.requests import JSON

__all__ = ["verifiers_episode", "verifiers_records"]

_TRACE_VERSION = 1
_VERIFIERS = "0.4.0"  # the version whose schema this is
_SAMPLING = {"temperature": "temperature", "top_p": "top_p", "max_output_tokens": "max_tokens"}


def verifiers_episode(rollout: Rollout) -> JSON:
    """A rollout as a verifiers episode.

    Raises:
        NotExportable: an item or medium that verifiers has no form for, malformed tokens, or no reward.
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
        "ok": trace["ok"],
        "is_timeout": trace["is_timeout"],
        "errors": [],
        "traces": [trace],
    }


def verifiers_records(rollouts: Iterable[Rollout], tally: Tally) -> Iterator[JSON]:
    """The episodes of all rollouts."""
    for rollout in rollouts:
        record = tally.attempt(verifiers_episode, rollout)
        if record is not None:
            tally.exported += 1
            tally.masked += rollout.masked
            yield record


def _trace(rollout: Rollout, task: JSON) -> JSON:
    failed = rollout.failure_class
    tools = [_tool(tool["function"]) for tool in tools_of(rollout)]
    graph = MessageGraph(tools, rollout.created_at)
    calls: list[JSON] = []
    for conversation in rollout.conversations():
        graph.begin()
        for message in prompt_messages(conversation):
            graph.add(_message(message, {}))
        calls += _add_episode(graph, steps(conversation), conversation)
    timed_out = bool(failed and failed.endswith("_timeout"))
    sampling = {theirs: number(rollout.params.get(ours)) for ours, theirs in _SAMPLING.items()}
    config = {"model": rollout.model, "sampling": {k: v for k, v in sampling.items() if v is not None}}
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
        "timing": {"start": rollout.created_at},
    }


def _add_episode(graph: MessageGraph, episode: list[Step], rollout: Rollout) -> list[JSON]:
    calls: list[JSON] = []
    names: dict[str, str] = {}
    for step in episode:
        message = _message(step.message, names)
        if message["role"] != "assistant":
            graph.add(message)
            continue
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        call: JSON = {"node": graph.add_sampled(message, step.tokens), "finish_reason": finish}
        if rollout.model is not None:
            call["model"] = rollout.model
        if step.tokens is not None:
            call["usage"] = _usage(step.tokens)
        calls.append(call)
    details = rollout.response.get("incomplete_details")
    if calls and isinstance(details, dict) and details.get("reason") == "max_output_tokens":
        calls[-1]["finish_reason"] = "length"
    return calls


def _message(message: JSON, names: dict[str, str]) -> JSON:
    """A chat message as verifiers has it; ``names`` collects the tools that were called, by call id."""
    role, content = message["role"], message["content"]
    if role == "assistant":
        calls = [{"id": call["id"], **call["function"]} for call in message.get("tool_calls", ())]
        names.update((call["id"], call["name"]) for call in calls)
        made = {"role": role, "content": content, "reasoning_content": message.get("reasoning_content")}
        made["tool_calls"] = calls or None
        return {key: value for key, value in made.items() if value is not None}
    parts = [_part(part) for part in content] if isinstance(content, list) else content
    if role != "tool":
        return {"role": "user" if role == "user" else "system", "content": parts}
    made = {"role": role, "tool_call_id": message["tool_call_id"], "content": parts}
    name = names.get(message["tool_call_id"])
    return {**made, "name": name} if name is not None else made


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


def _usage(tokens: Bundle) -> JSON:
    return {"prompt_tokens": len(tokens.prompt), "completion_tokens": len(tokens.generation)}


def _rewards(rollout: Rollout) -> JSON:
    """The components where they add up to the reward, as verifiers adds them; else the reward."""
    if rollout.failure_class:
        return {"reward": None}
    components = rollout.raw.get("reward_components")
    if isinstance(components, dict) and components:
        scores = {name: number(score) for name, score in components.items()}
        known = [score for score in scores.values() if score is not None]
        if len(known) == len(scores) and math.isclose(sum(known), rollout.reward, rel_tol=1e-5, abs_tol=1e-6):
            return {name: {"score": score} for name, score in scores.items()}
    return {"reward": {"score": rollout.reward}}


def _metrics(rollout: Rollout) -> JSON:
    values = {name: number(value) for name, value in rollout.extras.items() if name[:1] != "_"}
    return {name: v for name, v in values.items() if v is not None and name not in ("reward", "mask_sample")}


def _error(rollout: Rollout) -> JSON:
    failure = rollout.raw.get("failure")
    failure = failure if isinstance(failure, dict) else {}
    status = failure.get("status")
    error: JSON = {"type": rollout.failure_class, "message": str(failure.get("detail") or "")}
    return {**error, "status_code": status} if type(status) is int else error
