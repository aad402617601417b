"""Run slime's own rollout of a group with gym_serve's function, and a tiny engine behind ``/generate``.

Run by `test_acceptance.py` in the venv of `make interop`: ``python run_slime.py FOLDER``; prints JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import acceptance
from acceptance import CASES, LONGEST_PROMPT, LONGEST_RESPONSE, Case, Policy, Ran, Sample
from aiohttp import web

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": LONGEST_RESPONSE}


async def router(policy: Policy) -> tuple[web.AppRunner, int]:
    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        params = body["sampling_params"]
        asked, stop = policy.generate(body["input_ids"], params["max_new_tokens"], params["temperature"])
        told = [
            [logprob, token, None] for token, logprob in zip(asked.generation, asked.logprobs, strict=True)
        ]
        meta = {
            "output_token_logprobs": told,
            "finish_reason": {"type": stop},
            "weight_version": str(asked.ended),
        }
        return web.json_response({"text": "", "meta_info": meta})

    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, runner.addresses[0][1]


def arguments(folder: Path, port: int) -> SimpleNamespace:
    return SimpleNamespace(
        hf_checkpoint=str(folder / "model"),
        sglang_server_concurrency=8,
        rollout_num_engines=1,
        rollout_num_gpus=1,
        rollout_num_gpus_per_engine=1,
        use_distributed_post=False,
        rollout_temperature=1.0,
        rollout_top_p=1.0,
        rollout_top_k=-1,
        rollout_max_response_len=LONGEST_RESPONSE,
        rollout_max_context_len=LONGEST_PROMPT + LONGEST_RESPONSE,
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
        custom_rm_path=None,
        rollout_sample_hook_paths=None,
    )


def told(case: Case, sample: Any) -> Sample:
    assert type(sample).from_dict(sample.to_dict()).tokens == sample.tokens
    start = len(sample.tokens) - sample.response_length
    failed = sample.status.value == "failed"
    assert sample.remove_sample == failed
    return Sample(
        case.name,
        prompt=sample.tokens[:start],
        response=sample.tokens[start:],
        mask=sample.loss_mask,
        logprobs=sample.rollout_log_probs,
        reward=sample.reward,
        failed=failed,
        truncated=sample.status.value == "truncated",
        versions=[int(each) for each in sample.weight_versions],
    )


async def run(folder: Path) -> list[Ran]:
    from slime.rollout.sglang_rollout import generate_and_rm_group
    from slime.utils.http_utils import init_http_client
    from slime.utils.types import Sample as Theirs

    policy = Policy(folder)
    running, port = await router(policy)
    args = arguments(folder, port)
    init_http_client(args)
    samples = []
    for at, case in enumerate(CASES):
        group = [
            Theirs(group_index=at, index=3 * at + i, prompt=case.name, metadata={"row": json.dumps(case.row)})
            for i in range(case.size)
        ]
        for made in await generate_and_rm_group(args, group, dict(SAMPLING)):
            samples += [told(case, each) for each in (made if isinstance(made, list) else [made])]
    await running.cleanup()
    return [Ran("slime", "624b824", samples, policy.asked)]


def main(folder: Path) -> list[Ran]:
    (folder / "rollout.py").write_text(
        f"""\
from gym_serve.training.slime import generator

generate = generator({str(folder / "graph.yaml")!r}, attempts=1)
"""
    )
    sys.path.insert(0, str(folder))
    return asyncio.run(run(folder))


if __name__ == "__main__":
    acceptance.script(main)
