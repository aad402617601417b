"""Tasks of Inspect: the same completions get the scores that its own program gives them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("inspect_ai", reason="needs the extra inspect")

from inspect_ai import eval as inspect_eval
from inspect_ai.dataset import MemoryDataset
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import value_to_float

from gym_serve.evaluation.benchmark import find_benchmark
from gym_serve.interop.inspect_tasks import InspectTasks, tasks, worker
from gym_serve.testing import TestClient
from gym_serve.types.errors import GymError, InvalidRequest

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore"),
]  # warnings of Inspect and its packages

FILE = Path(__file__).with_name("inspect_tasks_made.py")
MADE = ["sums", "thoughts", "contained", "boxed", "choices", "several_choices", "measured"]
COMPLETIONS = [
    "4",
    "The answer is 391.",
    "ANSWER: 4",
    "ANSWER: 391\nbecause",
    "ANSWER: A",
    "**ANSWER: A, C**",
    "answer: (c)",
    "It is four.",
    "ANSWER: B\nANSWER: A",
    "",
]


def spec(name: str) -> str:
    return f"{FILE}@{name}"


def run(task: Any, folder: Path, completions: list[str]) -> Any:
    """The log of Inspect's own program, with a model that gives the completions in turn."""
    usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)  # its estimate would need a download
    outputs = [ModelOutput.from_content("mockllm/model", text) for text in completions]
    for output in outputs:
        output.usage = usage
    model = get_model("mockllm/model", custom_outputs=outputs, memoize=False)
    one = {"epochs": 1, "max_samples": 1, "max_connections": 1}
    (log,) = inspect_eval(task, model=model, display="none", log_dir=str(folder), **one)
    assert log.status == "success", log.error
    return log


def their_scores(name: str, folder: Path) -> list[dict[str, float]]:
    """The scores of each sample with each completion, by Inspect's own program."""
    task = tasks.load.__wrapped__(spec(name))
    samples = [
        sample.model_copy(update={"id": None}, deep=True) for sample in task.dataset for _ in COMPLETIONS
    ]
    task.dataset = MemoryDataset(samples)
    log = run(task, folder, COMPLETIONS * len(samples))
    return [flat({key: score.value for key, score in sample.scores.items()}) for sample in log.samples]


def flat(values: dict[str, Any]) -> dict[str, float]:
    number = value_to_float()
    return {
        f"{name}/{key}" if key else name: number(one)
        for name, value in values.items()
        for key, one in (value.items() if isinstance(value, dict) else [("", value)])
    }


@pytest.mark.parametrize("name", MADE)
def test_completions_get_the_scores_of_inspects_own_program(name: str, tmp_path: Path) -> None:
    task = tasks.load(spec(name))
    ours = [
        asyncio.run(tasks.scores(task, sample, completion))
        for sample in task.dataset
        for completion in COMPLETIONS
    ]
    assert ours == their_scores(name, tmp_path)
    assert len({next(iter(scores.values())) for scores in ours}) > 1, "right and wrong completions"


def test_the_model_is_asked_what_inspect_asks(tmp_path: Path) -> None:
    for name in MADE:
        rows = list(tasks.rows_of(spec(name)))
        log = run(tasks.load.__wrapped__(spec(name)), tmp_path, ["4"] * len(rows))
        theirs = [
            [(message.role, message.text) for message in sample.messages if message.role != "assistant"]
            for sample in log.samples
        ]
        if name in ("choices", "several_choices", "measured"):
            assert len(theirs) == len(rows) == 1
        assert [
            [(item["role"], item["content"]) for item in row["responses_create_params"]["input"]]
            for row in rows
        ] == theirs


def test_a_task_is_a_benchmark() -> None:
    benchmark = find_benchmark(f"inspect:{spec('sums')}")
    assert (benchmark.name, benchmark.repeats) == ("inspect_inspect_tasks_made_sums", 2)
    row = next(benchmark.rows()).row
    assert row is not None
    assert row["responses_create_params"] == {
        "input": [
            {"role": "system", "content": "You are precise."},
            {"role": "user", "content": "Say it: 2 + 2?"},
        ],
        "temperature": 0.5,
        "max_output_tokens": 50,
    }
    assert row["extra_body"] == {"stop": ["<end>"]}


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("judged", r"is scored by a model \(model_graded_qa\)"),
        ("criticised", "its solver does not run by itself"),
        ("twice", "its solver asks the model more than once"),
        ("with_tools", "its solver has tools"),
        ("in_a_sandbox", "needs a sandbox"),
        ("shuffled", "shuffles the choices at random"),
        ("unscored", "has no scorer"),
    ],
)
def test_what_needs_inspects_model_loop_is_refused(name: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        list(find_benchmark(f"inspect:{spec(name)}").rows_from.rows("test", Path()))


@pytest.mark.parametrize("name", [spec("nothing"), "no_package/no_task"])
def test_a_task_that_is_not_there(name: str) -> None:
    with pytest.raises(GymError, match=name.rpartition("@")[2]):
        find_benchmark(f"inspect:{name}")


def test_a_server_scores_by_its_worker() -> None:
    row = next(tasks.rows_of(spec("choices")))
    with TestClient(InspectTasks()) as client, client.episode(row) as episode:
        verdict = episode.verify("ANSWER: A")
        assert (verdict.reward, verdict.model_dump()["inspect"]) == (1.0, {"choice": 1.0})
        assert episode.verify("ANSWER: B").reward == 0.0


def test_a_metric_is_chosen() -> None:
    row = next(tasks.rows_of(spec("contained")))
    with TestClient(InspectTasks(metric="f1")) as client, client.episode(row) as episode:
        verdict = episode.verify("It is 4")
    assert 0 < verdict.reward < verdict.model_dump()["inspect"]["includes"] == 1.0


def test_a_solver_that_asks_again_gives_no_score() -> None:
    sample = {"input": "2 + 2?", "target": "4"}
    refused = worker.work((spec("asks_again"), sample, "no"))
    problem = f"inspect:{spec('asks_again')}: its solver asks the model more than once"
    assert refused == {"metrics": {}, "invalid": problem}
    assert worker.work((spec("asks_again"), sample, "4"))["metrics"] == {"includes": 1.0}
