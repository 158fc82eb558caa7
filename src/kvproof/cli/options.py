"""What several commands share: exit statuses, and the options that say how a model is loaded."""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvproof.errors import UsageError

if TYPE_CHECKING:
    from kvproof.subjects._adapter import LoadOptions

#: Exit statuses that no verdict uses.
EXIT_USAGE, EXIT_REQUIRED, EXIT_INTERNAL, EXIT_OUTPUT, EXIT_INTERRUPTED = 2, 5, 70, 73, 130

#: What torch takes as a seed.
SEED = click.IntRange(0, 2**63 - 1)

DTYPES = ("float32", "bfloat16", "float16", "float64")
ATTENTIONS = ("eager", "sdpa")

#: A file that is read or written, and no folder.
FILE = click.Path(path_type=Path, dir_okay=False)


class Finished(SystemExit):
    """A command is done, with its exit status; a `SystemExit` of any other kind comes from the user's code."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """How a target is loaded, as it was typed."""

    dtype: str | None
    attention: str
    device: str
    config: Path | None
    network: bool
    trust_remote_code: bool
    timeout_s: int | None

    def options(self, seed: int) -> "LoadOptions":
        """Return what `load_target` takes."""
        from kvproof.subjects._adapter import LoadOptions

        return LoadOptions(
            dtype=self.dtype,
            seed=seed,
            attention=self.attention,
            device=self.device,
            trust_remote_code=self.trust_remote_code,
            network=self.network,
            config=self.config,
        )


_NETWORK = click.option(
    "--download", "network", is_flag=True, help="Download org/name from the hub if it is not cached."
)
_REMOTE_CODE = click.option("--trust-remote-code", is_flag=True, help="Allow the model's own code to run.")
_LOADING = (
    click.option(
        "--dtype", type=click.Choice(DTYPES), help="Declared dtype. Default: float32, or the factory's own."
    ),
    click.option("--attention", type=click.Choice(ATTENTIONS), default="eager", show_default=True),
    click.option("--device", default="cpu", show_default=True, help="Device to run on, such as cuda or cuda:1."),
    click.option("--config", type=FILE, help="Instead of TARGET: a random model of exactly this config.json."),
    _NETWORK,
    _REMOTE_CODE,
    click.option(
        "--timeout",
        "timeout_s",
        type=click.IntRange(0, 604_800),
        help="Seconds that one call of your decoder, or of its factory, may take; 0 for no limit. Default: no "
        "limit, or 600 for your own code where the environment variable CI is set.",
    ),
)


def ids_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say which token ids programs are made of."""
    for option in (
        click.option(
            "--avoid-ids",
            metavar="IDS",
            help="Never feed these token ids. Padding that the decoder declares is always avoided.",
        ),
        click.option("--ids", metavar="IDS", help="Feed only these token ids, such as 5,7,100-199."),
    ):
        command = option(command)
    return command


def read_ids(text: str | None) -> tuple[int, ...] | None:
    """Return the token ids in a list such as ``5,7,100-199``; raise `UsageError` for anything else."""
    if text is None:
        return None
    ids: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise UsageError(
                f"{part!r} is no token id: give ids and ranges, separated by commas, as in 5,7,100-199"
            )
        ids += range(int(found[1]), int(found[2] or found[1]) + 1)
    return tuple(ids)


def permission_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that allow a model to be fetched, and to bring code of its own."""
    return _NETWORK(_REMOTE_CODE(command))


def loading_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of loading; the command gets them as one value, ``loading``."""

    @functools.wraps(command)
    def with_loading(**values: Any) -> Any:
        members = {name: values.pop(name) for name in Loading.__dataclass_fields__}
        return command(loading=Loading(**members), **values)

    for option in reversed(_LOADING):
        with_loading = option(with_loading)
    return with_loading
