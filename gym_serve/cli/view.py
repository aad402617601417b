"""`gym-serve view`: a page where rollouts are read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gym_serve.cli.options import JsonOption, PriceOption
from gym_serve.cli.printing import echo, print_json
from gym_serve.servers.usage import read_prices

PORT = 7433


def view(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH...", help="Files of rollouts (.jsonl, .gz, .zst), and folders."),
    ],
    *,
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help=f"Port; by default {PORT}, or a free one if that is taken.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen at. Other machines reach it only with the printed token.")
    ] = "127.0.0.1",
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")
    ] = True,
    export: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Write a static site into this folder instead, for any file server."
        ),
    ] = None,
    where: Annotated[
        str, typer.Option(metavar="CONDITION", help="Rollouts to export, by a filter as on the page.")
    ] = "",
    price: PriceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show rollouts on a page in the browser: runs, tasks, conversations, tokens.

    Files are indexed in the background, also while they are being written. The
    index is kept in ~/.cache/gym-serve/view. Failures beside a file belong to it.
    Prices are those in the header of a run, where --price gives no others.

    Exit status: 0, or 1 if a path cannot be read.

    Example: gym-serve view out.jsonl
    """
    from gym_serve.view.serving import export_site, serve

    prices = read_prices(price or ())
    if export is not None:
        count = export_site(paths, export, where, prices)
        if as_json:
            print_json({"ok": True, "folder": str(export), "rollouts": count})
        else:
            echo(f"{export}: {count:,} rollouts; to look: python -m http.server --directory {export}")
        return

    def say(url: str) -> None:
        if as_json:
            print_json({"ok": True, "url": url})
        else:
            echo(f"{url}\nCtrl-C ends it.")

    serve(paths, host=host, port=port, default_port=PORT, browser=browser, say=say, prices=prices)
