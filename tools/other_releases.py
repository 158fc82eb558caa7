"""Runs the adapter's tests with other releases of transformers than the one that is installed.

Run by ``make test-transformers``. Each file in ``tools/releases`` names one release and what it needs; these
packages go to a folder of their own, which stands first on the path, and all else is shared.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ("tests/hf/test_adapter.py", "tests/hf/test_tiny.py")
PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--upgrade")


def folder_for(packages: Path) -> Path:
    """Install a release where it is not yet installed as its file says, and return its folder."""
    folder = ROOT / ".venv" / "releases" / packages.stem
    stamp = folder / packages.name
    if not stamp.is_file() or stamp.read_bytes() != packages.read_bytes():
        subprocess.run([sys.executable, *PIP, "--target", folder, "--requirement", packages], check=True)
        stamp.write_bytes(packages.read_bytes())
    return folder


def start(folder: Path) -> subprocess.Popen[str]:
    """Start the tests with a release's folder first on the path."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *TESTS]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def main() -> int:
    """Run all releases at the same time; return 1 if any test failed."""
    folders = [folder_for(packages) for packages in sorted((ROOT / "tools" / "releases").glob("*.txt"))]
    failed = False
    for folder, run in [(folder, start(folder)) for folder in folders]:
        output, _ = run.communicate()
        sys.stdout.write(f"transformers {folder.name}\n{output}")
        failed |= run.returncode != 0
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
