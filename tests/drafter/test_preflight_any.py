"""preflight on whatever a config, a manifest or a file may hold: judged in a line each, never a traceback."""

import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from drafter.checkpoint import summary
from drafter.checkpoint.folder import DrafterError, open_folder
from drafter.checkpoint.preflight import preflight, read_folder
from drafter.checkpoint.subject import Deployment, Subject, read_target
from tests.drafter.test_preflight import SERVED, errors, random_weights, write_config, write_target
from tests.server.drafters import LLAMA, MLA, llama_tensors, mla_tensors, write_drafter


@pytest.fixture
def sound(tmp_path):
    return write_drafter(tmp_path / "d", random_weights(llama_tensors()))


@pytest.mark.parametrize("theta", [0, -1, -0.0, 10**400, float("inf"), float("nan")])
def test_a_rope_that_turns_nothing(sound, tmp_path, theta):
    """Of the target too, whose config is not judged: no traceback."""
    write_config(sound, rope_theta=theta)
    target = write_target(tmp_path / "target")
    if theta <= 0:
        assert list(errors(sound, target)) == ["rope"]
    else:
        with pytest.raises(DrafterError, match="is not JSON"):
            open_folder(sound)
    write_config(sound, rope_theta=10000.0)
    assert not errors(sound, write_target(tmp_path / "other", rope_theta=theta))


@pytest.mark.parametrize("tied", ["true", "false", 1, 0, []])
def test_a_tie_that_is_no_boolean(sound, tied):
    """SGLang takes any of them by its truth: the head would be the target's embedding for the string "false"."""
    write_config(sound, tie_word_embeddings=tied)
    assert "tied-head" in errors(sound)


@pytest.mark.parametrize("config", [{}, {"added_tokens_decoder": None}, {"model_max_length": 4}])
def test_a_tokenizer_that_names_no_special_tokens(sound, tmp_path, config):
    """sentencepiece's folders: nothing is known, which is said and stands in no way."""
    target = write_target(tmp_path / "target")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).unlink(missing_ok=True)
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    found = {f.check: f for f in preflight(Subject(open_folder(sound), read_target(target)))}
    assert found["special-tokens"].severity == "info" and "does not name" in found["special-tokens"].found
    assert not errors(sound, target)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**18) | st.just(10**400) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    key=st.sampled_from(
        sorted(
            {
                *LLAMA,
                *MLA,
                "rope_scaling",
                "rope_theta",
                "rope_parameters",
                "fc_norm",
                "bias",
                "norm_output",
                "sliding_window",
                "quantization_config",
                "tie_word_embeddings",
                "target_hidden_size",
                "num_aux_hidden_states",
                "auto_map",
            }
        )
    ),
    value=JSON,
    style=st.sampled_from(["llama", "mla"]),
)
def test_any_config_is_judged_without_a_traceback(tmp_path, key, value, style):
    folder, target = tmp_path / "d", tmp_path / "t"
    config, make = (LLAMA, llama_tensors) if style == "llama" else (MLA, mla_tensors)
    write_drafter(folder, make(), **(config | {key: value}))
    if not target.exists():
        write_target(target)
    try:
        opened = open_folder(folder)
    except DrafterError as refused:
        assert re.search("NaN|Infinity|0{400}", (folder / "config.json").read_text()) and "no number" in str(refused)
        return
    found = preflight(Subject(opened, read_target(target), Deployment(**SERVED)))
    assert all("\n" not in finding.sentence for finding in found)
    summary.render(json.loads(json.dumps(summary.summarise(folder), allow_nan=False)), tensors=True)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=JSON, part=st.sampled_from(["sha256", "target", "capture", "vocab_hash", "format"]))
def test_any_manifest_is_judged_without_a_traceback(tmp_path, value, part):
    folder, target = tmp_path / "d", tmp_path / "t"
    if not target.exists():
        write_target(target)
        write_drafter(folder)
    (folder / "eyas.json").write_text(json.dumps({"format": 1, part: value}))
    preflight(Subject(open_folder(folder), read_target(target)))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damaged_byte_is_harmless_or_named(tmp_path, data):
    """A file with bytes changed anywhere in its header is refused, or reads as a drafter still."""
    file = write_drafter(tmp_path / "d") / "model.safetensors"
    whole = bytearray(file.read_bytes())
    length = int.from_bytes(whole[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, 7 + length))] = data.draw(st.integers(0, 255))
    file.write_bytes(bytes(whole))
    try:
        read_folder(file.parent)
    except DrafterError as refused:
        assert "\n" not in str(refused).strip()
    else:  # and then it is one to the library that the engine loads it by
        load_file(file)
