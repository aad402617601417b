"""What the fields of a pydantic model mean: the docstrings below them.

Read from the source when somebody asks, not by pydantic's ``use_attribute_docstrings``: that looks for the
source of every class when the class is made, which was half of what the import of a server took in a replica.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from contextlib import suppress
from itertools import pairwise

from pydantic import BaseModel

__all__ = ["meanings"]


def meanings(model: type[BaseModel]) -> dict[str, str]:
    """The meaning of every field that has one: its ``description``, else the docstring below it."""
    found: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if issubclass(cls, BaseModel) and cls is not BaseModel:
            found |= _docstrings(cls)
    given = {name: info.description for name, info in model.model_fields.items() if info.description}
    return {name: meaning for name, meaning in {**found, **given}.items() if name in model.model_fields}


def _docstrings(cls: type) -> dict[str, str]:
    """Those in the body of a class; none if there is no source, as for a class made by a function."""
    found: dict[str, str] = {}
    with suppress(OSError, TypeError):
        definition = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        for field, below in pairwise(definition.body if isinstance(definition, ast.ClassDef) else ()):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(docstring))),
                ):
                    found[name] = inspect.cleandoc(docstring)
    return found
