"""The error tree: its drawing, its codes, and the two ways in which it travels."""

import pickle
import re
from pathlib import Path

import pytest
import ray.cloudpickle

from gym_serve.types import errors
from gym_serve.types.errors import GraphError, GymError, error_from_body


def tree(cls: type[GymError] = GymError) -> list[type[GymError]]:
    own = (child for child in cls.__subclasses__() if child.__module__ == errors.__name__)
    return [cls] + [leaf for child in own for leaf in tree(child)]


CLASSES = [cls for cls in tree() if cls not in (GymError, GraphError)]


def test_the_drawing_shows_every_class_and_nothing_else() -> None:
    drawn = {line.split("── ")[1].split()[0] for line in (errors.__doc__ or "").splitlines() if "── " in line}
    assert drawn == {cls.__name__ for cls in tree()} - {"GymError"}
    assert {cls.__name__ for cls in tree()} | {
        "STAGES",
        "error_class",
        "error_from_body",
        "own_error",
    } == set(errors.__all__)


def test_the_drawing_says_the_right_status() -> None:
    for line in (errors.__doc__ or "").splitlines():
        if "── " in line and (words := line.split("── ")[1].split()) and words[1].isdigit():
            assert getattr(errors, words[0]).status == int(words[1]), words[0]


def test_the_page_of_errors_has_every_code_with_its_status() -> None:
    page = (Path(__file__).parents[2] / "docs" / "errors.md").read_text(encoding="utf-8")
    in_table = dict(re.findall(r"^\| `(\w+)` \| (\d{3}) \|", page, re.MULTILINE))
    in_text = dict(re.findall(r"^`(\w+)` \((\d{3})\)", page, re.MULTILINE))
    assert {**in_table, **in_text} == {cls.code: str(cls.status) for cls in tree()}


@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_survives_pickle_and_json(cls: type[GymError]) -> None:
    error = cls("what happened", server="policy", stage="model", retry_after=1.5)
    for dumps in (pickle.dumps, ray.cloudpickle.dumps):
        copy = pickle.loads(dumps(error))
        assert type(copy) is cls
        assert (str(copy), copy.__dict__) == (str(error), error.__dict__)
    again = error_from_body(cls.status, error.to_body())
    assert again.to_body() == error.to_body()
    assert type(again) is cls


def test_codes_are_unique_and_stable() -> None:
    codes = [cls.code for cls in tree()]
    assert len(set(codes)) == len(codes)
    assert errors.SessionLost.code == "session_lost"
    assert errors.Overloaded.code == "overloaded"


def test_a_graph_error_lists_all_its_problems() -> None:
    error = pickle.loads(pickle.dumps(GraphError(["a: bad", "b: worse"], source="graph.yaml")))
    assert error.problems == ["a: bad", "b: worse"]
    assert str(error) == "2 problems in graph.yaml:\n  - a: bad\n  - b: worse"
    many = GraphError([*(f"m{number}: bad" for number in range(50)), "b: worse", "x is odd"])
    assert str(many) == "52 problems:\n  - m0, m1, m2 and 47 more: bad\n  - b: worse\n  - x is odd"


@pytest.mark.parametrize(
    ("status", "body", "cls", "said"),
    [
        (404, {"detail": "Not Found"}, errors.NotFound, "Not Found"),
        (500, '"ValueError"', errors.Unavailable, "ValueError"),
        (502, "<html>Bad gateway</html>", errors.Unavailable, "Bad gateway"),
        (429, {"error": {"message": "slow down"}}, errors.Overloaded, "slow down"),
        (400, {"error": "no"}, errors.BadRequest, "no"),
        (422, None, errors.InvalidRequest, "422"),
        (418, [], errors.BadRequest, "418"),
        (503, {"error": {"code": "no_such_code", "message": "x"}}, errors.Unavailable, "x"),
        (
            429,
            {"error": {"code": "overloaded", "message": 7, "server": {"a": 1}, "stage": []}},
            errors.Overloaded,
            "7",
        ),
    ],
)
def test_the_errors_of_foreign_servers_are_typed_by_status(
    status: int, body: object, cls: type[GymError], said: str
) -> None:
    error = error_from_body(status, body, server="theirs")
    assert type(error) is cls
    assert said in error.message
    assert error.server == "theirs"
    assert error.stage is None
