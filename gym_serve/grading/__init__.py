"""Comparing answers with what was expected: parts that verifiers share. Nothing here asks a model.

All functions of text take linear time, because the text comes from a model.
"""

from gym_serve.grading.answers import (
    answer_lines,
    bare_answer,
    code_blocks,
    ending,
    excerpt,
    last_box,
    last_box_text,
    listed,
    listed_calls,
    not_in_the_box,
    plain_answer,
    replace_surrogates,
    same_number,
    same_text,
    stated,
    undecorated,
)
from gym_serve.grading.function_calls import (
    arguments_of,
    decode_arguments,
    decoded_arguments,
    is_call,
    pair_up,
    same_value,
)
from gym_serve.grading.math_answer import boxed_gold, plain_numerals
from gym_serve.grading.math_pool import MathVerifyPool, why_unequal
from gym_serve.grading.math_text import ask
from gym_serve.grading.math_worker import Comparison
from gym_serve.types.exact import MAX_DEPTH

__all__ = [
    "MAX_DEPTH",
    "Comparison",
    "MathVerifyPool",
    "answer_lines",
    "arguments_of",
    "ask",
    "bare_answer",
    "boxed_gold",
    "code_blocks",
    "decode_arguments",
    "decoded_arguments",
    "ending",
    "excerpt",
    "is_call",
    "last_box",
    "last_box_text",
    "listed",
    "listed_calls",
    "not_in_the_box",
    "pair_up",
    "plain_answer",
    "plain_numerals",
    "replace_surrogates",
    "same_number",
    "same_text",
    "same_value",
    "stated",
    "undecorated",
    "why_unequal",
]
