"""The bench on engines that already run, named by their URLs."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.bench.fake_engine import FakeEngine


def test_engines_that_already_run(bench: Any, engine: type[FakeEngine], running: Any, key_file: Path):
    urls = [f"{name}={running(name).url}" for name in ("good", "none")]
    args = [word for url in urls for word in ("--url", url)]
    code, report, _, _ = bench(*args, "--key-file", str(key_file))
    assert code == 0 and engine.seen.starts == ["good", "none"] and engine.seen.stops == []
    assert [variant["drafter"] for variant in report["variants"]] == ["none", "good"]
    where, good = report["provenance"], report["variants"][1]
    assert where["engine_env"] == "unknown" and "profile_sha256" not in where
    assert where["target"] == {"served_name": "fake", "path": "/elsewhere"}
    assert good["acceptance_length"] == pytest.approx(1 + 25 / 14) and good["flushed"] is True
    assert good["greedy_equal"]["equal"] == 4 and good["steps"] == 3
    text = json.dumps(report)
    assert FakeEngine.api_key not in text and FakeEngine.admin_key not in text


def test_a_running_engine_whose_caches_stay_is_said_so(
    bench: Any, engine: type[FakeEngine], running: Any, tmp_path: Path
):
    (tmp_path / "keys").write_text(json.dumps({"api-key": FakeEngine.api_key}))
    code, report, _, err = bench("--url", running("good").url, "--key-file", str(tmp_path / "keys"))
    assert code == 0 and report["variants"][0]["flushed"] is False and "its caches were not emptied" in err


def test_a_running_engine_beside_one_of_ours(bench: Any, engine: type[FakeEngine], running: Any, key_file: Path):
    url = running("good").url
    code, report, _, _ = bench("--drafter", "none", "--url", f"theirs={url}", "--key-file", str(key_file))
    assert code == 0 and engine.seen.stops == ["none"]
    assert [variant["drafter"] for variant in report["variants"]] == ["none", "theirs"]
    assert report["provenance"]["engine_env"] == "unknown"


@pytest.mark.parametrize(
    ("keys", "reason"), [(False, "wants its key (401): name its key file"), (True, "does not answer")]
)
def test_a_running_engine_that_cannot_be_asked(
    bench: Any, engine: type[FakeEngine], running: Any, key_file: Path, keys: bool, reason: str
):
    url = running("good").url if not keys else "http://127.0.0.1:9"
    code, report, _, _ = bench("--url", url, *(["--key-file", str(key_file)] if keys else []))
    assert code == 1 and reason in report["variants"][0]["error"]
