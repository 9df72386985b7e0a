"""The probe after a start, against the fake engine: who is stopped, who is told, who is not asked at all."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from drafter.checkpoint.folder import DrafterError
from server import probe
from server.config import ProfileError, load_profile
from server.engine import Engine, EngineError
from server.serve import probe_text
from tests.server.drafters import llama_tensors, write_drafter
from tests.server.fake_profile import FAKE, MINE, NGRAM, PROFILE


@pytest.fixture
def make_engine(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    (tmp_path / "model").mkdir()
    write_drafter(tmp_path / "mine")
    made = []

    def make(cues="", drafter="mine", more="", **options):
        monkeypatch.setenv("FAKE_SGLANG", cues)
        (tmp_path / "profile.toml").write_text(PROFILE + MINE + NGRAM + more)
        made.append(Engine(load_profile(tmp_path / "profile.toml"), drafter, run_dir=tmp_path / "run", **options))
        return made[-1]

    yield make
    for engine in made:
        engine.stop()


def test_a_drafter_that_is_accepted(make_engine):
    stages = []
    engine = make_engine("accepts:0,0,9,9")
    engine.start(stages.append)
    assert stages[-1] == "probing the drafter"
    assert engine.probe.histogram == [0, 0, 72, 72] and engine.probe.acceptance_length == 3.5
    assert probe_text(engine) == ["acceptance length 3.50 on 8 fixed prompts (144 verify steps)"]


@pytest.mark.parametrize(("histogram", "length"), [("9,0,0", "1.00"), ("91,9", "1.09")])
def test_a_drafter_that_is_not_stops_the_start(make_engine, histogram, length):
    engine = make_engine(f"accepts:{histogram}")
    with pytest.raises(EngineError) as caught:
        engine.start()
    said = str(caught.value)
    assert f"acceptance length {length}" in said and "expected 1.10 or more" in said
    assert all(cause in said for cause in probe.CAUSES) and "--force probe" in said
    assert engine.state == "stopped" and engine._process.poll() is not None


def test_at_the_floor_it_serves(make_engine):
    with make_engine("accepts:90,10") as engine:
        assert engine.probe.acceptance_length == 1.1


def test_forced_it_serves_and_says_so(make_engine):
    with make_engine("accepts:9,0", force=["probe"]) as engine:
        assert probe_text(engine)[0].endswith("under the floor of 1.10 (forced)")


def test_the_profile_sets_the_floor(make_engine):
    with make_engine("accepts:99,1", more="[probe]\nfloor = 1.005") as engine:
        assert engine.probe is not None
    with pytest.raises(EngineError, match=r"expected 4.00 or more"):
        make_engine(more="[probe]\nfloor = 4.0").start()


def test_the_profile_turns_it_off_with_a_reason(make_engine):
    with make_engine("accepts:9,0", more='[probe]\noff = "the drafter is trained while it serves"') as engine:
        assert engine.probe is None
        assert probe_text(engine) == ["none: the profile turns it off: the drafter is trained while it serves"]


@pytest.mark.parametrize("table", ["floor = 0.5", 'off = ""', "off = true", "ceiling = 2"])
def test_a_table_that_cannot_be_meant(make_engine, table):
    with pytest.raises(ProfileError, match=r"probe"):
        make_engine(more=f"[probe]\n{table}")


def test_who_is_not_probed(make_engine):
    with make_engine("accepts:9,0", drafter="ngram") as engine:
        assert engine.probe is None and "has seen nothing yet" in engine.not_probed
        assert probe_text(engine) == []
    with make_engine("accepts:9,0", drafter="none") as engine:
        assert engine.not_probed == "nothing speculates"
    with make_engine("accepts:9,0", simulate_accept_len=2.0) as engine:
        assert engine.not_probed == "acceptance is simulated"


def test_a_target_without_a_chat_template(make_engine):
    with make_engine("no-template") as engine:
        assert engine.probe.acceptance_length == 3.5


@pytest.mark.parametrize(
    ("cues", "message"),
    [("no-statistics", "no trustworthy statistics"), ("accepts:1,1", "made 16 verify steps"), ("accepts:", "answer")],
)
def test_a_probe_that_says_nothing(make_engine, cues, message):
    with pytest.raises(EngineError, match=message):
        make_engine(cues).start()


def test_what_the_preflight_finds_starts_nothing(make_engine, tmp_path):
    tensors = llama_tensors()
    tensors["fc.weight"][0, 0] = np.nan
    save_file(tensors, tmp_path / "mine" / "model.safetensors")
    with pytest.raises(DrafterError, match=r"fc.weight has NaN .*\(Check finite.\)"):
        make_engine()
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="'finit' is no check"):
        make_engine(force=["finit"])
    with make_engine(force=["finite"]) as engine:
        assert [each.check for each in engine.findings if each.severity == "error"] == ["finite"]


def test_the_target_on_this_disk_is_checked_too(make_engine, tmp_path):
    (tmp_path / "model" / "config.json").write_text(json.dumps({"vocab_size": 65, "hidden_size": 8}))
    with pytest.raises(DrafterError, match=r"'vocab_size' is 64, the target has 65"):
        make_engine()
