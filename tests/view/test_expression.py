"""The filter: what it selects, where it is wrong, and that nothing else can be reached by it."""

import json
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from view.made import failed, rollout, write

from gym_serve.view import BadExpression, View, runs
from gym_serve.view.expression import check, condition
from gym_serve.view.queries import read_rollouts

STATIC = Path(runs.__file__).parent / "static"
TEXTS = ["Paris is rainy", "oslo is dry", "the tool failed", "Märchen in Paris 東京"]


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> Iterator[View]:
    """Rollouts 0 to 3, a failed one after them, and another run without a field and a key of the row."""
    folder = tmp_path_factory.mktemp("filter")
    made = [rollout(at // 2, at % 2, score=at / 4, **{"a b": at > 1}) for at in range(4)]
    for at, one in enumerate(made):
        one["response"]["output"][0]["name"] = ("find", "finder")[at % 2]
        one["responses_create_params"]["input"][0]["content"] = TEXTS[at]
        made[at] = {"difficulty": ("hard", "50%")[at % 2], "level": at, **one}
    paths = [write(folder / "one.jsonl", made), write(folder / "two.jsonl", [rollout(9, 0)])]
    write(folder / "one_failures.jsonl", [failed(0, 2)])
    with View(paths, folder / "cache") as view:
        view.index()
        first = next(iter(view.runs))
        view.annotate(first, 1, tags=["it's odd"])
        yield view


FAILED = 10**9
SELECTED = {
    "reward >= 0.5": [1, 2],
    "not reward >= 0.5": [0, 3],
    "reward is null": [FAILED],
    "REWARD IS NOT NULL and not (task = 1 or tokens < 1)": [1],
    "task = 0 and attempt = 1 or task = 1 and reward = 1.0": [1, 2],
    "failure = 'model_timeout'": [FAILED],
    "agent like 'WEATHER%' and reward = 0": [0, 3],
    "version <> 17": [],
    "tool('find') and reward is not null": [0, 2],
    "tag('it''s odd')": [1],
    "not tag('it''s odd') and reward = 1": [2],
    "id = '1-0'": [2],
    "prompt like '%paris%'": [0, 3],
    "fields.score > 0.25 and fields.score != 0.5": [3],
    "fields.extracted = 'answer 1'": [1, 3],
    "row.difficulty = 'hard'": [0, 2],
    "row.difficulty like '%\\%' escape '\\'": [1, 3],
    "row.level between 1 and 2": [1, 2],
    'fields."a b" = true': [2, 3],
    "words('dry')": [1],
    "words('rainy paris') or words('marchen')": [0, 3],
    "words('rai*') and not words('東京')": [0, 1, 2, FAILED],  # the last message has "rains"
    "words('is rainy!')": [0],
    "lower(agent) in ('weather_agent') and n in (1, 2)": [1, 2],
}


@pytest.mark.parametrize(("expression", "expected"), SELECTED.items())
def test_what_it_selects(view: View, expression: str, expected: list[int]) -> None:
    first = [row["n"] for row in view.rollouts(expression) if row["run"] == next(iter(view.runs))]
    assert first == expected


@pytest.mark.parametrize(
    ("expression", "position", "message"),
    [
        ("rewrad > 1", 0, "did you mean reward?"),
        ("fields.difficulty = 'hard'", 0, "there is no 'fields.difficulty'; did you mean row.difficulty?"),
        ("reward = 1 and row.nothing = 1", 15, "names are reward, "),
        ("agent = math", 8, "a text stands in single quotes"),
        ('agent = "math"', 8, "a text stands in single quotes"),
        ("agent = 'math", 8, "this quote is not closed"),
        ("reward >", None, "a part of the condition is missing"),
        ("reward > > 1", 7, "'>' is unexpected"),
        ("(reward = 1", 0, "this parenthesis is not closed"),
        ("reward = 1)", 10, "')' closes nothing"),
        ("tool(agent)", 0, "tool('rain')"),
        ("words('!!')", 0, "has no word to search for"),
        ("x" * 5000, 4000, "at most 4,000 characters"),
        ("~" * 3000 + "n", None, ""),
        # what is no condition
        ("1) or (1", 1, "closes nothing"),
        ("1) union select 1 from rollouts where (1", 1, "closes nothing"),
        ("n in (select n from rollouts)", None, "without SELECT"),
        ("n in (select value from state)", None, "no such table"),
        ("n in (values (1))", None, "without SELECT"),
        ("n in sqlite_master", None, "sub-select returns 5 columns"),
        ("n in pragma_table_list", None, ""),
        ("1 -- ", 2, "'--' is unexpected"),
        ("1 /* ", 2, "'/*' is unexpected"),
        ("1; drop table rollouts", 1, "';' is unexpected"),
        ("n = ?1", 4, "'?' is unexpected"),
        ("n = :n", 4, "':' is unexpected"),
        ("[n] = 1", 0, "'[' is unexpected"),
        ("prompt || prompt like prompt", 7, "'|' is unexpected"),
        ("rollouts.n = 1", 0, "there is no 'rollouts.n'"),
        ("start > 0", 0, "there is no 'start'"),  # a column of the index that is none of the filter
        ("1 limit 1", 2, "'limit' is unexpected"),
        ("n = 'a\0b'", None, "null"),
        ("agent = '\ud800'", None, "surrogates"),
        # functions
        ("load_extension('x')", 0, "there is no function load_extension"),
        ("readfile('/etc/passwd') = 1", 0, "there is no function readfile"),
        ("printf('%1000000000d', n) = ''", 0, "there is no function printf"),
        ("zeroblob(1000000000) = n", 0, "there is no function zeroblob"),
        ("replace(agent, 'a', agent) = ''", 0, "there is no function replace"),
        ("randomblob(9) = n", 0, "there is no function randomblob"),
        ("agent -> 'x' = 1", 6, "there is no function ->"),
        ("max(n) > 1", None, "misuse of aggregate"),
    ],
)
def test_where_it_is_wrong(view: View, expression: str, position: int | None, message: str) -> None:
    with pytest.raises(BadExpression) as caught:
        list(view.rollouts(expression))
    assert message in str(caught.value)
    assert caught.value.position == position


def test_a_name_of_another_run_is_no_mistake(view: View) -> None:
    one, two = view.runs.values()
    assert read_rollouts([one, two], "row.level >= 0")["total"] == 4
    with pytest.raises(BadExpression, match=r"there is no 'row.level'"):
        read_rollouts([two], "row.level >= 0")
    with pytest.raises(BadExpression, match="did you mean seconds"):
        read_rollouts([one], sort="-second")
    with pytest.raises(BadExpression, match=r"did you mean row.level\?"):
        read_rollouts([one], sort="fields.level")


def test_a_filter_has_a_second(view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "FILTER_SECONDS", -1.0)
    (one, _) = view.runs.values()
    many = ", ".join(f"rollouts AS r{at}" for at in range(9))
    with one.reading() as reading:
        where = reading.where("prompt like '%a%'")
        with pytest.raises(BadExpression, match=r"this filter cannot be used: it needs more than"):
            reading.sql(f"SELECT count(*) FROM rollouts, {many} WHERE {where}")
    with one.reading() as reading:
        assert reading.sql("SELECT count(*) FROM rollouts") == [(5,)], "without a filter there is no limit"


@given(st.text(alphabet="()'\"-/*;[]?:@.,=<>n1 \n\\\0aéOR", max_size=30) | st.text(max_size=60))
def test_any_text_is_refused_or_one_condition(text: str) -> None:
    try:
        check(text, [])
    except BadExpression:
        return
    database = sqlite3.connect(":memory:")
    database.execute("CREATE TABLE rollouts (n, a, o, r)")
    database.execute("CREATE TABLE details (n, id, prompt)")
    database.execute("INSERT INTO rollouts VALUES (1, 2, 3, 4)")
    query = f"SELECT 7 FROM rollouts WHERE n = 2 AND {condition(text, {}, lambda tag: [])}"
    assert database.execute(query).fetchall() == []
    database.close()


SCRIPT = """
import { readFileSync } from "node:fs";
globalThis.document = { querySelector: () => null };
const { condition } = await import(process.argv[1]);
const { rows, filters } = JSON.parse(readFileSync(0));
console.log(JSON.stringify(filters.map((text) => {
  try { return rows.filter(condition(text)).map(({ n }) => n); }
  catch (error) { return String(error.message); }
})));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
def test_an_export_filters_as_the_server_does(view: View) -> None:
    rows = [row for row in view.rollouts() if row["run"] == next(iter(view.runs))]
    beyond = ("row.", "between", " in (", "lower(", "escape", '"', "= true", "marchen", "rai*")
    known = {k: v for k, v in SELECTED.items() if not any(part in k for part in beyond)}
    asked = json.dumps({"rows": rows, "filters": [*known, "reward >", "tool(agent)", "(n = 1"]})
    done = subprocess.run(
        ["node", "--input-type=module", "-e", SCRIPT, (STATIC / "exported.js").as_uri()],
        input=asked,
        capture_output=True,
        text=True,
        check=True,
    )
    *found, incomplete, other, unclosed = json.loads(done.stdout)
    assert dict(zip(known, found, strict=True)) == known
    assert "must be followed by a value" in incomplete
    assert "single quotes" in other
    assert "A ) must stand here" in unclosed
