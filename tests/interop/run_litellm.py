"""A model by LiteLLM's name, behind which our own scripted model answers over HTTP."""

import asyncio
import json
from typing import Any

from support.in_process import serving

from gym_serve import Gym
from gym_serve.deployments.litellm_model import LiteLLMModel
from gym_serve.graph import resolve
from gym_serve.graph.spec import GraphSpec

ASKED = {"messages": [{"role": "user", "content": "hi"}]}
ROW = {
    "prompt": "What is the weather in Paris? Tell condition and degrees.",
    "verifier_metadata": {"cities": ["Paris"]},
}


async def streamed(settings: dict[str, Any]) -> list[dict[str, Any]]:
    model = LiteLLMModel(name="policy", **{key: settings[key] for key in ("model", "options", "api_key")})
    await model.start()
    await model._upstream.start()
    try:
        return [chunk async for chunk in model.stream_chat(ASKED)]
    finally:
        await model._upstream.stop()


def main() -> None:
    graph = resolve(GraphSpec(models={"policy": {"type": "scripted_model"}}))
    with serving(lambda url: {"": graph}) as url:
        model = {"type": "litellm_model", "model": "openai/any", "api_key": "secret-key-1"}
        options = {"api_base": f"{url}/policy/v1"}
        models = {
            "policy": {**model, "options": options, "prices": {"input": 1.0, "output": 1.0}},
            "nowhere": {**model, "options": {**options, "api_base": f"{url}/no/v1"}, "max_retries": 0},
            "gone": {**model, "options": {**options, "api_base": "http://127.0.0.1:9/v1"}, "max_retries": 0},
        }
        agent = {"type": "simple_agent", "resources": "weather"}
        agents = {f"{name}_agent": {**agent, "model": name} for name in models}
        spec = {"models": models, "resources": {"weather": {"type": "simple_weather"}}, "agents": agents}
        with Gym.from_graph(spec, ray=False) as gym:
            (rollout,) = gym.run([ROW], agent="policy_agent")
            refused = gym.call("policy", "v1/chat/completions", ASKED)
            chunks = asyncio.run(streamed(models["policy"]))
            failures = {}
            for name in ("nowhere", "gone"):
                try:
                    gym.call(name, "v1/chat/completions", ASKED)
                except Exception as error:
                    failures[name] = [type(error).__name__, str(error)]
    print(json.dumps({
        "reward": rollout.reward,
        "items": [item["type"] for item in rollout["response"]["output"]],
        "usage": rollout["model_usage"]["model"]["policy"]["calls"],
        "said": refused["choices"][0]["message"]["content"],
        "streamed": "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]),
        "chunks": len(chunks),
        "failures": failures,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
