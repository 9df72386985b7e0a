"""An engine that captures: its command, its table in the profile, and the handshake without which it does not start."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from drafter.data.spool import spool_of
from server.capture import plan_capture
from server.config import ProfileError, load_profile
from server.drafters import LaunchError, resolve_drafter
from server.engine import Engine, EngineError
from server.launch import build_launch, child_environment
from tests.server.drafters import write_drafter
from tests.server.fake_profile import FAKE, MINE, PROFILE

REPO = Path(__file__).parents[2]
TABLE = """
[capture]
layer_ids = [1, 14, 26]
convention = "output_of_layer"
"""
EXTRA = 'extra_args = ["--cuda-graph-backend-prefill", "breakable"]\n'


@pytest.fixture
def profile(tmp_path):
    def make(table=TABLE, device="cpu"):
        (tmp_path / "model").mkdir(exist_ok=True)
        write_drafter(tmp_path / "mine")
        (tmp_path / "profile.toml").write_text(PROFILE.replace('"cpu"', f'"{device}"') + EXTRA + MINE + table)
        return load_profile(tmp_path / "profile.toml")

    return make


@pytest.fixture
def make_engine(profile, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    made = []

    def make(cues="", drafter="none", folder="captured", **options):
        monkeypatch.setenv("FAKE_SGLANG", cues)
        run_dir = tmp_path / f"run-{len(made)}"
        made.append(Engine(profile(), drafter, run_dir=run_dir, capture_dir=tmp_path / folder, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.stop()


def launch_of(profile, drafter, folder):
    resolved = resolve_drafter(profile, drafter)
    return build_launch(
        profile, resolved, port=1, config_file="k.yaml", capture=plan_capture(profile, resolved, folder)
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_argv_without_a_drafter(profile, tmp_path, device):
    launch = launch_of(profile(device=device), "none", tmp_path / "c")
    argv = launch.argv
    at = argv.index("--return-aux-hidden-state-layer-ids")
    assert argv[at + 1 : at + 4] == ["1", "14", "26"] and len(argv) == at + 4
    assert argv[argv.index("--speculative-algorithm") + 1] == "EAGLE3"
    assert "--enable-return-aux-hidden-states" in argv and "--disable-radix-cache" in argv
    assert "--speculative-draft-model-path" not in argv
    last = len(argv) - 1 - argv[::-1].index("--cuda-graph-backend-prefill")
    assert argv[last + 1] == "disabled", "a replayed graph does not pass the plugin, whatever extra_args say"
    assert launch.environment["EYAS_CAPTURE_DIR"] == str(tmp_path / "c")
    assert launch.expected["speculative_algorithm"] is None
    assert launch.expected["return_aux_hidden_state_layer_ids"] == [1, 14, 26]
    assert child_environment(launch, {"EYAS_CAPTURE_DIR": "/other"})["EYAS_CAPTURE_DIR"] == str(tmp_path / "c")


def test_argv_while_a_drafter_serves(profile, tmp_path):
    launch = launch_of(profile(table=""), "mine", tmp_path / "c")
    assert launch.argv.count("--speculative-algorithm") == 1
    assert launch.argv[launch.argv.index("--speculative-draft-model-path") + 1] == str(tmp_path / "mine")
    assert "--disable-radix-cache" in launch.argv and "--enable-return-aux-hidden-states" not in launch.argv
    assert launch.environment["EYAS_CAPTURE_DIR"] == str(tmp_path / "c")


def test_without_a_capture_nothing_of_it_is_there(profile):
    made = profile()
    launch = build_launch(made, resolve_drafter(made, "mine"), port=1, config_file="k.yaml")
    assert "--disable-radix-cache" not in launch.argv and "EYAS_CAPTURE_DIR" not in launch.environment


def test_what_cannot_be_captured(profile, tmp_path):
    made = profile(table="")
    with pytest.raises(LaunchError, match=r"has no \[capture\] table: add one with layer_ids"):
        plan_capture(made, resolve_drafter(made, "none"), tmp_path)
    with pytest.raises(LaunchError, match="drafter ngram names no layers"):
        plan_capture(made, resolve_drafter(made, "ngram"), tmp_path)
    write_drafter(tmp_path / "plain", eagle_config={})
    with pytest.raises(LaunchError, match="drafter plain names no layers"):
        plan_capture(made, resolve_drafter(made, str(tmp_path / "plain")), tmp_path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (("[1, 14, 26]", "[]"), r"capture\.layer_ids"),
        (("[1, 14, 26]", "[1, -2]"), r"capture\.layer_ids\.1"),
        (("[1, 14, 26]", "[1, 1]"), "capture: layer_ids [1, 1] name a layer twice"),
        (("output_of_layer", "output"), "capture.convention: should be 'output_of_layer' or 'input_to_layer'"),
        (('convention = "output_of_layer"', ""), "'capture.convention' is missing"),
        (("layer_ids", "layers"), "unknown key 'capture.layers': did you mean 'layer_ids'?"),
    ],
)
def test_a_table_that_is_wrong(profile, edit, message):
    with pytest.raises(ProfileError) as caught:
        profile(TABLE.replace(*edit))
    assert message.replace("\\", "") in str(caught.value)


@pytest.mark.parametrize("flag", ["--enable-return-aux-hidden-states", "--return-aux-hidden-state-layer-ids=1"])
def test_the_flags_are_not_for_extra_args(profile, flag):
    file = profile().source
    file.write_text(file.read_text().replace('"breakable"', f'"breakable", "{flag}"'))
    with pytest.raises(ProfileError, match="is set from a key of the profile"):
        load_profile(file)


@pytest.mark.parametrize("drafter", ["none", "mine"])
def test_an_engine_with_the_plugin_starts(make_engine, tmp_path, drafter):
    cue = "shake:layer_ids=[1, 2, 3];shake:inputs_to=[2, 3, 4]" if drafter == "mine" else ""
    folder = tmp_path / "captured"
    spool_of(folder).mkdir(parents=True)
    (spool_of(folder) / "capture-old-00000000.safetensors").touch()
    with make_engine(cue, drafter) as engine:
        assert engine.state == "ready" and engine.capture.folder == folder
        assert not list(spool_of(folder).iterdir())
        with pytest.raises(EngineError, match=r"captures into .* already: stop it"):
            make_engine().start()


@pytest.mark.parametrize(
    ("cues", "message"),
    [
        ("no-plugin", "without Eyas's capture plugin; it was stopped. Install eyas anew"),
        ("shake:pid=1", "was written by process 1, which is not of this engine"),
        ("shake:layer_ids=[1, 2, 3]", "but this engine captures"),
        (
            "shake:inputs_to=[1, 14, 26]",
            "are the inputs to layers [2, 15, 27], but this engine",
        ),
        ("change:disable_radix_cache=false", "disable_radix_cache: asked for True"),
        ("change:return_aux_hidden_state_layer_ids=[2, 15, 27]", "return_aux_hidden_state_layer_ids: asked for [1, 14"),
        ("change:aux_hidden_state_capture=null", "aux_hidden_state_capture: asked for 'eagle3'"),
        ('change:speculative_algorithm="EAGLE3"', "speculative_algorithm: asked for None"),
    ],
)
def test_an_engine_that_would_capture_nothing_or_other_layers_is_stopped(make_engine, cues, message):
    engine = make_engine(cues)
    with pytest.raises(EngineError) as caught:
        engine.start()
    assert message in str(caught.value)
    assert engine._process.poll() is not None


def test_a_handshake_of_an_earlier_engine_does_not_count(make_engine, tmp_path):
    with make_engine():
        pass
    assert (tmp_path / "captured" / "handshake.json").exists()
    with pytest.raises(EngineError, match="without Eyas's capture plugin"):
        make_engine("no-plugin").start()


def test_a_folder_that_cannot_be_made(make_engine, tmp_path):
    (tmp_path / "captured").write_text("a file")
    with pytest.raises(EngineError, match=r"captured cannot be written \("):
        make_engine().start()


def test_errors_on_the_command_line(command, profile, tmp_path):
    both = command("engine", "--profile", str(profile().source), "--capture", str(tmp_path / "c"), "--drafter", "none")
    assert both.returncode == 2 and "--capture loads no drafter: leave --drafter out" in both.stderr
    none = command("engine", "--profile", str(profile(table="").source), "--capture", str(tmp_path / "c"))
    assert none.returncode == 1 and "has no [capture] table" in none.stderr and "Traceback" not in none.stderr


def test_the_command_says_what_it_captures(profile, tmp_path):
    command = [sys.executable, "-m", "server", "engine", "--profile", str(profile().source)]
    process = subprocess.Popen(
        [*command, "--capture", str(tmp_path / "c")],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(FAKE), "EYAS_HOME": str(tmp_path)},
    )
    ready = process.stdout.readline()
    assert f"with no drafter; layers [1, 14, 26] go to {tmp_path / 'c'}" in ready
    assert json.loads((tmp_path / "c" / "handshake.json").read_text())["layer_ids"] == [1, 14, 26]
    process.terminate()
    process.communicate()
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("name", "layers", "convention"),
    [
        ("cpu-smollm2", [1, 14, 26], "output_of_layer"),
        ("kimi-k2.5-nvfp4-8xb200", [2, 30, 58], "input_to_layer"),
    ],
)
def test_profiles_that_come_with_eyas(name, layers, convention):
    capture = load_profile(REPO / f"deploy/profiles/{name}.toml").capture
    assert (capture.layer_ids, capture.convention) == (layers, convention)
