"""What a fault is, and how one is planted: in values through taps, in what is kept between calls by sessions."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kvproof._numerics.taps import Tap, untouched
from kvproof.contract.stages import Stage
from kvproof.scenarios import Action, Claim
from kvproof.subjects import Session

MakeTap = Callable[[], Tap]


class Planting:
    """One planting of a fault in one run: how taps are made, and how operations are carried out.

    Every session that opens, and every forward inside a library's ``generate()``, gets a tap of its own. As it
    stands, operations are carried out as they should be.
    """

    def __init__(self, make_tap: MakeTap = lambda: untouched) -> None:
        self.make_tap = make_tap

    def __call__(self) -> Tap:
        """Make a tap."""
        return self.make_tap()

    def after_call(self, session: Session) -> None:
        """Act on what a session keeps, after a call that extended it."""

    def act(self, action: Action, session: Session) -> Counter[Claim]:
        """Let a session carry out an action; return how often each claim came true."""
        return action.act(session)

    def fork(self, session: Session, tap: Tap) -> Session:
        """Return a session that continues from this one's state."""
        return session.fork(tap=tap)

    def under(self, wrap: Callable[[Tap], Tap]) -> "Planting":
        """Wrap each tap that is made from now on, as a recorder wraps one; return the planting."""
        make_tap = self.make_tap
        self.make_tap = lambda: wrap(make_tap())
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A way to break the cached path. ``plant`` returns a new `Planting`, for one run."""

    name: str
    breaks: str  #: the contract, in words
    first_stage: Stage
    plant: Callable[[], Planting]


def plant(fault: Fault | None) -> Planting:
    """Plant a fault for one run; None breaks nothing."""
    return Planting() if fault is None else fault.plant()
