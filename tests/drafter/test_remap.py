"""remap: kept rows are kept bit for bit, and made ones follow the verifier."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drafter.__main__ import main
from drafter.checkpoint.manifest import read_manifest
from drafter.checkpoint.preflight import read_folder
from drafter.checkpoint.vocab import DraftVocab
from drafter.data.target import target_identity
from drafter.data.tensorfile import to_float32, write_tensors
from tests.drafter.remapping import DTYPES, HEAD, Remap, cast, drafter_of, normal, tensors_of, verifier_of, write_map
from tests.server.drafters import HIDDEN, VOCAB

FOLDER_FIXTURE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("init", ["verifier", "scaled", "ridge"])
def test_an_identity_remap_changes_no_bit(remap: Remap, verifier: Path, dtype: str, init: str) -> None:
    ids = [3, 8, 9, 40, 63]
    source = drafter_of(remap.folder / "d", ids, cast(normal(5, HIDDEN), dtype))
    found = remap.run(source, source, verifier, init)
    assert (found["kept"], found["moved"], found["initialised"], found["dropped"]) == (5, 0, 0, 0)
    for name in ("config.json", "model.safetensors"):
        assert (found["folder"] / name).read_bytes() == (source / name).read_bytes()


unordered = st.permutations(range(VOCAB)).flatmap(lambda ids: st.integers(1, 20).map(lambda n: list(ids[:n])))


@FOLDER_FIXTURE
@given(
    old=unordered, new=unordered, dtype=st.sampled_from(DTYPES), theirs=st.sampled_from(DTYPES), listed=st.booleans()
)
def test_rows_go_where_a_dictionary_says(
    remap: Remap, old: list[int], new: list[int], dtype: str, theirs: str, listed: bool
) -> None:
    shutil.rmtree(remap.folder)
    remap.folder.mkdir()
    head, target = cast(normal(len(old), HIDDEN), dtype), cast(normal(VOCAB, HIDDEN, seed=1), theirs)
    source, verifier = drafter_of(remap.folder / "d", old, head), verifier_of(remap.folder / "v", target)
    if listed:
        vocab = remap.folder / "new.json"
        vocab.write_text(json.dumps(new))
    else:
        vocab = write_map(remap.folder / "new.safetensors", new)
    found = remap.run(source, vocab, verifier)
    rows = dict(zip(old, head, strict=True))
    made = cast(to_float32(target), dtype)
    expected = np.array([rows.get(token, made[token]) for token in sorted(new)])

    out = tensors_of(found["folder"])
    assert out[HEAD].dtype == head.dtype and out[HEAD].tobytes() == expected.tobytes()
    assert (out["d2t"] + np.arange(len(new))).tolist() == sorted(new) and out["d2t"].dtype == np.int64
    assert np.flatnonzero(out["t2d"]).tolist() == sorted(new) and len(out["t2d"]) == VOCAB
    before = tensors_of(source)
    assert out.keys() == before.keys()
    for name in before.keys() - {HEAD, "d2t", "t2d"}:
        assert out[name].tobytes() == before[name].tobytes() and out[name].shape == before[name].shape
    assert found["kept"] == found["shared"] == len(set(old) & set(new))
    assert (found["initialised"], found["dropped"]) == (len(set(new) - set(old)), len(set(old) - set(new)))
    read = read_folder(found["folder"])
    assert read.config == json.loads((source / "config.json").read_text()) | {"draft_vocab_size": len(new)}
    manifest = read_manifest(found["folder"])
    assert manifest is not None
    assert manifest["vocab_hash"] == found["vocab_hash"] == DraftVocab(np.array(sorted(new)), VOCAB).hash
    assert manifest["target"] == {"name": "v"} | target_identity(verifier)
    assert manifest["origin"]["kind"] == "remap" and manifest["origin"]["parent"] == "d"
    assert manifest["training"]["remap"]["kept"] == found["kept"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_there_and_back_is_the_same_file(remap: Remap, verifier: Path, dtype: str) -> None:
    ids = [3, 8, 9, 40, 63]
    source = drafter_of(remap.folder / "d", ids, cast(normal(5, HIDDEN), dtype))
    large = remap.run(source, write_map(remap.folder / "l.safetensors", [1, *ids, 50, 41]), verifier, "scaled")
    assert large["initialised"] == 3 and large["dropped"] == 0
    back = remap.run(large["folder"], source, verifier, "ridge")
    assert back["kept"] == 5 and back["dropped"] == 3
    assert (back["folder"] / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_a_scrambled_map_is_mended_by_the_one_the_rows_were_trained_under(remap: Remap, verifier: Path) -> None:
    ids, head = [3, 8, 9, 40, 63], normal(5, HIDDEN)
    right = write_map(remap.folder / "right.safetensors", ids)
    spoilt = drafter_of(remap.folder / "spoilt", [40, 3, 63, 9, 8], head)
    found = remap.run(spoilt, right, verifier, rows_vocab=right)
    assert np.array_equal(tensors_of(found["folder"])[HEAD], head)
    assert (tensors_of(found["folder"])["d2t"] + np.arange(5)).tolist() == ids
    wrong = remap.run(spoilt, right, verifier)
    assert wrong["moved"] > 0 and not np.array_equal(tensors_of(wrong["folder"])[HEAD], head)


def test_a_map_overwritten_by_another_vocabulary(remap: Remap, verifier: Path) -> None:
    """The case: d2t and t2d are another vocabulary's, of the same size, and the rows were never moved."""
    head = normal(5, HIDDEN)
    old = write_map(remap.folder / "old.safetensors", [3, 8, 9, 40, 63])
    spoilt = drafter_of(remap.folder / "spoilt", [2, 3, 8, 9, 40], head)
    found = remap.run(spoilt, spoilt, verifier, rows_vocab=old)
    out = to_float32(tensors_of(found["folder"])[HEAD])
    target = tensors_of(verifier)[HEAD]
    assert np.array_equal(out, [target[2], head[0], head[1], head[2], head[3]])
    assert (found["kept"], found["initialised"], found["dropped"]) == (4, 1, 1)


def test_a_head_over_every_token_is_cut_to_some(remap: Remap, verifier: Path) -> None:
    head = normal(VOCAB, HIDDEN)
    source = drafter_of(remap.folder / "d", list(range(VOCAB)), head)
    tensors = {name: x for name, x in tensors_of(source).items() if name not in ("d2t", "t2d")}
    write_tensors(source / "model.safetensors", tensors)
    found = remap.run(source, write_map(remap.folder / "new.safetensors", [60, 2]), verifier)
    assert found["reading"] == "identity" and found["dropped"] == VOCAB - 2
    assert np.array_equal(tensors_of(found["folder"])[HEAD], head[[2, 60]])
    assert read_folder(found["folder"]).tensors["d2t"].shape == (2,)


def test_a_drafter_in_two_files_becomes_one(remap: Remap, verifier: Path) -> None:
    source = drafter_of(remap.folder / "d", [3, 8, 9], normal(3, HIDDEN))
    whole = tensors_of(source)
    (source / "model.safetensors").unlink()
    names = sorted(whole)
    for number, part in enumerate((names[::2], names[1::2])):
        write_tensors(source / f"model-0000{number}-of-00002.safetensors", {name: whole[name] for name in part})
    found = remap.run(source, source, verifier)
    out = tensors_of(found["folder"])
    assert out.keys() == whole.keys() and all(np.array_equal(out[name], whole[name]) for name in whole)


def heads(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """(the verifier's head [V, H], what a drafter's would be [V, H])."""
    target = normal(VOCAB, HIDDEN, seed=7)
    turned, _ = np.linalg.qr(normal(HIDDEN, HIDDEN, seed=8))
    return target, {"same": target, "longer": 1.75 * target, "turned": target @ turned}[kind].astype(np.float32)


@pytest.mark.parametrize(
    ("kind", "cosine", "ratio", "init"),
    [("same", 1.0, 1.0, "verifier"), ("longer", 1.0, 1.75, "scaled"), ("turned", None, 1.0, "ridge")],
)
def test_the_recommended_init_gives_the_rows_that_would_have_been(
    remap: Remap, kind: str, cosine: float | None, ratio: float, init: str
) -> None:
    target, head = heads(kind)
    old, new = list(range(0, VOCAB, 2)), [*range(1, VOCAB, 3), 2]
    source, verifier = drafter_of(remap.folder / "d", old, head[old]), verifier_of(remap.folder / "v", target)
    vocab = write_map(remap.folder / "new.safetensors", new)
    errors = {}
    for choice in ("verifier", "scaled", "ridge"):
        found = remap.run(source, vocab, verifier, choice)
        assert found["recommended"] == init
        assert f"--init {init} is recommended" in remap.last.splitlines()[0]
        pairs = [(head[token], target[token]) for token in old if token in new]
        by_hand = np.mean([a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in pairs])
        assert found["mean_cosine"] == pytest.approx(by_hand, abs=1e-5)
        assert found["norm_ratio"] == pytest.approx(ratio, rel=1e-5)
        errors[choice] = float(np.abs(tensors_of(found["folder"])[HEAD] - head[sorted(new)]).max())
    if cosine is not None:
        assert by_hand == pytest.approx(cosine)
    assert errors[init] < 0.01 and errors[init] <= min(errors.values()) + 0.01
    if kind != "same":
        assert errors["verifier"] > 0.1


def test_scaled_rows_have_the_median_norm_of_the_shared_ones(remap: Remap, verifier: Path) -> None:
    old, new = list(range(20)), list(range(10, 40))
    factors = np.linspace(0.5, 3.0, 20, dtype=np.float32)
    target = tensors_of(verifier)[HEAD]
    source = drafter_of(remap.folder / "d", old, target[:20] * factors[:, None])
    found = remap.run(source, write_map(remap.folder / "new.safetensors", new), verifier, "scaled")
    out = tensors_of(found["folder"])[HEAD]
    np.testing.assert_allclose(out[10:], np.median(factors[10:]) * target[20:40], rtol=1e-6)


def test_ridge_fits_heads_of_different_widths(remap: Remap) -> None:
    target = normal(VOCAB, 5, seed=2)
    head = (target @ normal(5, HIDDEN, seed=3)).astype(np.float32)
    verifier = verifier_of(remap.folder / "v", target)
    source = drafter_of(remap.folder / "d", list(range(40)), head[:40])
    vocab = write_map(remap.folder / "new.safetensors", list(range(30, 60)))
    found = remap.run(source, vocab, verifier, "ridge")
    assert found["mean_cosine"] is None and found["recommended"] == "ridge"
    np.testing.assert_allclose(tensors_of(found["folder"])[HEAD], head[30:60], atol=0.01)
    for init in ("verifier", "scaled"):
        assert "rows are 5 wide and the drafter's 8" in remap.refused(source, vocab, verifier, init)


def test_without_a_shared_token_only_a_copy_is_possible(remap: Remap, verifier: Path) -> None:
    source = drafter_of(remap.folder / "d", [1, 2], normal(2, HIDDEN))
    vocab = write_map(remap.folder / "new.safetensors", [5, 9, 11])
    found = remap.run(source, vocab, verifier)
    assert (found["kept"], found["initialised"], found["recommended"]) == (0, 3, "verifier")
    for init in ("scaled", "ridge"):
        assert "--init verifier" in remap.refused(source, vocab, verifier, init)


@pytest.mark.parametrize(
    ("name", "tied"),
    [
        ("lm_head.weight", False),
        ("language_model.lm_head.weight", False),
        ("model.embed_tokens.weight", True),
        ("language_model.model.embed_tokens.weight", True),
    ],
)
@pytest.mark.parametrize("sharded", [False, True])
def test_the_verifiers_head_is_found(remap: Remap, name: str, tied: bool, sharded: bool) -> None:
    target = normal(VOCAB, HIDDEN, seed=7)
    verifier = verifier_of(remap.folder / "v", target, name, tied)
    if sharded:  # and the other shard cannot be read: only the head's is opened
        (verifier / "model.safetensors").rename(verifier / "model-00002-of-00002.safetensors")
        (verifier / "model-00001-of-00002.safetensors").write_bytes(b"not safetensors")
        index = {name: "model-00002-of-00002.safetensors", "model.fc": "model-00001-of-00002.safetensors"}
        (verifier / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    source = drafter_of(remap.folder / "d", [1, 2], normal(2, HIDDEN))
    found = remap.run(source, write_map(remap.folder / "new.safetensors", [2, 9]), verifier)
    assert np.array_equal(tensors_of(found["folder"])[HEAD][1], target[9])


def test_the_words(remap: Remap, verifier: Path) -> None:
    source = drafter_of(remap.folder / "d", [1, 2, 5], normal(3, HIDDEN))
    vocab = write_map(remap.folder / "new.safetensors", [2, 3, 9, 5])
    command = ["remap", str(source), "--vocab", str(vocab), "--verifier", str(verifier), "--init", "verifier"]
    assert main([*command, "--out", str(remap.folder / "out"), "--name", "mended"]) == 0
    shown = remap.capsys.readouterr()
    assert "2 rows kept (1 of them moved), 2 initialised, 1 dropped; 4 rows." in shown.out
    assert "Made by --init verifier; ridge is recommended." in shown.out
    assert shown.err.startswith("remap: mean cosine ") and shown.err.count("\n") == 1
    manifest = read_manifest(remap.folder / "out")
    assert manifest is not None and manifest["name"] == "mended"
