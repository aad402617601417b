"""`gym-serve collect` and `reverify` without a graph: wrong usage, and the pieces of the display."""

import io
import logging
from contextlib import redirect_stderr
from pathlib import Path
from typing import NoReturn

import pytest
from rich.console import Console
from rich.file_proxy import FileProxy
from typer.testing import CliRunner

from gym_serve.cli import main
from gym_serve.cli.options import Target
from gym_serve.cli.printing import set_verbosity
from gym_serve.cli.run_collection import ProgressDisplay, Rate
from gym_serve.rollouts import Progress

runner = CliRunner()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("collect rows.jsonl -o o.jsonl", "rows.jsonl is no graph"),
        ("collect g.yaml rows.jsonl -o o.jsonl --attach x", "a graph file, --attach NAME"),
        ("collect rows.jsonl -o o.jsonl --url http://x --attach x", "a graph file, --attach NAME"),
        ("collect rows.jsonl -o o.jsonl --url http://x --address auto", "needs no Ray"),
        ("collect rows.jsonl -o o.jsonl --url http://x --set a.b=1", "--set changes"),
        ("collect rows.jsonl -o o.jsonl --attach x --application y", "--attach takes the name itself"),
        ("collect rows.jsonl -o o.jsonl --attach x --dashboard", "--dashboard needs a graph file"),
        ("collect g.yaml rows.jsonl -o o.jsonl --no-ray --dashboard", "--dashboard needs a graph file"),
        ("collect a b c -o o.jsonl", "got 3 files"),
        ("collect rows.jsonl -o o.jsonl --url http://x --shard 2-8", "must be I/N, e.g. 2/8"),
        (
            "collect rows.jsonl -o o.jsonl --url http://x --repeats a=b",
            "must be a number, or math=8,_default=1",
        ),
        (
            "collect rows.jsonl -o o.jsonl --url http://x --param temperature",
            "must be KEY=VALUE, as in --param temperature=0.7",
        ),
        ("collect rows.jsonl --url http://x", "--output"),
        ("reverify out.jsonl -o o.jsonl", "a graph file, --attach NAME"),
    ],
)
def test_wrong_usage_is_status_2(arguments: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    result = runner.invoke(main, arguments.split())
    assert result.exit_code == 2
    assert problem in result.output


def test_ctrl_c_outside_of_a_run_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Target) -> NoReturn:
        raise KeyboardInterrupt  # as while Ray starts

    monkeypatch.setattr(Target, "open", interrupted)
    result = runner.invoke(main, ["collect", "mcqa", "-o", str(tmp_path / "o.jsonl")])
    assert (result.exit_code, result.stderr) == (130, "Stopped by Ctrl-C.\n")


def test_a_graph_with_problems_and_a_graph_that_is_not_there(tmp_path: Path) -> None:
    graph = tmp_path / "graph.yaml"
    graph.write_text("agents: {a: {type: simple_agnt}}")
    result = runner.invoke(main, ["collect", str(graph), "rows.jsonl", "-o", str(tmp_path / "o.jsonl")])
    assert result.exit_code == 1
    assert "simple_agent" in result.stderr
    result = runner.invoke(main, ["collect", "rows.jsonl", "--url", "http://127.0.0.1:9", "-o", "o.jsonl"])
    assert result.exit_code == 1
    assert "no gym_serve graph answers at http://127.0.0.1:9" in result.stderr


def test_the_rate_is_that_of_the_last_minute() -> None:
    rate = Rate()
    assert rate.per_second() is None
    for second in range(100):
        rate.add(float(second), 1000 + second)
        rate.add(second + 0.5, 1000 + second)
    assert rate.per_second() == pytest.approx(1.0, rel=0.02)
    for second in range(100, 200):
        rate.add(float(second), 1099 + 5 * (second - 99))
    assert rate.per_second() == pytest.approx(5.0)


def test_a_bar_on_a_terminal() -> None:
    now = [0.0]
    file = io.StringIO()
    with ProgressDisplay(Console(file=file, force_terminal=True, width=120), clock=lambda: now[0]) as live:
        for finished in range(0, 60, 10):
            live(Progress(100, finished, finished, 0, 8, {}, 0.5))
            now[0] += 1.0
        live.say("stopping")
    shown = file.getvalue()
    assert "50/100  10.0/s  reward 0.500  failed 0  running 8  ETA 0:00:05" in shown
    assert "━" in shown
    assert "stopping" in shown


def test_at_80_columns_nothing_is_cut_and_the_commonest_failures_are_named() -> None:
    now = [0.0]
    file = io.StringIO()
    failures = {"overloaded": 7_000, "model_timeout": 12_000, "a\x1b[31m" + "b" * 30: 3, "x": 2, "y": 1}
    with ProgressDisplay(Console(file=file, force_terminal=True, width=80), clock=lambda: now[0]) as live:
        for second in range(3):
            live(Progress(10_000, 5_000 + second, 4_990, 0, 128, failures, 0.25, tokens=4_000 * second))
            now[0] += 1.0
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    assert "5,002/10,000  1.0/s  4,000 tokens/s  reward 0.250" in lines
    at = lines.index("failed 12 (attempts: 12,000 model_timeout, 7,000 overloaded, 3 a")
    assert lines[at + 1] == "[31mbbbbbbbbbbb..., 3 others)  running 128  ETA 1:23:18"


def test_quiet_shows_no_progress() -> None:
    file = io.StringIO()
    with ProgressDisplay(Console(file=file, force_terminal=True, quiet=True)) as live:
        live(Progress(2, 1, 1, 0, 1, {}, 0.5))
        live.say("stopping")
    assert file.getvalue() == ""


def test_the_log_is_printed_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich takes the place of stderr while it shows the bar."""
    logger = logging.getLogger("gym_serve")
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logger, "level", logger.level)
    set_verbosity(1)
    shown, terminal = io.StringIO(), io.TextIOWrapper(io.BytesIO())
    with redirect_stderr(FileProxy(Console(file=shown, width=200), terminal)):
        logger.info("a record")
    assert shown.getvalue().endswith(" INFO gym_serve: a record\n")


def test_lines_where_there_is_no_terminal() -> None:
    now = [0.0]
    file = io.StringIO()
    live = ProgressDisplay(Console(file=file), clock=lambda: now[0])
    with live:
        for finished in range(0, 1001, 10):
            live(Progress(1000, finished, finished - finished // 10, 0, 8, {"overloaded": 3}, 0.25))
            now[0] += 1.0
    lines = file.getvalue().splitlines()
    assert len(lines) == 11
    begun, later = "0/1,000  reward 0.250  failed 0", "100/1,000  10.0/s  reward 0.250  failed 10"
    assert lines[0] == f"{begun} (attempts: 3 overloaded)  running 8"
    assert lines[1] == f"{later} (attempts: 3 overloaded)  running 8  ETA 0:01:30"
    assert lines[-1].startswith("1,000/1,000")


def test_comparisons_after_the_rollouts() -> None:
    now = [0.0]
    file = io.StringIO()
    live = ProgressDisplay(Console(file=file), clock=lambda: now[0])
    with live:
        for left in (0, *range(25, -1, -1)):
            live(Progress(100, 100, 100, 0, 0, {}, 0.5, comparing=left))
            now[0] += 1.0
    done = "100/100  reward 0.500  failed 0  running 0"
    seen = [done, f"{done}  comparing 16 groups", f"{done}  comparing 6 groups", done]
    assert file.getvalue().splitlines() == seen
