"""The wheel, used from outside the repository. ``make test-package`` installs it with each extra alone, too."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *build], check=True, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but what the wheel installs; its libraries are those of these tests."""
    folder = tmp_path_factory.mktemp("installed")
    install = ["install", "--no-deps", "--no-index", "--target", str(folder), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *install], check=True, cwd=folder)
    return folder


def kvproof(installed: Path, *arguments: str, **variables: str) -> str:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    done = subprocess.run(
        [str(installed / "bin" / "kvproof"), *arguments],
        cwd=installed,
        env={**plain, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_holds_every_file_of_the_package_and_none_beside_it(wheel: Path):
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = (path for path in (SOURCE / "kvproof").rglob("*") if path.is_file())
    assert packed == {path.relative_to(SOURCE).as_posix() for path in files if "__pycache__" not in path.parts}
    assert "kvproof/py.typed" in packed


def test_its_command_runs_the_installed_files(installed: Path):
    assert "Usage: kvproof" in kvproof(installed, "--help")
    assert "The gate holds." in kvproof(installed, "milestone", "--quiet")
    where = "import kvproof; print(kvproof.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    found = subprocess.run([sys.executable, "-c", where], env=environment, capture_output=True, text=True)
    assert Path(found.stdout.strip()).is_relative_to(installed)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_its_commands(installed: Path, shell: str):
    assert "_KVPROOF_COMPLETE" in kvproof(installed, _KVPROOF_COMPLETE=f"{shell}_source")
