"""What a fault is, and how one is planted: in values through taps, and in caches between calls."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvproof._numerics.taps import Tap, untouched
from kvproof.contract.stages import Stage
from kvproof.errors import UsageError
from kvproof.faults._carriers import SEEN_BY, Carrier, steps
from kvproof.faults._places import Place, PlantingSite, probe
from kvproof.scenarios import Ability, Action, Claim, Scenario, longest_sequences
from kvproof.subjects import Session, Subject

#: Short enough for every audit, and long enough that there is an entry before the newest one.
_DEFAULT_POSITION = 2
#: This many tokens are enough to plant every fault, and to exceed a short window.
MAX_TOKENS = 16
#: The place of a fault that is not pinned.
ANYWHERE = Place()


class Planting:
    """One planting of a fault in one run: it makes the run's taps and carries out its operations.

    Every session, and every forward inside a library's ``generate()``, gets a tap of its own. This base class
    plants nothing: its taps change no value, and it carries out every operation correctly.
    """

    def __init__(self, make_tap: Callable[[], Tap] = lambda: untouched) -> None:
        self.make_tap = make_tap

    def __call__(self) -> Tap:
        """Make a tap."""
        return self.make_tap()

    def after_call(self, session: Session) -> None:
        """Act on the cache of a session after a call that extended it."""

    def act(self, action: Action, session: Session) -> Counter[Claim]:
        """Let a session carry out an action; return how often each claim came true."""
        return action.act(session)

    def fork(self, session: Session, tap: Tap) -> Session:
        """Return a session that continues from this one's state."""
        return session.fork(tap=tap)

    def under(self, wrap: Callable[[Tap], Tap]) -> "Planting":
        """Wrap every tap that is made from now on, for example in a recorder; return the planting."""
        make_tap = self.make_tap
        self.make_tap = lambda: wrap(make_tap())
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A way to break the cached path.

    ``make`` returns a new `Planting` for each run. A fault of the catalogue acts on a warm cache, once it holds
    ``place.position`` tokens, in any subject that has a place for it; ``layers`` returns these places. A fault
    without ``layers`` acts where it was made to act.
    """

    name: str
    breaks: str  #: the contract, in words
    stages: frozenset[Stage]  #: it must first show at one of these, or at a module where none of them is shown
    make: Callable[[Place], Planting]
    place: Place = ANYWHERE
    layers: Callable[[PlantingSite], Iterable[int | None]] | None = None  #: None stands for no layer of its own
    program: Carrier = steps  #: in which the certificate plants it
    classes: tuple[str, ...] = ()  #: the classes of public cache bugs that it stands for
    edits_cache: bool = False  #: it replaces tensors of the cache
    misplaces: bool = False  #: it puts the content of one token, or request, in another's place in a layer
    fills_window: bool = False  #: it needs a prompt that fills a window

    def at(self, *, layer: int | None = None, position: int | None = None) -> "Fault":
        """Return the fault pinned to a layer, a position, or both.

        ``layer`` counts from 0. ``position`` is how many tokens the cache holds when the fault first acts: at
        position 2, "the newest entry" is the one in slot 1. Raises `UsageError` for a fault without ``layers``.
        """
        if self.layers is None:
            raise UsageError(f"{self.name} has its place already")
        if layer is not None and layer < 0:
            raise UsageError(f"layers count from 0: there is no layer {layer}")
        if position is not None and position < 1:
            raise UsageError(f"a fault acts on a cache that holds at least 1 token, not {position}")
        place = dataclasses.replace(
            self.place,
            layer=self.place.layer if layer is None else layer,
            position=self.place.position if position is None else position,
        )
        return dataclasses.replace(self, place=place)

    def plant(self) -> Planting:
        """Return a new planting of the fault at its place."""
        return self.make(self.place)

    def must_show_at(self, stage: Stage, layer: int | None) -> bool:
        """Return whether the first difference may be here; modules stand for stages that are not shown."""
        if self.place.layer is not None and layer != self.place.layer:
            return False
        if stage in self.stages:
            return True
        site = self.place.site
        if stage is not Stage.MODULE or site is None:
            return False
        own = (s for s in site.shown if self.place.layer is None or s.layer == self.place.layer)
        return self.stages.isdisjoint(s.stage for s in own)

    @property
    def seen_by(self) -> tuple[str, ...]:
        """The scenarios of the catalogue each of which must see the fault, where the subject can run them."""
        return ("window crossing",) if self.fills_window else SEEN_BY[self.program]


def plant(fault: Fault | None) -> Planting:
    """Return a new planting of a fault, or one that plants nothing."""
    return Planting() if fault is None else fault.plant()


def choose_place(fault: Fault, subject: Subject, programs: Iterable[Scenario]) -> Fault:
    """Return a fault whose place is known: where it is pinned, or else the first place that the subject offers.

    ``programs`` are those in which it is to be planted. Raises `UsageError` where the subject has no such place.
    """
    if fault.layers is None or fault.place.site is not None:
        return fault
    name = subject.info.name
    if fault.edits_cache and Ability.EDIT not in subject.info.abilities:
        raise UsageError(
            f"cannot plant {fault.name} in {name}: the subject lacks the ability: {Ability.EDIT.value}"
        )
    sequence, other = choose_sequences(programs)
    if not sequence:
        raise UsageError(f"cannot plant {fault.name} in {name}: the programs feed no token")
    site = probe(subject, sequence, other)
    layer = fault.place.layer
    if layer is None:
        places = list(fault.layers(site))
        if not places:
            raise UsageError(f"cannot plant {fault.name} in {name}: the subject has no place for it")
        layer = places[0]
    elif not fault.edits_cache and None in fault.layers(site):
        raise UsageError(f"{fault.name} acts outside the layers: pin it to a position alone")
    elif layer >= subject.info.num_layers:
        raise UsageError(
            f"cannot plant {fault.name} in layer {layer} of {name}: it has {subject.info.num_layers}"
        )
    position = _DEFAULT_POSITION if fault.place.position is None else fault.place.position
    return dataclasses.replace(fault, place=Place(layer=layer, position=position, site=site))


def choose_sequences(
    programs: Iterable[Scenario], max_tokens: int = MAX_TOKENS
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return two sequences of one length, at most ``max_tokens``, from these programs.

    The second one starts with another token. Where no sequence does, it is the first one backwards.
    """
    sequences = {sequence for program in programs for sequence in longest_sequences(program)}
    longest = max(sequences, key=lambda sequence: (len(sequence), sequence), default=())
    length = min(len(longest), max_tokens)
    others = [s[:length] for s in sequences if len(s) >= length and s[0] != longest[0]]
    return longest[:length], min(others, default=longest[:length][::-1])
