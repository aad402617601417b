"""A model with trained weights plays every graph: what it writes is real, and often broken.

    python -m benchmarks.real [GRAPH]... [--rows 2] [--tokens 24]

``boxes`` is a graph of this file: tasks in boxes, by an agent with tools and by a program in the box, which
runs what the model writes there.

Each row must end with a reward, or with a failure that has a name and is no error of gym_serve's own. The
exit status is 1 if one does not, or if the weights cannot be fetched. What such a run finds becomes a case of
the tests with scripted models.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

from gym_serve import Gym
from gym_serve.cli.examples import example_rows
from gym_serve.evaluation.local_weights import fetch_local_weights, local_weights
from gym_serve.graph import classes
from gym_serve.graph.loading import load_graph
from gym_serve.graph.resolving import resolve
from gym_serve.rollouts.rows import read_rows
from gym_serve.types.errors import AuthorError, InvalidRequest
from gym_serve.types.requests import JSON

ELSEWHERE = {
    "google_search": "needs a key",
    "math_gpu_judge": "needs a GPU",
    "mcp": "needs a server of its own",
    "quickstart": "is three of the others",
    "remote_agent": "needs an agent at a URL",
    "reward_model": "needs a reward model",
    "shapes": "needs a model that reads pictures",
    "workspace": "has coding agents that are no part of the tests: `boxes` is played in its place",
}
"""Graphs that are not played, and why."""

_PROGRAM = """
import json, os, subprocess, urllib.request
items = [{"role": "user", "content": os.environ["GYM_SERVE_PROMPT"]}]
for turn in range(2):
    body = json.dumps({"model": "policy", "input": items, "max_output_tokens": 24}).encode()
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/responses", body, headers)
    output = json.load(urllib.request.urlopen(request))["output"]
    texts = [part["text"] for item in output if item["type"] == "message" for part in item["content"]]
    command = ["timeout", "5", "sh", "-c", "".join(texts)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    items += [*output, {"role": "user", "content": (done.stdout + done.stderr)[:500] or "no output"}]
"""

_TASK: JSON = {"model": "policy", "resources": "workspace"}
_BOXES: JSON = {
    "models": {"policy": {"type": "scripted_model"}},
    "resources": {"workspace": {"type": "workspace"}},
    "agents": {
        "workspace_agent": {"type": "simple_agent", "max_steps": 4, **_TASK},
        "harness": {"type": "harness_agent", "box": True, "command": ["python3", "-c", _PROGRAM], **_TASK},
        "oracle": {"type": "oracle", **_TASK},
        "nop": {"type": "nop", **_TASK},
    },
}

_OWN_ERRORS = {"gym_error", "bad_request", *(error.code for error in AuthorError.__subclasses__())}
"""Codes of failures that no text of a model may cause."""

_POLICY = {"type": "llama_cpp_engine", "max_model_len": 2048, "slots": 4}


def play(
    name: str, rows: int, tokens: int, played: dict[str, set[str]]
) -> Iterator[tuple[str, list[Any], int]]:
    """Each agent of a graph, with its rollouts and how many there should be.

    ``played`` gets the environments by name, and the kinds of agents.
    """
    file: Any = _BOXES if name == "boxes" else classes.graph_file(name)
    loaded = load_graph(file)
    models: Any = loaded.spec.models
    policy = {**_POLICY, "model": str(local_weights())}
    changes = {
        f"models.{model}": policy
        for model, settings in models.items()
        if "if" in settings or settings.get("type") in ("scripted_model", "chat_model", "openai_model")
    }
    changed = load_graph(file, overrides=changes)
    graph = resolve(changed.spec, source=changed.path, base_dir=changed.base_dir)
    with Gym.from_graph(file, ray=False, overrides=changes) as gym:
        for agent, node in graph.nodes.items():
            if node.kind != "agent":
                continue
            given = [row.row for row in islice(read_rows(example_rows(graph, agent, "ROWS")), rows)]
            asked = [{**row, "agent_ref": {"name": agent}} for row in given if row is not None]
            params: JSON = {"max_output_tokens": tokens, "temperature": 1.0}
            yield agent, list(gym.run(asked, params=params, seed=7, timeout=120)), len(asked)
            played["agents"].add(str(node.type))
    played["environments"] |= {name for name, node in graph.nodes.items() if node.kind == "resources"}


def problem(rollout: Any) -> str | None:
    """What is wrong with a rollout, if anything."""
    failure = rollout.failure
    if failure is not None:
        return f"{failure['kind']}: {failure['detail']}" if failure["kind"] in _OWN_ERRORS else None
    reward = rollout.reward
    is_number = isinstance(reward, int | float) and not isinstance(reward, bool) and math.isfinite(reward)
    return None if is_number else f"reward {reward!r}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "graphs", nargs="*", default=[*(n for n in classes.names() if n not in ELSEWHERE), "boxes"]
    )
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=24)
    options = parser.parse_args()
    if not local_weights().exists():
        try:
            fetch_local_weights()
        except InvalidRequest as error:
            sys.exit(f"nothing was played: {error.message}")
    wrong = 0
    played: dict[str, set[str]] = {"environments": set(), "agents": set()}
    for name in options.graphs:
        begun = time.monotonic()
        try:
            for agent, rollouts, count in play(name, options.rows, options.tokens, played):
                found = [said for said in map(problem, rollouts) if said is not None]
                found += [f"{count - len(rollouts)} rows are lost"] if len(rollouts) != count else []
                failures = Counter(r.failure["kind"] for r in rollouts if r.failure is not None)
                rewards = [r.reward for r in rollouts if r.failure is None]
                print(f"{name:24} {agent:28} rewards {rewards} failures {dict(failures)}", flush=True)
                for said in found:
                    print(f"    WRONG: {said}")
                wrong += len(found)
        except Exception as error:  # whatever it is, the other graphs are played
            print(f"    WRONG: {name}: {type(error).__name__}: {error}")
            wrong += 1
        print(f"    {time.monotonic() - begun:.0f} s", flush=True)
    counts = " and ".join(f"{len(names)} {kind}" for kind, names in played.items())
    print(f"{counts} were played, {wrong} rollouts or graphs are wrong; {time.process_time():.0f} s of CPU")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
