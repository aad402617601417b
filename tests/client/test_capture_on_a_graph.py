"""Captures over HTTP on a graph: an official client as the harness, and two replicas of the model."""

import asyncio
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import openai
import orjson
import pytest

from benchmarks.loopback import Behaviour, run_model_server
from gym_serve import Gym
from gym_serve.types.protocols import ChunkJoiner

TOOL: Any = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}},
}


def chat(base_url: str, prompt: str, *, stream: bool = False) -> int:
    """A harness: the chat loop with one tool; how many calls of the model it took."""
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": prompt}]
        for call in range(1, 10):
            options: Any = {"model": "any", "messages": messages, "tools": [TOOL]}
            if stream:
                joiner = ChunkJoiner()
                for chunk in client.chat.completions.create(stream=True, **options):
                    joiner.add(chunk.to_dict())
                said = joiner.completion()["choices"][0]["message"]
                calls, text = said.get("tool_calls", []), said["content"] or ""
            else:
                message = client.chat.completions.create(**options).choices[0].message
                calls, text = [part.to_dict() for part in message.tool_calls or ()], message.content or ""
            if not calls:
                return call
            calls = [{key: part[key] for key in ("id", "type", "function")} for part in calls]
            messages.append({"role": "assistant", "content": text or None, "tool_calls": calls})
            messages += [{"role": "tool", "tool_call_id": part["id"], "content": "Sunny"} for part in calls]
    raise AssertionError("the model never answered")


class Work(BaseHTTPRequestHandler):
    """A server that works on a row, with a stream or without one, and with a sub-agent."""

    def do_POST(self) -> None:
        task = orjson.loads(self.rfile.read(int(self.headers["content-length"])))
        chat(task["base_url"], "What would be a good question?")
        calls = chat(task["base_url"], "Weather in Paris?", stream=task["row"]["stream"])
        body = orjson.dumps({"calls": calls})
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Quiet."""


@pytest.fixture(scope="module")
def gym(cluster: str, deploy: Any) -> Iterator[Gym]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Work)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with run_model_server(Behaviour(turns=2, tokens=4)) as model:
        graph = {
            "models": {
                "policy": {
                    "type": "chat_model", "base_url": f"{model.url}/v1", "model": "m",
                    "return_token_ids": True, "num_replicas": 2,
                }
            },
            "resources": {"weather": {"type": "simple_weather"}},
            "agents": {
                "agent": {
                    "type": "harness_agent",
                    "model": "policy", "resources": "weather", "gateway_url": f"{cluster}/captured",
                    "url": f"http://127.0.0.1:{server.server_port}/",
                }
            },
        }  # fmt: skip
        yield deploy(graph, name="captured")
    server.shutdown()
    server.server_close()


def assert_trainable(output: list[dict[str, Any]]) -> int:
    """What trainers assert; how many calls of the model the output has."""
    seen: list[int] = []
    bundles = [item for item in output if "prompt_token_ids" in item]
    for item in bundles:
        assert item["prompt_token_ids"][: len(seen)] == seen
        assert len(item["generation_log_probs"]) == len(item["generation_token_ids"]) == 4
        seen = item["prompt_token_ids"] + item["generation_token_ids"]
    return len(bundles)


def test_a_harness_makes_rollouts(gym: Gym) -> None:
    params = {"input": "Weather in Paris?"}
    rows = [{"responses_create_params": params, "stream": n % 2 == 1} for n in range(6)]

    async def rollouts() -> list[dict[str, Any]]:
        return [rollout async for rollout in gym.rollouts(rows)]

    for rollout in asyncio.run(rollouts()):
        assert "failure" not in rollout, rollout["failure"]
        assert rollout["harness"] == {"calls": 3}
        assert assert_trainable(rollout["response"]["output"]) == 3
        kinds = [item["type"] for item in rollout["response"]["output"]]
        assert kinds == ["function_call", "function_call_output"] * 2 + ["message"]
        (branch,) = rollout["branches"]
        assert assert_trainable(branch["response"]["output"]) == 3
        assert branch["input"][0]["content"] == "What would be a good question?"


def test_captures_over_http(gym: Gym) -> None:
    with httpx.Client(base_url=f"{gym.url}/policy", timeout=60) as client:
        opened: list[str] = []
        while len({id_.partition(".")[0] for id_ in opened}) < 2:  # on both replicas
            opened.append(client.post("/rollouts").json()["id"])
            time.sleep(0.1)  # for news of how many each one has
        threads = [
            threading.Thread(target=chat, args=(f"{gym.url}/policy/rollouts/{id_}/v1", "Hi"))
            for id_ in opened
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for id_ in opened:
            found = client.get(f"/rollouts/{id_}").json()
            assert (found["id"], found["calls"]) == (id_, 6)
            outputs = [one["response"]["output"] for one in found["trajectories"]]
            assert sum(map(assert_trainable, outputs)) == 6
        assert client.get(f"/rollouts/{opened[0]}/v1/models").json()["object"] == "list"
        first = opened[0]
        assert client.post(f"/rollouts/{first}").status_code == 405
        for id_ in opened:
            assert client.delete(f"/rollouts/{id_}").status_code == 200
        assert client.get(f"/rollouts/{first}").json()["error"]["code"] == "session_not_found"
        assert client.get("/rollouts/gone.abc").json()["error"]["code"] == "session_lost"
        paths = client.get(f"{gym.url}/openapi.json").json()["paths"]
        assert paths["/policy/rollouts/{id}"].keys() == {"get", "delete"}
        assert "post" in paths["/policy/rollouts/{id}/v1/chat/completions"]
