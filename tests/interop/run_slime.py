"""Run slime's own rollout of a group with gym_serve's function, and a tiny engine behind ``/generate``.

Its rollout manager imports SGLang, which needs a GPU: empty modules stand in for it. Rewards and advantages
are the manager's own.
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
import tiny
from acceptance import (
    ABANDONED,
    CASES,
    LONGEST_PROMPT,
    LONGEST_RESPONSE,
    SEEN,
    Case,
    Policy,
    Ran,
    Sample,
    StandIns,
)
from aiohttp import web

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": LONGEST_RESPONSE}


async def router(policy: Policy, shown: list[int]) -> tuple[web.AppRunner, int]:
    """SGLang's router and its only engine. ``shown``: pictures of each generation that had some."""
    running: set[asyncio.Task[Any]] = set()

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        params = body["sampling_params"]
        limit, temperature = params["max_new_tokens"], params["temperature"]
        if "image_data" in body:
            shown.append(len(body["image_data"]))
        work = asyncio.ensure_future(policy.agenerate(body["input_ids"], limit, temperature))
        running.add(work)
        await asyncio.wait([work])
        running.discard(work)
        if work.cancelled():
            return web.json_response({"text": "", "meta_info": {"finish_reason": {"type": "abort"}}})
        asked, stop = work.result()
        told = [
            [logprob, token, None] for token, logprob in zip(asked.generation, asked.logprobs, strict=True)
        ]
        meta = {
            "output_token_logprobs": told,
            "finish_reason": {"type": stop},
            "weight_version": str(asked.ended),
        }
        return web.json_response({"text": "", "meta_info": meta})

    async def workers(request: web.Request) -> web.Response:
        return web.json_response({"workers": [{"url": f"http://{request.host}"}]})

    async def abort_request(request: web.Request) -> web.Response:
        for work in running:
            work.cancel()
        return web.json_response({})

    async def loads(request: web.Request) -> web.Response:
        return web.json_response({"num_reqs": len(running)})

    app = web.Application()
    app.router.add_post("/generate", generate)
    app.router.add_post("/abort_request", abort_request)
    app.router.add_get("/workers", workers)
    app.router.add_get("/v1/loads", loads)
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
        custom_reward_post_process_path=None,
        advantage_estimator="grpo",
        rewards_normalization=True,
        grpo_std_normalization=False,
        reward_key=None,
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


def training_data(
    args: SimpleNamespace, groups: list[list[Any]], *, by_std: bool = False, ours: bool = False
) -> dict[str, Any]:
    """What slime's rollout manager makes of groups, by its own code, or with our rewards of groups.

    GRPO's advantage of a token is what is in ``rewards``.
    """
    from slime.ray.rollout import RolloutManager

    from gym_serve.training.slime import group_rewards

    settings = {"grpo_std_normalization": by_std, "rollout_batch_size": len(groups)}
    manager = SimpleNamespace(
        args=SimpleNamespace(**{**vars(args), **settings, "n_samples_per_prompt": len(groups[0])}),
        custom_reward_post_process_func=group_rewards if ours else None,
        custom_convert_samples_to_train_data_func=None,
    )
    own = RolloutManager.__ray_metadata__.modified_class
    manager._post_process_rewards = lambda samples: own._post_process_rewards(manager, samples)
    samples = [sample for group in groups for sample in group]
    data = own._convert_samples_to_train_data(manager, samples)
    assert data["loss_masks"] == [
        [0] * s.response_length if s.remove_sample else s.loss_mask for s in samples
    ]
    return data


def flat(made: list[Any]) -> list[Any]:
    """The samples of a group."""
    return [each for one in made for each in (one if isinstance(one, list) else [one])]


async def aborted(folder: Path, policy: Policy, args: SimpleNamespace, group: list[Any]) -> dict[str, int]:
    """What becomes of rollouts that slime aborts, as it does for new weights."""
    from slime.rollout.sglang_rollout import GenerateState, abort

    state = GenerateState(args)
    state.submit_generate_tasks([group])
    found = await acceptance.abandoned(folder, policy, list(state.pendings), lambda: abort(args, 0))
    assert {sample.status.value for sample in group} == {"aborted"}
    assert not any(sample.response_length for sample in group)
    return found


async def pictures(policy: Policy, args: SimpleNamespace, group: list[Any]) -> list[dict[str, Any]]:
    """What slime's data for its trainer have of pictures."""
    from slime.rollout.sglang_rollout import GenerateState, generate_and_rm_group

    state = GenerateState(args)
    state.reset()  # it was aborted
    state.processor = tiny.Sight(policy.tokenizer)
    args = SimpleNamespace(**{**vars(args), "custom_generate_function_path": "rollout.generate_seeing"})
    data = training_data(args, [flat(await generate_and_rm_group(args, group, dict(SAMPLING)))])
    return [
        acceptance.seen(state.processor, tokens, given["pixel_values"], given["image_grid_thw"])
        for tokens, given in zip(data["tokens"], data["multimodal_train_inputs"], strict=True)
    ]


async def run(folder: Path) -> list[Ran]:
    from slime.rollout.sglang_rollout import generate_and_rm_group
    from slime.utils.http_utils import init_http_client
    from slime.utils.types import Sample as Theirs

    policy = Policy(folder)
    shown: list[int] = []
    running, port = await router(policy, shown)
    args = arguments(folder, port)
    init_http_client(args)
    ran = Ran("slime", "624b824")

    def group_of(at: int, case: Case) -> list[Any]:
        row = json.dumps(case.row)
        indices = range(3 * at, 3 * at + case.size)
        return [Theirs(group_index=at, index=i, prompt=case.name, metadata={"row": row}) for i in indices]

    made = {
        case: flat(await generate_and_rm_group(args, group_of(at, case), dict(SAMPLING)))
        for at, case in enumerate(CASES)
    }
    for size in (2, 3, 4):  # slime's groups have one size; branches count as samples
        cases = [case for case in CASES if len(made[case]) == size]
        groups = [made[case] for case in cases]
        values = [training_data(args, groups, by_std=by_std)["rewards"] for by_std in (False, True)]
        samples = [told(case, each) for case in cases for each in made[case]]
        for sample, plain, normalized in zip(samples, *values, strict=True):
            sample.advantage, sample.normalized = plain, normalized
        ran.samples += samples
    ran.asked = list(policy.asked)
    # All at once, with a failure left out of its group and branches counted once.
    names = [case.name for case in CASES for _ in made[case]]
    by_group = training_data(args, list(made.values()), by_std=True, ours=True)["rewards"]
    ran.extra["by group"] = list(zip(names, by_group, strict=True))
    ran.extra["abandoned"] = await aborted(folder, policy, args, group_of(len(CASES), ABANDONED))
    seen = await pictures(policy, args, group_of(len(CASES) + 1, SEEN))
    ran.extra["pictures"] = {"engine": sorted(shown), "trained": seen}
    await running.cleanup()
    return [ran]


def main(folder: Path) -> list[Ran]:
    (folder / "rollout.py").write_text(
        f"""\
from gym_serve.training.slime import generator

generate = generator({str(folder / "graph.yaml")!r}, attempts=1)
generate_seeing = generator({str(folder / "graph.yaml")!r}, attempts=1)
"""
    )
    sys.path.insert(0, str(folder))
    sys.meta_path.insert(0, StandIns("sglang", "sglang_router"))
    return asyncio.run(run(folder))


if __name__ == "__main__":
    acceptance.script(main)
