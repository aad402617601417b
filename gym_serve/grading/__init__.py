"""Comparing answers with what was expected: parts that verifiers share. Nothing here asks a model.

    text           last_box  last_closed_box  same_text  replace_surrogates
    mathematics    MathVerifyPool  boxed_gold  plain_numerals
    tool calls     arguments_of  decoded_arguments  decode_arguments  same_value  pair_up

All functions of text take linear time, because the text comes from a model.
"""

from gym_serve.grading.answers import (
    boxed_gold,
    last_box,
    last_closed_box,
    plain_numerals,
    replace_surrogates,
    same_text,
)
from gym_serve.grading.function_calls import (
    MAX_DEPTH,
    arguments_of,
    decode_arguments,
    decoded_arguments,
    pair_up,
    same_value,
)
from gym_serve.grading.math_pool import MathVerifyPool
from gym_serve.grading.math_worker import Comparison

__all__ = [
    "MAX_DEPTH",
    "Comparison",
    "MathVerifyPool",
    "arguments_of",
    "boxed_gold",
    "decode_arguments",
    "decoded_arguments",
    "last_box",
    "last_closed_box",
    "pair_up",
    "plain_numerals",
    "replace_surrogates",
    "same_text",
    "same_value",
]
