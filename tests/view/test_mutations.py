"""Rollouts with wrong values at random places: each is indexed, shown and counted, or is a problem."""

import random
from pathlib import Path
from typing import Any

import orjson
import pytest
from view.hostile import hostile
from view.made import failed, rollout

from gym_serve.view.conversation import read_rollout
from gym_serve.view.facts import facts_of
from gym_serve.view.queries import read_rollouts, read_tasks
from gym_serve.view.statistics import compare_runs, read_summary
from gym_serve.view.tokens import read_tokens
from gym_serve.view.view import View

ODD: list[Any] = [
    *(None, True, 0, -1, 1.5, 1e300, -1e300, 2**63, "", "x", "\x00", "data:image/png;base64,AAAA"),
    *(
        [],
        [1],
        [[]],
        [None],
        {},
        {"a": 1},
        {"type": "message"},
        [{"type": []}],
        ["a", {"text": 3}],
        {"image_url": 7},
    ),
]
PIECES = [
    b"null",
    b"[]",
    b"{}",
    b"1e999",
    b'"',
    b"\\u0000",
    b",",
    b":",
    b"-1",
    b"true",
    b"[[",
    b"NaN",
    b"\xff",
]


def mutated(rng: random.Random, value: Any) -> Any:
    """The value with another one in some places."""
    if rng.random() < 0.06:
        return rng.choice(ODD)
    if isinstance(value, dict):
        found = {key: mutated(rng, inner) for key, inner in value.items()}
        if found and rng.random() < 0.05:
            found.pop(rng.choice(list(found)))
        return found
    return [mutated(rng, inner) for inner in value] if isinstance(value, list) else value


@pytest.mark.parametrize("seed", [1, 2])
def test_values(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    found = [
        orjson.loads(line) for name, line in hostile(False).items() if name.startswith(("script", "media"))
    ]
    bases = [rollout(1, 1), failed(1, 1), *found]
    lines = [orjson.dumps(mutated(rng, rng.choice(bases))) for _ in range(800)]
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"\n".join(lines))
    with View([path], tmp_path / "cache") as view:
        view.index()
        runs = list(view.runs.values())
        with runs[0].reading() as reading:
            objects = sum(isinstance(orjson.loads(line), dict) for line in lines)
            assert reading.count("") == objects
            for (n,) in reading.sql("SELECT n FROM rollouts"):
                orjson.dumps(read_rollout(reading, n))
                orjson.dumps(read_tokens(reading, n))
        for sort in ("task", "-version", "reward", "-fields.score", "agent"):
            shown = read_rollouts(runs, "", sort, limit=1000)
            assert len(orjson.loads(orjson.dumps(shown))["rows"]) == objects
        for figures in (read_tasks(runs), read_summary(runs), compare_runs(runs[0], runs[0])):
            orjson.dumps(figures)
        assert view.to_arrow().num_rows == objects


def test_bytes() -> None:
    rng = random.Random(3)
    bases = [orjson.dumps(rollout(1, 1)), *(line for line in hostile(False).values() if len(line) < 20_000)]
    read = 0
    for _ in range(20_000):
        line = bytearray(rng.choice(bases))
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(line) + 1)
            if rng.random() < 0.5:
                line[at:at] = rng.choice(PIECES)
            else:
                del line[at : at + rng.randrange(1, 30)]
        try:
            facts_of(bytes(line))
        except ValueError:  # what it says of a line that is no rollout
            continue
        read += 1
    assert read > 1000
