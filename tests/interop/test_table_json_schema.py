"""JSON-Schema-Test-Suite, draft 2020-12, from the sdist of jsonschema, through structured_outputs' validator.

The suite is about schemas as they are written, so that they are not made strict here.
"""

from __future__ import annotations

import json

from tables import TABLES, needs_table

from gym_serve.environments.structured_outputs import schemas
from gym_serve.types.errors import InvalidRequest

SUITE = TABLES / "jsonschema" / "json" / "tests" / "draft2020-12"

_META = "ours: meta-schemas of others are not loaded, so that all keywords count, and formats do not"
DISAGREEMENTS = {
    "remote references": "ours: a schema refers to nothing outside itself; such a row is refused, not scored",
    "optional/dependencies-compatibility.json": "ours: 2020-12 has no `dependencies`; the file is optional",
    "optional/format-assertion.json": _META,
    "vocabulary.json": _META,
    "optional/ecmascript-regex.json": "the suite (G8): patterns are Python's, not those of ECMA 262",
}
"""What differs, with who is right."""

PENDING = "optional/ecmascript-regex.json"
"""A file with disagreements that are faults of ours."""


def _verdict(schema: object, value: object) -> bool | str:
    try:
        return schemas.Schema(json.dumps(schema), strict=False).problem_of(value) is None
    except InvalidRequest as error:
        return error.message


@needs_table("jsonschema")
def test_every_disagreement_is_argued() -> None:
    found: dict[str, list[str]] = {}
    total = 0
    for path in sorted(SUITE.rglob("*.json")):
        if path.parent.name == "format":  # formats are annotations in 2020-12
            continue
        for group in json.loads(path.read_text("utf-8")):
            for test in group["tests"]:
                total += 1
                verdict = _verdict(group["schema"], test["data"])
                if verdict != test["valid"]:
                    remote = isinstance(verdict, str) and "cannot resolve" in verdict
                    kind = "remote references" if remote else path.relative_to(SUITE).as_posix()
                    found.setdefault(kind, []).append(
                        f"{group['description']}: {test['description']}: {verdict}"
                    )
    assert total > 1300
    assert found.keys() | {PENDING} == DISAGREEMENTS.keys(), found
    assert len(found["vocabulary.json"]) == 1
    assert len(found["optional/format-assertion.json"]) <= 2
    assert len(found["optional/dependencies-compatibility.json"]) <= 14
