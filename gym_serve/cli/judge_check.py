"""`gym-serve judge-check`: questions that people have labelled, against the judge of an environment."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import ValidationError

from gym_serve.cli.options import JsonOption, Target
from gym_serve.cli.printing import echo, print_json, print_table
from gym_serve.graph.loading import load_graph
from gym_serve.graph.resolving import resolve
from gym_serve.graph.spec import Graph
from gym_serve.rollouts import prices_of
from gym_serve.servers.runner import DESCRIBE
from gym_serve.types.errors import InvalidRequest, NotFound
from gym_serve.types.requests import JSON, problems_of

if TYPE_CHECKING:
    from gym_serve.evaluation.judge_trial import Question, Trial, Way

_DOUBTED = 6  # exit status
_PROBLEMS = 20
_SUFFIXES: dict[Way, str] = {"labels 1 and 2": "--labels-12", "labels 2 and 1": "--labels-21"}


def judge_check(
    rows: Annotated[
        Path,
        typer.Argument(
            metavar="ROWS",
            help="Questions that people have labelled: rows of the environment with response and label (true "
            "or false), or prompt, chosen and rejected.",
        ),
    ],
    *,
    judge: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="A model, as for eval, asked by gym_serve's own prompts."),
    ] = None,
    graph: Annotated[
        Path | None,
        typer.Option("--graph", metavar="FILE", help="Graph file with the environment whose judge is tried."),
    ] = None,
    resources: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The environment, where the graph has several."),
    ] = None,
    target: Target,
    max_output_tokens: Annotated[
        int, typer.Option(min=1, help="Of one answer of the model of --judge.")
    ] = 2048,
    limit: Annotated[int | None, typer.Option(min=1, help="Questions at most.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="How often each question is asked as it is.")] = 2,
    concurrency: Annotated[int, typer.Option(min=1, help="Questions that are asked at once.")] = 16,
    as_json: JsonOption = False,
) -> None:
    """Try a judge before training on it: agreement with people, bias, stability, cost.

    Each question is asked again, with the two texts swapped, and with other words
    for the labels. A sound judge says the same each time, and what people said.

    Exit status: 0, or 6 if there is a reason to doubt the judge, which is printed.

    Example: gym-serve judge-check labelled.jsonl --judge http://host:8000/v1#judge
    """
    from gym_serve.client import AsyncGym
    from gym_serve.evaluation.judge_trial import JudgeTrial, Trial

    questions = list(islice(_questions(rows), limit))
    if not questions:
        raise InvalidRequest(f"{rows} has no question")
    if judge is not None:
        if (graph, target.attach, target.url) != (None, None, None):
            raise typer.BadParameter("give either --judge, or the graph of an environment")
        target = _judged_by(judge, questions, max_output_tokens)
    else:
        target = target.of(graph)
        if (resolved := target.resolved()) is not None and graph is not None:
            extended = {"extends": load_graph(graph).path, "resources": _with_other_labels(resolved)}
            target = replace(target, graph=extended)
    with target.open() as gym:
        ways, name = _ways(gym.graph["resources"], resources)
        compares = "compare" in gym.call(name, DESCRIBE)

        async def run() -> Trial:
            trial = JudgeTrial(
                AsyncGym.of(gym).call, ways, compares=compares, repeats=repeats, concurrency=concurrency
            )
            return Trial.of(questions, await trial.run(questions))

        trial = asyncio.run(run())
        prices = prices_of(gym.graph)
    cost = sum(prices[server].cost(counts) for server, counts in trial.usage.items() if server in prices)
    doubts = list(trial.doubts())
    if as_json:
        print_json({"ok": not doubts, "doubts": doubts, "cost": cost if prices else None, **asdict(trial)})
    else:
        _show(trial, cost if prices else None)
        for doubt in doubts:
            echo(f"doubt: {doubt}")
    if doubts:
        raise typer.Exit(_DOUBTED)
    if not as_json:
        echo("These questions show no reason to doubt the judge.")


def _questions(path: Path) -> Iterator[Question]:
    """The questions of a file. Raises InvalidRequest: lines have problems, which are told together."""
    from gym_serve.evaluation.judge_trial import read_question
    from gym_serve.evaluation.sources import file_rows

    problems: list[str] = []
    for where, row, problem in file_rows(str(path)):
        if row is None:
            problems.append(f"{where}: {problem}")
            continue
        try:
            yield read_question(row)
        except ValidationError as error:
            problems += (f"{where}: {text}" for text in problems_of(error, "row"))
    if problems:
        more = [f"... and {len(problems) - _PROBLEMS:,} more"] if len(problems) > _PROBLEMS else []
        raise InvalidRequest("\n".join([*problems[:_PROBLEMS], *more]))


def _judged_by(judge: str, questions: Sequence[Question], max_output_tokens: int) -> Target:
    """A graph of a model and the environment of gym_serve that asks it such questions."""
    from gym_serve.evaluation.judge_trial import Preference
    from gym_serve.evaluation.models import read_models

    (model,) = read_models([judge])
    kinds = {isinstance(question, Preference) for question in questions}
    if len(kinds) > 1:
        raise InvalidRequest(
            "--judge tries rows with response and label, or with chosen and rejected, not both"
        )
    params = {"max_output_tokens": max_output_tokens}
    environment: JSON = {
        "type": "equivalence_llm_judge",
        "judge": "judge",
        "judge_responses_create_params": params,
    }
    if kinds == {True}:
        environment = {
            "type": "genrm_compare",
            "genrm": "judge",
            "genrm_responses_create_params": params,
            "message_format": "prompt",
            "comparison_strategy": "all_pairs",  # each pair in one order, so that a bias is seen
        }
    graph: JSON = {"models": {"judge": model.settings}, "resources": {"environment": environment}}
    graph["resources"] |= _with_other_labels(resolve(load_graph(graph).spec))
    return Target(graph=graph, no_ray=not model.needs_ray)


def _with_other_labels(graph: Graph) -> dict[str, JSON]:
    """The environments of a graph once more, by a name of their own, with other labels for their judges."""
    from gym_serve.evaluation.judge_trial import other_labels

    return {
        f"{name}{_SUFFIXES[way]}": {**settings, **labels}
        for name, settings in graph.public()["resources"].items()
        for way, labels in other_labels(settings).items()
    }


def _ways(environments: Iterable[str], chosen: str | None) -> tuple[dict[Way, str], str]:
    """The environment that is tried, in all the ways in which it asks, and its name."""
    suffixes = tuple(_SUFFIXES.values())
    names = [name for name in environments if not name.endswith(suffixes)]
    if chosen is not None and chosen not in names:
        raise NotFound(f"--resources {chosen}: the graph has {', '.join(names)}")
    if chosen is None and len(names) != 1:
        raise typer.BadParameter(f"choose an environment by --resources: {', '.join(names)}")
    name = chosen or names[0]
    others = {way: f"{name}{suffix}" for way, suffix in _SUFFIXES.items()}
    return {"as it is": name, **{way: one for way, one in others.items() if one in environments}}, name


def _show(trial: Trial, cost: float | None) -> None:
    print_table(
        ("", "share", "95% interval", "of"),
        [
            (
                what,
                f"{100 * share.share:.1f}%",
                f"{100 * share.low:.1f} to {100 * share.high:.1f}",
                f"{share.of:,}",
            )
            for what, share in (
                ("agrees with people", trial.agreement),
                ("finds both texts equal", trial.tied),
                ("chooses the text that stands first", trial.first),
                ("changes with the order of the texts", trial.swapped),
                ("chooses the label 1", trial.label_one),
                ("changes with the names of the labels", trial.relabelled),
                ("changes when asked again", trial.repeated),
                ("gives no verdict", trial.silent),
            )
            if share is not None
        ],
    )
    echo()
    if trial.kappa is not None:
        echo(f"kappa, the agreement beyond chance: {trial.kappa:.2f}")
    calls, tokens = (
        sum(counts[name] for counts in trial.usage.values() for name in names)
        for names in (("calls",), ("input_tokens", "output_tokens"))
    )
    price = "" if cost is None else f", at a cost of {cost:.4g}"
    echo(f"{trial.questions:,} questions took {calls:,} calls and {tokens:,} tokens{price}")
