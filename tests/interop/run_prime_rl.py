"""Run prime-rl's own dispatcher and train sink on gym_serve's env server, with a tiny engine.

Run by `test_acceptance.py` in the venv of `make interop`: ``python run_prime_rl.py FOLDER``; prints JSON.
Taskset and source are those of docs/released-trainers.md. This prime-rl is made for verifiers 0.3, which lies
beside the newer one.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import acceptance
import yaml
from acceptance import ABANDONED, CASES, LONGEST_RESPONSE, Case, Policy, Ran, Sample, case_of
from support.docs import ROOT, blocks_of
from support.endpoint import endpoint

from gym_serve.interop.prime_rl import EnvServer


def file_of(name: str) -> str:
    """A file of the guide."""
    (block,) = (block for block in blocks_of(ROOT / "docs/released-trainers.md") if block.file == name)
    return block.text


def config_of(folder: Path, address: str, url: str, cases: Sequence[Case]) -> Any:
    """The config for groups of one size, which a source of prime-rl has one of."""
    from prime_rl.configs.orchestrator import OrchestratorConfig

    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(case.row) + "\n" for case in cases))
    (source,) = yaml.safe_load(file_of("prime.yaml"))["orchestrator"]["train"]["source"]
    source["env"]["taskset"]["path"] = str(rows)
    source |= {"serve": {"address": address}, "group_size": cases[0].size}
    return OrchestratorConfig(
        model={"name": str(folder / "model"), "client": {"base_url": url}},
        renderer={"name": "default"},
        train={
            "source": [source],
            "sampling": {"max_completion_tokens": LONGEST_RESPONSE},
            "filter_zero_advantages": False,
        },
        seq_len=4096,
        batch_size=1000,
    )


class Orchestrator:
    """The parts of prime-rl's orchestrator that rollouts pass, each task drawn once."""

    def __init__(self, config: Any) -> None:
        from prime_rl.orchestrator.envs import TrainEnvs
        from prime_rl.utils.client import InferencePool

        self.config = config
        client, renderer = config.model.client, config.renderer
        self.pool = InferencePool(client, "policy", train_client_type="renderer", renderer_config=renderer)
        self.envs = TrainEnvs(
            config.train.source, config.env_addresses, policy_pool=self.pool, renderer_config=renderer
        )

    async def start(self) -> None:
        from prime_rl.orchestrator.dispatcher import Dispatcher
        from prime_rl.orchestrator.train_sink import TrainSink
        from prime_rl.orchestrator.train_source import TrainSource
        from prime_rl.orchestrator.types import Policy as Version
        from prime_rl.orchestrator.types import Progress

        await self.envs.start()
        (env,) = self.envs
        source = TrainSource(self.envs)
        left = iter(range(env.num_tasks))

        def next_task(*, step: int) -> Any:
            return None if next(left, None) is None else TrainSource.next_task(source, step=step)

        source.next_task = next_task
        self.dispatcher = Dispatcher(
            train_envs=self.envs,
            eval_envs=None,
            train_source=source,
            eval_source=None,
            policy_pool=self.pool,
            policy=Version(0, "policy"),
            progress=Progress(),
            initial_max_inflight=8,
            max_inflight_ceiling=None,
            tasks_per_minute=None,
            max_off_policy_steps=8,
            run_id="a-run",
            run_name=None,
        )
        self.sink = TrainSink(
            self.config,
            tokenizer=None,
            train_envs=self.envs,
            mm_token_type_ids_mapping=None,
            progress=Progress(),
            batch_size=self.config.batch_size,
            token_batch_size=None,
            on_result=source.on_result,
        )
        self.dispatching = asyncio.ensure_future(self.dispatcher.start())

    async def result(self) -> Any:
        """What the dispatcher has next, or died of."""
        getting = asyncio.ensure_future(self.dispatcher.out_q.get())
        await asyncio.wait([getting, self.dispatching], return_when=asyncio.FIRST_COMPLETED)
        return getting.result() if getting.done() else self.dispatching.result()

    async def stop(self) -> None:
        await self.dispatcher.stop()
        for env in self.envs:
            await env.env_client.close()


def told(sink: Any) -> list[Sample]:
    """The samples of the batch that the trainer gets."""
    of_traces, episodes = dict(sink.pending_batch), dict(sink.episode_by_trace)
    assert sink.process_batch().samples == [sample for samples in of_traces.values() for sample in samples]
    found = []
    for id_, samples in of_traces.items():
        (trace,) = episodes[id_].traces
        for sample in samples:
            start = sample.mask.index(True)
            (advantage,) = {each for each, own in zip(sample.advantages, sample.mask, strict=True) if own}
            found.append(
                Sample(
                    case_of(str(trace.task.data.row)).name,
                    prompt=sample.token_ids[:start],
                    response=sample.token_ids[start:],
                    mask=[int(own) for own in sample.mask[start:]],
                    logprobs=sample.logprobs[start:],
                    reward=trace.reward,
                    truncated=trace.is_truncated,
                    advantage=advantage,
                )
            )
    return found


async def samples_of(config: Any, cases: Sequence[Case]) -> list[Sample]:
    orchestrator = Orchestrator(config)
    await orchestrator.start()
    for _ in range(sum(case.size for case in cases)):
        assert await orchestrator.sink.add(await orchestrator.result()) is None
    await orchestrator.stop()
    return told(orchestrator.sink)


async def dropped(folder: Path, policy: Policy, config: Any) -> dict[str, int]:
    """A group that prime-rl drops because it has become too old."""
    orchestrator = Orchestrator(config)
    await orchestrator.start()

    async def drop() -> None:
        (group,) = orchestrator.dispatcher.groups
        await orchestrator.dispatcher.drop_group(group, reason="stale")
        await orchestrator.sink.cancel(await orchestrator.result())

    found = await acceptance.abandoned(folder, policy, [], drop)
    assert not orchestrator.sink.pending_batch
    await orchestrator.stop()
    return found


async def run(folder: Path) -> list[Ran]:
    policy = Policy(folder)
    ran = Ran("prime-rl", "559b447")
    graph = str(folder / "graph.yaml")
    server = EnvServer(graph, "tcp://127.0.0.1:0", verifiers="0.3", attempts=1, ray=False)
    serving = asyncio.ensure_future(server.serve())
    with endpoint(policy.tokenizer, policy.sample) as url:
        for size in (2, 3):
            cases = [case for case in CASES if case.size == size]
            ran.samples += await samples_of(config_of(folder, server.address, url, cases), cases)
        ran.asked = list(policy.asked)
        config = config_of(folder, server.address, url, [ABANDONED])
        ran.extra["abandoned"] = await dropped(folder, policy, config)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    return [ran]


def main(folder: Path) -> list[Ran]:
    (folder / "rows.py").write_text(file_of("rows.py"))
    sys.path[:0] = [str(folder), str(Path(sys.prefix) / "src/verifiers-0.3")]
    return asyncio.run(run(folder))


if __name__ == "__main__":
    acceptance.script(main)
