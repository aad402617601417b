"""`gym-serve eval`: benchmarks by name, with any number of models, to a table, JSON and one page of HTML."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import orjson
import typer

from gym_serve.cli import local_ray
from gym_serve.cli.options import (
    MODEL_HELP,
    JsonOption,
    PriceOption,
    RunOptions,
    SandboxOption,
    YesOption,
    fetch_weights,
    parse_pairs,
)
from gym_serve.cli.printing import echo, print_json, print_start, print_table
from gym_serve.cli.run_collection import collect_into, exit_of, report_of
from gym_serve.cli.run_report import FAILURE_COLUMNS, failures_of
from gym_serve.cli.view import PORT
from gym_serve.rollouts import Report
from gym_serve.servers.usage import read_prices
from gym_serve.types.errors import InvalidRequest
from gym_serve.types.requests import JSON

if TYPE_CHECKING:
    from gym_serve.client.core import CollectOptions
    from gym_serve.evaluation import Benchmark, Plan, Results

_BELOW = 6  # exit status
_ROLLOUTS, _RESULTS, _PAGE = "rollouts.jsonl", "results.json", "report.html"
_PROBLEMS = 20


def evaluate(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[BENCHMARK]...",
            help="Names of gym-serve list benchmark, files of benchmarks (.yaml), NAME:WHAT of another "
            "catalogue (harbor:NAME@VERSION, inspect:FILE.py@TASK, lm_eval:TASK), or a file of rows with "
            "--grader.",
        ),
    ] = None,
    *,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "-m",
            "--model",
            metavar="MODEL",
            help=f"{MODEL_HELP} Can be repeated.",
        ),
    ] = None,
    yes: YesOption = False,
    judge: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The judge of benchmarks that need one.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FOLDER", help="Folder of the results. [default: eval-TIME]"),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Rows of each benchmark at most.")] = None,
    sample: Annotated[
        bool,
        typer.Option("--sample", help="The few rows that a benchmark has with it: no network, for a try."),
    ] = False,
    rows: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FILE", help="Rows of a benchmark from a file, of the same columns."),
    ] = None,
    split: Annotated[str, typer.Option(help="Split of the rows: test, or train.")] = "test",
    agent: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Agent in place of the benchmark's own: one of the graph of its environment, as "
            "mini_swe_agent or oracle of workspace.",
        ),
    ] = None,
    sandbox: SandboxOption = None,
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="With --grader: the user message, e.g. '{question}'.")
    ] = None,
    grader: Annotated[
        str | None,
        typer.Option(metavar="FILE.py:NAME", help="Function (row, response) -> reward, for a file of rows."),
    ] = None,
    map_: Annotated[
        list[str] | None,
        typer.Option("--map", metavar="FIELD=EXPR", help="With --grader: a field of the rows, from columns."),
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Rollouts per row; by default what the benchmark says.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="Sampling temperature.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="Nucleus of the sampling.")] = None,
    max_output_tokens: Annotated[int | None, typer.Option(min=1, help="Of one answer.")] = None,
    param: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Another key of responses_create_params.")
    ] = None,
    max_turns: Annotated[int | None, typer.Option(min=1, help="Model calls of one rollout at most.")] = None,
    sample_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of one rollout at most; it is scored as it stands.")
    ] = None,
    sample_seconds: Annotated[
        float | None,
        typer.Option(min=0.001, help="Seconds of one rollout at most, before its verification."),
    ] = None,
    sample_cost: Annotated[
        float | None, typer.Option(min=0, help="Cost of one rollout at most, at the --price of its model.")
    ] = None,
    price: PriceOption = None,
    run: RunOptions,
    max_seconds: Annotated[
        float | None, typer.Option(min=0, help="Start no rollout after this time; --resume goes on.")
    ] = None,
    by: Annotated[
        list[str] | None, typer.Option(metavar="FIELD", help="Break scores down by a field of the rows.")
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="An earlier evaluation: differences to it, paired by row."),
    ] = None,
    fail_under: Annotated[
        float | None, typer.Option(metavar="PERCENT", help="Exit with 6 if a score is lower.")
    ] = None,
    repeat_of: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="The sampling, rows and models of an earlier evaluation, once more."
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Run no model: the sample's right answers must score 1, and empty ones less."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Evaluate models on benchmarks: a table here, and results.json, report.html and all rollouts in FOLDER.

    A first run: gym-serve eval gsm8k --sample --model scripted

    It runs in this process, without Ray, but for vllm: models. All benchmarks and
    models are one run, which --resume continues.

    Exit status: as for collect; 6 if a score is below --fail-under; 1 if a --check
    fails.

    Example: gym-serve eval gsm8k ifeval --model http://host:8000/v1#qwen3-8b --repeats 4
    """
    # Imported here, so that --help and usage errors start fast.
    from gym_serve.evaluation.plan import Request

    sampling = {"temperature": temperature, "top_p": top_p, "max_output_tokens": max_output_tokens}
    request = Request(
        benchmarks=names or [],
        models=model or [],
        judge=judge,
        split=split,
        limit=limit,
        files=_pairs(rows or (), "--rows gsm8k=rows.parquet"),
        sample=sample,
        agent=agent,
        sandbox=sandbox,
        prompt=prompt,
        grader=grader,
        map=_pairs(map_ or (), "--map expected_answer=answer"),
        params={
            **{key: value for key, value in sampling.items() if value is not None},
            **parse_pairs(param or (), "--param reasoning={effort: low}"),
        },
        repeats=repeats,
        seed=run.seed,
        max_turns=max_turns,
        sample_tokens=sample_tokens,
        sample_seconds=sample_seconds,
        sample_cost=sample_cost,
        prices={name: one.model_dump(exclude_none=True) for name, one in read_prices(price or ()).items()},
    )
    earlier = None if repeat_of is None else _stored(repeat_of)
    if earlier is not None:
        request = Request(**earlier["request"])
    if not request.benchmarks:
        raise typer.BadParameter("name a benchmark, see gym-serve list benchmark; or --repeat-of FOLDER")
    if check:
        _check(request.find(), as_json=as_json)
        return
    if not request.models:
        raise typer.BadParameter("choose one --model or more; scripted is a stand-in that needs nothing")
    if baseline is not None:
        _stored(baseline)
    plan = request.plan()
    fetch_weights([*plan.models, *([plan.judge] if plan.judge else [])], yes=yes)
    record = plan.record()
    record["notes"] = [] if earlier is None else list(_changes(earlier, record))
    for note in record["notes"]:
        echo(f"note: {note}", err=True)
    folder = output or Path(time.strftime("eval-%Y%m%d-%H%M%S"))
    options: CollectOptions = {
        **run.of(max_seconds),
        "repeats": plan.rollouts_per_row(),
        "seed": request.seed,
    }
    report, signalled = _run(plan, folder / _ROLLOUTS, options)
    if report is not None:
        results = _results(plan, folder, record, report, by=by or [], baseline=baseline)
        with report_of(folder):
            _show(results, folder, report, as_json=as_json)
    exit_of(report, signalled)
    if fail_under is not None and (results.lowest is None or 100 * results.lowest < fail_under):
        echo(f"A score is below {fail_under:g}.", err=True)
        raise typer.Exit(_BELOW)


def _run(plan: Plan, output: Path, options: CollectOptions) -> tuple[Report | None, int | None]:
    from gym_serve.client import Gym

    needs_ray = any(model.needs_ray for model in plan.models)
    if needs_ray:
        print_start()
        local_ray.import_ray()
    output.parent.mkdir(parents=True, exist_ok=True)
    with Gym.from_graph(plan.graph(), ray=needs_ray) as gym:
        return collect_into(output, gym, plan.rows(), options)


def _results(
    plan: Plan, folder: Path, record: JSON, report: Report, *, by: list[str], baseline: Path | None
) -> Results:
    """The results, which are written beside the rollouts."""
    from gym_serve.evaluation.report import write_html
    from gym_serve.evaluation.results import results_of

    if report.exhausted:
        record["notes"].append(f"stopped before its end: {report.exhausted}")
    if left_out := report.progress.left_out:
        record["notes"].append(f"{left_out:,} rows cannot be used, and are in no score")
    answers = {one.name: field for one in plan.benchmarks if (field := one.server.metrics.answer)}
    results = results_of(
        folder / _ROLLOUTS,
        {agent: (benchmark.name, model.label) for agent, benchmark, model in plan.cells()},
        record,
        by=by,
        baseline=None if baseline is None else baseline / _ROLLOUTS,
        answers=answers,
        cost=report.spent.cost,
    )
    (folder / _RESULTS).write_bytes(orjson.dumps(results.to_json(), option=orjson.OPT_INDENT_2, default=str))
    write_html(results, folder / _PAGE, folder / _ROLLOUTS, f"http://127.0.0.1:{PORT}")
    return results


def _show(results: Results, folder: Path, report: Report, *, as_json: bool) -> None:
    from gym_serve.evaluation.report import change, interval, percent

    if as_json:
        print_json({"ok": report.complete, "files": str(folder), **results.to_json()})
        return
    rows = [
        (
            cell.benchmark,
            cell.model,
            percent(cell.score),
            interval(cell.score),
            f"{cell.scored:,}/{cell.asked:,}",
            ", ".join(f"{name} {100 * value:.1f}" for name, value in cell.reducers.items()),
            "" if cell.difference is None else change(cell.difference),
        )
        for cell in results.cells
    ]
    columns = ("benchmark", "model", "score %", "95% interval", "scored", "", "to the baseline")
    used = [place for place in range(len(columns)) if any(row[place] for row in rows)]
    print_table([columns[place] for place in used], [[row[place] for place in used] for row in rows])
    for cell in results.cells:
        for field, groups in cell.by.items():
            echo()
            print_table(
                (f"{cell.benchmark}, {cell.model}: {field}", "rows", "score %", "95% interval"),
                [(value, str(one.rows), percent(one), interval(one)) for value, one in groups.items()],
            )
    if failed := failures_of([folder / _ROLLOUTS]):
        echo()
        print_table(FAILURE_COLUMNS, [one.cells() for one in failed])
    echo()
    for cell in results.cells:
        for line in cell.health:
            echo(f"look at {cell.benchmark}, {cell.model}: {line}")
    for note in report.notes:
        echo(f"note: {note}")
    for problem in report.problems[:_PROBLEMS]:
        echo(f"left out: {problem}")
    echo(
        f"{folder / _PAGE} is the report, {folder / _RESULTS} the numbers, {folder / _ROLLOUTS} the rollouts."
    )


def _check(benchmarks: list[Benchmark], *, as_json: bool) -> None:
    from gym_serve.evaluation.checking import problems_of_benchmark

    checked = {benchmark.name: list(problems_of_benchmark(benchmark)) for benchmark in benchmarks}
    if as_json:
        print_json({"ok": not any(checked.values()), "benchmarks": checked})
    else:
        for name, problems in checked.items():
            echo(f"{name}: {'; '.join(problems) or 'right answers score 1, and empty ones less'}")
    if any(checked.values()):
        raise typer.Exit(1)


def _pairs(texts: Iterable[str], example: str) -> dict[str, str]:
    """``NAME=TEXT``, as it is."""
    pairs = [text.partition("=") for text in texts]
    for name, _, value in pairs:
        if not (name and value):
            raise typer.BadParameter(f"must be NAME=VALUE, as in {example}, got {name!r}")
    return {name: value for name, _, value in pairs}


def _stored(folder: Path) -> JSON:
    path = folder / _RESULTS
    try:
        stored: JSON = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}") from None
    return stored


def _changes(before: JSON, now: JSON) -> Iterator[str]:
    """What would make another result than the earlier evaluation."""
    if before["gym_serve"] != now["gym_serve"]:
        yield f"gym-serve was {before['gym_serve']}, and is {now['gym_serve']}"
    for old, new in zip(before["benchmarks"], now["benchmarks"], strict=True):
        if old["file_digest"] != new["file_digest"]:
            versions = f"version {old['version']} was evaluated, this is {new['version']}"
            yield f"{new['name']} has changed since: {versions}"
