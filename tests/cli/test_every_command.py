"""What holds for every command of `gym-serve`: its help, its example, its exit statuses, and `--json`."""

import json
import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from support.commands import COMMANDS, options_of
from typer.testing import CliRunner

from gym_serve import cli
from gym_serve.cli import main, printing

GYM_SERVE = [sys.executable, "-c", "from gym_serve.cli import main; main()"]
NO_REPORT = {"logs", "debug"}  # they print lines of a log and of a shell as they are


each = pytest.mark.parametrize("path", COMMANDS, ids=" ".join)


def help_of(path: tuple[str, ...]) -> str:
    result = CliRunner().invoke(main, [*path, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.stdout


@each
def test_help_says_the_exit_statuses_and_what_every_option_does(path: tuple[str, ...]) -> None:
    text = help_of(path)
    assert "Exit status:" in text
    for parameter in COMMANDS[path].params:
        if parameter.name != "help":
            assert parameter.help, f"{parameter.name} has no help"


@each
def test_the_example_can_be_typed(path: tuple[str, ...]) -> None:
    (example,) = (line.strip() for line in help_of(path).splitlines() if "Example:" in line)
    words = shlex.split(example.removeprefix("Example: "))
    assert words[: 1 + len(path)] == ["gym-serve", *path]
    # Raises where an option does not exist, or something is missing; runs nothing.
    COMMANDS[path].make_context(path[-1], words[1 + len(path) :])


@each
def test_what_it_reports_can_be_read_by_programs(path: tuple[str, ...]) -> None:
    assert ("--json" in options_of(path)) == (path[-1] not in NO_REPORT)


@each
def test_how_much_it_says_can_be_chosen(path: tuple[str, ...]) -> None:
    assert {"-v", "--verbose", "-q", "--quiet"} <= options_of(path)


def test_the_version_is_that_of_the_package() -> None:
    result = CliRunner().invoke(main, ["--version"])
    assert result.exit_code == 0
    assert result.stdout.startswith(f"gym-serve {version('gym-serve')}, Ray {version('ray')}, Python 3.")


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ([], {"warning", "error"}),
        (["-v"], {"info", "warning", "error"}),
        (["-vv"], {"debug", "info", "warning", "error"}),
        (["-q"], {"error"}),
    ],
)
def test_verbosity_chooses_what_of_the_log_is_shown(options: list[str], shown: set[str]) -> None:
    code = (
        "import logging, sys\n"
        "from gym_serve.cli import main\n"
        f"main(['validate', 'graphs/mcqa.yaml', *{options}], standalone_mode=False)\n"
        "for level in ('debug', 'info', 'warning', 'error'):\n"
        "    getattr(logging.getLogger('gym_serve'), level)('said as %s', level)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(re.findall(r"said as (\w+)", done.stderr)) == shown


def test_quiet_and_verbose_exclude_each_other() -> None:
    result = CliRunner().invoke(main, ["validate", "graphs/mcqa.yaml", "-q", "-v"])
    assert result.exit_code == 2
    assert "--verbose or --quiet" in result.output


def test_collect_has_all_options() -> None:
    assert options_of(("collect",)) >= {
        "--attach",
        "--url",
        "--resume",
        "--repeats",
        "--concurrency",
        "--limit",
        "--shard",
        "--set",
        "--application",
    }


@pytest.mark.parametrize("path", [(), ("dataset",), ("init",)], ids=" ".join)
def test_a_group_alone_shows_its_commands(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, list(path), env={"COLUMNS": "200"})
    assert result.exit_code == 2
    for command in COMMANDS:
        if command[: len(path)] == path:
            assert command[len(path)] in result.output


def test_help_loads_no_ray() -> None:
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from gym_serve.cli import main\n"
        f"for path in {list(COMMANDS)}:\n"
        "    assert CliRunner().invoke(main, [*path, '--help']).exit_code == 0, path\n"
        "    loaded = {'ray', 'openai', 'httpx', 'aiohttp'} & sys.modules.keys()\n"
        "    assert not loaded, (path, loaded)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_ctrl_c_while_the_commands_are_imported_is_quiet() -> None:
    code = (
        "import sys, gym_serve\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from gym_serve.cli import main\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")


def test_all_that_is_printed_is_cleaned_in_one_place() -> None:
    """Of escapes that data, models and logs may contain: `printing` alone calls what writes to a terminal."""
    writes = re.compile(
        r"typer\.echo|typer\.secho|(?<!Plain)\bConsole\(|(?<![\w.])print\(|sys\.stdout\.write"
    )
    for file in Path(cli.__file__).parent.glob("*.py"):
        if file.name != "printing.py":
            assert not writes.search(file.read_text()), file


def test_what_is_printed_holds_no_escape(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "\x1b[2Jx\x9b1m\u202etxt"
    printing.echo(hostile)
    printing.echo(hostile, err=True)
    printing.print_table([hostile], [[hostile]])
    printing.new_console().print(hostile)
    printing.print_json({hostile: hostile})
    printing.print_json_stream({"a": hostile}, "b", [hostile])
    told = capsys.readouterr()
    assert not {"\x1b", "\x9b", "\u202e"} & set(told.out + told.err)
    assert told.out.count("\ufffd[2Jx\ufffd1m\ufffdtxt") == 4
    assert told.out.count(r"\u001b[2Jx\u009b1m\u202etxt") == 4


@pytest.mark.parametrize(
    ("stdout", "stderr", "said"),
    [
        ("closed", "kept", ""),
        ("kept", "closed", ""),
        ("full", "full", ""),
        ("full", "kept", "report of out.jsonl is not printed: cannot write to standard output: No space"),
    ],
)
def test_a_run_goes_on_without_a_reader(tmp_path: Path, stdout: str, stderr: str, said: str) -> None:
    reader, closed = os.pipe()
    os.close(reader)
    with open("/dev/full", "wb") as full:
        streams = {"closed": closed, "full": full, "kept": subprocess.PIPE}
        done = subprocess.run(
            [*GYM_SERVE, "collect", "simple_weather", "-o", "out.jsonl", "--no-ray"],
            stdout=streams[stdout],
            stderr=streams[stderr],
            cwd=tmp_path,
            check=False,
        )
    os.close(closed)
    assert done.returncode == 0
    assert (tmp_path / "out_aggregate_metrics.json").exists()
    assert said in (done.stderr or b"").decode()
    assert b"Traceback" not in (done.stderr or b"")


def test_a_full_standard_output_is_told() -> None:
    for command in (["list"], ["validate", "none.yaml", "--json"], ["show", "mcqa"]):
        with open("/dev/full", "wb") as full:
            done = subprocess.run(
                [*GYM_SERVE, *command], stdout=full, stderr=subprocess.PIPE, text=True, check=False
            )
        assert (done.returncode, done.stderr) == (
            1,
            "cannot write to standard output: No space left on device\n",
        )


def test_sigterm_ends_a_command_as_ctrl_c_does() -> None:
    code = (
        "import os, signal\n"
        "from gym_serve.cli import main, options\n"
        "options.set_verbosity = lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM)\n"
        "main(['validate', 'graphs/mcqa.yaml'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (143, "Stopped by SIGTERM.\n")


NOISY = """
import os
print("of the module")
from gym_serve.servers import ResourcesServer, Verdict
class Noisy(ResourcesServer):
    async def verify(self, request):
        print("of the verifier")
        os.system("echo of its child process")
        return Verdict(reward=1.0)
"""


def test_what_an_author_prints_is_not_in_the_report(tmp_path: Path) -> None:
    (tmp_path / "gs_noisy.py").write_text(NOISY)
    (tmp_path / "graph.yaml").write_text(
        "models: {policy: {type: scripted_model}}\n"
        "resources: {noisy: {type: gs_noisy:Noisy}}\n"
        "agents: {agent: {type: simple_agent, model: policy, resources: noisy}}\n"
    )
    (tmp_path / "rows.jsonl").write_text('{"responses_create_params": {"input": "hello"}}\n')
    command = [*GYM_SERVE, "collect", "graph.yaml", "rows.jsonl", "--no-ray", "--json", "-o", "out.jsonl"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["ok"]
    assert re.findall("of .*", done.stderr) == ["of the module", "of the verifier", "of its child process"]
