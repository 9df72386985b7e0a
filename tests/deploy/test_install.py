"""The installer's and the unpacker's bad days: no network, no Python, a model that is not the one named."""

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPO = Path(__file__).parents[2]
PROFILE = """
[target]
package = "some-model"
sha256 = "{sha256}"
served_name = "m"
[engine]
device = "cpu"
context_length = 64
max_running_requests = 1
"""


def copy_of_the_installer(tmp_path):
    (tmp_path / "deploy").mkdir()
    shutil.copy(REPO / "deploy/install.sh", tmp_path / "deploy")
    for lock in REPO.glob("requirements*.lock"):
        shutil.copy(lock, tmp_path)
    return tmp_path / "deploy/install.sh"


def test_no_network(tmp_path):
    script = copy_of_the_installer(tmp_path)
    offline = {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_FIND_LINKS": "",
        "PIP_RETRIES": "0",
        "PIP_NO_CACHE_DIR": "1",
    }
    shown = subprocess.run(
        [script], capture_output=True, text=True, env={**os.environ, "PYTHON": sys.executable, **offline}
    )
    assert shown.returncode == 1
    assert shown.stderr.splitlines()[-1].startswith("eyas: a package could not be fetched: is there a network")
    assert not (tmp_path / ".venv/.installed").exists()


def test_no_python(tmp_path):
    script = copy_of_the_installer(tmp_path)
    shown = subprocess.run([script], capture_output=True, text=True, env={**os.environ, "PYTHON": "no-such-python"})
    assert shown.returncode == 1
    assert "needs Python 3.11 and found no no-such-python: " in shown.stderr.splitlines()[-1]
    assert not (tmp_path / ".venv").exists()


def test_every_data_package_is_pinned_by_hash():
    lines = [line for line in (REPO / "requirements-data.lock").read_text().splitlines() if not line.startswith("#")]
    assert lines
    for line in lines:
        name, _, digest = line.partition(" --hash=sha256:")
        assert "==" in name and len(digest) == 64, line


def test_the_lock_names_no_local_versions_and_no_duplicates():
    lines = [line for line in (REPO / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    names = [line.partition("==")[0].lower().replace("_", "-") for line in lines]
    assert all("==" in line and "+" not in line and "@" not in line for line in lines)
    assert len(names) == len(set(names))
    assert {"torch", "sglang", "triton", "torchvision", "transformers"} <= set(names)


def pinned(*more):
    """What .venv holds, and `more` locks: name -> version. Other locks are of environments of their own."""
    locks = [REPO / f"requirements{which}.lock" for which in ("", "-data", *more)]
    lines = [line for lock in locks for line in lock.read_text().splitlines()]
    pairs = (line.split(" ")[0].split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def required():
    """Every requirement of pyproject.toml that holds on this machine."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    found = [Requirement(line) for line in [*project["dependencies"], *extras]]
    return [requirement for requirement in found if not requirement.marker or requirement.marker.evaluate()]


@pytest.mark.parametrize("requirement", required(), ids=str)
def test_the_locks_pin_whatever_is_required(requirement):
    version = pinned("-tracing").get(canonicalize_name(requirement.name))
    assert version, f"{requirement.name} is in no lock: make lock"
    assert requirement.specifier.contains(version)


def test_what_is_installed_is_what_the_lock_names():
    """Else the suite would run on other versions than those that a fresh clone gets."""
    names = set(pinned()) - {"pip"}
    there = {name: importlib.metadata.version(name).partition("+")[0] for name in names}
    assert there == {name: version for name, version in pinned().items() if name in names}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package that carries a GGUF file, which is not one."""
    site = tmp_path / "site"
    (site / "some_model").mkdir(parents=True)
    (site / "some_model/weights.gguf").write_bytes(b"not a model")
    info = site / "some_model-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-model\nVersion: 1.0\n")
    (info / "RECORD").write_text("some_model/weights.gguf,,\n")
    return site


def unpack(tmp_path, sha256, site):
    (tmp_path / "profile.toml").write_text(PROFILE.format(sha256=sha256))
    return subprocess.run(
        [sys.executable, REPO / "deploy/cpu/unpack_model.py", "--profile", tmp_path / "profile.toml"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(site), "EYAS_HOME": str(tmp_path / "home")},
    )


def test_a_model_whose_hash_differs(tmp_path, package):
    shown = unpack(tmp_path, "0" * 64, package)
    actual = hashlib.sha256(b"not a model").hexdigest()
    assert shown.returncode == 1
    assert shown.stderr.startswith(f"eyas: weights.gguf has sha256 {actual}, the profile names 0000")
    assert "Traceback" not in shown.stderr
    assert not (tmp_path / "home").exists()


def test_a_model_package_that_is_not_installed(tmp_path):
    shown = unpack(tmp_path, "0" * 64, tmp_path)
    assert shown.returncode == 1 and "is not installed: run `make install`" in shown.stderr


def test_a_model_that_cannot_be_unpacked_leaves_nothing(tmp_path, package, monkeypatch):
    """The conversion fails half-way: no folder, and no scratch beside it."""
    spec = importlib.util.spec_from_file_location("unpack_model", REPO / "deploy/cpu/unpack_model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "profile.toml").write_text(PROFILE.format(sha256=hashlib.sha256(b"not a model").hexdigest()))
    monkeypatch.setenv("EYAS_HOME", str(tmp_path / "home"))
    monkeypatch.syspath_prepend(package)

    def half(gguf, folder):
        folder.mkdir()
        (folder / "config.json").write_text("{")
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "convert", half)
    with pytest.raises(KeyboardInterrupt):
        module.unpack(module.load_profile(tmp_path / "profile.toml"))
    assert list((tmp_path / "home/models").iterdir()) == []
