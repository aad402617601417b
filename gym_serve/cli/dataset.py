"""`gym-serve dataset`: checks files of rows and fills prompt templates, one row at a time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gym_serve.cli.options import App, ApplicationOption, JsonOption
from gym_serve.cli.printing import echo, print_json, print_problems
from gym_serve.types.errors import InvalidRequest

if TYPE_CHECKING:
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
    from gym_serve.cli.row_checks import Duplicates, checked_rows, row_check
    from gym_serve.rollouts.rows import Problems

    problems, earlier = Problems(), Duplicates()
    files, duplicates = [], 0
    check = row_check(graph, application)
    for file in rows:
        good = bad = 0
        for where, row in checked_rows(file, problems, check):
            if row is None:
                bad += 1
                continue
            good += 1
            if (first := earlier.first_place(row, where)) is not None:
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
            echo(f"note: {note}")
        for entry in files:
            echo("{file}: {rows:,} rows, {bad_rows:,} with problems".format(**entry))
        if duplicates:
            echo(f"{duplicates:,} repeated rows")
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
    from gym_serve.cli.row_checks import checked_rows, row_problems
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
            echo(f"{written:,} rows: {output}")
    if problems.count:
        raise typer.Exit(1)


dataset = App(name="dataset", no_args_is_help=True, help="Check and prepare files of rows.")
for command in (validate, render):
    dataset.command()(command)
