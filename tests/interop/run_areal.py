"""Run gym_serve's agent in AReaL's own workflow, behind its proxy, with a tiny engine.

Run by `test_acceptance.py` in the venv of `make interop`: ``python run_areal.py FOLDER``; prints JSON.
"""

from __future__ import annotations

import asyncio
import json
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import acceptance
import uvicorn
from acceptance import ABANDONED, CASES, SEEN, Case, Policy, Ran, Sample
from openai.types.chat.chat_completion_message_function_tool_call import (
    ChatCompletionMessageFunctionToolCall,
    Function,
)

from gym_serve import InvalidRequest
from gym_serve.training.areal import GymAgent


def parsed(
    text: str, tools: list[Any], parser: str, reasoning: str, finish: str, **options: Any
) -> tuple[list[ChatCompletionMessageFunctionToolCall] | None, str, str]:
    """The tool calls of a text. AReaL has the parsers of SGLang and vLLM, of which neither is installed."""
    before, found, call = text.partition("<tool_call>")
    if not found:
        return None, text, finish
    given = json.loads(call.partition("</tool_call>")[0])
    function = Function(name=given["name"], arguments=json.dumps(given["arguments"]))
    return (
        [ChatCompletionMessageFunctionToolCall(id=f"call-{id(call)}", type="function", function=function)],
        before,
        "tool_calls",
    )


def told(case: Case, interaction: dict[str, list[Any]]) -> Sample:
    """What AReaL trains on: each of its interactions is a model call, with all the tokens before."""
    ids, mask = interaction["input_ids"], interaction["loss_mask"]
    start = mask.index(1)
    return Sample(
        case.name,
        prompt=ids[:start],
        response=ids[start:],
        mask=mask[start:],
        logprobs=interaction["logprobs"][start:],
        reward=interaction["rewards"],
        versions=interaction["versions"][start:],
    )


async def run(folder: Path) -> list[Ran]:
    from areal.api.io_struct import ModelRequest, ModelResponse
    from areal.experimental.openai import client
    from areal.experimental.openai.proxy import proxy_rollout_server as proxy
    from areal.experimental.openai.proxy.workflow import OpenAIProxyWorkflow
    from areal.infra import workflow_context

    policy = Policy(folder)

    class Engine:
        config = SimpleNamespace(
            tokenizer_path=str(folder / "model"),
            lora_name="",
            agent=SimpleNamespace(
                tool_call_parser="qwen25",
                reasoning_parser="qwen3",
                engine_max_tokens=4000,
                chat_template_type="hf",
                session_timeout_seconds=600,
                admin_api_key="an-admin-key",
            ),
        )

        async def agenerate(self, req: ModelRequest) -> ModelResponse:
            config = req.gconfig
            asked, stop = await policy.agenerate(req.input_ids, config.max_new_tokens, config.temperature)
            if stop == "abort":
                raise RuntimeError("AReaL aborts the generation")
            versions = [asked.begun] * (len(asked.generation) - 1) + [asked.ended]
            return ModelResponse(
                req.input_ids, asked.generation, asked.logprobs, versions, stop, req.tokenizer
            )

    client.process_tool_calls = parsed
    proxy._engine = Engine()
    proxy._setup_openai_client()
    server = uvicorn.Server(uvicorn.Config(proxy.app, port=0, log_level="error"))
    work = asyncio.ensure_future(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.02)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    agent = GymAgent(str(folder / "graph.yaml"))
    workflow = OpenAIProxyWorkflow("inline", agent, url, "an-admin-key", discount=1.0)
    ran = Ran("AReaL", version("areal"))
    for number, case in enumerate(each for each in CASES for _ in range(each.size)):
        workflow_context.set(workflow_context.WorkflowContext(task_id=number))
        try:
            kept = await workflow.arun_episode(None, {"row": json.dumps(case.row)})
        except Exception as error:  # AReaL rejects the trajectory
            ran.extra.setdefault(case.name, []).append(f"{type(error).__name__}: {error}")
            continue
        for interaction in kept.values():
            tensors = interaction.to_tensor_dict()
            ran.samples.append(told(case, {key: value[0].tolist() for key, value in tensors.items()}))
    ran.asked = list(policy.asked)

    workflow_context.set(workflow_context.WorkflowContext(task_id=999))
    try:
        await workflow.arun_episode(None, {"row": json.dumps(SEEN.row)})
    except InvalidRequest as error:
        ran.extra["pictures"] = {"refused": str(error)}

    async def episode(number: int) -> Any:
        workflow_context.set(workflow_context.WorkflowContext(task_id=number))
        return await workflow.arun_episode(None, {"row": json.dumps(ABANDONED.row)})

    running = [asyncio.ensure_future(episode(1000 + i)) for i in range(ABANDONED.size)]
    ran.extra["abandoned"] = await acceptance.abandoned(
        folder, policy, running, lambda: [each.cancel() for each in running], reaches_engine=False
    )
    await asyncio.to_thread(agent.close)
    server.should_exit = server.force_exit = True
    await work
    return [ran]


if __name__ == "__main__":
    acceptance.script(lambda folder: asyncio.run(run(folder)))
