"""TRL 1.16 with rollouts of a graph: its own trainers, on models that are made on the spot."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.docs import ROOT, blocks_of

pytest.importorskip("torch", reason="needs the venv of `make test-vllm`")

from support.eyes import seen_graph, seen_row
from support.packed_attention import varlen_attention

from gym_serve import Gym, ResourcesServer, Verdict, VerifyRequest, tool
from gym_serve.client.policy import Policy
from gym_serve.servers.runner import DESCRIBE
from gym_serve.training.trl import (
    RolloutWorker,
    dataset,
    environment_factory,
    environment_reward,
    rollout_func,
    rollout_reward,
)
from gym_serve.types.errors import BadRequest, InvalidRequest, ToolFailed, Unavailable, VerifierFailed

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(500),
]

EXAMPLES = ROOT / "examples"


class Numbers(ResourcesServer):
    """Adds numbers; the verifier breaks down where a row says so."""

    @tool
    async def add(self, a: int, b: int, note: str | None = None) -> str:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
            note: What it is for.
        """
        if a < 0:
            raise ToolFailed("too small")
        return str(a + b)

    async def verify(self, request: VerifyRequest) -> Verdict:
        """The length of the answer in characters."""
        if getattr(request, "broken", False):
            raise VerifierFailed("out of order")
        return Verdict(reward=float(len(request.response.last_text)))


ROWS: list[dict[str, Any]] = [{"prompt": "What is 1 + 2?"}, {"prompt": "What is 3 + 4?", "broken": True}]


@pytest.fixture(scope="module")
def gym(tiny: Path) -> Iterator[Gym]:
    engine = {"type": "hf_engine", "model": str(tiny), "weight_updates": True}
    agent = {"type": "simple_agent", "model": "policy", "resources": "numbers"}
    graph = {
        "models": {"policy": engine, "judge": {"type": "scripted_model"}},
        "resources": {"numbers": {"type": f"{__name__}:Numbers"}},
        "agents": {"agent": agent},
    }
    with Gym.from_graph(graph, ray=False) as running:
        yield running


def trainer_of(model: Any, tokenizer: Any, data: Any, **changes: Any) -> Any:
    """What `RolloutFunc` reads of a GRPOTrainer."""
    args = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    accelerator = SimpleNamespace(
        get_state_dict=lambda model: model.state_dict(), is_main_process=True,
        unwrap_model=lambda model: model, wait_for_everyone=lambda: None,
    )  # fmt: skip
    return SimpleNamespace(
        model=model.train(), accelerator=accelerator, processing_class=tokenizer, train_dataset=data,
        eval_dataset=None, num_generations=3, num_generations_eval=1, state=SimpleNamespace(global_step=0),
        args=SimpleNamespace(max_completion_length=8, **args | changes),
    )  # fmt: skip


@pytest.fixture
def trainer(other: Path) -> Any:
    """One whose model has other weights than the graph's engine had."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(other, dtype="float32")
    return trainer_of(model, AutoTokenizer.from_pretrained(other), dataset(ROWS))


def asked_by(trainer: Any, *indices: int) -> list[Any]:
    """Prompts as TRL passes them."""
    return [trainer.train_dataset[i]["prompt"] for i in indices for _ in range(trainer.num_generations)]


def test_a_batch_has_the_trainers_weights_exact_tokens_and_masked_failures(gym: Gym, trainer: Any) -> None:
    import torch

    ask = rollout_func(gym)
    batch = ask(asked_by(trainer, 0, 1, 0), trainer)
    rewards = batch["rollout_reward"]
    assert [reward is None for reward in rewards] == [False] * 3 + [True] * 3 + [False] * 3
    assert [any(mask) for mask in batch["env_mask"]] == [True] * 3 + [False] * 3 + [True] * 3
    assert all(batch["completion_ids"])
    assert batch["rollout_metrics"]["rollouts/failed"] == 3
    assert batch["rollout_metrics"]["rollouts/staleness"] == 0
    for prompt, completion, logprobs in zip(
        batch["prompt_ids"], batch["completion_ids"], batch["logprobs"], strict=True
    ):
        assert len(completion) == len(logprobs)
        with torch.inference_mode():
            logits = trainer.model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
        assert logprobs == pytest.approx(expected.tolist(), abs=1e-3)


def test_weights_are_pushed_once_a_step(gym: Gym, trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: list[str] = []
    update = Policy.update_weights
    monkeypatch.setattr(
        Policy,
        "update_weights",
        lambda policy, model, version, **given: (
            pushed.append(version),
            update(policy, model, version, **given),
        ),
    )
    ask = rollout_func(gym, model="policy")
    for step in (4, 4, 5):
        trainer.state.global_step = step
        ask(asked_by(trainer, 0), trainer)
    assert pushed == ["4", "5"]
    assert gym.policy.version() == "5"


def test_rewards_and_metrics_reach_the_trainer() -> None:
    noted: dict[str, float] = {}
    given = {"rollout_reward": [1.0, None], "rollout_metrics": [{"rollouts/failed": 1.0}] * 2}
    rewards = rollout_reward(["?"] * 2, ["!"] * 2, log_metric=noted.__setitem__, **given)
    assert rewards == [1.0, None]
    assert noted == {"rollouts/failed": 1.0}


def test_what_rollouts_cannot_be_made_of_is_told(gym: Gym, trainer: Any) -> None:
    with pytest.raises(BadRequest, match=r"models\.judge takes no weights"):
        rollout_func(gym, model="judge")
    with pytest.raises(InvalidRequest, match="`repeats` must be left out"):
        rollout_func(gym, repeats=2)
    ask = rollout_func(gym)
    with pytest.raises(InvalidRequest, match="no row of the trainer's dataset has the prompt"):
        ask(["another"], trainer)
    trainer.train_dataset = dataset([{"prompt": "?", "answer": 1}, {"prompt": "?", "answer": 2}])
    with pytest.raises(InvalidRequest, match="rows 0 and 1 of the dataset have the same prompt"):
        rollout_func(gym)(asked_by(trainer, 0), trainer)


def test_a_dataset_of_ones_own_has_the_keys_of_rows_as_columns(gym: Gym, trainer: Any) -> None:
    from datasets import Dataset

    trainer.train_dataset = Dataset.from_list([{"broken": None, **row} for row in ROWS])
    batch = rollout_func(gym)(asked_by(trainer, 0, 1), trainer)
    assert [reward is None for reward in batch["rollout_reward"]] == [False] * 3 + [True] * 3


# TRL's own trainers


def grpo_config(folder: Path, **settings: Any) -> dict[str, Any]:
    """Settings of a configuration for a machine without a GPU."""
    quiet = {"report_to": "none", "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no"}
    plain = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    sizes = {"num_generations": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    return {"output_dir": str(folder), **quiet, **plain, **sizes, **settings}


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Modules of `examples/`, by name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


def test_a_small_model_learns_and_the_training_is_resumed(
    examples: Callable[[str], Any], tmp_path: Path
) -> None:
    train = examples("train_grpo").train
    rewards = train(tmp_path, steps=36, ray=False)
    assert sum(rewards[:3]) / 3 <= 0.4
    assert sum(rewards[-3:]) / 3 >= 0.6
    longer = train(tmp_path, steps=38, resume=True, ray=False)
    assert longer[:36] == rewards
    assert sum(longer[36:]) / 2 >= 0.6  # it went on, and did not begin again
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 39))
    assert (tmp_path / "training.png").stat().st_size > 10_000


def test_held_out_rows_are_asked_before_and_after_and_only_the_last_layers_learn(
    examples: Callable[[str], Any], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = examples("train_real")
    for name, value in {"HELD_OUT": 3, "TRAINED": 8, "LAYERS": 1}.items():
        monkeypatch.setattr(real, name, value)
    folders = [tmp_path / "swap-0", tmp_path / "swap-1"]
    results = []
    for seed, folder in enumerate(folders):
        folder.mkdir()
        results.append(real.train(folder, tiny, task="swap", steps=2, seed=seed, ray=False))
        for name in ("before", "after"):
            said = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
            assert len(said) == 3 * real.REPEATS
            assert sum(rollout["reward"] for rollout in said) / len(said) == results[-1][name]
            versions = {rollout["response"]["output"][-1]["weight_version"] for rollout in said}
            assert versions == {"trained" if name == "after" else "0"}
    steps = [examples("report").read_metrics(folder / "metrics.jsonl") for folder in folders]
    assert [[step["step"] for step in made] for made in steps] == [[1, 2], [1, 2]]
    examples("report").draw_seeds(results, steps, tmp_path / "swap.png")
    assert (tmp_path / "swap.png").stat().st_size > 10_000


def test_a_loop_of_ones_own_trains_while_rollouts_run(examples: Callable[[str], Any], tmp_path: Path) -> None:
    examples("boxes").make_policy(tmp_path / "model", steps=20)
    report = examples("train_async").train(tmp_path / "asynchronous", max_staleness=2, steps=6, delay=0.01)
    assert [step["step"] for step in report.steps] == list(range(1, 7))
    ages = [step["staleness"] for step in report.steps]
    assert max(ages) <= 2
    assert sum(ages) > 0  # rollouts ran meanwhile
    assert report.steps[0]["kl"] == pytest.approx(0, abs=1e-4)
    assert report.steps[-1]["kl"] > 0
    assert (tmp_path / "asynchronous" / "metrics.jsonl").read_text().count("\n") == 6


def test_the_script_of_the_guide_trains_and_has_fifteen_lines(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = ROOT / "docs" / "tutorial-train.md"
    (script,) = (block for block in blocks_of(page) if block.file == "train.py")
    lines = [line for line in script.text.splitlines()[1:] if line.strip()]
    assert len(lines) <= 15
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[0]))
    engine = {"type": "hf_engine", "model": str(tiny), "weight_updates": True}
    graph = {
        "models": {"policy": engine},
        "resources": {"numbers": {"type": f"{__name__}:Numbers"}},
        "agents": {"agent": {"type": "simple_agent", "model": "policy", "resources": "numbers"}},
    }
    (tmp_path / "graph.yaml").write_text(json.dumps(graph))
    smaller = {
        '"Qwen/Qwen3-0.6B"': repr(str(tiny)),
        '"graph.yaml"': '"graph.yaml", ray=False',
        "max_completion_length=1024": "max_completion_length=8, max_steps=2, save_steps=2, use_cpu=True, "
        "bf16=False, report_to='none'",
    }
    text = script.text
    for theirs, ours in smaller.items():
        assert text.count(theirs) == 1
        text = text.replace(theirs, ours)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(text, "train.py", "exec"), names)
    assert names["trainer"].state.global_step == 2
    assert (tmp_path / "checkpoints" / "checkpoint-2").is_dir()


def test_tools_of_our_environments_are_read_by_trl() -> None:
    """Their names, arguments and which of these are required, as TRL makes schemas of methods."""
    from transformers.utils import get_json_schema

    kinds = ("simple_weather", "session_counter", "tool_call_multireward", "workplace_assistant")
    seen = 0
    with Gym.from_graph({"resources": {kind: {"type": kind} for kind in kinds}}, ray=False) as gym:
        for kind in kinds:
            environment = environment_factory(gym, kind)()
            for op, operation in gym.call(kind, DESCRIBE).items():
                if op.startswith("tools/"):
                    given = operation["request"] or {}
                    read = get_json_schema(getattr(environment, op.removeprefix("tools/")))["function"]
                    assert read["description"]
                    assert read["parameters"]["properties"].keys() == given.get("properties", {}).keys()
                    assert read["parameters"].get("required", []) == given.get("required", [])
                    seen += 1
    assert seen > 25


def test_trl_is_given_the_pictures_of_tools_and_no_others() -> None:
    with Gym.from_graph(seen_graph(), ray=False) as gym:
        environment = environment_factory(gym, "bell")()
        environment.reset(**dataset([{"prompt": "ring"}])[0])
        text, shown = asyncio.run(environment.ring(times=1))
        assert text == {"type": "text", "text": "ding "}
        assert (shown["type"], shown["image"].size) == ("image", (224, 224))
        with pytest.raises(InvalidRequest, match="must be text, got input_image"):
            environment.reset(**dataset([seen_row()])[0])


def test_trls_own_tool_loop_runs_the_tools_of_an_environment(
    gym: Gym, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its generation is scripted, so that there are calls: one with a result, one that fails, one without."""
    import trl
    from transformers import AutoTokenizer
    from transformers.utils import get_json_schema
    from trl.chat_template_utils import qwen3_chat_template

    factory = environment_factory(gym, "numbers")
    schema = get_json_schema(factory().add)["function"]
    assert schema["description"] == "Add two numbers."
    assert schema["parameters"]["required"] == ["a", "b"]
    assert schema["parameters"]["properties"]["a"] == {"type": "integer", "description": "The first."}
    assert schema["parameters"]["properties"]["note"]["nullable"]

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = qwen3_chat_template
    trainer = trl.GRPOTrainer(
        model=str(tiny),
        processing_class=tokenizer,
        args=trl.GRPOConfig(**grpo_config(tmp_path, max_steps=1, max_completion_length=400)),
        train_dataset=dataset([{"prompt": "one"}, {"prompt": "two", "broken": True}]),
        environment_factory=factory,
        reward_funcs=environment_reward,
    )
    calls = ({"a": 1, "b": 2}, {"a": -1, "b": 2}, {"b": 2})
    written = [
        f'<tool_call>\n{{"name": "add", "arguments": {json.dumps(arguments)}}}\n</tool_call><|im_end|>'
        for arguments in calls
    ]
    asked: list[int] = []

    def generate(prompt_ids: list[list[int]], *rest: Any, **options: Any) -> tuple[list[list[int]], None]:
        texts = [*written, "no<|im_end|>"] if not asked else ["three<|im_end|>"] * len(prompt_ids)
        asked.append(len(prompt_ids))
        return [tokenizer(text)["input_ids"] for text in texts], None

    results: list[tuple[Any, list[float | None]]] = []
    judge = trainer.reward_funcs[0]

    async def judged(prompts: Any, completions: Any, **given: Any) -> list[float | None]:
        rewards: list[float | None] = await judge(prompts, completions, **given)
        results.append((completions, rewards))
        return rewards

    monkeypatch.setattr(trainer, "_generate_single_turn", generate)
    monkeypatch.setattr(trainer, "reward_funcs", [judged])
    trainer.train()
    assert asked == [4, 3]
    ((completions, rewards),) = results
    said = [
        [message["content"] for message in completion if message["role"] == "tool"]
        for completion in completions
    ]
    assert said[0] == ['"3"']
    assert "too small" in said[1][0]
    assert "a" in said[2][0]
    assert said[3] == []
    # The second row is the broken one, and TRL shuffles them.
    assert rewards in ([5.0, 5.0, None, None], [None, None, 5.0, 2.0])


def test_the_asynchronous_trainer_trains_on_what_the_graph_makes(
    gym: Gym, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trl.experimental import async_grpo
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda accelerator, dtype: None)
    kernel = SimpleNamespace(flash_attn_varlen_func=varlen_attention)
    monkeypatch.setattr(packing, "_flash_attn", lambda: kernel)
    worker = RolloutWorker(gym, ROWS[:1], size=4, max_staleness=1, params={"max_output_tokens": 8})
    trainer = async_grpo.AsyncGRPOTrainer(
        model=str(tiny),
        args=async_grpo.AsyncGRPOConfig(
            **grpo_config(tmp_path, max_steps=4, per_device_train_batch_size=8),
            token_budget=0, max_staleness=2, learning_rate=1e-4, dtype="float32",
        ),
        train_dataset=dataset(ROWS[:1]),
        rollout_worker=worker,
        weight_transfer=worker,
    )  # fmt: skip
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "ratio" in entry]
    assert len(logs) == 4
    assert gym.policy.version() == str(trainer.model_version) == "5"
    assert logs[0]["ratio"] == pytest.approx(1, abs=1e-3)  # its probabilities are the engine's
    assert all(0 <= entry["rollouts/staleness"] <= 2 for entry in logs)
    assert {entry["rollouts/failed"] for entry in logs} == {0.0}
    with pytest.raises(Unavailable, match="the worker is not running"):
        worker.check_health(1.0)
