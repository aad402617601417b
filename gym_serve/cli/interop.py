"""`gym-serve export` and `import-nemo-gym`: to the formats of trainers and tools, and from NeMo Gym."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from gym_serve.cli.options import JsonOption, parse_pairs
from gym_serve.cli.printing import echo, print_json, print_table
from gym_serve.rollouts.files import replacing
from gym_serve.rollouts.rows import read_rows
from gym_serve.types.errors import InvalidRequest
from gym_serve.types.requests import JSON

if typing.TYPE_CHECKING:
    from gym_serve.interop.export import ExportReport


def _list_formats(wanted: bool) -> None:
    if not wanted:
        return
    from gym_serve.interop.export import FORMATS

    print_table(
        ("format", "for", "output", "options (with defaults)"),
        (
            (
                exporter.name,
                exporter.summary,
                exporter.suffix or "a folder",
                "\n".join(f"{option.name}={option.default}" for option in exporter.options.values()),
            )
            for exporter in FORMATS.values()
        ),
    )
    raise typer.Exit


def export(
    rollouts: Annotated[
        list[Path], typer.Argument(metavar="ROLLOUTS...", help="Files as collect writes them.")
    ],
    *,
    to: Annotated[
        str,
        typer.Option("--to", metavar="FORMAT", help="One of --formats, e.g. verl."),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="OUT", help="The file or folder to write.")
    ],
    min_reward: Annotated[
        float | None, typer.Option(help="Leave out rollouts whose reward is lower.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="An option of the format; may repeat.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it is a file.")] = False,
    formats: Annotated[
        bool,
        typer.Option(
            "--formats", callback=_list_formats, is_eager=True, help="List the formats with their options."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write rollouts in a format of a trainer or a tool; says what was left out, and why.

    Exit status: 0, or 1 if no record was written.

    Example: gym-serve export out.jsonl --to verl -o train.parquet --min-reward 0.5
    """
    values = parse_pairs(option or (), "--option key=value")
    from gym_serve.interop.export import export as write

    report = write(_read(rollouts), to, output, min_reward=min_reward, overwrite=overwrite, **values)
    if as_json:
        print_json({"ok": report.records > 0, **report.to_json()})
    else:
        _print(report)
    if not report.records:
        if report.dropped:
            echo(f"Every rollout is left out, so {report.path} is empty.", err=True)
        raise typer.Exit(1)


def _read(paths: list[Path]) -> Iterator[JSON]:
    for path in paths:
        for where, rollout, problem in read_rows(path):
            if rollout is None:
                raise InvalidRequest(f"{where}: {problem}")
            yield rollout


def _print(report: ExportReport) -> None:
    masked = f", {report.masked:,} of them masked" if report.masked else ""
    echo(f"{report.path}: {report.records:,} records of {report.exported:,} rollouts{masked}")
    for what, reasons in (("left out", report.dropped), ("left out branches", report.dropped_branches)):
        for reason, dropped in reasons.items():
            echo(f"{what}: {dropped.count:,} {reason}; e.g. {dropped.example}: {dropped.detail}")
    for note in report.notes:
        echo(f"note: {note}")


def import_nemo_gym(
    configs: Annotated[
        list[Path],
        typer.Argument(
            metavar="CONFIG...", help="Configs, as for NeMo Gym's --config; later ones take precedence."
        ),
    ],
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="GRAPH", help="Graph file to write; by default it is printed."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the graph; by default that of the first config.")
    ] = None,
    skip_unknown: Annotated[
        bool,
        typer.Option(
            "--skip-unknown",
            help="Skip servers that can be neither replaced nor hosted.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Make a graph file from NeMo Gym's configs, including those that they import and inherit.

    Values that NeMo Gym takes from the command line or env.yaml become
    environment variables (policy_base_url: POLICY_BASE_URL); secrets are never
    copied. A resources server without a counterpart is hosted as it is
    (type: nemo_gym), if its code is beside the config. Differences and data sets
    are listed on stderr: graphs have no data sets.

    Exit status: 0, or 1 with all problems; then nothing is written.

    Example: gym-serve import-nemo-gym Gym/benchmarks/aime24/config.yaml -o graphs/aime24.yaml
    """
    from gym_serve.interop.nemo_gym import import_config

    imported = import_config(configs, name=name, skip_unknown=skip_unknown)
    if output is not None:
        with replacing(output) as file:
            file.write(imported.yaml().encode())
    if as_json:
        print_json(
            {
                "ok": True,
                "graph": imported.config,
                "variables": imported.variables,
                "datasets": imported.datasets,
                "notes": imported.notes,
            }
        )
        return
    for note in imported.notes:
        echo(f"note: {note}", err=True)
    for dataset in imported.datasets:
        described = ", ".join(f"{key} {value}" for key, value in dataset.items())
        echo(f"data set: {described}", err=True)
    if output is None:
        echo(imported.yaml(), nl=False)
    else:
        echo(f"{output}: check it with gym-serve validate {output}")
