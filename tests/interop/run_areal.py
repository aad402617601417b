"""Run gym_serve's agent in AReaL's own workflow, behind its proxy, with a tiny engine.

Run by `test_trainers.py` in the venv of `make interop`: ``python run_areal.py FOLDER``; prints JSON.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tiny
import uvicorn
from openai.types.chat.chat_completion_message_function_tool_call import (
    ChatCompletionMessageFunctionToolCall,
    Function,
)

from gym_serve.training.areal import GymAgent

WORDS = ("ring", "refuse", "break")


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


async def run(folder: Path) -> dict[str, Any]:
    from areal.api.io_struct import ModelRequest, ModelResponse
    from areal.experimental.openai import client
    from areal.experimental.openai.proxy import proxy_rollout_server as proxy
    from areal.experimental.openai.proxy.workflow import OpenAIProxyWorkflow
    from areal.infra import workflow_context

    engine, asked = tiny.Engine(folder / "model"), []

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
            ids, logprobs = engine.generate(
                req.input_ids, req.gconfig.max_new_tokens, req.gconfig.temperature
            )
            asked.append({"prompt": req.input_ids, "generation": ids, "logprobs": logprobs})
            stop = "stop" if ids[-1] == engine.tokenizer.eos_token_id else "length"
            return ModelResponse(req.input_ids, ids, logprobs, [3] * len(ids), stop, req.tokenizer)

    client.process_tool_calls = parsed
    proxy._engine = Engine()
    proxy._setup_openai_client()
    server = uvicorn.Server(uvicorn.Config(proxy.app, port=0, log_level="error"))
    work = asyncio.ensure_future(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.02)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    agent = GymAgent(str(folder / "graph.yaml"))
    workflow = OpenAIProxyWorkflow("inline", agent, url, "an-admin-key", discount=0.5)
    found: dict[str, Any] = {}
    for number, word in enumerate(WORDS):
        workflow_context.set(workflow_context.WorkflowContext(task_id=number))
        try:
            kept = await workflow.arun_episode(None, {"messages": [{"role": "user", "content": word}]})
        except Exception as error:  # AReaL rejects the trajectory
            found[word] = f"{type(error).__name__}: {error}"
            continue
        tensors = [interaction.to_tensor_dict() for interaction in kept.values()]
        found[word] = [{key: value[0].tolist() for key, value in each.items()} for each in tensors]
    await asyncio.to_thread(agent.close)
    server.should_exit = True
    await work
    return {"asked": asked, **found}


def main(folder: Path) -> dict[str, Any]:
    tiny.prepare(folder)
    return asyncio.run(run(folder))


if __name__ == "__main__":
    faulthandler.dump_traceback_later(200, exit=True)  # says where it hangs
    print(json.dumps(main(Path(sys.argv[1]))))
