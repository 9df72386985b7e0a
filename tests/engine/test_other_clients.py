"""The npm client and LiteLLM as clients, against the gateway and the bare engine; each in an environment of its own."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_conformance import Endpoint, both, endpoint  # noqa: F401 (fixtures)

pytestmark = [pytest.mark.engine, pytest.mark.peers]

REPO = Path(__file__).parents[2]
CLIENTS = Path(__file__).parent / "clients"
ENVIRONMENT = REPO / ".cache" / "peers"
FIX = f"{ENVIRONMENT} is missing or not whole: run `make peers-env` first."


def ask(argv: list[str], endpoint: Endpoint) -> dict[str, Any]:  # noqa: F811
    """What a client's script found."""
    words = [*argv, f"{endpoint.url}/v1", endpoint.key, endpoint.model]
    done = subprocess.run(words, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def check(found: dict[str, Any]) -> None:
    assert found["plain"] and found["streamed"] == found["plain"]
    assert found["streamed_tokens"] == 12
    assert found["structured"]["to"] in ("north", "south")
    assert found["tool"] == "fly"
    assert found["refused"] == [400, True]


def test_the_npm_client(endpoint: Endpoint) -> None:  # noqa: F811
    npm = ENVIRONMENT / "npm"
    assert (npm / "node_modules" / "openai").is_dir(), FIX
    script = npm / "ask.mjs"
    script.write_bytes((CLIENTS / "ask.mjs").read_bytes())  # node looks for packages from the script's own folder
    found = ask(["node", str(script)], endpoint)
    check(found)
    assert found["models"] == [endpoint.model] and found["left"]


def test_litellm_as_a_client(endpoint: Endpoint) -> None:  # noqa: F811
    python = ENVIRONMENT / "python" / "bin" / "python"
    assert python.is_file(), FIX
    check(ask([str(python), str(CLIENTS / "ask_litellm.py")], endpoint))
