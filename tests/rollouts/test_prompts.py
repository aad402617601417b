"""Prompt templates: names are filled in, and nothing else happens."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_serve.rollouts import PromptTemplate
from gym_serve.types.errors import InvalidRequest


def test_fields_are_filled_in() -> None:
    template = PromptTemplate("{question}\n{{not a field}} {n}", "You know {topic}.")
    assert template.fields == ["topic", "question", "n"]
    assert template.messages({"question": "1 + {x}?", "n": 3, "topic": None, "more": 1}) == [
        {"role": "system", "content": "You know None."},
        {"role": "user", "content": "1 + {x}?\n{not a field} 3"},
    ]


def test_all_missing_fields_are_named() -> None:
    with pytest.raises(InvalidRequest, match=r"needs the keys a, c; the row has b, d$"):
        PromptTemplate("{a}{b}{c}").messages({"b": 1, "d": 2})


@pytest.mark.parametrize(
    "part",
    [
        "{a.b}",
        "{a[0]}",
        "{a!r}",
        "{a:>1000000000}",
        "{}",
        "{0}",
        "{",
        "}",
        "{a b}",
        "{__class__.__init__}",
        "{ a }",
    ],
)
def test_what_is_no_plain_name_is_refused(part: str) -> None:
    with pytest.raises(InvalidRequest, match="prompt template: user: "):
        PromptTemplate(f"a question: {part}")


def test_all_problems_of_a_template_are_named() -> None:
    with pytest.raises(InvalidRequest) as caught:
        PromptTemplate("{a.b} {", "{c!r}")
    assert all(part in caught.value.message for part in ("'{a.b}' at 0", "'{' at 6", "system: '{c!r}'"))


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,5}", fullmatch=True), st.text() | st.integers()), st.text())
def test_it_does_what_format_does_with_plain_names(row: dict[str, object], text: str) -> None:
    literal = text.replace("{", "{{").replace("}", "}}")
    template = literal + "".join(f"{{{name}}}{literal}" for name in row)
    (message,) = PromptTemplate(template).messages(row)
    assert message["content"] == template.format_map(row)


def test_a_file_and_a_mapping_do_the_same(tmp_path: Path) -> None:
    path = tmp_path / "prompt.yaml"
    path.write_text("system: Be brief.\nuser: |-\n  {question}\n")
    assert PromptTemplate.of(path) == PromptTemplate.of({"system": "Be brief.", "user": "{question}"})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[1]", "a mapping with 'user'"),
        ("system: x", "a mapping with 'user'"),
        ("user: [x]", "a mapping with 'user'"),
        ("{user: x, assistant: y}", "unknown keys assistant"),
        ("{user: x, system: [y]}", "'system' must be a string"),
        ("{user: x", "cannot read"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "prompt.yaml"
    path.write_text(content)
    with pytest.raises(InvalidRequest, match=said) as caught:
        PromptTemplate.of(path)
    assert str(path) in caught.value.message
