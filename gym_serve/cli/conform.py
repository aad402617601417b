"""`gym-serve conform`: whether a server, in whatever language, does what docs/formats.md says."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated

import typer

from gym_serve.cli.examples import row_of
from gym_serve.cli.options import JsonOption, TokenOption
from gym_serve.cli.printing import echo, print_json

if TYPE_CHECKING:
    from gym_serve.testing.conformance import Result

_WIDTH = 80


def conform(
    url: Annotated[
        str,
        typer.Argument(metavar="URL", help="Base URL of the server: its routes are URL/verify and so on."),
    ],
    *,
    kind: Annotated[str, typer.Option(metavar="environment|agent|model", help="What the server is.")],
    row: Annotated[
        str | None,
        typer.Option(
            metavar="ROW", help="A row that it takes: a JSON object, or FILE.jsonl[:LINE]. Default: a prompt."
        ),
    ] = None,
    fixtures: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Episodes of an environment with their rewards, as of gym-serve test."
        ),
    ] = None,
    auth_token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check a server over HTTP, in whatever language it is written, against docs/formats.md.

    It opens sessions, sends what is wrong or hostile, plays 64 episodes at
    once, closes sessions that are used, and leaves in the middle of requests.
    A server that has just been started is waited for.

    Exit status: 0 if all holds, 1 if a check fails or nothing answers.

    Example: gym-serve conform http://127.0.0.1:8701 --kind environment
    """
    from gym_serve.testing.conformance import KINDS, check_conformance
    from gym_serve.testing.fixtures import load_fixtures

    chosen = next((known for known in KINDS if known == kind), None)
    if chosen is None:
        raise typer.BadParameter(f"must be one of {', '.join(KINDS)}, got {kind!r}", param_hint="--kind")
    example = None if row is None else row_of(row)
    headers = {} if auth_token is None else {"authorization": f"Bearer {auth_token}"}
    cases = load_fixtures(fixtures) if fixtures is not None else []
    results: list[Result] = []

    async def check() -> None:
        async for result in check_conformance(url, chosen, example, cases, headers):
            results.append(result)
            if not as_json:
                why = f": {result.details['why']}" if result.state == "skipped" else ""
                echo(fill(f"{result.state:9}{result.name}{why}", _WIDTH, subsequent_indent=" " * 9))

    asyncio.run(check())
    counts = Counter(result.state for result in results)
    if as_json:
        print_json({"ok": not counts["failed"], "checks": [result._asdict() for result in results]})
    else:
        for result in results:
            if result.state == "failed":
                echo(f"\n{result.name}")
                says = {"the page says": f'docs/formats.md, {result.heading}: "{result.says}"'}
                for label, text in (result.details | says).items():
                    echo(fill(text, _WIDTH, initial_indent=f"  {label:15}", subsequent_indent=" " * 17))
        echo(f"\n{', '.join(f'{count} {state}' for state, count in counts.items())}")
    if counts["failed"]:
        raise typer.Exit(1)
