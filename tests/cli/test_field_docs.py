"""The field_docs of a model's fields are the docstrings below them."""

from pydantic import BaseModel, Field, create_model

from gym_serve.cli.catalog import field_docs


class Base(BaseModel):
    """Not a field's."""

    size: int
    """How large
    it is."""
    plain: int = 0
    given: int = Field(default=0, description="As given.")
    """Below."""


class Outer:
    class Derived(Base):
        size: int = 1
        """Another meaning."""
        colour: str = ""
        """Its colour."""

        def method(self) -> None:
            """Not a field's either."""


def test_docstrings_and_descriptions() -> None:
    assert field_docs(Base) == {"size": "How large\nit is.", "given": "As given."}


def test_a_class_inherits_meanings_and_changes_them() -> None:
    found = field_docs(Outer.Derived)
    assert found == {"size": "Another meaning.", "given": "As given.", "colour": "Its colour."}


def test_a_model_without_source_has_those_that_were_given() -> None:
    model = create_model("Made", size=(int, Field(description="How large.")), other=(int, 0))
    assert field_docs(model) == {"size": "How large."}
