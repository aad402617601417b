"""`gym-serve dataset`: checks, prepares and describes files of rows, one row at a time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gym_serve.cli.completion import graph
from gym_serve.cli.options import App, ApplicationOption, JsonOption
from gym_serve.cli.printing import print_json, print_problems, print_table, shortened
from gym_serve.types.errors import InvalidRequest

if TYPE_CHECKING:
    from gym_serve.cli.dataset.statistics import RowStatistics
    from gym_serve.types.requests import JSON

RowsArgument = Annotated[
    list[Path], typer.Argument(metavar="ROWS...", help="Files of rows: .jsonl, .jsonl.gz or .jsonl.zst.")
]
GraphOption = Annotated[
    Path | None,
    typer.Option(
        "--graph",
        metavar="FILE",
        help="Check agents and verifiers against this graph.",
        autocompletion=graph,
    ),
]

_DUPLICATES_NAMED = 20


def validate(
    rows: RowsArgument,
    *,
    graph: GraphOption = None,
    application: ApplicationOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check every row against the row format, and print what is wrong with file and line.

    With --graph, each row is also checked against the graph: its agent must exist,
    and it must have the fields that its environment's verifier needs. A repeated
    row is only a note; both rows count as one task.

    Exit status: 0, or 1 if a row has a problem, or a file is empty or cannot be
    read.

    Example: gym-serve dataset validate data/train.jsonl --graph graphs/math.yaml
    """
    # Imported here, so that --help starts fast.
    from gym_serve.cli.dataset.checks import Duplicates, checked_rows, row_check
    from gym_serve.rollouts.rows import Problems

    problems, seen = Problems(), Duplicates()
    files, duplicates = [], 0
    check = row_check(graph, application)
    for file in rows:
        good = bad = 0
        for where, row in checked_rows(file, problems, check):
            if row is None:
                bad += 1
                continue
            good += 1
            if (first := seen.first_place(row, where)) is not None:
                duplicates += 1
                if duplicates <= _DUPLICATES_NAMED:
                    problems.notes.append(f"{where}: the same row as {first}")
        files.append({"file": str(file), "rows": good + bad, "bad_rows": bad})
    if as_json:
        print_json(
            {
                "ok": not problems.count,
                "files": files,
                "duplicates": duplicates,
                "problem_count": problems.count,
                "problems": problems.kept,
                "notes": problems.notes,
            }
        )
    else:
        print_problems(problems)
        for note in problems.notes:
            typer.echo(f"note: {note}")
        for entry in files:
            typer.echo("{file}: {rows:,} rows, {bad_rows:,} with problems".format(**entry))
        if duplicates:
            typer.echo(f"{duplicates:,} repeated rows")
    if problems.count:
        raise typer.Exit(1)


_COLLATE_COLUMNS = (
    "rows of",
    "agent",
    "set",
    "read",
    "bad",
    "duplicates",
    "in validation",
    "to validation",
    "written",
)


def collate(
    *,
    train: Annotated[
        list[str] | None,
        typer.Option(metavar="[AGENT=]ROWS", help="Training rows, for AGENT; can be repeated."),
    ] = None,
    validation: Annotated[
        list[str] | None, typer.Option(metavar="[AGENT=]ROWS", help="Validation rows; can be repeated.")
    ] = None,
    output: Annotated[
        Path,
        typer.Option("-o", "--output", metavar="FOLDER", help="Folder for train.jsonl and validation.jsonl."),
    ],
    validation_share: Annotated[
        float, typer.Option(min=0.0, max=0.5, help="Move this share of the training rows to validation.")
    ] = 0.0,
    graph: GraphOption = None,
    application: ApplicationOption = None,
    skip_invalid: SkipOption = False,
    as_json: JsonOption = False,
) -> None:
    """Combine files of rows to train.jsonl and validation.jsonl, ready for collect.

    Rows are checked. AGENT= sets their agent_ref. Repeated rows are left out, and
    so are training rows whose prompt is in the validation set. The keys of an
    earlier run (_ng_task_index, ...) are removed. The rows for validation are
    drawn by a hash of the prompt: every run draws the same rows.

    Exit status: 0, or 1 if a row has a problem (also with --skip-invalid).

    Example: gym-serve dataset collate --train math_agent=math.jsonl --validation-share 0.05 -o data
    """
    if not train and not validation:
        raise typer.BadParameter("give rows by --train or --validation")
    # Imported here, so that --help starts fast.
    from gym_serve.cli.dataset.checks import row_check
    from gym_serve.cli.dataset.collation import Collation, source_of
    from gym_serve.rollouts.rows import Problems

    problems = Problems()
    collation = Collation(problems, row_check(graph, application), validation_share)
    written = collation.write(
        [source_of(text) for text in train or []],
        [source_of(text) for text in validation or []],
        output,
        skip_invalid=skip_invalid,
    )
    if as_json:
        report = {
            "ok": not problems.count,
            "files": written,
            "sources": [asdict(tally) for tally in collation.tallies],
            "problems": problems.kept,
            "notes": problems.notes,
        }
        print_json(report)
    else:
        print_table(_COLLATE_COLUMNS, (tally.cells() for tally in collation.tallies))
        typer.echo()
        for file, count in written.items():
            typer.echo(f"{file}: {count:,} rows")
        print_problems(problems)
        for note in problems.notes:
            typer.echo(f"note: {note}")
    if problems.count:
        raise typer.Exit(1)


SkipOption = Annotated[
    bool,
    typer.Option(
        "--skip-invalid", help="Skip rows with problems; by default nothing is written if there are any."
    ),
]


def render(
    rows: Annotated[Path, typer.Argument(metavar="ROWS", help="Rows without input, in JSONL.")],
    *,
    prompt: Annotated[
        Path,
        typer.Option(
            metavar="YAML", help="Prompt template {system?, user}, with {field} for fields of the row."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="OUT",
            help="File for the rows with prompts; by default they are printed.",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only this many rows.")] = None,
    skip_invalid: SkipOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write rows with the input that a prompt template makes of their fields.

    Rows must not have an input yet. {field} is a top-level field; write {{ for a
    literal brace. If a row has a problem, all problems are reported and nothing
    is written.

    Exit status: 0, or 1 if a row has a problem (also with --skip-invalid).

    Example: gym-serve dataset render rows.jsonl --prompt prompt.yaml -o prompted.jsonl
    """
    if as_json and output is None:
        raise typer.BadParameter("--json needs --output: without it, the rows themselves are printed")
    # Imported here, so that --help starts fast.
    from gym_serve.cli.dataset.checks import checked_rows, row_problems
    from gym_serve.rollouts.expansion import PromptTemplate
    from gym_serve.rollouts.files import replacing
    from gym_serve.rollouts.rows import Problems
    from gym_serve.servers.transport import encode

    problems = Problems()
    written = 0
    template = PromptTemplate.of(prompt)

    def check(row: JSON) -> Iterator[str]:
        try:
            yield from row_problems(template.apply(row))
        except InvalidRequest as error:
            yield error.message

    with replacing(output) if output else nullcontext(sys.stdout.buffer) as file:
        for _, row in checked_rows(rows, problems, check):
            if row is not None:
                file.write(encode(template.apply(row)) + b"\n")
                written += 1
            if written == limit:
                break
        if output and not skip_invalid:
            problems.raise_if_any(f"{problems.count} problems, so nothing was written")
    if as_json:
        print_json(
            {"ok": not problems.count, "file": str(output), "rows": written, "problems": problems.kept}
        )
    else:
        print_problems(problems)
        if output:
            typer.echo(f"{written:,} rows: {output}")
    if problems.count:
        raise typer.Exit(1)


_AGENTS_SHOWN = 20


def stats(rows: RowsArgument, *, as_json: JsonOption = False) -> None:
    """Print the numbers of rows, agents, tools, turns and words, and statistics of each field.

    Words are those of responses_create_params as JSON: a proxy for tokens, as
    in NeMo Gym.

    Exit status: 0, or 1 if a row has a problem or a file cannot be read.

    Example: gym-serve dataset stats data/train.jsonl
    """
    from gym_serve.cli.dataset.checks import checked_rows
    from gym_serve.cli.dataset.statistics import RowStatistics
    from gym_serve.rollouts.rows import Problems

    problems, statistics = Problems(), RowStatistics()
    for file in rows:
        for where, row in checked_rows(file, problems):
            if row is not None:
                statistics.add(row, where)
    if as_json:
        print_json({"ok": not problems.count, **statistics.result(), "problems": problems.kept})
    else:
        _print_stats(statistics)
        print_problems(problems)
    if problems.count:
        raise typer.Exit(1)


def _print_stats(statistics: RowStatistics) -> None:
    result = statistics.result()
    typer.echo(
        f"{result['rows']:,} rows, {result['duplicate_rows']:,} of them repeated; "
        f"{result['unique_prompts']:,} different prompts\n"
    )
    agents = list(result["agents"].items())[:_AGENTS_SHOWN]
    print_table(("agent", "rows"), ((shortened(name), f"{count:,}") for name, count in agents))
    typer.echo()
    print_table(
        ("per row", "rows", "mean", "std", "min", "max"),
        (
            (name.replace("_", " "), f"{n['total']:,}", *(f"{n[key]:.4g}" for key in _STATS_COLUMNS))
            for name, n in result["numbers"].items()
            if n["total"]
        ),
    )
    typer.echo()
    print_table(
        ("field", "rows", "texts", "different", "numbers", "mean", "min", "max"),
        (
            (
                shortened(name),
                f"{field['rows']:,}",
                f"{field['texts']:,}",
                f"{field['unique_texts']:,}",
                f"{(numbers := field['numbers'])['total']:,}",
                *(f"{numbers[key]:.4g}" if numbers["total"] else "" for key in ("average", "min", "max")),
            )
            for name, field in result["fields"].items()
        ),
    )


_STATS_COLUMNS = ("average", "stddev", "min", "max")


dataset = App(name="dataset", no_args_is_help=True, help="Check, prepare and describe files of rows.")
for command in (validate, collate, render, stats):
    dataset.command()(command)
