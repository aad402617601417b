"""`gym-serve dataset render`: the prompts of rows, made by a template."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gym_serve.cli.graph_file import JsonOption
from gym_serve.cli.printing import print_json, print_problems
from gym_serve.cli.target import stop
from gym_serve.types.errors import GymError, InvalidRequest

if TYPE_CHECKING:
    from gym_serve.types.requests import JSON

__all__ = ["SkipOption", "render"]

SkipOption = Annotated[
    bool, typer.Option("--skip-invalid", help="Leave out rows with problems; else nothing is written.")
]


def render(
    rows: Annotated[Path, typer.Argument(metavar="ROWS", help="Rows without input, in JSONL.")],
    *,
    prompt: Annotated[
        Path, typer.Option(metavar="YAML", help="Template: user, and maybe system, with {field} of the row.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="OUT", help="The rows with prompts; else they are printed."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Take only this many rows, to have a look.")
    ] = None,
    skip_invalid: SkipOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write rows with the input that a prompt template makes of their fields.

    A row must not have an input already. {field} is a top-level field; a
    literal brace is doubled. All problems are reported at once, and then
    nothing is written.

    Exit status: 0, or 1 if a row has a problem (also with --skip-invalid).

    Example: gym-serve dataset render rows.jsonl --prompt prompt.yaml -o prompted.jsonl
    """
    if as_json and output is None:
        raise typer.BadParameter("--json reports on what --output writes; without it, the rows are printed")
    # Only now, so that --help needs little.
    from gym_serve.cli.dataset.reading import checked_rows
    from gym_serve.cli.dataset.rows import row_problems
    from gym_serve.rollouts.outputs import replacing
    from gym_serve.rollouts.problems import Problems
    from gym_serve.rollouts.prompts import PromptTemplate
    from gym_serve.servers.transport import encode

    problems = Problems()
    written = 0
    try:
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
                problems.refuse(f"{problems.count} problems, so nothing was written")
    except GymError as error:
        stop(error, as_json=as_json)
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
