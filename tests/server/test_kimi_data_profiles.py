"""The profiles by which Kimi-K2.5 writes and is read for its drafter, by SGLang's own argument code on Blackwell."""

import json
import os
import subprocess
import sys

import pytest

from server.config import load_profile
from server.launch import build_launch, plan_capture, resolve_drafter
from tests.server.test_kimi_profile import PROFILE, REPO, RESOLVE, TARGET

PROFILES = {name: REPO / f"deploy/profiles/kimi-k2.5-{name}-8xb200.toml" for name in ("generate", "capture")}


def test_what_is_captured_is_what_is_served():
    """The same target in the same form, and the layers that the serving profile's drafters are fed."""
    serving = load_profile(PROFILE)
    for file in PROFILES.values():
        profile = load_profile(file)
        assert profile.target == serving.target
        for key in ("device", "tp", "dtype", "quantization", "kv_cache_dtype", "page_size"):
            assert getattr(profile.engine, key) == getattr(serving.engine, key), key
        assert profile.default_drafter == "none" and not profile.drafters
    assert load_profile(PROFILES["capture"]).capture == serving.capture


@pytest.fixture(scope="module")
def resolved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kimi")
    (folder / "target").mkdir()
    (folder / "target" / "config.json").write_text(json.dumps(TARGET))
    cases = {}
    for name, file in PROFILES.items():
        profile = load_profile(file)
        drafter = resolve_drafter(profile, "none")
        capture = plan_capture(profile, drafter, folder / "spool") if profile.capture else None
        launch = build_launch(profile, drafter, port=30000, config_file="k.yaml", capture=capture)
        argv = launch.argv[launch.argv.index("--model-path") :]
        argv[argv.index("--model-path") + 1] = str(folder / "target")
        cases[name] = [*argv, "--skip-tokenizer-init"], launch.expected
    shown = subprocess.run(
        [sys.executable, "-c", RESOLVE],
        input=json.dumps({case: argv for case, (argv, _) in cases.items()}),
        capture_output=True,
        text=True,
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"},
    )
    lines = [line for line in shown.stdout.splitlines() if line.startswith("RESOLVED ")]
    assert lines, shown.stderr[-3000:]
    found = json.loads(lines[0].removeprefix("RESOLVED "))
    return {case: (found[case], cases[case][1]) for case in cases}


@pytest.mark.engine
@pytest.mark.parametrize("name", PROFILES)
def test_sglang_accepts_it_on_blackwell(resolved, name):
    found, expected = resolved[name]
    assert "refused" not in found
    assert found["tp_size"] == 8 and found["speculative_algorithm"] is None
    compared = set(expected) & set(found)
    assert len(compared) >= 4
    for key in compared:
        assert found[key] == expected[key], key
    if name == "capture":
        assert found["disable_radix_cache"] and found["return_aux_hidden_state_layer_ids"] == [2, 30, 58]
