"""The corpus of the reference system: four patterns over eight tokens.

Each pattern is ``<bos> t1 t2 t3 <eos>``: four inputs at positions 0..3, and the last one returns ``<eos>``.
``B`` and ``C`` follow ``A`` equally often, and ``X`` and ``Y`` are equally frequent at the start: these are ties
by construction, which make tie rules and generator states visible.
"""

from collections.abc import Iterable

from kvproof.errors import TokenError

VOCABULARY = ("<bos>", "<eos>", "A", "B", "C", "D", "X", "Y")
BOS_ID = VOCABULARY.index("<bos>")
EOS_ID = VOCABULARY.index("<eos>")
PATTERNS = ("A B D", "A C D", "X Y X", "Y X Y")


def encode(text: str) -> tuple[int, ...]:
    """Return the ids of tokens separated by spaces; raise `TokenError` for one that is not in the vocabulary."""
    words = text.split()
    for word in words:
        if word not in VOCABULARY:
            raise TokenError(f"token {word!r} is not in the vocabulary {' '.join(VOCABULARY)}")
    return tuple(VOCABULARY.index(word) for word in words)


def decode(ids: Iterable[int]) -> str:
    """Return the tokens of ``ids``, separated by spaces."""
    return " ".join(VOCABULARY[i] for i in ids)


#: Every pattern's inputs, ``<bos> t1 t2 t3``: the four controlled sequences.
SEQUENCES = tuple((BOS_ID, *encode(pattern)) for pattern in PATTERNS)
#: The token after each of these inputs, ``t1 t2 t3 <eos>``.
TARGETS = tuple((*encode(pattern), EOS_ID) for pattern in PATTERNS)
