"""Every code block of README.md and docs/ is run; what that means by language: `support.docs`."""

import json
import os
import re
import runpy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.any_language import needs_node
from support.commands import COMMANDS, command_of, options_of
from support.docs import (
    ROOT,
    Block,
    blocks_of,
    check_console,
    check_graph,
    gym_serve_commands,
    is_graph,
    matches,
    run_bash,
    run_python,
)

import gym_serve
import gym_serve.testing
from gym_serve.observe.catalogue import METRICS

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES.sort(key=lambda page: page.stem == "collecting")  # it says what `down --all` prints
ADDRESS = "http://127.0.0.1:8000"
"""Where a reader's graph answers; the cluster of the tests may have another port."""


class Reader:
    """Runs the blocks of a page one after the other."""

    def __init__(
        self, page: Path, folder: Path, address: str, capture: pytest.CaptureFixture[str], of_up: Path
    ) -> None:
        self.of_up = of_up
        self.page = page
        self.folder = folder
        self.address = address
        self.capture = capture
        self.namespace: dict[str, Any] = {"__name__": page.stem}
        self.printed: str | None = None
        self.up = ""
        self.deployed = ExitStack()

    def read(self, block: Block) -> None:
        block = block._replace(text=block.text.replace(ADDRESS, self.address))
        if block.language == "yaml":
            if is_graph(block):
                check_graph(block)
            else:
                assert block.file is not None, f"line {block.line}: neither a graph nor a file"
        if block.file is not None:
            (self.folder / block.file).write_text(block.text, encoding="utf-8")
        else:
            _ACTIONS[block.language](self, block)

    def python(self, block: Block) -> None:
        self.capture.readouterr()
        run_python(block, str(self.page), self.namespace)
        self.printed = self.capture.readouterr().out

    def bash(self, block: Block) -> None:
        words = block.text.split()
        if words[0] == "make":
            self.printed = None  # .ci/run runs these
        elif words[:2] == ["serve", "run"] and len(words) == 3:
            from gym_serve import Gym

            self.deployed.enter_context(Gym.from_graph(words[2]))
        else:
            if found := re.search(r"gym-serve up graphs/(\w+)", block.text):
                self.up = found[1]
            if self.page != PAGES[-1]:  # the pages have one Ray of `up`
                down = f"gym-serve down {self.up}"
                block = block._replace(text=block.text.replace("gym-serve down --all", down))
            self.printed = run_bash(block, self.folder, self.of_up)

    def text(self, block: Block) -> None:
        if self.printed is not None:
            assert matches(block.text, self.printed), f"line {block.line}; this was printed:\n{self.printed}"


_ACTIONS: dict[str, Callable[[Reader, Block], None]] = {
    "python": Reader.python,
    "bash": Reader.bash,
    "text": Reader.text,
    "yaml": lambda reader, block: None,  # checked, whether it is a file or not
    "json": lambda reader, block: json.loads(block.text),
    "console": lambda reader, block: check_console(block),
    "haproxy": lambda reader, block: None,  # tests/http/test_tls_ingress.py runs it
}


def _needs_ray(block: Block) -> bool:
    wanted = {"python": "import Gym", "bash": "serve run"}.get(block.language)
    return wanted is not None and block.file is None and wanted in block.text and not _in_this_process(block)


def _in_this_process(block: Block) -> bool:
    """Whether all graphs of a block of Python run without Ray."""
    return 0 < block.text.count("ray=False") >= block.text.count("from_graph(")


@pytest.fixture(scope="module")
def address(cluster: str, deploy: Callable[..., Any]) -> str:
    """The cluster of the tests, with a graph that several pages deploy: they join it instead."""
    deploy(ROOT / "graphs" / "mcqa.yaml")
    return cluster


@pytest.fixture(scope="module")
def of_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where `gym-serve up` notes its Ray, which is stopped in the end if no page has done that."""
    folder = tmp_path_factory.mktemp("state")
    yield folder
    if any(folder.rglob("*")):
        run_bash(Block(0, "bash", "gym-serve down --all || true"), folder, folder)


_WITHOUT_RAY = {"play", "validate", "list", "diff", "test", "conform", "eval"}
"""Commands that start no Ray, besides those with ``--no-ray``."""


def _may_start_ray(block: Block) -> bool:
    if block.language == "python":
        return block.file is None and (
            not _in_this_process(block) if "Gym" in block.text else "ray" in block.text
        )
    commands = [line.split() for line in block.text.splitlines()]
    return block.language == "bash" and not all(
        words[:1] in ([], ["node"], ["sed"], ["kill"])
        or (words[0] == "gym-serve" and (words[1] in _WITHOUT_RAY or "--no-ray" in words))
        for words in commands
    )


def _page(page: Path) -> Any:
    needs_ray = any(map(_may_start_ray, blocks_of(page)))
    marks = [pytest.mark.ray if needs_ray else pytest.mark.thorough]
    marks += [needs_node] * any(block.text.startswith("node ") for block in blocks_of(page))
    return pytest.param(page, marks=marks, id=page.stem)


@pytest.mark.timeout(600)  # a page may start a Ray, and a process for each command
@pytest.mark.parametrize("page", [_page(page) for page in PAGES])
def test_code_blocks(
    page: Path,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for metric in METRICS:  # a page sees a process in which nothing happened before
        metric.clear()
    blocks = list(blocks_of(page))
    address = request.getfixturevalue("address") if any(map(_needs_ray, blocks)) else ADDRESS
    for linked in ("graphs", "environments", "examples"):
        (tmp_path / linked).symlink_to(ROOT / linked)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    reader = Reader(page, tmp_path, address, capsys, request.getfixturevalue("of_up"))
    with reader.deployed:
        for block in blocks:
            reader.read(block)


def test_every_command_is_run_by_a_page() -> None:
    blocks = [block for page in PAGES for block in blocks_of(page)]
    run = {
        command_of(words)
        for block in blocks
        if block.language == "bash"
        for words in gym_serve_commands(block.text)
    }
    assert COMMANDS.keys() <= run


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_in_the_text_exist(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for words in gym_serve_commands(prose):
        command = command_of(words) if words and not words[0].startswith("-") else ()
        assert command is not None, f"gym-serve {' '.join(words)}"
        unknown = {word for word in words if word.startswith("--")} - options_of(command)
        assert not unknown, f"gym-serve {' '.join(words)}"


def test_the_reference_is_complete() -> None:
    api, commands, options = (
        (ROOT / "docs" / f"{page}.md").read_text() for page in ("api", "commands", "options")
    )
    names = {name for name in (*gym_serve.__all__, *gym_serve.testing.__all__) if name != "__version__"}
    assert names == {name for name in names if re.search(rf"^(### |- +|.*`){name}\b", api, re.MULTILINE)}
    links = " ".join(re.findall(r"\[`[^]]*\]", commands))
    for command in COMMANDS:
        assert f"`{command[-1]}`" in links or f"`{' '.join(command)}`" in links, command
        assert f"\n## {' '.join(command)}\n" in options


def test_the_pages_from_the_code_are_up_to_date() -> None:
    generate = runpy.run_path(os.fspath(ROOT / "docs" / "generate.py"))
    for path, text in generate["PAGES"].items():
        assert path.read_text(encoding="utf-8") == text(), f"{path.name}: run `python docs/generate.py`"
