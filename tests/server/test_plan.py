"""`python -m server plan`: memory, break-even and warnings, with and without the models' files; and `--pin`."""

import json
import re
import shutil
import tomllib
from pathlib import Path

import pytest

from server.cli import main
from server.config import load_profile
from server.known import find
from tests.server.drafters import write_drafter

REPO = Path(__file__).parents[2]
PROFILES = REPO / "deploy/profiles"
B200, H200, RTX, TWO = (
    PROFILES / f"kimi-k2.5-{name}.toml" for name in ("nvfp4-8xb200", "8xh200", "8xrtx6000-pcie", "2node")
)


@pytest.fixture
def plan(capsys):
    def ask(profile, *more, code=0):
        assert main(["plan", "--profile", str(profile), *more]) == code
        shown = capsys.readouterr()
        return json.loads(shown.out) if "--json" in more else shown.out if code == 0 else shown.err

    return ask


def test_memory_of_a_gpu_as_its_profile_says_at_the_top(plan):
    """Each profile's own header states the figures that the plan computes."""
    for file in (B200, PROFILES / "kimi-k2.5-int4-8xb200.toml", H200, RTX, TWO):
        found = plan(file, "--json")["memory"]
        head = file.read_text().partition("default_drafter")[0]
        assert f"weights {sum(found['weights'].values()) / 1e9:.1f}:" in head, file.name
        left = found["mem_fraction"] - sum(found["weights"].values()) - found["drafter"]
        stated = float(re.search(r"so ([\d.]+) for the cache", head).group(1))
        assert stated == pytest.approx(left / 1e9, abs=0.15), file.name
        assert found["gpus"] == tomllib.loads(file.read_text())["engine"]["tp"]


def test_the_load_to_plan_for(plan):
    usual = plan(B200, "--json")
    assert usual["memory"]["asked"] == {"context": 131072, "requests": 16, "tokens": 2097152}
    assert not [line for line in usual["warnings"] if "the cache holds" in line]
    heavy = plan(B200, "--json", "--context", "65536", "--requests", "64")
    assert heavy["memory"]["asked"]["tokens"] == 64 * 65536
    assert [line for line in heavy["warnings"] if "the cache holds 32 of 64 requests of 65,536 tokens" in line]
    assert heavy["argv"] == usual["argv"], "a load to plan for changes nothing that is started"


def test_break_even_with_and_without_the_cheap_allreduce(plan):
    found = plan(RTX, "--json")["break_even"]
    cheap, dear = found["allreduces"]
    assert (cheap["name"], cheap["set"], dear["name"], dear["set"]) == ("pcie-ipc", True, "pcie-nccl", False)
    first, last = cheap["rows"][0], dear["rows"][0]
    assert first["requests"] == last["requests"] == 1 and first["context"] == 1024
    assert last["decode_ms"] > 4 * first["decode_ms"]
    assert 1 < first["break_even"] == pytest.approx(first["cycle_ms"] / first["decode_ms"])
    text = plan(RTX)
    assert "all-reduce pcie-ipc, as this profile sets it" in text and "all-reduce pcie-nccl, without that" in text


def test_without_the_variable_pcie_is_told_of(plan, tmp_path):
    file = tmp_path / "rtx.toml"
    file.write_text(RTX.read_text().replace('SGLANG_ENABLE_PCIE_IPC_ALLREDUCE = "1"', ""))
    found = plan(file, "--json")
    assert [each["set"] for each in found["break_even"]["allreduces"]] == [False, True]
    assert [line for line in found["warnings"] if line.startswith("without SGLANG_ENABLE_PCIE_IPC_ALLREDUCE")]


@pytest.mark.parametrize(
    ("file", "drafter", "why"),
    [
        (TWO, "lightseek-mla", "between machines"),
        (B200, "none", "nothing speculates"),
        (B200, "ngram", "on the host"),
        (PROFILES / "cpu-smollm2.toml", "smollm2-135m-eagle3", "names no machine"),
    ],
)
def test_why_no_break_even_is_told(plan, file, drafter, why):
    assert why in plan(file, "--drafter", drafter, "--json")["break_even"]["unknown"]


def test_a_drafters_cache_that_nobody_reserved(plan):
    lines = plan(H200, "--drafter", "k2-direct", "--json")["warnings"]
    assert [line for line in lines if "takes 4,096 bytes of cache a token" in line and "1,152" in line]
    assert not [line for line in plan(H200, "--json")["warnings"] if "bytes of cache a token" in line]


def test_two_nodes(plan):
    shown = plan(TWO, "--node-rank", "1", "--dist-init-addr", "10.0.0.1:20000")
    assert "--nnodes 2 \\\n  --node-rank 1 \\\n  --dist-init-addr 10.0.0.1:20000" in shown
    assert "FIRST-NODE:20000" in plan(TWO)
    assert "0 to 1" in plan(TWO, "--node-rank", "2", "--dist-init-addr", "a:1", code=1)
    assert "has one node" in plan(H200, "--dist-init-addr", "a:1", code=1)


def test_the_other_reading_of_the_layers(plan):
    argv = plan(B200, "--drafter", "k2-direct-outputs", "--json")["argv"]
    override = json.loads(argv[argv.index("--json-model-override-args") + 1])
    assert override["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [3, 31, 59]
    assert "--json-model-override-args" not in plan(B200, "--drafter", "k2-direct", "--json")["argv"]


def test_with_the_targets_files(plan, tmp_path):
    """A folder's own config.json is read: half the layers, half the cache."""
    known = find("nvidia/Kimi-K2.5-NVFP4")
    config = {**known.config, "text_config": {**known.config["text_config"], "num_hidden_layers": 30}}
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    file = tmp_path / "profile.toml"
    file.write_text(B200.read_text().replace('"nvidia/Kimi-K2.5-NVFP4"', f'"{folder}"'))
    found = plan(file, "--drafter", "none", "--json")
    assert found["memory"]["cache_bytes_per_token"] == 576 * 30
    assert found["memory"]["sources"]["target"] == str(folder / "config.json")
    assert "revision" not in " ".join(found["warnings"])


PIN = """# A deployment.
default_drafter = "mine"
[target]
path = "org/model"
served_name = "m"
[engine]
device = "cpu"
context_length = 1024
max_running_requests = 4

# The first one.
[drafters.mine] # ours
path = "org/drafter" # where it comes from
quantization = "unquant"

# The second one keeps its comment.
[drafters.other]
path = "./other"
layer_ids = [1, 2, 3]
"""


OTHER = '[drafters.other]\npath = "./other"\nlayer_ids = [1, 2, 3]'


@pytest.fixture
def pinned(tmp_path):
    write_drafter(tmp_path / "other")
    snapshot = tmp_path / "hub" / "snapshots" / ("ab" * 20)
    snapshot.parent.mkdir(parents=True)
    write_drafter(snapshot)
    file = tmp_path / "profile.toml"
    file.write_text(PIN)
    file.chmod(0o600)
    return file, snapshot


def test_pin_writes_what_a_download_is(plan, pinned):
    file, snapshot = pinned
    shown = plan(file, "--pin", f"mine={snapshot}", "--json")
    profile = load_profile(file)
    table = profile.drafters["mine"]
    assert (table.path, table.revision) == (str(snapshot), "ab" * 20)
    assert table.sha256 == shown["drafter"]["sha256"] and table.layer_ids == [1, 2, 3]
    assert profile.drafters["other"] == load_profile(write(file.parent / "before.toml", PIN)).drafters["other"]
    text = file.read_text()
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        line for line in PIN.splitlines() if line.startswith("#")
    ]
    assert "[drafters.mine] # ours" in text and "# where it comes from" in text
    assert text.index("sha256") < text.index("# The second one") and file.stat().st_mode & 0o777 == 0o600
    assert not [line for line in shown["warnings"] if "not pinned" in line]
    again = file.read_bytes()
    plan(file, "--pin", "mine")
    assert file.read_bytes() == again, "pinning twice changes nothing"


def test_a_pinned_drafter_that_changed_is_refused_until_it_is_pinned_anew(plan, pinned):
    file, snapshot = pinned
    plan(file, "--pin", "other")
    config = snapshot.parents[2] / "other" / "config.json"
    config.write_text(config.read_text() + "\n")
    assert "it was changed" in plan(file, "--drafter", "other", code=1)
    plan(file, "--pin", "other")
    plan(file, "--drafter", "other")


@pytest.mark.parametrize(
    ("asked", "edit", "says"),
    [
        ("nobody", ("", ""), "no EAGLE3 drafter of that name, only mine, other"),
        ("mine", ("", ""), "--pin mine=DIR"),
        ("mine=/nowhere", ("", ""), "is not a folder"),
        ("other", (OTHER, '[drafters]\nother = {path = "./other"}'), "write it yourself: sha256 ="),
        ("other", ("layer_ids = [1, 2, 3]", "layer_ids = [1, 2, 4]"), "captures layers"),
    ],
)
def test_what_cannot_be_pinned_leaves_the_profile_as_it_was(plan, pinned, asked, edit, says):
    file, _ = pinned
    text = PIN.replace(*edit)
    file.write_text(text)
    assert says in plan(file, "--pin", asked, code=1)
    assert file.read_text() == text
    assert sorted(path.name for path in file.parent.iterdir()) == ["hub", "other", "profile.toml"]


def test_a_drafter_that_fails_the_preflight_is_not_pinned(plan, pinned):
    file, snapshot = pinned
    shutil.copy(snapshot / "config.json", snapshot / "config.bak")
    write_drafter(snapshot, eagle_config={})
    config = json.loads((snapshot / "config.json").read_text())
    del config["draft_vocab_size"]
    (snapshot / "config.json").write_text(json.dumps(config))
    assert "eyas: " in plan(file, "--pin", f"mine={snapshot}", code=1)
    assert file.read_text() == PIN


def write(file, text):
    file.write_text(text)
    return file
