"""The gateway's wheel in an environment without torch: it serves, checks drafters, and stays small."""

import importlib.metadata
import json
import subprocess
import sys
import time
import venv
import zipfile
from pathlib import Path

import httpx
import psutil
import pytest
from packaging.requirements import Requirement

from server.ports import free_port
from tests.deploy.tools import REPO
from tests.server.fake_engine import ADMIN_KEY, API_KEY, MODEL, FakeEngine, wait_until

pytestmark = pytest.mark.slow

AT_MOST_MB = 120
PROFILE = """\
[target]
path = "/nowhere"
served_name = "{model}"
[engine]
device = "cuda"
context_length = 4096
max_running_requests = 16
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    build = ["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, "."]
    subprocess.run([sys.executable, *map(str, build)], cwd=REPO, check=True)
    (made,) = folder.glob("eyas-*.whl")
    return made


def needed(requirements):
    """Every distribution that these ask for, without extras, as pip would find them; all are in this environment."""
    found, asked = {}, [Requirement(text) for text in requirements]
    while asked:
        requirement = asked.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        distribution = importlib.metadata.distribution(requirement.name)
        assert requirement.specifier.contains(distribution.version, prereleases=True)
        name = distribution.metadata["Name"]
        extras = requirement.extras - found.get(name, (None, set()))[1]
        if name not in found or extras:
            found[name] = (distribution, found.get(name, (None, set()))[1] | extras)
            for line in distribution.requires or []:
                other = Requirement(line)
                if not other.marker or any(other.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                    asked.append(Requirement(line.partition(";")[0]))
    return [distribution for distribution, _ in found.values()]


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """A fresh environment: the wheel, and links to what it declares that it needs, for want of a network."""
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    venv.create(folder, with_pip=True)
    python = folder / "bin/python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel], check=True)
    (site,) = folder.glob("lib/*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith("METADATA")]
        lines = archive.read(metadata).decode().splitlines()
    for distribution in needed([line.removeprefix("Requires-Dist: ") for line in lines if "Requires-Dist" in line]):
        for top in {Path(str(file)).parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution.locate_file(top))))
    return python


def ask(python, program):
    """What a program prints there."""
    return subprocess.run([python, "-c", program], capture_output=True, text=True, check=True, cwd="/").stdout.strip()


def test_there_is_no_torch_and_the_code_is_the_wheels(environment):
    program = (
        "import importlib.util as u; print([u.find_spec(n) for n in ('torch', 'sglang', 'transformers', 'scipy')])"
    )
    assert ask(environment, program) == "[None, None, None, None]"
    assert "site-packages" in ask(environment, "import server; print(server.__file__)")
    subprocess.run([environment, "-m", "pip", "check"], check=True, capture_output=True)


def test_it_checks_a_drafter(environment):
    drafter = REPO / "deploy/drafters/smollm2-135m-eagle3"
    shown = subprocess.run(
        [environment, "-m", "drafter", "inspect", drafter, "--json"],
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
    )
    assert json.loads(shown.stdout)


def test_it_serves_and_is_small(environment, tmp_path):
    engine = FakeEngine().start()
    port = free_port()
    (tmp_path / "profile.toml").write_text(PROFILE.format(model=MODEL))
    (tmp_path / "keys.json").write_text(json.dumps({"api-key": API_KEY, "admin-api-key": ADMIN_KEY}))
    words = ["serve", "--profile", tmp_path / "profile.toml", "--port", port]
    words += ["--engine-url", engine.url, "--engine-keys", tmp_path / "keys.json"]
    log = (tmp_path / "log").open("wb")
    gateway = subprocess.Popen(
        [environment, "-m", "server", *map(str, words)],
        stdout=log,
        stderr=log,
        cwd=tmp_path,
        env={"HOME": str(tmp_path)},
    )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: responds(f"{url}/readyz"), timeout=60)
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
        for stream in (False, True):
            answer = httpx.post(f"{url}/v1/chat/completions", json={**body, "stream": stream}, timeout=30)
            assert answer.status_code == 200, answer.text
        time.sleep(2)  # at rest
        process = psutil.Process(gateway.pid)
        resident = process.memory_info().rss / 2**20
        print(f"resident at rest: {resident:.1f} MiB in {process.num_threads()} threads")
        assert not process.children()
        assert resident < AT_MOST_MB
    finally:
        gateway.terminate()
        assert gateway.wait(30) == 0, (tmp_path / "log").read_text()
        engine.stop()


def responds(url):
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


def test_the_wheel_holds_what_it_needs(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {"server/serve.py", "drafter/roofline.toml", "bench/accept_len.py"} <= names
    assert not any(name.startswith(("tests/", "deploy/")) for name in names)
