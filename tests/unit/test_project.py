"""What the project promises about itself: the README's commands are what CI runs, Binder builds what it should."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_ci_installs_and_tests_as_the_readme_says():
    ci = (ROOT / ".ci" / "run").read_text()
    install = re.search(r"\.venv/bin/pip install (-e \S+)", README)
    test = re.search(r"^\.venv/bin/python -m pytest$", README, re.MULTILINE)
    assert install and f".venv/bin/pip install --quiet {install[1]}" in ci
    assert test and re.search(r"^\.venv/bin/python -m pytest$", ci, re.MULTILINE)


def test_every_link_of_the_readme_leads_somewhere():
    for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", README):
        assert (ROOT / target).exists(), target


def test_every_lesson_is_in_the_readme():
    for lesson in sorted((ROOT / "notebooks").glob("*.ipynb")):
        assert f"notebooks/{lesson.name}" in README, lesson.name


@pytest.mark.skipif(sys.platform == "win32", reason="repo2docker builds Linux images, on Linux or macOS")
def test_binder_builds_cpu_torch_the_kit_and_the_lessons(tmp_path):
    """What `jupyter-repo2docker --no-build --debug .` prints is the Dockerfile that Binder would build."""
    repo = tmp_path / "repo"
    keep = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "*.egg-info")
    shutil.copytree(ROOT, repo, ignore=keep)
    command = [sys.executable, "-m", "repo2docker", "--no-build", "--debug", "."]
    done = subprocess.run(command, cwd=repo, capture_output=True, text=True, timeout=120)
    dockerfile = done.stdout + done.stderr
    assert done.returncode == 0, dockerfile[-2000:]
    copied = dockerfile.index("COPY --chown=0:0 src/ ${REPO_DIR}")
    installed = dockerfile.index('pip install --no-cache-dir -r "binder/requirements.txt"')
    assert copied < installed  # the kit itself is among the requirements, so its files must be there first
    assert "environment.py-3.11" in dockerfile.replace("-2d", "-").replace("-2e", ".")
    requirements = (repo / "binder" / "requirements.txt").read_text()
    assert "https://download.pytorch.org/whl/cpu" in requirements
    assert re.search(r"^torch==[\d.]+\+cpu$", requirements, re.MULTILINE) and re.search(r"^-e \.$", requirements, re.MULTILINE)
    # What Binder installs satisfies what the kit asks for.
    wanted = re.search(r'"torch>=([\d.]+)"', (repo / "pyproject.toml").read_text())
    given = re.search(r"^torch==([\d.]+)\+cpu$", requirements, re.MULTILINE)
    assert wanted and given

    def number(version: str) -> tuple[int, ...]:
        return tuple(map(int, version.split(".")))

    assert number(wanted[1]) <= number(given[1]) <= (2, 14, 1)
