"""Builds the distributions and tries them from outside: ``make test-package``; takes some minutes.

Names of extras, "" for none, try these alone.

The wheel is built from the source distribution. It goes into an environment of its own with each extra alone,
where the commands, the shell completion and what the extra is for must work, and a type checker must see the
types.
"""

import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]

TYPED = """
import kvproof

def passes(report: kvproof.Report) -> bool:
    return report.verdict.passes

reveal_type(kvproof.audit)
reveal_type(kvproof.Report)
"""
SUITE = """
import numpy as np

rows = np.random.default_rng(0).normal(size=(11, 11))

def step(ids, cache):
    logits = (0 if cache is None else cache) + rows[ids].cumsum(axis=0)
    return logits, logits[-1]

def test_the_cache(kvproof):
    kvproof.assert_match((lambda ids: rows[ids].cumsum(axis=0), step))
"""


class Environment:
    """A virtual environment with the wheel, and one extra or none."""

    def __init__(self, folder: Path, wheel: Path, extra: str) -> None:
        self.folder = folder
        venv.create(folder, with_pip=True)
        self.bin = folder / "bin"
        target = f"{wheel}[{extra}]" if extra else str(wheel)
        self.run(
            "python", "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt"), target
        )

    def run(self, command: str, *arguments: str, status: int = 0, **variables: str) -> str:
        """Run a program of the environment, outside the repository, and return what it printed.

        Raises `SystemExit` where it ends with another exit status.
        """
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [str(self.bin / command), *arguments],
            cwd=self.folder,
            env={**environment, "OMP_NUM_THREADS": "1", **variables},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        if done.returncode != status:
            raise SystemExit(f"{command} {' '.join(arguments)} exits with {done.returncode}:\n{done.stdout}")
        return done.stdout

    def lacks(self, *modules: str) -> None:
        """Raise `SystemExit` where something is installed that the extra does not ask for."""
        for module in modules:
            found = self.run(
                "python", "-c", f"import importlib.util as u; print(u.find_spec({module!r}) is not None)"
            )
            if found.strip() != "False":
                raise SystemExit(f"{module} is installed in {self.folder.name}")


def check_core(there: Environment) -> None:
    """Try the commands, completion and types without any extra."""
    there.lacks("transformers", "pytest", "hypothesis")
    expect("Usage: kvproof", there.run("kvproof", "--help"))
    expect("The gate holds.", there.run("kvproof", "milestone", "--quiet"))
    for shell in ("bash", "zsh", "fish"):
        expect("_KVPROOF_COMPLETE", there.run("kvproof", _KVPROOF_COMPLETE=f"{shell}_source"))
    expect("kvproof[transformers]", there.run("kvproof", "audit", "random:llama", status=2))
    there.run("python", "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt"), "mypy")
    (there.folder / "typed.py").write_text(TYPED)
    types = there.run("mypy", "--strict", "typed.py")
    expect("Revealed type", types)
    if "Any" in types.split("Report")[0].splitlines()[0] or "Success" not in types:
        raise SystemExit(f"the types are not seen from outside:\n{types}")


def check_transformers(there: Environment) -> None:
    """Audit a random model, and leave out what another extra brings."""
    there.lacks("gguf", "pytest", "hypothesis")
    expect("computes the same logits", there.run("kvproof", "audit", "random:llama", "--length", "8", "--quiet"))
    (there.folder / "model.gguf").touch()
    expect("kvproof[gguf]", there.run("kvproof", "audit", "model.gguf", status=2))


def check_gguf(there: Environment) -> None:
    """Import what reads a GGUF file."""
    there.run("python", "-c", "import accelerate, gguf, transformers")


def check_pytest(there: Environment) -> None:
    """Run a suite with the plugin."""
    there.lacks("transformers", "hypothesis")
    (there.folder / "test_mine.py").write_text(SUITE)
    expect("1 passed", there.run("python", "-m", "pytest", "test_mine.py"))


def check_hypothesis(there: Environment) -> None:
    """Draw a program."""
    there.lacks("transformers", "pytest")
    there.run("python", "-c", "import kvproof.strategies")


CHECKS: dict[str, Callable[[Environment], None]] = {
    "": check_core,
    "transformers": check_transformers,
    "gguf": check_gguf,
    "pytest": check_pytest,
    "hypothesis": check_hypothesis,
}


def expect(words: str, text: str) -> None:
    """Raise `SystemExit` unless the words stand in a text."""
    if words not in text:
        raise SystemExit(f"{words!r} is not in what was printed:\n{text}")


def built(folder: Path) -> Path:
    """Build the source distribution, and the wheel from it, and look into both."""
    tool = folder / "build"
    venv.create(tool, with_pip=True)
    subprocess.run([tool / "bin" / "python", "-m", "pip", "install", "--quiet", "build"], check=True)
    subprocess.run(
        [tool / "bin" / "python", "-m", "build", "--outdir", folder, ROOT], check=True, stdout=subprocess.PIPE
    )
    (wheel,), (_sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    for name in ("kvproof/py.typed", "kvproof/schemas/report-1.json"):
        if name not in names:
            raise SystemExit(f"{name} is not in {wheel.name}")
    return wheel


def main() -> int:
    """Build, and try every extra or those that are named."""
    wanted = sys.argv[1:] or list(CHECKS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = built(folder)
        sys.stdout.write(f"built {wheel.name}\n")
        for extra in wanted:
            CHECKS[extra](Environment(folder / f"with-{extra or 'nothing'}", wheel, extra))
            sys.stdout.write(f"kvproof{f'[{extra}]' if extra else ''}: installed and tried\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
