"""No source of ours, and no library that sees a model's text, evaluates it.

The first test walks our sources for whatever makes code of text; each place that is left is in a table, with
the reason why no text of a model gets there unconfined. The others try the entry points of the libraries that
our verifiers give a model's text to (reasoning_gym's families: test_reasoning_gym.py).
"""

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hostile import CODE

from gym_serve.grading import math_worker

ROOT = Path(__file__).parents[2]

BUILTINS = {"eval", "exec", "compile", "__import__", "execfile"}
"""As bare names: ``re.compile`` and ``model.eval`` are others."""
EVALUATORS = {
    # SymPy's; S, the shortest of them, is found by its import
    *("parse_expr", "sympify", "lambdify", "parse_latex", "parse_mathematica", "stringify_expr", "eval_expr"),
    *("literal_eval", "read_pickle", "unsafe_load", "full_load", "load_all", "unsafe_load_all"),
    *("getoutput", "getstatusoutput", "popen", "create_subprocess_shell", "run_path", "run_module"),
}
"""As names or attributes, whatever they are of."""
OF_MODULES = {
    **{
        name: {"load", "loads", "Unpickler"}
        for name in ("pickle", "cloudpickle", "dill", "marshal", "joblib")
    },
    "yaml": {"load"},
    "os": {"system", "startfile"},
    "shelve": {"open"},
    "sympy": {"S", "sympify"},
    "numexpr": {"evaluate"},
    "pandas": {"eval"},
    "numpy": {"load"},
    "torch": {"load"},
    "timeit": {"timeit", "repeat"},
    "builtins": BUILTINS,
    "code": {"interact", "InteractiveInterpreter"},
}
"""By the module that they are of."""

ALLOWED = {
    (
        "gym_serve/grading/math_worker.py",
        "parse_expr",
    ): "math-verify's own, taken out: `arithmetic` is in its place",
    ("gym_serve/cluster/preflight.py", "cloudpickle.loads"): "classes that this process has pickled itself",
    (
        "gym_serve/interop/nemo_gym/nemo_rl.py",
        "run_path",
    ): "a trainer's own script, named on its command line",
    ("gym_serve/evaluation/grader.py", "run_path"): "the user's own grader, named on the command line",
    ("gym_serve/sandbox/templates.py", "compile"): "this package's own file, for a box",
    ("gym_serve/sandbox/inside/resident.py", "marshal.loads"): "requests of the process that made the box",
    ("gym_serve/sandbox/inside/main.py", "compile"): "an environment's prelude, inside a sandbox",
    ("gym_serve/sandbox/inside/main.py", "exec"): "an environment's prelude, inside a sandbox",
    ("gym_serve/sandbox/inside/program.py", "compile"): "a model's program, inside a sandbox",
    ("gym_serve/sandbox/inside/program.py", "exec"): "a model's program, inside a sandbox",
    ("gym_serve/sandbox/inside/session.py", "compile"): "a model's code, inside a sandbox",
    ("gym_serve/sandbox/inside/session.py", "eval"): "a model's code, inside a sandbox",
    ("gym_serve/sandbox/inside/session.py", "exec"): "a model's code, inside a sandbox",
    ("environments/structured_outputs/worker.py", "yaml.load"): "its loader is a SafeLoader (see below)",
}
"""The places that are left, and why."""


def _evaluators(tree: ast.AST) -> Iterator[str]:
    modules: dict[str, str] = {}  # by the name that they have in the source
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name: alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):  # as in `from ray import cloudpickle`
            modules |= {alias.asname or alias.name: alias.name for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in BUILTINS | EVALUATORS:
            yield node.id
        elif isinstance(node, ast.Attribute):
            of = modules.get(node.value.id, "") if isinstance(node.value, ast.Name) else ""
            if node.attr in EVALUATORS:
                yield node.attr
            elif node.attr in OF_MODULES.get(of, ()):
                yield f"{of}.{node.attr}"
        elif isinstance(node, ast.ImportFrom):
            of = (node.module or "").split(".")[0]
            for alias in node.names:
                if alias.name in EVALUATORS | OF_MODULES.get(of, set()):
                    yield f"{of}.{alias.name}"
        elif isinstance(node, ast.Call):
            yield from (
                "shell=True" for word in node.keywords if word.arg == "shell" and not _false(word.value)
            )


def _false(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and not node.value


def test_our_sources_make_code_of_no_text() -> None:
    found = set()
    for folder in ("gym_serve", "environments", "deployments"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            found |= {(name, what) for what in _evaluators(ast.parse(path.read_text("utf-8")))}
    assert found == ALLOWED.keys()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("eval(x)", ["eval"]),
        ("map(eval, x)", ["eval"]),
        ("re.compile(x)", []),
        ("model.eval()", []),
        ("from sympy import S", ["sympy.S"]),
        ("import sympy as s\ns.S(x)", ["sympy.S"]),
        ("from sympy.parsing.sympy_parser import parse_expr", ["sympy.parse_expr"]),
        ("a.b.parse_expr(x)", ["parse_expr"]),
        ("import pickle as p\np.loads(x)", ["pickle.loads"]),
        ("from pickle import loads", ["pickle.loads"]),
        ("from ray import cloudpickle\ncloudpickle.loads(x)", ["cloudpickle.loads"]),
        ("json.loads(x)", []),
        ("import yaml\nyaml.load(x)", ["yaml.load"]),
        ("import yaml\nyaml.safe_load(x)", []),
        ("from os import system", ["os.system"]),
        ("subprocess.run(x, shell=True)", ["shell=True"]),
        ("subprocess.run(x, shell=y)", ["shell=True"]),
        ("subprocess.run(x, shell=False)", []),
        ("import builtins\nbuiltins.exec(x)", ["builtins.exec"]),
    ],
)
def test_the_walk_finds(source: str, found: list[str]) -> None:
    assert list(_evaluators(ast.parse(source))) == found


def test_yaml_is_read_by_a_safe_loader() -> None:
    import yaml

    from gym_serve.environments.structured_outputs import worker

    assert issubclass(worker._YamlLoader, yaml.SafeLoader | yaml.CSafeLoader)
    assert not issubclass(worker._YamlLoader, yaml.FullLoader | yaml.UnsafeLoader)


LIBRARIES = {
    "lm_eval.tasks.ifeval.instructions": "instruction_following",
    "lm_eval.tasks.ifeval.instructions_util": "instruction_following",
    "langdetect.detector": "instruction_following",
    "jsonschema.validators": "structured_outputs",
    "jsonschema._keywords": "structured_outputs",
    "xmltodict": "structured_outputs",
    "mpmath.libmp.libmpf": "reasoning_gym",
    "latex2sympy2_extended.latex2sympy2": "math_with_judge, math_with_code",
    "latex2sympy2_extended.math_normalization": "math_with_judge, math_with_code",
    "math_verify.grader": "math_with_judge, math_with_code",
    "math_verify.parser": "math_with_judge, math_with_code",
}
"""Modules of others that a model's text gets to, and the environments that give it to them."""

EVALUATE = {  # parse_latex is latex2sympy's, which has a grammar of its own
    ("latex2sympy2_extended.latex2sympy2", "parse_expr"): "values of variables, which we never give",
    ("math_verify.parser", "parse_expr"): "digits, brackets and operators alone (see below)",
}


def test_the_libraries_that_see_a_text_evaluate_none() -> None:
    found = set()
    for name in LIBRARIES:
        tree = ast.parse(inspect.getsource(importlib.import_module(name)))
        calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
        called = {call.id for call in calls if isinstance(call, ast.Name)}
        found |= {(name, what) for what in called & (BUILTINS | EVALUATORS - {"parse_latex"} | {"S"})}
    assert found == EVALUATE.keys()


NUMBERS = re.compile(r"[\d.\s+\-*×÷/^()]*")


def test_math_verify_evaluates_digits_and_operators_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """SymPy's parser is Python's `eval`: what math-verify gives it has no letter, quote or underscore."""
    math_verify = math_worker._library()
    plain = (math_verify.ExprExtractionConfig(),)
    parser: Any = sys.modules["math_verify.parser"]
    seen: list[str] = []

    def parse_expr(text: str, **options: Any) -> Any:
        seen.append(text)
        raise ValueError(text)

    monkeypatch.setattr(parser, "parse_expr", parse_expr)
    for code in [*CODE, "(2)+(3)"]:
        for text in (
            code,
            f"The final answer is {code}",
            f"answer: 1+({code})",
            f"= (1)+{code}",
            f"${code}$",
        ):
            for whole in (text, f"\\boxed{{{text}}}"):
                math_verify.parse(whole[:3000], plain, parsing_timeout=None)
    assert seen
    assert [text for text in seen if not NUMBERS.fullmatch(text)] == []
