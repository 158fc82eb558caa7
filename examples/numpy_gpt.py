"""A decoder in NumPy, through two functions: kvproof audit examples/numpy_gpt.py:subject

One layer of attention with learnt positions. ``full(ids)`` computes every row from nothing; ``step(ids, cache)``
keeps keys and values as arrays. With the bug, a step asks for its position after it has advanced the length.
"""

from collections.abc import Callable

import numpy as np

from kvproof.subjects import CacheOps, CallableSubject

Cache = tuple[np.ndarray, np.ndarray]

VOCAB, WIDTH, HEADS, CONTEXT = 37, 16, 2, 64


class Weights:
    """Random weights, in the dtype that they are asked for."""

    def __init__(self, dtype: str = "float32") -> None:
        draw = np.random.default_rng(0)
        self.tokens = draw.normal(0, 1, (VOCAB, WIDTH)).astype(dtype)
        self.positions = draw.normal(0, 1, (CONTEXT, WIDTH)).astype(dtype)
        shapes = {"q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "out": (WIDTH, VOCAB)}
        self.parts = {name: draw.normal(0, 0.4, shape).astype(dtype) for name, shape in shapes.items()}


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return what new tokens read; all are (token, width), and the last query stands beside the last key."""
    num_new, num_all = len(q), len(k)
    heads = [part.reshape(len(part), HEADS, -1).transpose(1, 0, 2) for part in (q, k, v)]
    scores = heads[0] @ heads[1].transpose(0, 2, 1) * (WIDTH // HEADS) ** -0.5
    visible = np.tril(np.ones((num_new, num_all), dtype=bool), num_all - num_new)
    scores = np.where(visible, scores, np.finfo(scores.dtype).min)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    return (weights @ heads[2]).transpose(1, 0, 2).reshape(num_new, -1)


def decoder(dtype: str = "float32", *, bug: bool = False) -> tuple[Callable, Callable]:
    """Return full(ids) and step(ids, cache)."""
    weights = Weights(dtype)
    part = weights.parts

    def embedded(ids: np.ndarray, start: int) -> np.ndarray:
        return weights.tokens[ids] + weights.positions[start : start + len(ids)]

    def full(ids: np.ndarray) -> np.ndarray:
        x = embedded(ids, 0)
        return (x + attend(x @ part["q"], x @ part["k"], x @ part["v"])) @ part["out"]

    def step(ids: np.ndarray, cache: Cache | None) -> tuple[np.ndarray, Cache]:
        old_k, old_v = cache if cache is not None else (np.zeros((0, WIDTH), dtype),) * 2
        start = len(old_k)
        if bug and start:
            start += len(ids)  # the length has already advanced
        x = embedded(ids, start)
        k, v = np.concatenate([old_k, x @ part["k"]]), np.concatenate([old_v, x @ part["v"]])
        return (x + attend(x @ part["q"], k, v)) @ part["out"], (k, v)

    return full, step


def subject(*, bug: bool = False) -> CallableSubject:
    """Return the decoder as kvproof takes it: in any dtype, and with a cache that can be cropped."""
    return CallableSubject(
        *decoder(bug=bug),
        context_len=CONTEXT,
        cast=lambda dtype: decoder(dtype, bug=bug),
        ops=CacheOps(crop=lambda cache, length: tuple(part[:length] for part in cache)),
    )


def broken() -> CallableSubject:
    """Return the decoder with its bug."""
    return subject(bug=True)
