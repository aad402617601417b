"""Run the executors of the OpenRLHF that is installed, with gym_serve's graph and a tiny engine.

Run by `test_trainers.py` in the venv of `make interop`: ``python run_openrlhf.py FOLDER``; prints JSON.
OpenRLHF imports vLLM, which needs a GPU: `SamplingParams` and the names of two modules stand in for it.
Everything else, from the loading of the agent's file to `Experience`, is OpenRLHF's own.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import tiny
import torch
import uvicorn
from support.bells import bell_graph

WORDS = ("ring", "break", "refuse", "chatter")
LONGEST = 700


@dataclass
class SamplingParams:
    """vLLM's, as far as OpenRLHF sets it."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int | None = None
    min_tokens: int = 1
    skip_special_tokens: bool = False
    logprobs: int | None = 1


def stand_in_for_vllm() -> None:
    names = {"vllm": {"SamplingParams": SamplingParams}, "vllm.inputs": {"TokensPrompt": dict}}
    for name, members in {**names, "vllm.utils": {"random_uuid": lambda: "1"}}.items():
        module = sys.modules[name] = ModuleType(name)
        vars(module).update(members)


class Engine:
    """``llm_engine``: samples from the tiny model, and answers as vLLM does."""

    def __init__(self, folder: Path) -> None:
        self.engine = tiny.Engine(folder)
        self.asked: list[dict[str, Any]] = []

    async def generate(self, prompt: list[int], params: SamplingParams, multi_modal_data: Any = None) -> Any:
        ids, logprobs = self.engine.generate(prompt, params.max_tokens, params.temperature)
        self.asked.append({"prompt": prompt, "generation": ids, "logprobs": logprobs})
        told = [
            {token: SimpleNamespace(logprob=logprob)} for token, logprob in zip(ids, logprobs, strict=True)
        ]
        finish = "stop" if ids[-1] == self.engine.tokenizer.eos_token_id else "length"
        text, told = self.engine.tokenizer.decode(ids), told if params.logprobs is not None else None
        output = SimpleNamespace(
            token_ids=ids,
            text=text,
            logprobs=told,
            finish_reason=finish,
        )
        return SimpleNamespace(outputs=[output])


async def groups(executor: Any, engine: Engine) -> list[dict[str, Any]]:
    """As ``generate_responses`` of OpenRLHF's rollout actor: three samples of each prompt at once."""
    from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator

    found = []
    for word in WORDS:
        params = SamplingParams()
        given = {"prompt": word, "label": json.dumps({"prompt": word}), "sampling_params": params}
        engines = {"hf_tokenizer": engine.engine.tokenizer, "llm_engine": engine, "max_length": LONGEST}
        responses = await asyncio.gather(*(executor.execute(**given, **engines) for _ in range(3)))
        for response in responses:
            experience = SamplesGenerator._process_response_into_experience(None, response, max_len=LONGEST)
            found.append({"word": word, **told(experience)})
    return found


def told(experience: Any) -> dict[str, Any]:
    return {
        "sequence": experience.sequences[0].tolist(),
        "action_mask": experience.action_mask[0].int().tolist(),
        "logprobs": None
        if experience.rollout_log_probs is None
        else experience.rollout_log_probs[0].tolist(),
        "reward": experience.rewards.flatten()[0].item(),
        "truncated": bool(experience.truncated[0]),
        "failed": float(experience.info["failed"][0]) if "failed" in experience.info else None,
    }


async def remote_rewards(engine: Engine) -> list[dict[str, Any]]:
    """OpenRLHF's single-turn executor, with the graph's verifier at its URL."""
    from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
    from openrlhf.utils.agent import SingleTurnAgentExecutor

    from gym_serve.training.openrlhf import reward_app

    graph = {**bell_graph(), "resources": {"bell": {"type": "support.bells:Bell"}}}
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(reward_app(graph, ray=False), log_level="error"))
    serving = asyncio.ensure_future(server.serve([listening]))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/get_reward"
    executor = SingleTurnAgentExecutor(url)
    found = []
    for prompt in ("ding", "refuse"):
        response = await executor.execute(
            prompt, "x", SamplingParams(max_tokens=50), LONGEST, engine.engine.tokenizer, engine
        )
        found.append(
            told(SamplesGenerator._process_response_into_experience(None, response, max_len=LONGEST))
        )
    server.should_exit = True
    await serving
    return found


def main(folder: Path) -> dict[str, Any]:
    tiny.prepare(folder)
    stand_in_for_vllm()
    from openrlhf.trainer.ray.vllm_engine import _load_agent_executor

    agent = f"""\
from gym_serve.training.openrlhf import executor

AgentExecutor = executor({str(folder / "graph.yaml")!r}, attempts=1)
"""
    (folder / "agent.py").write_text(agent)
    engine = Engine(folder / "model")

    async def both() -> dict[str, Any]:
        executor = _load_agent_executor(str(folder / "agent.py"))
        return {"groups": await groups(executor, engine), "rewards": await remote_rewards(engine)}

    torch.set_num_threads(1)
    return {**asyncio.run(both()), "asked": engine.asked}


if __name__ == "__main__":
    faulthandler.dump_traceback_later(400, exit=True)  # says where it hangs
    print(json.dumps(main(Path(sys.argv[1]))))
