"""Testing environments without Ray.

- `TestClient` calls an environment as a graph does: rows, tools, verdicts, sessions.
- `load_fixtures` and `check_fixtures` are what `gym-serve test` runs:

    def test_fixtures() -> None:
        results = asyncio.run(check_fixtures(MyEnvironment, load_fixtures(FOLDER / "fixtures.jsonl")))
        assert [result for result in results if not result.passed] == []
"""

from gym_serve.testing.client import (
    KINDS,
    EpisodeClient,
    Fixture,
    FixtureResult,
    ScriptedReplies,
    TestClient,
    check_fixtures,
    load_fixtures,
    missing_kinds,
)

__all__ = [
    "KINDS",
    "EpisodeClient",
    "Fixture",
    "FixtureResult",
    "ScriptedReplies",
    "TestClient",
    "check_fixtures",
    "load_fixtures",
    "missing_kinds",
]
