"""`main`: the `gym-serve` command, put together from its commands."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from gym_serve.cli.analysis import calibrate, diff, profile
from gym_serve.cli.catalog import list_entries, show
from gym_serve.cli.collect import collect
from gym_serve.cli.dataset import dataset
from gym_serve.cli.evaluate import evaluate
from gym_serve.cli.fixtures import conform, run_fixtures
from gym_serve.cli.init import init
from gym_serve.cli.interop import export, import_nemo_gym
from gym_serve.cli.judge_check import judge_check
from gym_serve.cli.lifecycle import down, logs, status, up
from gym_serve.cli.merge import merge, reverify
from gym_serve.cli.monitoring import monitoring, top
from gym_serve.cli.options import App
from gym_serve.cli.play import play
from gym_serve.cli.printing import echo
from gym_serve.cli.sandbox import sandbox
from gym_serve.cli.validate import export_k8s, resolve, validate
from gym_serve.cli.view import view

__all__ = ["main"]

# Tracebacks show no locals: they may hold secrets.
main = App(name="gym-serve", no_args_is_help=True, pretty_exceptions_show_locals=False)
main.command()(validate)
main.command()(resolve)
main.command()(collect)
main.command("eval")(evaluate)
main.command()(play)
main.command()(merge)
main.command()(reverify)
main.command()(calibrate)
main.command()(judge_check)
main.command()(view)
main.command()(profile)
main.command()(diff)
main.command()(export)
main.add_typer(dataset)
main.command("list")(list_entries)
main.command()(show)
main.add_typer(init)
main.command("test")(run_fixtures)
main.command()(conform)
main.command("import-nemo-gym")(import_nemo_gym)
main.command()(up)
main.command()(status)
main.command()(top)
main.command()(down)
main.command()(logs)
main.command("export-k8s")(export_k8s)
main.command()(monitoring)
main.add_typer(sandbox)


def _print_version(asked: bool) -> None:
    if asked:
        ours, ray = version("gym-serve"), version("ray")
        echo(f"gym-serve {ours}, Ray {ray}, Python {platform.python_version()}")
        raise typer.Exit


@main.callback()
def _start(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the versions, and exit."
        ),
    ] = False,
) -> None:
    """Environments for reinforcement learning of language-model agents, on Ray Serve."""
    # As `serve run` does, so that a type `my_package.env:MyEnvironment` is found from its project.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
