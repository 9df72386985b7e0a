"""The real tools that read what deploy/ holds, found on this machine or made by `make ops-env`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
OPS = REPO / ".cache" / "ops" / "bin"
FIXES = {
    "kubectl": "install kubectl",
    "systemd-analyze": "install systemd (Debian: apt-get install systemd)",
}


def tool(name: str) -> str:
    """The path of a tool. Fails the test where it cannot be had, with what to do."""
    if found := shutil.which(name):
        return found
    if name in FIXES:
        pytest.fail(f"{name} is needed to check deploy/ and was not found: {FIXES[name]}.")
    if not (OPS / name).exists():
        pytest.fail(f"{name} is needed to check deploy/ and was not found: make ops-env.")
    return str(OPS / name)


def run(name: str, *arguments: object) -> str:
    """The output of a tool that must succeed."""
    shown = subprocess.run([tool(name), *map(str, arguments)], cwd=REPO, capture_output=True, text=True)
    assert shown.returncode == 0, f"{name} {' '.join(map(str, arguments))}\n{shown.stdout}{shown.stderr}"
    return shown.stdout + shown.stderr
