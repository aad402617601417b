"""Run slime's own rollout of a group with gym_serve's function, and a tiny engine behind ``/generate``.

Run by `test_trainers.py` in the venv of `make interop`: ``python run_slime.py FOLDER``; prints JSON.
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
from aiohttp import web

WORDS = ("ring", "flaky uneven", "chatter")
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 200}


async def router(engine: tiny.Engine, asked: list[dict[str, Any]]) -> tuple[web.AppRunner, int]:
    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        prompt, params = body["input_ids"], body["sampling_params"]
        ids, logprobs = engine.generate(prompt, params["max_new_tokens"], params["temperature"])
        asked.append({"prompt": prompt, "generation": ids, "logprobs": logprobs})
        stop = "stop" if ids[-1] == engine.tokenizer.eos_token_id else "length"
        told = [[logprob, token, None] for token, logprob in zip(ids, logprobs, strict=True)]
        meta = {
            "output_token_logprobs": told,
            "finish_reason": {"type": stop},
            "weight_version": str(len(asked)),
        }
        return web.json_response({"text": "", "meta_info": meta})

    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, runner.addresses[0][1]


async def run(folder: Path) -> dict[str, Any]:
    from slime.rollout.sglang_rollout import generate_and_rm_group
    from slime.utils.http_utils import init_http_client
    from slime.utils.types import Sample

    engine, asked = tiny.Engine(folder / "model"), []
    running, port = await router(engine, asked)
    args = SimpleNamespace(
        hf_checkpoint=str(folder / "model"),
        sglang_server_concurrency=8,
        rollout_num_engines=1,
        rollout_num_gpus=1,
        rollout_num_gpus_per_engine=1,
        use_distributed_post=False,
        rollout_temperature=1.0,
        rollout_top_p=1.0,
        rollout_top_k=-1,
        rollout_max_response_len=200,
        rollout_max_context_len=1000,
        rollout_stop=None,
        rollout_stop_token_ids=None,
        rollout_skip_special_tokens=False,
        sglang_router_ip="127.0.0.1",
        sglang_router_port=port,
        sglang_dp_size=1,
        custom_generate_function_path="rollout.generate",
        partial_rollout=False,
        mask_offpolicy_in_partial_rollout=False,
        group_rm=False,
        rollout_sample_hook_paths=None,
    )
    init_http_client(args)
    found = []
    for index, word in enumerate(WORDS):
        row = json.dumps({"prompt": word})
        group = [
            Sample(group_index=index, index=3 * index + i, prompt=word, metadata={"row": row})
            for i in range(3)
        ]
        found += await generate_and_rm_group(args, group, dict(SAMPLING))
    await running.cleanup()
    samples = [
        {
            "word": WORDS[sample.group_index],
            "prompt": sample.tokens[: len(sample.tokens) - sample.response_length],
            "response": sample.tokens[len(sample.tokens) - sample.response_length :],
            "loss_mask": sample.loss_mask,
            "logprobs": sample.rollout_log_probs,
            "reward": sample.reward,
            "status": sample.status.value,
            "removed": sample.remove_sample,
            "again": Sample.from_dict(sample.to_dict()).tokens == sample.tokens,
        }
        for sample in found
    ]
    return {"samples": samples, "asked": asked}


def main(folder: Path) -> dict[str, Any]:
    tiny.prepare(folder)
    (folder / "rollout.py").write_text(
        f"""\
from gym_serve.training.slime import generator

generate = generator({str(folder / "graph.yaml")!r}, attempts=1)
"""
    )
    sys.path.insert(0, str(folder))
    return asyncio.run(run(folder))


if __name__ == "__main__":
    faulthandler.dump_traceback_later(400, exit=True)  # says where it hangs
    print(json.dumps(main(Path(sys.argv[1]))))
