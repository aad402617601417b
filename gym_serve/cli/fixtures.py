"""`gym-serve test`: runs the fixtures of an environment's verifier, without Ray.

`gym-serve conform`: whether a server, in whatever language, does what docs/formats.md says.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gym_serve.cli.examples import row_of
from gym_serve.cli.options import JsonOption, TokenOption, parse_pairs
from gym_serve.cli.printing import echo, print_json, print_table
from gym_serve.graph.classes import find_class
from gym_serve.servers import ResourcesServer
from gym_serve.types.errors import GraphError, NotFound

if TYPE_CHECKING:
    from gym_serve.testing import FixtureResult
    from gym_serve.testing.conformance import Result


def run_fixtures(
    environment: Annotated[
        str,
        typer.Argument(
            metavar="ENV",
            help="Type of an environment, package.module:Class, or a package with one environment.",
        ),
    ],
    *,
    fixtures: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File of fixtures; by default fixtures.jsonl beside the module of the class."
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SETTING=VALUE", help="Setting of the environment; can be repeated."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Time limit of one verifier call, in seconds.")
    ] = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Run an environment's verifier fixtures: full reward, zero, malformed; each twice, for determinism.

    A fixture is a row, a response and the expected verdict. Replies of a judge are
    part of the fixture. It needs neither Ray nor a model.

    Exit status: 0, or 1 if a fixture fails, or there is none of the kind full,
    zero or malformed.

    Example: gym-serve test mcqa
    """
    import asyncio

    from gym_serve.testing import check_fixtures, load_fixtures, missing_kinds

    settings = parse_pairs(set_ or [], "--set num_workers=1")
    cls = _class_of(environment)
    cases = load_fixtures(fixtures or _fixtures_of(cls))
    results = asyncio.run(check_fixtures(cls, cases, settings, timeout=timeout))
    missing = missing_kinds(cases)
    failed = [result for result in results if not result.passed]
    if as_json:
        print_json(
            {
                "ok": not failed and not missing,
                "fixtures": [{**asdict(result), "passed": result.passed} for result in results],
                "missing_kinds": missing,
            }
        )
    else:
        _print(results, failed)
        for kind in missing:
            echo(f"No fixture is of the kind {kind!r}. Add one with the name '{kind}: ...'", err=True)
    if failed or missing:
        raise typer.Exit(1)


def _class_of(environment: str) -> type[ResourcesServer]:
    """The class of a type; of a package that is no type, the one environment that it exports."""

    cls: Any
    try:
        cls = find_class("resources", environment)
    except GraphError:
        if ":" in environment or not Path(environment, "__init__.py").is_file():
            raise
        try:
            module = importlib.import_module(environment)
        except Exception as error:  # the author's own code
            problem = f"cannot import {environment}: {type(error).__name__}: {error}"
            raise GraphError(problem) from error
        classes = [
            value
            for value in vars(module).values()
            if isinstance(value, type)
            and issubclass(value, ResourcesServer)
            and f"{value.__module__}.".startswith(f"{environment}.")  # not those that it imports
        ]
        if len(classes) != 1:
            raise NotFound(
                f"the package {environment} has {len(classes)} environments; write {environment}:Class"
            ) from None
        cls = classes[0]
    return cls  # type: ignore[no-any-return]


def _fixtures_of(cls: type[ResourcesServer]) -> Path:
    path = Path(inspect.getfile(cls)).with_name("fixtures.jsonl")
    if not path.exists():
        raise NotFound(f"{path} does not exist: write fixtures, or give their file with --fixtures")
    return path


def _print(results: Sequence[FixtureResult], failed: Sequence[FixtureResult]) -> None:
    print_table(
        ("fixture", "kind", "result"),
        ((result.name, result.kind, "ok" if result.passed else "FAILED") for result in results),
    )
    for result in failed:
        echo(f"\n{result.name}", err=True)
        for problem in result.problems:
            echo(f"  - {problem}", err=True)
    kinds = Counter(result.kind for result in results)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    echo(f"\n{len(results) - len(failed)} of {len(results)} passed, each run twice: {counts}")


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
    from gym_serve.testing.client import load_fixtures
    from gym_serve.testing.conformance import KINDS, check_conformance

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
                echo(_wrapped(f"{result.state:9}{result.name}{why}", 9))

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
                    echo(_wrapped(f"  {label:15}{text}", 17))
        echo(f"\n{', '.join(f'{count} {state}' for state, count in counts.items())}")
    if counts["failed"]:
        raise typer.Exit(1)


def _wrapped(text: str, indent: int) -> str:
    return fill(text, _WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)  # ids stay whole
