"""`digest`: what tells whether two JSON values are the same, in a few bytes each."""

from __future__ import annotations

import hashlib

import orjson

__all__ = ["digest"]


def digest(value: object) -> int:
    """63 bits of a JSON value; two of a million values share theirs with a chance of 1 in 18 million.

    Raises:
        TypeError: it is no JSON.
    """
    data = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 1
