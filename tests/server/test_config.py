"""Profiles: what is accepted, and what a person is told about one that is not."""

from pathlib import Path

import pytest

from server.config import ProfileError, load_profile

REPO = Path(__file__).parents[2]
GOOD = """
[target]
path = "org/model"
served_name = "m"
[engine]
device = "cuda"
context_length = 1024
max_running_requests = 4
"""


def load(tmp_path, text):
    (tmp_path / "profile.toml").write_text(text)
    return load_profile(tmp_path / "profile.toml")


@pytest.mark.parametrize("profile", sorted((REPO / "deploy/profiles").glob("*.toml")), ids=lambda path: path.stem)
def test_the_profiles_that_come_with_eyas_are_valid(profile):
    assert load_profile(profile).target.served_name


def test_a_package_becomes_a_folder_named_by_its_hash(monkeypatch, tmp_path):
    monkeypatch.setenv("EYAS_HOME", str(tmp_path))
    text = GOOD.replace('path = "org/model"', f'package = "some-model"\nsha256 = "{"ab" * 32}"')
    assert load(tmp_path, text).model_path == str(tmp_path / "models" / "some-model-abababababab")


def test_a_relative_folder_is_beside_the_profile_and_a_hub_id_is_left_alone(tmp_path):
    assert load(tmp_path, GOOD).model_path == "org/model"
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert load(tmp_path, GOOD).model_path == str(tmp_path / "org" / "model")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("[engine]", "[engin]"), "unknown key 'engin': did you mean 'engine'?"),
        (("device =", "devise ="), "unknown key 'engine.devise': did you mean 'device'?"),
        (("device =", "zzzzz ="), "unknown key 'engine.zzzzz': known here: device, tp"),
        (('device = "cuda"', 'device = "tpu"'), "engine.device: should be 'cpu' or 'cuda' (found 'tpu')"),
        (("context_length = 1024", 'context_length = "1024"'), "engine.context_length: should be a valid integer"),
        (
            ("context_length = 1024", "context_length = 0"),
            "engine.context_length: should be greater than or equal to 1",
        ),
        (("context_length = 1024\n", ""), "'engine.context_length' is missing"),
        (("[engine]", "[arms.a]\nurl = 'http://x'\nlocal = true\n[engine]"), "arms.a: needs exactly one of 'url' and"),
        (("[engine]", "[arms.a]\n[engine]"), "arms.a: needs exactly one of 'url' and"),
        (("[engine]", "[arms.a]\nurl = 'http://x/v1'\n[engine]"), "arms.a.url: "),
        (("[engine]", "[arms.'a b']\nlocal = true\n[engine]"), "arms.a b"),
        (("[engine]", "[arms.a]\nlocal = true\nweigth = 1.0\n[engine]"), "did you mean 'weight'?"),
        (("[engine]", "[arms.a]\nlocal = true\nweight = -1.0\n[engine]"), "arms.a.weight: should be greater"),
        (("[engine]", "[arms.a]\nlocal = true\nweight = inf\n[engine]"), "arms.a.weight: should be a finite number"),
        (("[engine]", "[arms.a]\nlocal = true\nengine_keys_file = 'k'\n[engine]"), "are for a remote arm"),
        (("[engine]", "[arms.a]\nurl = 'http://x'\nenv = {A = '1'}\n[engine]"), "'env' is for a local arm"),
        (("[engine]", "[arms.a]\nlocal = true\nenv = {SGL_SIMULATE_X = '1'}\n[engine]"), "fakes acceptance"),
        (("[engine]", "[arms.a]\nurl = 'http://x'\nshadow = true\n[engine]"), "add one that answers"),
        (("[engine]", "[gateway.limits]\nrequests_per_minute = 0\n[engine]"), "gateway.limits.requests_per_minute: "),
        (("[engine]", "[gateway]\ntls_key = 'k'\n[engine]"), "'tls_certificate' and 'tls_key' go together"),
        (("[engine]", "[engine]\non_gateway_exit = 'leave'"), "engine.on_gateway_exit: should be 'stop' or 'keep'"),
        (('path = "org/model"', ""), "target: needs exactly one of 'path' and 'package'"),
        (('path = "org/model"', 'package = "p"'), "target: 'package' and 'sha256'"),
        (("[engine]", "[engine]\nextra_args = ['--api-key', 'x']"), "extra_args has --api-key"),
        (("[engine]", "[engine]\nextra_args = ['--api-k=x']"), "extra_args has --api-k, but --api-key is set"),
        (("[engine]", "[engine]\nextra_args = ['--speculative-num-st', '5']"), "but --speculative-num-steps is set"),
        (("[engine]", "[engine]\nenv = {SGLANG_SIMULATE_ACC_LEN = '3'}"), "fakes acceptance"),
        (("[engine]", "[engine]\nenv = {SGL_SIMULATE_ACC_LEN = '3'}"), "fakes acceptance"),
        (("[engine]", "[engine]\nenv = {EYAS_CAPTURE_DIR = '/x'}"), "for Eyas itself"),
        (("[engine]", '[engine]\nenv = {"A=B" = "1"}'), "no environment can hold"),
        (("[engine]", '[engine]\nenv = {A = "a\\u0000"}'), "no environment can hold"),
        (('path = "org/model"', 'path = ""'), "target.path"),
        (('path = "org/model"', 'path = "a\\u0000b"'), "target.path"),
        (("[engine]", "[target.x]\n[engine]"), "unknown key 'target.x'"),
        (("[target]", "a = " + "[" * 5000 + "\n[target]"), "nests too deep"),
        (("[engine]", "[speculation]\nnum_steps = 3\ndraft_tokens = 8\n[engine]"), "a chain (topk 1) of 3 steps"),
        (("[engine]", "[speculation]\ntopk = 4\n[engine]"), "a tree (topk > 1) needs draft_tokens"),
        (("[engine]", "[drafters.x]\nlayer_idz = [1]\npath='p'\n[engine]"), "did you mean 'layer_ids'?"),
        (("[engine]", "[drafters.x]\n[engine]"), "drafters.x: an EAGLE3 drafter needs 'path'"),
        (("[engine]", "[drafters.none]\npath='p'\n[engine]"), "'none' is reserved"),
        (("[engine]", "[drafters.ngram]\npath='p'\n[engine]"), "its algorithm must be NGRAM"),
        (("[engine]", "[engine"), "is not TOML"),
        (("[target]", "source = 'x'\n[target]"), "unknown key 'source'"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, change, message):
    assert change[0] in GOOD
    with pytest.raises(ProfileError) as caught:
        load(tmp_path, GOOD.replace(*change))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "profile.toml" in str(caught.value)


def test_a_missing_profile(tmp_path):
    with pytest.raises(ProfileError, match="does not exist"):
        load_profile(tmp_path / "none.toml")
    with pytest.raises(ProfileError, match="cannot be read"):
        load_profile(tmp_path)
