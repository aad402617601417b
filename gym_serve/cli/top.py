"""`gym-serve top`: what a running graph does, on a page that is drawn anew every second.

The page is a pure function of the last `Samples` of ``/stats`` and the size of the terminal (`page`). Around
it stands an event loop, which asks, draws, and ends at a key or a signal: a handler that raised an exception
could raise it anywhere, also in a destructor. It asks beside drawing, so that a graph that does not answer
holds up no key.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from gym_serve.cli.options import JsonOption, Target, TokenOption, UrlOption
from gym_serve.cli.printing import new_console, print_json, shortened
from gym_serve.types.errors import GymError, NotFound, Unavailable

if TYPE_CHECKING:
    from gym_serve.client import Gym

_WINDOW = 10.0  # seconds that rates are taken over
_KEPT = 60.0  # seconds, for quantiles and the mean reward
_PATIENCE = 30.0  # seconds without an answer after which a graph is gone
_BOLD, _BAD, _FAINT = "bold", "bold red", "dim"
_NAME_WIDTH = 24
_FULL = 0.9  # load from which a server is marked


def top(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="A running graph; not needed if only one runs."),
    ] = None,
    *,
    address: Annotated[
        str | None,
        typer.Option(
            "--address", metavar="HOST:PORT", help="Ray cluster; by default the one that runs here."
        ),
    ] = None,
    url: UrlOption = None,
    auth_token: TokenOption = None,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two updates.")] = 1.0,
    as_json: JsonOption = False,
) -> None:
    """Show what a running graph does: rollouts, failures, and the load of each server.

    The page ends with q or Ctrl-C, or if the graph is gone. Without a terminal it is printed once; with
    --json, the numbers behind it.

    Exit status: 0, or 1 if the graph does not answer at the start, or any more.

    Example: gym-serve top math
    """
    if url is None and name is None:
        name = _only_graph(address)
    with Target(attach=name, url=url, address=address, token=auth_token).open() as gym:
        if as_json:
            print_json({"ok": True, "name": gym.name, **gym.stats()})
            return
        console = new_console()
        asyncio.run(_watch(gym, console, interval))


def _only_graph(address: str | None) -> str:
    """The name of the one graph that runs.

    Raises:
        NotFound: none runs, or several do.
    """
    from gym_serve.cli import local_ray
    from gym_serve.cluster.serve_compat import serve_is_running

    local_ray.connect(address)
    from ray import serve

    names = list(serve.status().applications) if serve_is_running() else []
    if len(names) != 1:
        raise NotFound(f"choose a running graph by its NAME: {', '.join(names) or 'none runs'}")
    return names[0]


async def _watch(gym: Gym, console: Console, interval: float) -> None:
    """Draw the page until a key or a signal ends it; without a terminal, once.

    Raises:
        GymError: the graph does not answer, at the start or for `_PATIENCE`.
    """
    samples = Samples(gym.name)
    samples.add(time.monotonic(), await gym.astats())
    if not console.is_terminal:
        await asyncio.sleep(interval)
        samples.add(time.monotonic(), await gym.astats())
        console.print(Group(*page(samples, console.width)))
        return
    ended = asyncio.Event()
    with _ends(ended.set), Live(console=console, screen=True, auto_refresh=False) as live:
        asking = asyncio.create_task(_ask(gym, samples, interval))
        asking.add_done_callback(lambda _: ended.set())
        while not ended.is_set():
            lines = page(samples, console.width)[: console.height]
            live.update(Group(*lines), refresh=True)
            with suppress(asyncio.TimeoutError, TimeoutError):
                await asyncio.wait_for(ended.wait(), interval)
    if asking.done():
        raise asking.exception() or AssertionError("it asks for ever")
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def _ask(gym: Gym, samples: Samples, interval: float) -> None:
    """Ask again and again.

    Raises:
        NotFound: the graph is gone.
        Unavailable: it has not answered for `_PATIENCE`.
    """
    answered = time.monotonic()
    while True:
        await asyncio.sleep(interval)
        try:
            stats = await asyncio.wait_for(gym.astats(), _PATIENCE)
        except NotFound as error:
            raise NotFound(f"{gym.name} is gone: {error.message}") from None
        except GymError as error:
            samples.problem = error.message
        except (asyncio.TimeoutError, TimeoutError):
            samples.problem = f"nothing for {_PATIENCE:.0f} s"
        else:
            answered = time.monotonic()
            samples.add(answered, stats)
            continue
        if time.monotonic() - answered > _PATIENCE:
            raise Unavailable(f"{gym.name} is gone: {samples.problem}")


@contextmanager
def _ends(end: Callable[[], None]) -> Iterator[None]:
    """Within the block, ``end`` is called at SIGINT, SIGTERM and the key q, which needs no Enter."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in signals:
        loop.add_signal_handler(number, end)
    keys, before = sys.stdin.fileno() if sys.stdin.isatty() else None, None

    def read() -> None:
        if os.read(sys.stdin.fileno(), 1) in (b"q", b"Q", b""):
            end()

    if keys is not None:
        import termios
        import tty

        before = termios.tcgetattr(keys)
        tty.setcbreak(keys)
        loop.add_reader(keys, read)
    try:
        yield
    finally:
        if keys is not None and before is not None:
            loop.remove_reader(keys)
            termios.tcsetattr(keys, termios.TCSADRAIN, before)
        for number in signals:
            loop.remove_signal_handler(number)


class Samples:
    """The answers of ``/stats`` over the last minute.

    Args:
        name: of the graph.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.problem = ""
        """Why the last request had no answer."""
        self._samples: deque[tuple[float, dict[str, Any]]] = deque()

    def add(self, now: float, stats: dict[str, Any]) -> None:
        """Add an answer, of the time ``now`` in seconds."""
        self.problem = ""
        while self._samples and self._samples[0][0] < now - _KEPT:
            self._samples.popleft()
        self._samples.append((now, stats))

    @property
    def last(self) -> dict[str, Any]:
        """The latest answer."""
        return self._samples[-1][1]

    def now(self, name: str, *by: str) -> dict[tuple[str, ...], float]:
        """The latest values of a series, summed by some of its labels."""
        return _values(self.last, name, by)

    def grown(self, name: str, *by: str, seconds: float = _KEPT) -> dict[tuple[str, ...], float]:
        """By how much a series grew. A sum that fell, because a replica ended, counts as unchanged."""
        first = _values(self._before(seconds)[1], name, by)
        return {key: max(0.0, value - first.get(key, 0.0)) for key, value in self.now(name, *by).items()}

    def rate(self, name: str, *by: str) -> dict[tuple[str, ...], float]:
        """By how much a series grew per second."""
        duration = self._samples[-1][0] - self._before(_WINDOW)[0]
        grown = self.grown(name, *by, seconds=_WINDOW)
        return {key: value / duration if duration else 0.0 for key, value in grown.items()}

    def _before(self, seconds: float) -> tuple[float, dict[str, Any]]:
        since = self._samples[-1][0] - seconds
        return next(sample for sample in self._samples if sample[0] >= since)


def page(samples: Samples, width: int) -> list[Text]:
    """The lines of the page, none of which is longer than ``width``."""
    stats = samples.last
    lines = [
        Text(f"{samples.name}", _BOLD),
        *([Text(f"no answer: {samples.problem}", _BAD)] if samples.problem else []),
        *_rollouts(samples),
        _bottleneck(stats),
        Text(),
        *_servers(samples, width),
        *_models(samples),
    ]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def _rollouts(samples: Samples) -> Iterator[Text]:
    ended = samples.now("gym_serve_rollouts_total", "outcome")
    rate = sum(samples.rate("gym_serve_rollouts_total").values())
    counts = [f"{value:,.0f} {outcome}" for (outcome,), value in sorted(ended.items(), reverse=True)]
    running = [f"{samples.last.get('rollouts', 0):,} running"]
    yield _fact("rollouts", "  ".join([f"{rate:,.1f}/s", *running, *counts]))
    parts = []
    scored = sum(samples.now("gym_serve_rollout_reward_count").values())
    if scored:
        parts.append(f"{sum(samples.now('gym_serve_rollout_reward_sum').values()) / scored:.3f} mean")
    recent = sum(samples.grown("gym_serve_rollout_reward_count").values())
    if recent:
        mean = sum(samples.grown("gym_serve_rollout_reward_sum").values()) / recent
        parts.append(f"{mean:.3f} in the last minute")
    yield _fact("reward", "  ".join(parts) or "-")
    seconds = _quantiles(samples, "gym_serve_rollout_seconds")
    turns, rollouts = (
        sum(samples.now(f"gym_serve_rollout_turns_{part}").values()) for part in ("sum", "count")
    )
    parts = [f"p50 {_duration(seconds[0])}  p95 {_duration(seconds[1])}"] if seconds else []
    if rollouts:
        parts.append(f"{turns / rollouts:.1f} model calls each")
    yield _fact("duration", "  ".join(parts) or "-")
    tokens = samples.rate("gym_serve_tokens_total", "kind")
    parts = [f"{tokens[kind,]:,.0f} {kind}/s" for kind in ("input", "cached", "output") if (kind,) in tokens]
    yield _fact("tokens", "  ".join(parts) or "-")
    failures = samples.now("gym_serve_failures_total", "class").items()
    commonest = sorted(failures, key=lambda item: (-item[1], item[0]))[:6]
    told = "  ".join(f"{count:,.0f} {shortened(kind, _NAME_WIDTH)}" for (kind,), count in commonest)
    yield _fact("failures", told or "none", _BAD if told else "")


def _bottleneck(stats: dict[str, Any]) -> Text:
    if stats.get("bottleneck") is None:
        return _fact("limit", "idle")
    suited = f", {stats['concurrency']:,} rollouts suit the graph" if stats.get("concurrency") else ""
    return _fact("limit", f"{stats['bottleneck']} ({stats['reason']} {stats['load']:.2f}){suited}")


def _fact(name: str, value: str, style: str = "") -> Text:
    return Text.assemble((f"{name:<10}", _FAINT), (value, style))


_Column = tuple[str, Callable[[str, dict[str, Any]], str]]


def _servers(samples: Samples, width: int) -> Iterator[Text]:
    """A table with as many columns as fit, in the order of their importance."""
    servers = samples.last.get("servers", {})
    calls = samples.rate("gym_serve_calls_total", "server")
    failed = samples.rate("gym_serve_calls_total", "server", "status")
    quantiles = {server: _quantiles(samples, "gym_serve_call_seconds", server) for server in servers}

    def errors(server: str) -> str:
        rate = sum(n for (name, status), n in failed.items() if name == server and status[:1] == "5")
        return f"{100 * rate / calls[server,]:.1f}" if calls.get((server,)) else "-"

    def seconds(server: str, which: int) -> str:
        found = quantiles[server]
        return _duration(found[which]) if found else "-"

    def stages(server: dict[str, Any]) -> str:
        spent = Counter(server.get("cpu_seconds") or {})
        total = sum(spent.values())
        return " ".join(f"{stage} {100 * n / total:.0f}%" for stage, n in spent.most_common(4) if total)

    columns: list[_Column] = [
        ("server", lambda name, server: shortened(name, _NAME_WIDTH)),
        ("replicas", lambda name, server: _replicas(server)),
        ("load", lambda name, server: f"{server['load']:.2f}"),
        ("by", lambda name, server: server.get("reason") or "-"),
        ("running", lambda name, server: f"{server['running']:,}"),
        ("queued", lambda name, server: f"{server['waiting']:,}"),
        ("calls/s", lambda name, server: f"{calls.get((name,), 0.0):,.1f}"),
        ("p50", lambda name, server: seconds(name, 0)),
        ("p95", lambda name, server: seconds(name, 1)),
        ("err%", lambda name, server: errors(name)),
        ("sessions", lambda name, server: f"{server['sessions']:,}"),
        ("cores", lambda name, server: f"{server['cpu']:.2f}"),
        ("CPU time by stage", lambda name, server: stages(server)),
    ]
    cells = [[title, *(show(name, server) for name, server in servers.items())] for title, show in columns]
    taken = 0
    shown: list[list[str]] = []
    for column in cells:
        wide = max(map(len, column))
        if shown and taken + 2 + wide > width:
            break
        taken += wide + 2 * bool(shown)
        shown.append([cell.ljust(wide) if len(shown) in (0, 3, 12) else cell.rjust(wide) for cell in column])
    styles = [_FAINT, *(_BAD if server["load"] >= _FULL else "" for server in servers.values())]
    for style, row in zip(styles, zip(*shown, strict=True), strict=True):
        yield Text("  ".join(row).rstrip(), style)


def _replicas(server: dict[str, Any]) -> str:
    return f"{server['replicas']}" + (f"+{server['draining']}" if server.get("draining") else "")


def _models(samples: Samples) -> Iterator[Text]:
    """Endpoints and versions of the models."""
    up = _by_label(samples.last, "gym_serve_endpoint_up", "model", "endpoint")
    waits = _by_label(samples.last, "gym_serve_endpoint_wait_seconds", "model", "endpoint")
    retries = samples.now("gym_serve_model_retries_total", "model", "endpoint")
    if up:
        yield Text()
    for (model, endpoint), values in sorted(up.items()):
        seen = sum(value > 0 for value in values)
        state = "up" if seen == len(values) else f"down at {len(values) - seen} of {len(values)} replicas"
        more = f"  {n:,.0f} retries" if (n := retries.get((model, endpoint))) else ""
        if wait := max(waits.get((model, endpoint), (0.0,))):
            state = f"refuses calls for {wait:,.0f} s"
        text = f"{shortened(endpoint, 80)}  {state}{more}"
        yield _fact(shortened(model, 10), text, "" if seen == len(values) and not wait else _BAD)
    for (model,), values in sorted(_by_label(samples.last, "gym_serve_policy_version", "model").items()):
        versions = " to ".join(f"{value:g}" for value in sorted({min(values), max(values)}))
        yield _fact(shortened(model, 10), f"policy version {versions}")


def _series(stats: dict[str, Any], name: str) -> Sequence[dict[str, Any]]:
    points: Sequence[dict[str, Any]] = stats.get("metrics", {}).get(name, ())
    return points


def _values(stats: dict[str, Any], name: str, by: Sequence[str]) -> dict[tuple[str, ...], float]:
    return {labels: sum(values) for labels, values in _by_label(stats, name, *by).items()}


def _by_label(stats: dict[str, Any], name: str, *by: str) -> dict[tuple[str, ...], list[float]]:
    """The values of a series by some of its labels: for a gauge, one of each replica."""
    found: dict[tuple[str, ...], list[float]] = {}
    for point in _series(stats, name):
        found.setdefault(tuple(point["labels"].get(label, "") for label in by), []).append(point["value"])
    return found


def _quantiles(samples: Samples, name: str, server: str | None = None) -> tuple[float, float] | None:
    """Median and 95th percentile of the last minute, by interpolation within a bucket of a histogram."""
    grown = samples.grown(f"{name}_bucket", "server", "le")
    buckets: dict[float, float] = {}
    for (of, bound), count in grown.items():
        if server in (None, of):
            buckets[float(bound)] = buckets.get(float(bound), 0.0) + count
    ranked = sorted(buckets.items())
    if not ranked or not ranked[-1][1]:
        return None
    return _quantile(ranked, 0.5), _quantile(ranked, 0.95)


def _quantile(cumulative: Sequence[tuple[float, float]], share: float) -> float:
    wanted = share * cumulative[-1][1]
    low = below = 0.0
    for bound, count in cumulative:
        if count >= wanted:
            if bound == float("inf"):
                return low
            return low + (bound - low) * (wanted - below) / (count - below)
        low, below = bound, count
    return low


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.1f} min"
