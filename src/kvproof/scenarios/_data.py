"""What scenarios are made of: abilities, operations, and programs of them.

A program is data. Each `Extend` names the token ids that it feeds, so what the resulting rows must equal
follows from the ids alone: the uncached row of the same tokens, recomputed from nothing.
"""

from dataclasses import dataclass
from enum import StrEnum


class Ability(StrEnum):
    """What a subject or its sessions declare that they can do. Declared, never probed."""

    CAST = "cast"  #: give the same decoder in another dtype
    TAP = "tap"  #: show and replace intermediate values
    INSPECT = "inspect"  #: show the cache's tensors
    EDIT = "edit"  #: let the cache's tensors be replaced between calls
    BATCH = "batch"  #: several rows in one session
    CROP = "crop"  #: forget the newest tokens
    FORK = "fork"  #: continue one prefix twice
    REORDER = "reorder"  #: permute, repeat or drop batch rows
    PAD = "pad"  #: start a session with rows of unequal length, padded on the left
    POISON = "poison"  #: fill the cache's unused slots with garbage
    OMIT_POSITIONS = "omit-positions"  #: leave the positions of new tokens to the decoder
    STATIC_CACHE = "static-cache"  #: a cache whose buffers are made in advance
    OFFLOADED_CACHE = "offloaded-cache"  #: a cache that stands in other memory than the decoder
    QUANTISED_CACHE = "quantised-cache"  #: a cache that keeps keys and values in few bits
    GENERATE = "generate"  #: generate through the decoder's own library, with every choice forced
    GENERATE_CHUNKED = "generate-chunked"  #: let that library take a prompt in chunks
    GENERATE_ASSISTED = "generate-assisted"  #: let that library verify proposals


class CacheKind(StrEnum):
    """The kind of cache that a session keeps."""

    DYNAMIC = "dynamic"  #: grows as it is fed, and drops what lies behind a window
    STATIC = "static"
    OFFLOADED = "offloaded"
    QUANTISED = "quantised"

    @property
    def ability(self) -> Ability | None:
        """The ability that a subject declares which can keep such a cache; none for the usual one."""
        return None if self is CacheKind.DYNAMIC else Ability(f"{self.value}-cache")


class Method(StrEnum):
    """A way in which a library generates."""

    GREEDY = "greedy"
    BEAM = "beam search"
    PROMPT_LOOKUP = "prompt lookup"  #: proposals copied from the prompt, verified in one call
    CHUNKED_PREFILL = "chunked prefill"
    STATIC_CACHE = "static cache"


class Claim(StrEnum):
    """What a scenario says it does; one that was run and did it not once has shown nothing."""

    REFUSED = "tokens refused past the context"
    POISONED = "cache values overwritten with garbage"
    ACCEPTED = "proposed tokens accepted"
    REJECTED = "proposed tokens rejected"


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundaries:
    """The lengths around which a subject changes what it does."""

    context_len: int  #: positions 0..context_len - 1 are accepted
    windows: tuple[int, ...] = ()  #: sliding windows, attention chunks, convolutions and scan blocks, in tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Extend:
    """Feed each batch row its new tokens in one call; rows of unequal length may only start a session.

    With ``last_only``, the rows before each batch row's last new token are not compared.
    """

    ids: tuple[tuple[int, ...], ...]
    session: int = 0
    last_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Feed tokens that reach past the context: the session must refuse them and stay as it was."""

    ids: tuple[tuple[int, ...], ...]
    session: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Poison:
    """Fill the slots of the session's cache that hold no token with large finite garbage.

    It must change nothing. NaN would leak through ``0 × NaN`` even where every mask is right.
    """

    session: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Crop:
    """Keep the first ``length`` tokens."""

    length: int
    session: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reorder:
    """Let batch row i continue what was row ``rows[i]``."""

    rows: tuple[int, ...]
    session: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """Open a new session, numbered next, that continues from this one's state."""

    session: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reset:
    """Forget everything and start again."""

    session: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Open a new, empty session, numbered next."""

    batch: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    """Let the decoder's own library generate from prompts, in no session of ours, with every choice forced.

    ``steps`` has an entry for each new token: for each batch row, or beam, best first, the row that it
    continues and the token that it takes. Beams all start from the one prompt; elsewhere rows stay in place.
    """

    method: Method
    prompts: tuple[tuple[int, ...], ...]
    steps: tuple[tuple[tuple[int, int], ...], ...]

    def prefixes(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Return, for each step, the tokens of each row that its choice follows."""
        rows = self.prompts if self.method is not Method.BEAM else self.prompts * len(self.steps[0])
        taken = []
        for step in self.steps:
            taken.append(rows)
            rows = tuple((*rows[row], token) for row, token in step)
        return tuple(taken)


Operation = Extend | Refused | Crop | Reorder | Fork | Reset | Open | Poison | Generate


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A named program. Session 0 is open, with ``batch`` rows, when it starts."""

    name: str
    exposes: str
    operations: tuple[Operation, ...]
    needs: frozenset[Ability] = frozenset()
    batch: int = 1
    cache: CacheKind = CacheKind.DYNAMIC  #: of every session
    omit_positions: bool = False  #: sessions leave the positions of new tokens to the decoder
    advice: bool = False  #: against the library's documentation: reported, and no part of the verdict
    crosses: tuple[int, ...] = ()  #: lengths at which a row must have been compared
    claims: frozenset[Claim] = frozenset()  #: what must have happened at least once
    skipped: str | None = None  #: why there is nothing to run on this subject
