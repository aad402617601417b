"""Each environment's README has the same sections in the same order, and what it says of the code holds."""

import re
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest
import yaml
from support.environments import folder_of

GRAPHS = Path(__file__).parents[2] / "graphs"
ENVIRONMENTS = sorted(
    (
        ep
        for ep in entry_points(group="gym_serve.environments")
        if ep.value.startswith("gym_serve.environments.")
    ),
    key=lambda ep: ep.name,
)
FIRST, LAST = ["Run", "Row", "Tools", "Reward"], "Source"
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


@pytest.fixture(params=ENVIRONMENTS, ids=lambda ep: ep.name)
def environment(request: pytest.FixtureRequest) -> EntryPoint:
    found: EntryPoint = request.param
    return found


def readme_of(environment: EntryPoint) -> str:
    return (folder_of(environment.load()) / "README.md").read_text("utf-8")


def section(text: str, name: str) -> str:
    found = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found.group(1).strip()


def test_sections_have_one_order(environment: EntryPoint) -> None:
    text = FENCE.sub("", readme_of(environment))
    names = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert text.startswith(f"# {environment.name}\n")
    assert names[-1] == LAST
    known = [name for name in names if name in FIRST]
    assert names[: len(known)] == known == [name for name in FIRST if name in names]
    assert set(FIRST) - {"Tools"} <= set(names)
    assert ("Tools" in names) or not environment.load().tools


def test_it_says_whether_stored_rollouts_can_be_scored_again(environment: EntryPoint) -> None:
    mode = environment.load().reverify_mode
    assert f"`reverify_mode` is `{mode}`" in section(readme_of(environment), "Reward")


def test_its_graphs_are_there_and_have_it(environment: EntryPoint) -> None:
    graphs = re.findall(
        r"^serve run graphs/(\w+\.yaml)$", section(readme_of(environment), "Run"), re.MULTILINE
    )
    assert graphs
    for graph in graphs:
        (application,) = yaml.safe_load((GRAPHS / graph).read_text("utf-8"))["applications"]
        assert environment.name in {server["type"] for server in application["args"]["resources"].values()}


def test_it_says_where_it_comes_from(environment: EntryPoint) -> None:
    assert "https://" in section(readme_of(environment), LAST)


def test_arguments_that_are_made_up_are_treated_as_by_the_original(environment: EntryPoint) -> None:
    """NeMo Gym's servers leave them out; its office calls its tools by keyword, and so refuses them."""
    wanted = "forbid" if environment.name == "workplace_assistant" else "ignore"
    assert environment.load().extra_arguments == wanted
