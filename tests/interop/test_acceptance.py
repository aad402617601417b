"""Every trainer's own released code, on rollouts of seven environments with every outcome.

Each trainer runs in a process of the venv that `make interop` builds, on a CPU, with an engine that really
samples (`acceptance`). What it would train on is compared with what the engine sampled: tokens, masks,
log-probabilities, versions, rewards, and the baselines of groups.

The table in docs/released-trainers.md is made of what passed here; with ``TRAINERS_TABLE=1`` it is written.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Literal

import pytest
from acceptance import ABANDONED, CASES, SEEN, YES, Asked, Case, Ran, Sample
from support.docs import blocks_of
from venvs import INTEROP, ROOT, needs, printed

pytestmark = [pytest.mark.interop, pytest.mark.timeout(900), needs(INTEROP)]

PAGE = ROOT / "docs" / "released-trainers.md"


@dataclass(frozen=True)
class Trainer:
    """A trainer, and what it cannot hold.

    Attributes:
        script: ``run_{script}.py`` runs it.
        own: its own code that the script runs.
        left: what of it does not run without a GPU, and why.
        file: the file of a page that a user writes; None for a command with settings.
        page: the page of its guide.
        failures: what it has for a failed rollout: a masked sample with the reward of its siblings, one with
            a single action, a masked one without a reward, or none.
        versions: what its engine tells of the policy's versions: those of the first and the last token, the
            last one of each turn, or none.
        branches: whether it trains on the branches of a harness too.
        turns_apart: whether each turn is a sample of its own.
        truncated: whether its samples say that they were cut off.
        groups: whether it can have rewards of groups.
        cancel: how it cancels rollouts that run; None if it has no way.
        stops: whether a cancel ends the generation.
        pictures: what becomes of pictures: ``ran`` through its own code, ``tested`` (without its code, by the
            test that is named), or ``refused``.
    """

    script: str
    own: Sequence[str]
    left: str
    file: str | None
    page: Path = PAGE
    failures: Literal["masked", "one action", "unscored", "none"] = "masked"
    versions: Literal["tokens", "turns", "none"] = "none"
    branches: bool = False
    turns_apart: bool = False
    truncated: bool = True
    groups: bool = True
    cancel: str | None = None
    stops: bool = True
    pictures: str = "refused"


TRAINERS = {
    "verl V0": Trainer(
        "verl",
        ["LLMServerClient", "AgentLoopWorker.generate_sequences", "compute_grpo_outcome_advantage"],
        "`main_ppo`: FSDP and the engines need a GPU",
        "gym.yaml",
        versions="tokens",
        cancel="its worker's task; its client tells its engines nothing",
        pictures="ran",
    ),
    "verl V1": Trainer(
        "verl",
        ["LLMServerClient", "AgentLoopWorkerTQ.generate_sequences", "ReplayBuffer.sample"],
        "`main_ppo`: FSDP and the engines need a GPU",
        "gym.yaml",
        failures="none",
        versions="tokens",
        branches=True,
        truncated=False,
        pictures="tested: `tests/training/test_pictures.py`",
    ),
    "OpenRLHF": Trainer(
        "openrlhf",
        [
            "_load_agent_executor",
            "SamplesGenerator._process_response_into_experience",
            "RemoteExperienceMaker.compute_advantages_and_returns",
        ],
        "its Ray trainer: DeepSpeed, vLLM and FlashAttention need CUDA, and are stood in for",
        "agent.py",
        failures="one action",
        cancel="its executor's task",
    ),
    "NeMo RL": Trainer(
        "nemo_rl",
        [
            "spinup_nemo_gym_actor",
            "run_async_nemo_gym_rollout",
            "AsyncNemoGymRolloutImpl",
            "calculate_baseline_and_std_per_prompt",
            "classify_rollout_failure",
        ],
        "the policy's workers: need a GPU",
        "grpo.yaml",
        truncated=False,
        cancel="`NemoGym.shutdown`",
        pictures="ran",
    ),
    "SkyRL": Trainer(
        "skyrl",
        [
            "prepare_generator_input",
            "RayPPOTrainer.generate",
            "RayPPOTrainer.postprocess_generator_output",
            "RayPPOTrainer.convert_to_training_input",
            "RayPPOTrainer.compute_advantages_and_returns",
        ],
        "its inference engines and workers: need a GPU",
        None,
        cancel="its generator's task",
        pictures="ran",
    ),
    "slime": Trainer(
        "slime",
        [
            "generate_and_rm_group",
            "RolloutManager._convert_samples_to_train_data",
            "RolloutManager._post_process_rewards",
        ],
        "SGLang: needs a GPU, and is stood in for",
        "rollout.py",
        versions="turns",
        branches=True,
        cancel="`abort`",
        pictures="ran",
    ),
    "AReaL": Trainer(
        "areal",
        ["OpenAIProxyWorkflow.arun_episode", "proxy_rollout_server", "to_tensor_dict"],
        "the trainer: needs a GPU; its parser of tool calls (SGLang's or vLLM's) is replaced",
        "train.py",
        failures="none",
        versions="tokens",
        branches=True,
        turns_apart=True,
        truncated=False,
        groups=False,
        cancel="the task of an episode; its proxy tells its engine nothing",
        stops=False,
    ),
    "prime-rl": Trainer(
        "prime_rl",
        ["TrainEnvs", "Dispatcher", "TrainSource", "TrainSink", "InferencePool"],
        "its trainer and its vLLM: need a GPU",
        "rows.py",
        failures="none",
        branches=True,
        groups=False,
        cancel="`Dispatcher.drop_group`",
        pictures="refused: `tests/interop/test_prime_rl.py`",
    ),
    "TRL": Trainer(
        "trl",
        ["GRPOTrainer.train", "GRPOTrainer._generate_and_score_completions"],
        "vLLM's server mode: needs a GPU",
        "train.py",
        page=ROOT / "docs" / "tutorial-train.md",
        failures="unscored",
        truncated=False,
        pictures="of tools, by `environment_factory`: `tests/engines/test_trl.py`",
    ),
    "TRL, asynchronous": Trainer(
        "trl",
        ["AsyncGRPOTrainer.train"],
        "FlashAttention's kernel: needs a GPU, and is stood in for",
        "train_async.py",
        failures="none",
        branches=True,
        truncated=False,
        cancel="it stops its worker",
        pictures="refused: `tests/engines/test_trl.py`",
    ),
}

BEGIN, END = "<!-- made by tests/interop/test_acceptance.py -->\n", "<!-- end -->\n"

_passed: dict[str, list[Case]] = {name: [] for name in TRAINERS}


@cache
def runs(script: str) -> dict[str, Ran]:
    """The runs of a script, by trainer. (Its folder is removed by pytest's own fixture.)"""
    folder = _folder[0] / script
    folder.mkdir(exist_ok=True)
    found = printed(INTEROP, f"run_{script}.py", folder, folder=folder)
    return {run["trainer"]: Ran.load(run) for run in found}


_folder: list[Path] = []


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    _folder.append(tmp_path_factory.mktemp("trainers"))


def turns_of(sample: Sample, asked: Sequence[Asked]) -> list[list[Asked]]:
    """The generations that a sample consists of. Each is a list, as siblings may have asked for the same."""
    seen = sample.prompt + sample.response
    turns: dict[int, list[Asked]] = {}
    for each in asked:
        start = len(each.prompt)
        said = each.generation[: len(seen) - start]  # a response may be cut
        if len(sample.prompt) <= start < len(seen) and each.prompt + said == seen[: start + len(said)]:
            turns.setdefault(start, []).append(each)
    return [turns[start] for start in sorted(turns)]


def reward_of(case: Case, text: str) -> float:
    """What the verifier makes of a response."""
    last = text.rpartition("<|im_start|>assistant\n")[2].removesuffix("<|im_end|>")
    right = last == YES and (case.environment != "stateful" or "the total is 3" in text)
    return float(right) * (2 if case.environment == "group" else 1)


TURNS = {"single": 1, "tool": 2, "stateful": 3, "judge": 1, "group": 1, "harness": 2, "failing": 2}


def check_sample(trainer: Trainer, case: Case, sample: Sample, asked: Sequence[Asked]) -> None:
    """Tokens, mask, log-probabilities and versions of a sample that is trained on."""
    turns = turns_of(sample, asked)
    mask, logprobs = [0] * len(sample.response), [0.0] * len(sample.response)
    for turn in turns:
        start = len(turn[0].prompt) - len(sample.prompt)
        for i, logprob in enumerate(turn[0].logprobs[: len(mask) - start], start):
            mask[i], logprobs[i] = 1, logprob
    assert sample.mask == mask
    assert sample.logprobs == pytest.approx(logprobs, abs=1e-6)
    assert mask[0] == 1
    if trainer.versions == "none":
        assert sample.versions is None
    else:
        assert sample.versions is not None
        first = {each.begun if trainer.versions == "tokens" else each.ended for each in turns[0]}
        assert min(sample.versions) in first
        assert max(sample.versions) in {each.ended for each in turns[-1]}
        if case.outcome == "straddled" and (trainer.versions == "tokens" or len(turns) > 1):
            assert min(sample.versions) < max(sample.versions)
    if trainer.truncated:
        assert sample.truncated == (case.outcome == "truncated")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_gets_what_was_sampled_and_what_it_is_worth(name: str, case: Case) -> None:
    trainer = TRAINERS[name]
    run = runs(trainer.script)[name]
    found = [sample for sample in run.samples if sample.case == case.name]
    verified = [sample for sample in found if not sample.is_branch]
    failed = [sample for sample in verified if sample.failed]
    scored = [sample for sample in verified if not sample.failed]
    turns = TURNS[case.environment]
    if trainer.turns_apart:  # the last one stands for its rollout
        assert all(len(turns_of(sample, run.asked)) == 1 for sample in scored)
        apart = [scored[i : i + turns] for i in range(0, len(scored), turns)]
        assert all(len({sample.reward for sample in rollout}) == 1 for rollout in apart)
        scored, turns = [rollout[-1] for rollout in apart], 1
    if trainer.failures == "none":
        assert not failed
    else:
        assert len(verified) == case.size
    if case.fails or (case.environment == "group" and not trainer.groups):
        assert not scored
    else:
        assert len(scored) == case.size - (case.outcome == "mixed")

    for sample in found:
        assert sample.prompt
        assert len(sample.response) == len(sample.mask) == len(sample.logprobs) > 0
        if not sample.failed:
            check_sample(trainer, case, sample, run.asked)
    if case.outcome != "truncated":  # a trainer's own limit may cut turns off
        assert all(len(turns_of(sample, run.asked)) == turns for sample in scored)
    if case.outcome == "mixed":
        worth = 2.0 if case.environment == "group" else 1.0
        assert sorted(sample.reward for sample in scored) == [0.0, worth][: len(scored)]
    else:
        assert [sample.reward for sample in scored] == [reward_of(case, sample.text) for sample in scored]

    rewards = [sample.reward for sample in scored]
    mean = fmean(rewards) if rewards else 0.0
    for sample in failed:
        assert sum(sample.mask) == (1 if trainer.failures == "one action" else 0)
        if trainer.failures == "unscored":
            assert sample.reward is None
        else:
            assert sample.reward == pytest.approx(mean)
        assert sample.advantage in (None, pytest.approx(0.0))
        assert sample.normalized in (None, pytest.approx(0.0))
    for sample in scored:
        assert sample.advantage in (None, pytest.approx(sample.reward - mean))
        if sample.normalized is not None and len(set(rewards)) > 1:
            # docs/released-trainers.md, "The group of a failure"
            counted = 0 if trainer.failures == "unscored" else len(failed)
            larger = math.sqrt((len(scored) + counted - 1) / (len(scored) - 1))
            expected = (sample.reward - mean) / stdev(rewards) * larger
            assert sample.normalized == pytest.approx(expected, rel=1e-3)
    _passed[name].append(case)


def test_the_sub_agents_of_a_harness_are_trained_on_where_a_trainer_can() -> None:
    for name, trainer in TRAINERS.items():
        run = runs(trainer.script)[name]
        branches = [sample for sample in run.samples if sample.is_branch]
        assert Counter(sample.case for sample in branches) == Counter(
            {"harness/branches": 2} if trainer.branches else {}
        )
        assert all(sample.reward == 1.0 for sample in branches)


@pytest.mark.parametrize("name", [name for name, each in TRAINERS.items() if each.pictures == "ran"])
def test_a_trainer_is_given_every_picture_at_its_place(name: str) -> None:
    found = runs(TRAINERS[name].script)[name].extra["pictures"]
    assert found["engine"] == [1] * SEEN.size + [2] * SEEN.size  # by generation
    both = {"tokens": 2 * 16, "patches": 2 * 64, "same": True}
    assert found["trained"] == [both] * SEEN.size


@pytest.mark.parametrize("name", [name for name, each in TRAINERS.items() if each.pictures == "refused"])
def test_a_trainer_that_has_no_form_for_pictures_is_given_none(name: str) -> None:
    found = runs(TRAINERS[name].script)[name].extra["pictures"]
    assert found == {"refused": "the trainer's policy takes text only, got input_image"}


@pytest.mark.parametrize("name", [name for name, trainer in TRAINERS.items() if trainer.cancel])
def test_what_a_trainer_cancels_is_stopped_and_its_session_closed(name: str) -> None:
    trainer = TRAINERS[name]
    abandoned = runs(trainer.script)[name].extra["abandoned"]
    assert abandoned == {"stopped": ABANDONED.size if trainer.stops else 0, "open": 0}


def test_slime_can_leave_failures_out_of_a_group_and_count_a_branch_once() -> None:
    run = runs("slime")["slime"]
    found: dict[str, list[float]] = {}
    for case, advantage in run.extra["by group"]:
        found.setdefault(case, []).append(advantage)
    assert found.keys() == {case.name for case in CASES}
    for case in CASES:
        if case.outcome == "mixed":
            assert sorted(found[case.name]) == pytest.approx([-(0.5**0.5), 0.0, 0.5**0.5], abs=1e-4)
        else:
            assert set(found[case.name]) == {0.0}


def test_nemo_rls_actor_goes_on_after_a_restart_and_sends_failed_rows_again() -> None:
    extra = runs("nemo_rl")["NeMo RL"].extra
    assert extra["restarted"] == [1.0, 1.0]
    assert (extra["raised"]["type"], extra["raised"]["class"]) == ("GymTransportError", "infra")
    assert "the verifier is away" in extra["raised"]["text"]
    assert sorted(extra["sent again"]) == [0.0, 1.0]


def test_areal_says_why_it_rejects_a_rollout() -> None:
    extra = runs("areal")["AReaL"].extra
    assert extra["single/failed"] == ["RolloutFailed: unavailable: the verifier is away"] * 2
    assert "rewards groups of rollouts" in extra["group/accepted"][0]
    assert "a mistake in verify" in extra["failing/verify"][0]


def row_of(name: str, passed: Sequence[Case]) -> str:
    """The line of a trainer in the table: what passed, and what its script names."""
    trainer = TRAINERS[name]
    script = Path(__file__).with_name(f"run_{trainer.script}.py").read_text()
    for own in trainer.own:
        assert all(part in script for part in own.split(".")), f"run_{trainer.script}.py does not run {own}"
    refused = [case for case in passed if case.environment == "group" and not trainer.groups]
    cases = f"{len(passed) - len(refused)}" + (f"; {len(refused)} refused" if refused else "")
    lines = "a command"
    if trainer.file is not None:
        (block,) = (block for block in blocks_of(trainer.page) if block.file == trainer.file)
        code = [line for line in block.text.splitlines()[1:] if line.strip()]
        lines = f"{len(code)} (`{trainer.file}`)"
    own = ", ".join(f"`{own}`" for own in trainer.own)
    cancel = trainer.cancel or "—"
    version = runs(trainer.script)[name].version
    cells = (name, version, cases, trainer.pictures, own, cancel, trainer.left, lines)
    return f"| {' | '.join(cells)} |\n"


def test_the_table_of_the_documentation_says_what_ran() -> None:
    if any(len(passed) < len(CASES) for passed in _passed.values()):
        pytest.skip("the table is made of the whole suite, and not all of its cases have passed")
    made = (
        "| trainer | version | groups | pictures | its own code that ran | its cancel "
        "| what did not run, and why | lines of yours |\n|---|---|---|---|---|---|---|---|\n"
    ) + "".join(row_of(name, passed) for name, passed in _passed.items())
    text = PAGE.read_text()
    before, begin, rest = text.partition(BEGIN)
    table, end, after = rest.partition(END)
    assert begin
    assert end
    if os.environ.get("TRAINERS_TABLE"):
        PAGE.write_text(before + begin + made + end + after)
    else:
        assert table == made, "run this with TRAINERS_TABLE=1"
