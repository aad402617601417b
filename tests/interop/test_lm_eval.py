"""Tasks of lm-eval: the same completions get the scores that its own program gives them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

pytest.importorskip("lm_eval.tasks")

from lm_eval.api.model import LM
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks._index import Kind

from gym_serve.evaluation.benchmark import Benchmark
from gym_serve.interop.lm_eval import LmEval, lm_eval_benchmark, worker
from gym_serve.interop.lm_eval.tasks import manager_of, rows_of, task_files
from gym_serve.testing import TestClient
from gym_serve.types.errors import InvalidRequest

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore"),
]  # warnings of lm-eval and its packages

WORD_PROBLEM = {"question": "A box has 4 pens. How many have 3 boxes?", "answer": "3 * 4 = 12\n#### 12"}
CHOICES = {"text": ["ice", "steam", "sand", "salt"], "label": ["A", "B", "C", "D"]}
FIELDS = [
    "biology",
    "business",
    "chemistry",
    "computer science",
    "economics",
    "engineering",
    "health",
    "history",
]

ROWS: dict[str, list[dict[str, Any]]] = {
    "openai/gsm8k": [WORD_PROBLEM] * 9,
    "gsm8k": [WORD_PROBLEM] * 9,
    "SaylorTwift/bbh": [
        {"input": "Is (not True) true?", "target": "False"},
        {"input": "2?", "target": "(B)"},
    ],
    "TIGER-Lab/MMLU-Pro": [
        {
            "question_id": n,
            "question": f"Which of {field}?",
            "options": ["one", "two", "three", "four"],
            "answer": "B",
            "answer_index": 1,
            "cot_content": "A: Let's think step by step. The answer is (B).",
            "category": field,
            "src": "made",
        }
        for n, field in enumerate(FIELDS * 6)
    ],
    "juletxara/mgsm": [
        {
            "question": "4 + 8?",
            "answer": "Step-by-Step Answer: 4 + 8 = 12. The answer is 12.",
            "answer_number": 12,
            "equation_solution": "4+8=12",
        },
        {"question": "1 + 2?", "answer": None, "answer_number": 3, "equation_solution": None},
    ],
    "allenai/ai2_arc": [
        {"id": "m1", "question": "What is frozen water?", "choices": CHOICES, "answerKey": "A"}
    ]
    * 2,
    "google/IFEval": [
        {
            "key": 1,
            "prompt": "Describe rain without commas.",
            "instruction_id_list": ["punctuation:no_comma"],
            "kwargs": [{}],
        }
    ],
    "google-research-datasets/nq_open": [
        {"question": "who wrote hamlet", "answer": ["William Shakespeare", "Shakespeare"]}
    ]
    * 6,
    "mandarjoshi/trivia_qa": [
        {
            "question": "Who wrote Hamlet?",
            "answer": {"aliases": ["Shakespeare", "The Bard"], "value": "Shakespeare"},
        }
    ]
    * 2,
}

TASKS = [
    *(
        "gsm8k",
        "gsm8k_cot",
        "gsm8k_cot_zeroshot",
        "arc_challenge_chat",
        "ifeval",
        "nq_open",
        "triviaqa",
    ),
    *(f"mmlu_pro_{field.replace(' ', '_')}" for field in FIELDS),
    *(f"mgsm_direct_{language}" for language in ("en", "de", "fr")),
    *(
        f"bbh_cot_zeroshot_{name}"
        for name in (
            "boolean_expressions",
            "causal_judgement",
            "date_understanding",
            "navigate",
            "snarks",
        )
    ),
    *(f"bbh_zeroshot_{name}" for name in ("boolean_expressions", "object_counting", "sports_understanding")),
]

COMPLETIONS = [
    "12",
    "It is 4 times 3, so\n#### 12",
    "The answer is 12.",
    "#### 13",
    "Let's think. So the answer is False.",
    "(B)",
    "the answer is (B)",
    "The best answer is A",
    "A",
    "Shakespeare",
    "B",
    "no",
    "False",
    "3",
    "\\boxed{1}",
    "William Shakespeare",
    "Rain falls softly.",
    "Rain, and more rain.",
    "",
]


@pytest.fixture(autouse=True)
def published_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data sets of the published schemas, as no hub is reachable."""

    def load(path: str, name: str | None = None, **options: Any) -> Any:
        rows = datasets.Dataset.from_list(ROWS[path] * len(COMPLETIONS))
        return datasets.DatasetDict(dict.fromkeys(("train", "validation", "test"), rows))

    monkeypatch.setattr(datasets, "load_dataset", load)


class Answers(LM):
    """A model that gives the completions in turn."""

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        return [COMPLETIONS[n % len(COMPLETIONS)] for n in range(len(requests))]

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
        raise AssertionError

    loglikelihood_rolling = loglikelihood


Sample = tuple[dict[str, Any], str, dict[str, float]]


def their_samples(task: str) -> Iterator[Sample]:
    """Document, completion and metrics of each sample, by lm-eval's own program."""
    results = simple_evaluate(
        model=Answers(),
        tasks=[task],
        log_samples=True,
        bootstrap_iters=0,
        task_manager=manager_of(task, None),
    )
    merged: dict[int, Sample] = {}
    for sample in results["samples"][task]:
        _, _, metrics = merged.setdefault(sample["doc_id"], (sample["doc"], sample["resps"][0][0], {}))
        for metric in sample["metrics"]:
            if isinstance(sample[metric], bool | int | float):
                metrics[f"{metric},{sample['filter']}"] = float(sample[metric])
    return iter(merged.values())


@pytest.mark.parametrize("task", TASKS)
def test_completions_get_the_scores_of_lm_evals_own_program(task: str) -> None:
    samples = list(their_samples(task))
    assert {completion for _, completion, _ in samples} == set(COMPLETIONS)
    for doc, completion, metrics in samples:
        ours = worker.work((task, None, json.loads(json.dumps(doc)), completion))
        assert ours == {"metrics": metrics, "invalid": None}, completion
    assert len({max(metrics.values()) for _, _, metrics in samples}) > 1, "right and wrong completions"


def test_a_task_is_a_benchmark() -> None:
    benchmark = Benchmark.model_validate(
        lm_eval_benchmark("gsm8k_cot", metric="exact_match,flexible-extract")
    )
    row = next(benchmark.rows(limit=1)).row
    assert row is not None
    messages = row["responses_create_params"]["input"]
    assert [message["role"] for message in messages] == ["user"]
    assert messages[0]["content"].count("Q: ") == 9  # eight examples of the task, and the question
    assert messages[0]["content"].endswith("How many have 3 boxes?\nA:")
    assert row["extra_body"] == {"stop": ["Q:", "</s>", "<|im_end|>"]}
    with TestClient(LmEval(metric="exact_match,flexible-extract")) as client, client.episode(row) as episode:
        assert episode.verify("12 pens").reward == 1.0
        assert episode.verify("12 pens.\n\nQ: And 7 boxes?\nA: 28").reward == 1.0
        verdict = episode.verify("The answer is 13.")
    assert verdict.reward == 0.0
    assert verdict.model_dump()["lm_eval"] == {
        "exact_match,strict-match": 0.0,
        "exact_match,flexible-extract": 0.0,
    }


def test_likelihoods_of_given_answers_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="arc_challenge compares likelihoods of given answers"):
        list(rows_of("arc_challenge"))


def test_what_is_no_single_task_is_looked_for_among_all() -> None:
    assert len({row["lm_eval_task"] for row in rows_of("bbh_zeroshot")}) == 27
    with pytest.raises(InvalidRequest, match="has no task 'nosuch'"):
        list(rows_of("nosuch"))
    tasks = {
        name: entry.yaml_path
        for name, entry in manager_of("nosuch", None).task_index.items()
        if entry.kind in {Kind.TASK, Kind.PY_TASK}
    }
    assert task_files() == tasks


def test_a_user_s_files_come_before_those_of_lm_eval(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("task: 'gsm8k'  # with another prompt\ndescription: mine\n", "utf-8")
    (tmp_path / "group.yaml").write_text("group: ifeval\ntask: [gsm8k]\n", "utf-8")
    entry = manager_of("gsm8k", str(tmp_path)).task_index["gsm8k"]
    assert entry.yaml_path == tmp_path / "own.yaml"
    assert manager_of("nq_open", str(tmp_path)).task_index["nq_open"].yaml_path == task_files()["nq_open"]
    assert manager_of("ifeval", str(tmp_path)).task_index["ifeval"].kind == Kind.GROUP
