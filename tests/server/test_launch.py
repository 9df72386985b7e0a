"""A profile and a drafter become argv and environment; `python -m server plan` shows them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from drafter.checkpoint.folder import DrafterError
from drafter.checkpoint.preflight import read_folder
from server.config import load_profile
from server.drafters import LaunchError, check_drafter, resolve_drafter
from server.launch import Node, build_launch, child_environment, ngram_obstacle
from server.plan import warned, warnings_of
from server.resolved import changed_arguments
from tests.server.drafters import DRAFT_VOCAB, llama_tensors, write_drafter

REPO = Path(__file__).parents[2]
BASE = """
[target]
path = "./model"
served_name = "m"
[engine]
device = "{device}"
context_length = 1024
max_running_requests = 4
env = {{NCCL_PROTO = "LL"}}
extra_args = ["--decode-log-interval", "1"]
[speculation]
num_steps = 5
[drafters.mine]
path = "./mine"
[drafters.tree]
path = "./mine"
topk = 4
num_steps = 2
draft_tokens = 8
[drafters.ngram]
algorithm = "NGRAM"
ngram = {{draft_tokens = 6, max_bfs_breadth = 1}}
"""


@pytest.fixture
def profile(tmp_path):
    def make(device="cpu", edit=("", "")):
        (tmp_path / "model").mkdir(exist_ok=True)
        write_drafter(tmp_path / "mine")
        (tmp_path / "profile.toml").write_text(BASE.format(device=device).replace(*edit))
        return load_profile(tmp_path / "profile.toml")

    return make


def flags(profile, drafter):
    argv = build_launch(profile, resolve_drafter(profile, drafter), port=1234, config_file="k.yaml").argv
    return {flag: argv[at + 1] if at + 1 < len(argv) else "" for at, flag in enumerate(argv) if flag.startswith("--")}


def test_argv_on_a_cpu(profile, tmp_path):
    found = flags(profile(), "mine")
    assert found["--speculative-algorithm"] == "EAGLE3"
    assert found["--speculative-draft-model-path"] == str(tmp_path / "mine")
    assert (found["--speculative-num-steps"], found["--speculative-eagle-topk"]) == ("5", "1")
    assert found["--speculative-num-draft-tokens"] == "6"
    assert found["--speculative-draft-attention-backend"] == "intel_amx"
    assert found["--decode-log-interval"] == "1"
    assert found["--host"] == "127.0.0.1"
    assert "--tp" not in found and "--api-key" not in found


def test_argv_of_a_tree_of_ngram_and_of_none(profile):
    tree = flags(profile(), "tree")
    assert [tree[f"--speculative-{name}"] for name in ("num-steps", "eagle-topk", "num-draft-tokens")] == [
        "2",
        "4",
        "8",
    ]
    ngram = flags(profile(), "ngram")
    assert ngram["--speculative-num-draft-tokens"] == "6" and ngram["--speculative-ngram-max-bfs-breadth"] == "1"
    assert "--speculative-num-steps" not in ngram
    assert not [flag for flag in flags(profile(), "none") if flag.startswith("--speculative")]


ADAPTIVE = """[drafters.own]
path = "./mine"
adaptive = "adaptive.json"
[drafters.sglang]
path = "./mine"
adaptive = true
[drafters.ngram]"""


def test_adaptive_drafters_beside_a_fixed_one(profile, tmp_path):
    made = profile(edit=("[drafters.ngram]", ADAPTIVE))
    (tmp_path / "adaptive.json").write_text(
        '{"ema_alpha": 0.3, "1": {"candidate_steps": [5]}, "8": {"candidate_steps": [0]}}'
    )
    own, sglang, fixed = (flags(made, name) for name in ("own", "sglang", "mine"))
    assert own["--speculative-adaptive-config"] == str(tmp_path / "adaptive.json")
    assert "--speculative-adaptive" in own and "--speculative-adaptive" in sglang
    assert "--speculative-adaptive-config" not in sglang
    assert not [flag for flag in fixed if "adaptive" in flag]
    expected = [
        build_launch(made, resolve_drafter(made, name), port=1, config_file="k").expected for name in ("own", "mine")
    ]
    assert [each["speculative_adaptive"] for each in expected] == [True, False]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot be read"),
        ("{", "is no adaptive config"),
        ("[]", "is no adaptive config"),
        ('{"1": {}}', "is no adaptive config"),
        ('{"1": {"candidate_steps": [0, 3]}}', r"num_steps 5, but .* knows only \[0, 3\]"),
    ],
)
def test_an_adaptive_file_that_cannot_be_served(profile, tmp_path, text, says):
    made = profile(edit=("[drafters.ngram]", ADAPTIVE))
    if text is not None:
        (tmp_path / "adaptive.json").write_text(text)
    with pytest.raises(LaunchError, match=says):
        flags(made, "own")


def test_a_gpu_profile_gets_nothing_of_the_cpu(profile):
    launch = build_launch(profile("cuda"), resolve_drafter(profile("cuda"), "mine"), port=1, config_file="k.yaml")
    assert "intel_amx" not in launch.argv
    assert launch.environment == {"NCCL_PROTO": "LL", "HF_HUB_OFFLINE": "1"}


def test_a_folder_is_a_drafter_too(profile, tmp_path, monkeypatch):
    made = profile()
    monkeypatch.chdir(tmp_path)
    for name in (str(tmp_path / "mine"), "./mine"):
        drafter = resolve_drafter(made, name)
        assert drafter.path == str(tmp_path / "mine")
        assert drafter.sha256 == read_folder(tmp_path / "mine").sha256
    override = resolve_drafter(made, "mine", num_steps=2)
    assert (override.num_steps, override.topk, override.draft_tokens) == (2, 1, 3)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mina", {}, "neither known by name (here are none, ngram, mine, tree"),
        ("mine", {"topk": 4}, "needs draft_tokens"),
        ("mine", {"draft_tokens": 9}, "a chain of 5 steps verifies 6 tokens, not 9"),
    ],
)
def test_combinations_that_cannot_be_served(profile, name, options, message):
    with pytest.raises(LaunchError) as caught:
        resolve_drafter(profile(), name, **options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            ('[drafters.mine]\npath = "./mine"', f'[drafters.mine]\npath = "./mine"\nsha256 = "{"0" * 64}"'),
            "it was changed",
        ),
        (
            ('[drafters.mine]\npath = "./mine"', '[drafters.mine]\npath = "./mine"\nlayer_ids = [1]'),
            "captures layers [1, 2, 3]",
        ),
        (('[drafters.mine]\npath = "./mine"', '[drafters.mine]\npath = "./gone"'), "is not a folder"),
        (("context_length = 1024", "context_length = 4096"), "allows 2,048 tokens of context"),
    ],
)
def test_a_drafter_that_does_not_fit(profile, edit, message):
    made = profile(edit=edit)
    with pytest.raises(DrafterError) as caught:
        check_drafter(made, resolve_drafter(made, "mine"))
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["~nobody-of-this-name/d", "x" * 300, "a\0b", "", "loop"])
def test_a_name_that_is_no_folder(profile, tmp_path, monkeypatch, name):
    made = profile()
    monkeypatch.chdir(tmp_path / "model")
    Path("loop").symlink_to("loop")
    with pytest.raises((LaunchError, DrafterError)):
        resolve_drafter(made, name)


@pytest.mark.parametrize("broken", ["loop", "folder", "config", "layers", "map"])
def test_a_broken_folder_is_one_sentence(command, profile, tmp_path, broken):
    profile(edit=("context_length = 1024", "context_length = 2048"))
    folder = tmp_path / "mine"
    if broken == "loop":
        shutil.rmtree(folder)
        folder.symlink_to("mine")
    elif broken == "folder":
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").mkdir()
    elif broken == "config":
        (folder / "config.json").write_text("[" * 100_000)
    elif broken == "layers":
        write_drafter(folder, eagle_config=[1, 2, 3])
    else:
        write_drafter(folder, {**llama_tensors(), "d2t": np.full(DRAFT_VOCAB, 10**6)})
    shown = command("plan", "--profile", str(tmp_path / "profile.toml"), "--drafter", "mine")
    assert shown.returncode == 1 and shown.stdout == ""
    assert shown.stderr.startswith("eyas: drafter ") or "config.json" in shown.stderr
    assert shown.stderr.count("\n") == 1 and "Traceback" not in shown.stderr


def test_environment_of_the_child(profile):
    launch = build_launch(profile(), resolve_drafter(profile(), "none"), port=1, config_file="k.yaml")
    inherited = {
        "PATH": "/bin",
        "SGLANG_SIMULATE_ACC_LEN": "4",
        "SGLANG_SIMULATE_ACC_TOKEN_MODE": "x",
        "SGL_SIMULATE_ACC_LEN": "4",
        "SGLANG_DSPARK_SIMULATE_FOLD": "1",
        "EYAS_KEYS_FILE": "/keys",
        "SGLANG_CACHE_DIR": "/cache",
    }
    child = child_environment(launch, inherited)
    assert not [name for name in child if "SIMULATE" in name or name.startswith("EYAS_")]
    assert (
        child["SGLANG_CACHE_DIR"] == "/cache" and child["NCCL_PROTO"] == "LL" and child["SGLANG_USE_CPU_ENGINE"] == "1"
    )
    assert child["PATH"].endswith(f"{os.pathsep}/bin")
    assert child_environment(launch, inherited, 1.0)["SGLANG_SIMULATE_ACC_LEN"] == "1.0"


def test_ngram_without_a_compiler():
    assert "compiler" in (ngram_obstacle({"PATH": "/nonexistent"}) or "")
    assert "clang-99" in (ngram_obstacle({"PATH": os.environ["PATH"], "CXX": "clang-99"}) or "")
    assert ngram_obstacle({"PATH": os.environ["PATH"], "CXX": "sh"}) is None


def test_what_the_engine_changed_is_listed():
    lines = changed_arguments({"a": 1, "b": None, "c": "x"}, {"a": 2, "b": None})
    assert lines == ["a: asked for 1, the engine runs with 2", "c: asked for 'x', the engine runs with None"]


def test_warnings_on_blackwell(profile):
    made = profile("cuda", edit=("[speculation]", 'quantization = "modelopt_fp4"\n[speculation]'))
    drafter = resolve_drafter(made, "mine")
    text = "\n".join([*warnings_of(made, drafter), *warned(check_drafter(made, drafter))])
    assert 'attention_backend = "flashinfer"' in text
    assert 'quantization = "unquant"' in text
    assert "mem_fraction is not set" in text
    assert "topk above 1" in "\n".join(warnings_of(made, resolve_drafter(made, "tree")))


def test_plan_on_the_command_line(command):
    kimi = "deploy/profiles/kimi-k2.5-nvfp4-8xb200.toml"
    outside = [sys.executable, "-m", "server", "plan", "--profile", kimi, "--drafter", "lightseek-mha"]
    shown = subprocess.run(outside, capture_output=True, text=True, cwd=REPO)
    assert shown.returncode == 0
    assert "--speculative-draft-attention-backend flashinfer" in shown.stdout
    assert "# warning: " in shown.stdout
    plan = json.loads(command("plan", "--profile", kimi, "--json").stdout)
    assert plan["drafter"]["name"] == "lightseek-mla"
    assert plan["argv"][plan["argv"].index("--tp") + 1] == "8"
    assert not [arg for arg in plan["argv"] if "api-key" in arg]


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["plan", "--profile", "none.toml"], 1, "eyas: profile none.toml does not exist"),
        (
            ["plan", "--profile", "deploy/profiles/cpu-smollm2.toml", "--drafter", "x"],
            1,
            "eyas: drafter 'x' is neither",
        ),
        (["serve", "--profile", "pyproject.toml"], 1, "eyas: profile pyproject.toml: "),
        (["plan"], 2, "--profile"),
        ([], 2, "COMMAND"),
    ],
)
def test_errors_on_the_command_line(command, argv, code, message):
    shown = command(*argv)
    assert shown.returncode == code
    assert message in shown.stderr
    assert "Traceback" not in shown.stderr and shown.stdout == ""


def test_a_registered_drafter_goes_by_its_name(profile, tmp_path, monkeypatch):
    monkeypatch.setenv("EYAS_HOME", str(tmp_path / "home"))
    ours = profile()
    hidden = write_drafter(tmp_path / "home" / "drafters" / "mine")
    other = write_drafter(tmp_path / "home" / "drafters" / "other")
    found = resolve_drafter(ours, "other")
    assert (found.name, found.path) == ("other", str(other))
    assert resolve_drafter(ours, "mine").path == str(tmp_path / "mine") != str(hidden)


def test_a_profile_may_name_a_registered_drafter_by_its_path(profile, tmp_path, monkeypatch):
    """And one that is still to be made is refused at a start, not taken for a hub id; a plan goes on without it."""
    monkeypatch.setenv("EYAS_HOME", str(tmp_path / "home"))
    made = profile(edit=("[drafters.tree]", '[drafters.later]\npath = "made-later"\n[drafters.tree]'))
    with pytest.raises(LaunchError, match="'made-later' is neither a registered drafter nor a folder"):
        resolve_drafter(made, "later")
    assert resolve_drafter(made, "later", here=False).folder is None
    folder = write_drafter(tmp_path / "home" / "drafters" / "made-later")
    assert resolve_drafter(made, "later").path == str(folder)


def test_other_layers_keep_the_rest_of_the_drafters_own_config(profile, tmp_path):
    made = profile(
        edit=("[drafters.tree]", '[drafters.o]\npath = "./mine"\noverride_layer_ids = [2, 3, 4]\n[drafters.tree]')
    )
    write_drafter(
        tmp_path / "mine", eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": False}
    )
    override = json.loads(flags(made, "o")["--json-model-override-args"])
    assert override == {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 4], "use_aux_hidden_state": False}}
    assert "--json-model-override-args" not in flags(made, "mine")


def test_nodes(profile):
    one = profile()
    several = profile(edit=("[engine]", "[engine]\ntp = 4\nnodes = 2"))

    def argv(made, node):
        return build_launch(made, resolve_drafter(made, "none"), port=1, config_file="k.yaml", node=node).argv

    second = " ".join(argv(several, Node(1, "a:1")))
    assert "--tp 4 --nnodes 2 --node-rank 1 --dist-init-addr a:1" in second
    assert "--node-rank 0" in " ".join(argv(several, Node(0, "a:1"))) and "--node-rank" not in argv(one, Node())
    for made, node, says in (
        (several, Node(), "give --dist-init-addr HOST:PORT"),
        (several, Node(2, "a:1"), "--node-rank is 2, but the profile has nodes = 2: 0 to 1"),
        (several, Node(-1, "a:1"), "--node-rank is -1"),
        (one, Node(1), "has one node"),
        (one, Node(0, "a:1"), "has one node"),
    ):
        with pytest.raises(LaunchError, match=says):
            argv(made, node)
