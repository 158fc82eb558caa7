"""The workflow for GitHub Actions does what it says, apart from what only GitHub can do."""

import os
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def test_its_commands_run_as_they_stand(tmp_path: Path):
    workflow = yaml.safe_load((ROOT / "examples" / "kvproof-workflow.yml").read_text("utf-8"))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {
        **os.environ,
        **workflow["env"],
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
        "OMP_NUM_THREADS": "1",
    }
    steps = [step for step in workflow["jobs"]["cache"]["steps"] if "run" in step and step["name"] != "install"]
    assert [step["name"] for step in steps] == ["audit", "show"]
    for step in steps:
        done = subprocess.run(
            ["bash", "-e", "-c", step["run"]], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "summary.md").read_text("utf-8").startswith("# kvproof: ")
    assert (tmp_path / "kvproof.sarif").exists()
    assert (tmp_path / "kvproof-junit.xml").exists()
