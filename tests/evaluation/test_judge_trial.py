"""`gym-serve judge-check`: judges with one fault each, on real graphs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gym_serve.cli import main
from gym_serve.evaluation.judge_trial import other_labels
from gym_serve.servers import ModelServer
from gym_serve.types.errors import Unavailable
from gym_serve.types.protocols.items import message_item

TRUE = {"Paris", "It is Paris.", "the pancreas", "pancreas", "4", "four"}
"""What a good judge finds right; texts of one question are equal if both or none are here."""
LABELLED = [
    {"prompt": f"Question {n}?", "expected_answer": gold, "response": text, "label": text in TRUE}
    for n, (gold, text) in enumerate(
        [("Paris", "It is Paris."), ("the pancreas", "pancreas"), ("4", "four")] * 6
        + [("Paris", "Lyon"), ("the pancreas", "the liver"), ("4", "5")] * 6
    )
]
PREFERENCES = [
    {"prompt": f"Question {n}?", "chosen": good, "rejected": bad}
    for n, (good, bad) in enumerate([("Paris", "Lyon"), ("pancreas", "the liver"), ("4", "5")] * 8)
]
_LABELS = re.compile(r"exactly one verdict: (\S+) if .*?(\[\[\S+\]\]) if it does not", re.DOTALL)
_TEXTS = re.compile(r"<(?:reference|candidate|response_\d) (\w+)>\n(.*?)\n</", re.DOTALL)


class Judge(ModelServer):
    """A judge that reads its prompt by rule. ``fault``: what is wrong with it."""

    class Config(ModelServer.Config):
        fault: str = ""

    config: Config
    asked = 0

    async def responses(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = body["input"][-1]["content"]
        first, second = (text for _, text in _TEXTS.findall(prompt))
        labels = re.search(
            r"exactly one verdict: (\S+) if .*?(\[\[\S+\]\]) if it does not", prompt, re.DOTALL
        )
        self.asked += 1
        if labels is None:
            verdict = self._scores(first, second)
        else:
            equal = (first in TRUE) == (second in TRUE)
            if self.config.fault == "label one":
                equal = labels[1] == "[[1]]" if "[[1]]" in labels.groups() else equal
            elif self.config.fault == "order":
                equal = len(first) <= len(second)
            elif self.config.fault == "moody":
                equal = self.asked % 2 == 0
            verdict = labels[1] if equal else labels[2]
        if self.config.fault == "silent":
            verdict = "I would rather not say."
        if self.config.fault == "away":
            raise Unavailable("the judge is away")
        usage = {"input_tokens": 10, "output_tokens": 1, "total_tokens": 11}
        return {"object": "response", "output": [message_item(verdict)], "usage": usage}

    def _scores(self, first: str, second: str) -> str:
        better = first in TRUE if self.config.fault != "first" else True
        return json.dumps({"score_1": 4 if better else 2, "score_2": 2 if better else 4, "ranking": 3})


EQUIVALENCE = {"type": "equivalence_llm_judge", "judge": "judge"}
PAIRS = {
    **{"type": "genrm_compare", "genrm": "judge", "message_format": "prompt"},
    "comparison_strategy": "all_pairs",
}


def checked(
    folder: Path, rows: list[dict[str, Any]], environment: dict[str, Any], fault: str, *arguments: str
) -> Any:
    prices = {"input": 1.0, "output": 2.0}
    judge = {"type": f"{__name__}:Judge", "fault": fault, "prices": prices}
    args = {"models": {"judge": judge}, "resources": {"judged": environment}}
    application = {"name": "g", "route_prefix": "/g", "import_path": "gym_serve.graph:app", "args": args}
    (folder / "graph.yaml").write_text(json.dumps({"applications": [application]}))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["judge-check", str(folder / "rows.jsonl"), "--graph", str(folder / "graph.yaml"), "--no-ray"]
    return CliRunner().invoke(main, [*words, *arguments])


@pytest.mark.parametrize(
    ("rows", "environment", "fault", "doubt"),
    [
        (LABELLED, EQUIVALENCE, "", None),
        (PREFERENCES, PAIRS, "", None),
        (LABELLED, EQUIVALENCE, "label one", "changes its verdict with the names of the labels in 100.0%"),
        (LABELLED, EQUIVALENCE, "order", "changes its verdict with the order of the two texts"),
        (LABELLED, EQUIVALENCE, "moody", "gives the same question different verdicts"),
        (LABELLED, EQUIVALENCE, "silent", "gives no verdict in 100.0% of the calls"),
        (LABELLED, EQUIVALENCE, "away", "180 calls failed: the judge is away"),
        (PREFERENCES, PAIRS, "first", "chooses the text that stands first in 100.0%"),
        (PREFERENCES, PAIRS, "silent", "gives no verdict in 100.0% of the calls"),
    ],
)
def test_each_fault_of_a_judge_is_a_doubt(
    tmp_path: Path, rows: list[dict[str, Any]], environment: dict[str, Any], fault: str, doubt: str | None
) -> None:
    result = checked(tmp_path, rows, environment, fault, "--concurrency", "1", "--json")
    assert result.exit_code == (0 if doubt is None else 6), result.output
    found = json.loads(result.stdout)
    assert found["questions"] == len(rows)
    if doubt is None:
        assert found["doubts"] == []
        assert found["agreement"]["share"] == 1.0
        calls = found["usage"]["judge"]["calls"]
        assert calls == sum((2 + 1 + 2) if "label" in row else (2 + 1) for row in rows)
        assert found["cost"] == pytest.approx(12e-6 * calls)
    else:
        assert any(doubt in text for text in found["doubts"]), found["doubts"]


def test_labels_change_places_where_they_are_the_neutral_ones() -> None:
    settings = {
        "judge_equal_label": "[[1]]",
        "judge_not_equal_label": "[[2]]",
        "judge_prompt_template": "[[1]] if equal, else [[2]]",
    }
    other = other_labels(settings)["labels 2 and 1"]
    assert (other["judge_equal_label"], other["judge_not_equal_label"]) == ("[[2]]", "[[1]]")
    assert other["judge_prompt_template"] == "[[2]] if equal, else [[1]]"


def test_the_table(tmp_path: Path) -> None:
    shown = checked(tmp_path, LABELLED, EQUIVALENCE, "").stdout
    assert re.search(r"agrees with people +100.0% +90.4 to 100.0 +36", shown)
    assert "kappa, the agreement beyond chance: 1.00" in shown
    assert "36 questions took 180 calls and 1,980 tokens, at a cost of 0.00216" in shown
    assert shown.endswith("These questions show no reason to doubt the judge.\n")
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(
    ("rows", "arguments", "problem"),
    [
        ([{"prompt": "?", "response": "x"}], (), "label"),
        ([{"prompt": "?", "chosen": "x"}], (), "rejected"),
        ([], (), "has no question"),
        (LABELLED[:1], ("--resources", "other"), "--resources other: the graph has judged"),
    ],
)
def test_what_cannot_be_asked_is_said(
    tmp_path: Path, rows: list[dict[str, Any]], arguments: tuple[str, ...], problem: str
) -> None:
    result = checked(tmp_path, rows, EQUIVALENCE, "", *arguments)
    assert result.exit_code == 1, result.output
    assert problem in result.output


def test_a_model_alone_is_tried_by_our_prompts(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(PREFERENCES[0]) + "\n")
    result = CliRunner().invoke(
        main, ["judge-check", str(tmp_path / "rows.jsonl"), "--judge", "scripted", "--json"]
    )
    assert result.exit_code == 6
    assert json.loads(result.stdout)["silent"]["share"] == 1.0
