"""How faults of the catalogue act: on values in calls on a warm cache, and on what it keeps between calls."""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvproof.contract.stages import Site, Stage
from kvproof.faults._base import Planting
from kvproof.faults._places import Place, appending_layers
from kvproof.scenarios import Action, Claim, Crop, Reorder, Reset
from kvproof.subjects import Session

Layers = Sequence[dict[str, Tensor]]

#: Changes a value: ``change(site, value, start)``, where ``start`` counts the tokens before the call.
Change = Callable[[Site, Tensor, int], Tensor]


class InCalls(Planting):
    """Changes values in calls on a warm cache."""

    def __init__(self, *stages: Stage, layer: int | None, change: Change) -> None:
        super().__init__(lambda: _WarmTap(stages, layer, change))


class _WarmTap:
    """Counts the tokens that a session was fed, by those it shows."""

    def __init__(self, stages: Sequence[Stage], layer: int | None, change: Change) -> None:
        self.stages, self.layer, self.change = stages, layer, change
        self.start = self.end = 0

    def __call__(self, site: Site, value: Tensor, /) -> Tensor:
        if site.stage is Stage.TOKEN:
            self.start, self.end = self.end, self.end + value.shape[1]
        if self.start and site.stage in self.stages and site.layer == self.layer:
            return self.change(site, value, self.start)
        return value


class EditOnce(Planting):
    """Changes what the cache keeps, once: after the call with which it holds the prompt's ``position`` tokens."""

    def __init__(self, position: int, change: Callable[[Layers, Session], None]) -> None:
        super().__init__()
        self.position = position
        self.change = change
        self.done = False

    def after_call(self, session: Session) -> None:
        """Change what is kept."""
        if not self.done and len(session) >= self.position:
            self.done = True
            session.edit(lambda layers: self.change(layers, session))


class NotUpdated(Planting):
    """Leaves some of a layer's tensors as they were before the second call."""

    def __init__(self, layer: int, prefix: str) -> None:
        super().__init__()
        self.layer, self.prefix = layer, prefix
        self.before: dict[str, Tensor] | None = None
        self.done = False

    def after_call(self, session: Session) -> None:
        """Put back what stood there after the first call."""
        if self.before is None:
            self.before = copies(session, self.layer, self.prefix)
        elif not self.done:
            self.done, before = True, self.before
            session.edit(lambda layers: layers[self.layer].update(before))


class Leaking(Planting):
    """Lets what the second session keeps in a layer take the place of the first one's."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.layer = place.number
        self.first: Session | None = None

    def after_call(self, session: Session) -> None:
        """Copy from one to the other once both have consumed as much."""
        if self.first is None:
            self.first = session
        elif session is not self.first and len(session) == len(self.first):
            leaked = copies(session, self.layer)
            self.first.edit(lambda layers: layers[self.layer].update(leaked))


class SkipReorder(Planting):
    """Lets a layer's rows stay in place when rows are reordered."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.layer = place.number

    def act(self, action: Action, session: Session) -> Counter[Claim]:
        """Reorder all but one layer."""
        if not isinstance(action, Reorder):
            return action.act(session)
        before = copies(session, self.layer)
        counts = action.act(session)
        session.edit(lambda layers: layers[self.layer].update(before))
        return counts


class KeepsTail(Planting):
    """Lets entries of tokens that were taken back stay behind those that were kept."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.layers = appending_layers(place.ground)

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
    """Lets what was kept before a reset stand before, or under, what comes after it."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.appending_layers = appending_layers(place.ground)
        self.before: list[dict[str, Tensor]] | None = None

    def act(self, action: Action, session: Session) -> Counter[Claim]:
        """Remember what a reset forgets."""
        if isinstance(action, Reset):
            self.before = [copies(session, layer) for layer in range(len(session.cache_tensors()))]
        return action.act(session)

    def after_call(self, session: Session) -> None:
        """Bring back what was there, once."""
        if self.before is None:
            return
        before, self.before = self.before, None

        def bring_back(layers: Layers) -> None:
            for number, old in enumerate(before):
                own = layers[number]
                for name in ("k", "v") if number in self.appending_layers else ():
                    own[name] = torch.cat([old[name], own[name]], dim=2)
                for name in own.keys() & old.keys():
                    if name.startswith("state"):
                        own[name] = own[name] + old[name]

        session.edit(bring_back)


class StalePositions(Planting):
    """Lets positions go on where they stood before tokens were taken back."""

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
    """Return copies of a layer's tensors; recurrent ones are written in place."""
    tensors = session.cache_tensors()[layer]
    return {name: value.clone() for name, value in tensors.items() if name.startswith(prefix)}
