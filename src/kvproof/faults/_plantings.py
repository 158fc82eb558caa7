"""How faults act: on values in calls on a warm cache, and on the cache between calls."""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvproof.contract.stages import Site, Stage
from kvproof.faults._base import Planting
from kvproof.faults._places import Place
from kvproof.scenarios import Action, Claim, Crop, Reorder, Reset
from kvproof.subjects import Session

Layers = Sequence[dict[str, Tensor]]


class InCalls(Planting):
    """Changes a value in every call on a warm cache: at one site, or at a stage of the place's layer."""

    def __init__(self, at: Site | Stage, place: Place, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__(lambda: _WarmTap(at, place, change))


class TokenAgain(Planting):
    """Feeds the token before each call on a warm cache again, instead of the call's own tokens."""

    def __init__(self, place: Place) -> None:
        super().__init__(lambda: _TokenAgainTap(place))


class _WarmTap:
    """Counts the tokens of a session as they pass, and acts once the cache holds enough of them."""

    def __init__(self, at: Site | Stage, place: Place, change: Callable[[Tensor], Tensor]) -> None:
        self.at, self.layer, self.position = at, place.layer, place.known_position
        self.change = change
        self.start = self.end = 0

    def __call__(self, site: Site, value: Tensor, /) -> Tensor:
        if site.stage is Stage.TOKEN:
            self.start, self.end = self.end, self.end + value.shape[1]
        return self.change(value) if self.start >= self.position and self._is_place(site) else value

    def _is_place(self, site: Site) -> bool:
        return site == self.at or (site.stage is self.at and site.layer == self.layer)


class _TokenAgainTap(_WarmTap):
    def __init__(self, place: Place) -> None:
        super().__init__(Stage.TOKEN, place, lambda value: self.before.expand_as(value).clone())
        self.before = self.newest = torch.zeros(1, 1, dtype=torch.long)

    def __call__(self, site: Site, value: Tensor, /) -> Tensor:
        if site.stage is Stage.TOKEN:
            self.before, self.newest = self.newest, value[:, -1:]
        return super().__call__(site, value)


class EditOnce(Planting):
    """Edits the cache once: after the first call with which it holds the place's ``position`` tokens."""

    def __init__(self, place: Place, change: Callable[[Layers, Session], None]) -> None:
        super().__init__()
        self.position = place.known_position
        self.change = change
        self.done = False

    def after_call(self, session: Session) -> None:
        """Edit the cache."""
        if not self.done and len(session) >= self.position:
            self.done = True
            session.edit(lambda layers: self.change(layers, session))


class NotUpdated(Planting):
    """Leaves some of a layer's tensors as they were before a call on a warm cache."""

    def __init__(self, place: Place, prefix: str) -> None:
        super().__init__()
        self.layer, self.position, self.prefix = place.known_layer, place.known_position, prefix
        self.before: dict[str, Tensor] | None = None
        self.done = False

    def after_call(self, session: Session) -> None:
        """Put back the tensors that the cache held after the call before."""
        if self.before is None and len(session) >= self.position:
            self.before = copies(session, self.layer, self.prefix)
        elif self.before is not None and not self.done:
            self.done, before = True, self.before
            session.edit(lambda layers: layers[self.layer].update(before))


class Leaking(Planting):
    """Overwrites a layer of the first session with the same layer of the second one."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.layer = place.known_layer
        self.first: Session | None = None

    def after_call(self, session: Session) -> None:
        """Copy from the second session to the first whenever both hold the same number of tokens."""
        if self.first is None:
            self.first = session
        elif session is not self.first and len(session) == len(self.first):
            leaked = copies(session, self.layer)
            self.first.edit(lambda layers: layers[self.layer].update(leaked))


class SkipReorder(Planting):
    """Leaves the rows of one layer in place when rows are reordered."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.layer = place.known_layer

    def act(self, action: Action, session: Session) -> Counter[Claim]:
        """Reorder all but one layer."""
        if not isinstance(action, Reorder):
            return action.act(session)
        before = copies(session, self.layer)
        counts = action.act(session)
        session.edit(lambda layers: layers[self.layer].update(before))
        return counts


class KeepsTail(Planting):
    """Keeps the entries of tokens that were taken back, behind those of the tokens that remain."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.layers = place.appending_layers

    def act(self, action: Action, session: Session) -> Counter[Claim]:
        """Crop, and append the tail again."""
        if not isinstance(action, Crop):
            return action.act(session)
        before = {layer: copies(session, layer) for layer in self.layers}
        counts = action.act(session)

        def append(layers: Layers) -> None:
            for layer, old in before.items():
                for name in layers[layer].keys() & {"k", "v"}:  # none after a crop to nothing
                    kept = layers[layer][name]
                    layers[layer][name] = torch.cat([kept, old[name][:, :, kept.shape[2] :]], dim=2)

        session.edit(append)
        return counts


class SurvivesReset(Planting):
    """Brings back what the cache held before a reset: entries before the new ones, and states added to them."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.appending = place.appending_layers
        self.before: list[dict[str, Tensor]] | None = None

    def act(self, action: Action, session: Session) -> Counter[Claim]:
        """Remember what a reset forgets."""
        if isinstance(action, Reset):
            self.before = [copies(session, layer) for layer in range(len(session.cache_tensors()))]
        return action.act(session)

    def after_call(self, session: Session) -> None:
        """Bring the tensors back, once."""
        if self.before is None:
            return
        before, self.before = self.before, None

        def bring_back(layers: Layers) -> None:
            for number, old in enumerate(before):
                own = layers[number]
                for name in ("k", "v") if number in self.appending else ():
                    own[name] = torch.cat([old[name], own[name]], dim=2)
                for name in own.keys() & old.keys():
                    if name.startswith("state"):
                        own[name] = own[name] + old[name]

        session.edit(bring_back)


class StalePositions(Planting):
    """Counts positions as if no tokens had been taken back."""

    def __init__(self) -> None:
        super().__init__(lambda: self._ahead)
        self.ahead = 0

    def _ahead(self, site: Site, value: Tensor, /) -> Tensor:
        return value + self.ahead if site.stage is Stage.POSITION and self.ahead else value

    def act(self, action: Action, session: Session) -> Counter[Claim]:
        """Count the tokens that a crop removes."""
        if isinstance(action, Crop):
            self.ahead += len(session) - action.length
        return action.act(session)


def copies(session: Session, layer: int, prefix: str = "") -> dict[str, Tensor]:
    """Return copies of a layer's tensors, because recurrent layers write into their own."""
    tensors = session.cache_tensors()[layer]
    return {name: value.clone() for name, value in tensors.items() if name.startswith(prefix)}
