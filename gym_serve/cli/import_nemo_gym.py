"""`gym-serve import-nemo-gym`: a graph file from configs of NVIDIA NeMo Gym."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gym_serve.cli.graph_file import JsonOption
from gym_serve.cli.printing import print_json
from gym_serve.cli.target import stop
from gym_serve.types.errors import GymError

__all__ = ["import_nemo_gym"]


def import_nemo_gym(
    configs: Annotated[
        list[Path],
        typer.Argument(metavar="CONFIG...", help="Configs, as for NeMo Gym's --config; later ones go first."),
    ],
    *,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="GRAPH", help="The graph file; else it is printed."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the graph; else after the first config.")] = None,
    skip_unknown: Annotated[
        bool,
        typer.Option(
            "--skip-unknown",
            help="Leave out servers that can be neither replaced nor hosted.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Make a graph file from NeMo Gym's configs, with all that they pull in and inherit.

    What NeMo Gym takes from the command line or env.yaml becomes an environment
    variable (policy_base_url: POLICY_BASE_URL); secrets are never copied. A
    resources server without a counterpart is hosted as it is (type: nemo_gym),
    if its code is found beside the config. What differs is said on stderr.
    Data sets are listed there: graphs have none.

    Exit status: 0, or 1 with every problem, and then nothing is written.

    Example: gym-serve import-nemo-gym Gym/benchmarks/aime24/config.yaml -o graphs/aime24.yaml
    """
    from gym_serve.interop.nemo_gym import import_config
    from gym_serve.rollouts.outputs import replacing

    try:
        imported = import_config(configs, name=name, skip_unknown=skip_unknown)
        if output is not None:
            with replacing(output) as file:
                file.write(imported.yaml().encode())
    except GymError as error:
        stop(error, as_json=as_json)
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
        typer.echo(f"note: {note}", err=True)
    for dataset in imported.datasets:
        described = ", ".join(f"{key} {value}" for key, value in dataset.items())
        typer.echo(f"data set: {described}", err=True)
    if output is None:
        typer.echo(imported.yaml(), nl=False)
    else:
        typer.echo(f"{output}: check it with gym-serve validate {output}")
