"""What a person sees while something runs: on standard error, where that is a terminal."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class Progress:
    """Tells a person what is being done; the silent form says nothing."""

    def step(self, done: int, total: int, loss: float) -> None:
        """Report one finished training step and the loss before it, in nats."""

    def stage(self, name: str) -> None:
        """Report what is being run next."""

    def groups(self, num_ended: int, total: int) -> None:
        """Report how many of a sweep's groups have ended."""

    def parts(self, total: int) -> None:
        """Say how many parts there are."""

    def part(self, name: str) -> None:
        """Report the part that is being run next."""


@contextmanager
def show_progress(quiet: bool, *, still: bool = False, timed: bool = False) -> Iterator[Progress]:
    """Show progress on standard error, where that is a terminal and the caller did not ask for quiet.

    If ``still``, it is drawn only when something is reported, with the time left: drawing takes a thread, and
    processes are not forked beside one.
    """
    if quiet or sys.stderr is None or not sys.stderr.isatty():
        yield Progress()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    left = (MofNCompleteColumn(), TimeRemainingColumn())
    times = left if still or timed else (TimeElapsedColumn(),)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *times)
    with Bars(*columns, console=Console(stderr=True), transient=True, auto_refresh=not still) as bars:
        task = bars.add_task("loading torch", total=None)

        class Shown(Progress):
            def step(self, done: int, total: int, loss: float) -> None:
                text = f"training, loss {loss:.4f} nats"
                bars.update(task, completed=done, total=total, description=text)

            def stage(self, name: str) -> None:
                bars.update(task, description=name, total=None)

            def groups(self, num_ended: int, total: int) -> None:
                bars.update(task, description="auditing", completed=num_ended, total=total, refresh=True)

            def parts(self, total: int) -> None:
                bars.update(task, total=total, completed=-1)

            def part(self, name: str) -> None:
                bars.update(task, description=name, advance=1)

        yield Shown()
