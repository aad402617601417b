"""`gym-serve sandbox`: looks at the live boxes of this machine, and opens one as an agent gets it."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from gym_serve.cli.examples import file_of_rows, row_of, row_source
from gym_serve.cli.options import App, JsonOption
from gym_serve.cli.printing import echo, print_json
from gym_serve.graph.classes import find_class
from gym_serve.servers import ResourcesServer
from gym_serve.types.errors import InvalidRequest, ToolFailed

_SEED_SECONDS = 1800.0  # it may build an image


def list_boxes(*, as_json: JsonOption = False) -> None:
    """List the live boxes of this machine: those of all environments that run as this user.

    Exit status: 0.

    Example: gym-serve sandbox list
    """
    from gym_serve.sandbox.live import live_boxes

    boxes = live_boxes()
    if as_json:
        print_json({"boxes": boxes})
        return
    if not boxes:
        echo("There is no live box.")
    for box in boxes:
        memory = "?" if box["memory_mb"] is None else f"{box['memory_mb']} MiB"
        what = "  ".join(
            str(box[key]) for key in ("environment", "provider", "use", "task", "rollout") if box[key]
        )
        echo(f"{box['id']}  {box['age']:,.0f} s  {memory}  {what}")


def exec_in_box(
    box: Annotated[str, typer.Argument(metavar="BOX", help="Its id, or the beginning of it.")],
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND...", help="One word is for the shell of the box.")
    ],
    *,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds, after which it is killed.")] = 60.0,
    user: Annotated[str | None, typer.Option(help="User of the box; by default the agent's.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Run a command in a live box.

    What it does, the agent sees and the tests see. Options come before BOX.

    Exit status: that of the command (128 and more for a signal), or 1 if there is no such box.

    Example: gym-serve sandbox exec --timeout 5 3f2a ls -la /app
    """
    from gym_serve.sandbox.live import exec_in

    done = exec_in(box, command[0] if len(command) == 1 else command, timeout=timeout, user=user)
    if as_json:
        print_json(done)
    else:
        echo(done["output"], nl=False)
        if done["ended"] != "exit":
            echo(f"It was killed: {done['ended']}.", err=True)
    status = done["exit_status"]
    raise typer.Exit(128 - status if status < 0 else status)


def debug(
    row: Annotated[
        str,
        typer.Argument(metavar="ROW", help="A row as JSON, FILE.jsonl[:LINE], or harbor:FOLDER of a task."),
    ],
    *,
    sandbox: Annotated[str, typer.Option(help="Provider of the box.")] = "bubblewrap",
) -> None:
    """Open the box of a task, as its agent gets it, with a shell.

    Every line is a call of the agent's tool bash. The end of the input (Ctrl-D)
    runs the hidden tests on what was done, and prints their verdict.

    Exit status: 0, or 1 if the box does not start.

    Example: gym-serve sandbox debug harbor:tasks/sort-names
    """
    from gym_serve.testing import TestClient

    source = row_source(Path(row))
    if source is None:
        wanted = row_of(row)
    else:
        with file_of_rows(*source) as file:
            if len(file.read_text("utf-8").splitlines()) > 1:
                raise InvalidRequest(f"{row} has several tasks: name the folder of one")
            wanted = row_of(str(file))
    workspace = find_class("resources", "workspace")
    assert issubclass(workspace, ResourcesServer)
    with (
        TestClient(workspace(name="debug", sandbox=sandbox), timeout=_SEED_SECONDS) as client,
        client.episode(wanted) as episode,
    ):
        while (line := _line()) is not None:
            with suppress(KeyboardInterrupt):
                try:
                    answer = episode.call("bash", command=line)
                except ToolFailed as error:
                    echo(error.message, err=True)
                else:
                    echo(answer["output"], nl=False)
                    if answer["note"]:
                        echo(answer["note"], err=True)
        verdict = episode.verify()
        echo(
            f"reward {verdict.reward:g}" + (f": {verdict.reason}" if getattr(verdict, "reason", None) else "")
        )


def _line() -> str | None:
    """The next line; None at the end of the input."""
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401 - history and editing
    try:
        return input("box$ " if sys.stdin.isatty() else "")
    except EOFError:
        return None


sandbox = App(name="sandbox", help="Look into boxes.", no_args_is_help=True)
sandbox.command("list")(list_boxes)
# What comes after the box is the command's, such as `ls -la`.
sandbox.command("exec", context_settings={"allow_interspersed_args": False})(exec_in_box)
sandbox.command("debug")(debug)
