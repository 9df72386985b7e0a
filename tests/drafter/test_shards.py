"""Shards on disk: what is written is read back, a broken folder is refused, and a folder is valid at every moment."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from drafter.data import shard_writer
from drafter.data.shards import ShardError, check_target, not_finite, open_shards, token_bytes
from drafter.data.target import TargetError, output_head, target_identity
from drafter.data.tensorfile import TensorFileError, map_tensors, span_chunks, write_tensors
from tests.drafter.capturing import N_AUX, WIDTH, document, equal, write_target, writer

REPO = Path(__file__).parents[2]
SMALL = 2000  # bytes: two documents of 20 tokens in fp32 fill a shard


@pytest.fixture
def folder(tmp_path):
    with writer(tmp_path / "shards", shard_bytes=SMALL) as shards:
        for seed in range(7):
            shards.add(document(20, seed))
    return tmp_path / "shards"


def edit(folder, **changes):
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest.update(changes)
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_documents_come_back_as_they_were(tmp_path, dtype):
    documents = [document(length, seed, dtype) for seed, length in enumerate((1, 30, 2, 17, 50))]
    with writer(tmp_path, dtype=dtype, shard_bytes=SMALL // 2) as shards:
        for each in documents:
            shards.add(each)
    found = open_shards(tmp_path, verify=True)
    assert len(found) == 5 and len(found.manifest["shards"]) > 1
    for index, each in enumerate(documents):
        assert equal(found.document(index), each) and found.document(index).name == each.name
    assert found.names() == [each.name for each in documents]
    assert found.manifest["tokens"] == 100 and found.manifest["n_aux"] == N_AUX
    for index in (-1, 5):
        with pytest.raises(IndexError):
            found.document(index)
    for shard in found.manifest["shards"]:  # safetensors' own reader agrees, type and all
        with safe_open(tmp_path / shard["file"], "numpy") as file:
            assert file.get_slice("aux_hidden").get_dtype() == {"float32": "F32", "bfloat16": "BF16"}[dtype]
            assert file.get_tensor("doc_offsets")[-1] == shard["tokens"]
    sizes = sum((tmp_path / shard["file"]).stat().st_size for shard in found.manifest["shards"])
    assert 0 <= sizes - 100 * token_bytes(N_AUX, WIDTH, dtype) < 1000 * len(found.manifest["shards"])


def test_the_hash_of_the_data_follows_the_data(folder, tmp_path):
    with writer(tmp_path / "again", shard_bytes=SMALL) as shards:
        for seed in range(7):
            shards.add(document(20, seed))
    assert open_shards(folder).data_hash == open_shards(tmp_path / "again").data_hash
    with writer(tmp_path / "again", shard_bytes=SMALL) as shards:
        shards.add(document(20, 99))
    assert open_shards(folder).data_hash != open_shards(tmp_path / "again").data_hash


def test_going_on_gives_the_same_bytes_as_never_stopping(folder, tmp_path):
    with writer(tmp_path / "two", shard_bytes=SMALL) as shards:
        for seed in range(4):
            shards.add(document(20, seed))
    with writer(tmp_path / "two", shard_bytes=SMALL) as shards:
        assert shards.names == {document(20, seed).name for seed in range(4)} and shards.documents == 4
        for seed in range(4, 7):
            shards.add(document(20, seed))
    for file in sorted(folder.iterdir()):
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_ids": [1, 2, 4]}, ["layer_ids [1, 2, 3]", "[1, 2, 4]"]),
        ({"convention": "input_to_layer"}, ["convention 'output_of_layer'", "'input_to_layer'"]),
        ({"dtype": "bfloat16"}, ["dtype 'float32'", "'bfloat16'"]),
        ({"hidden_size": 8}, ["hidden_size 4", "8"]),
        (
            {"target": {"name": "t", "config_sha256": "c", "tokenizer_sha256": "t", "lm_head_sha256": "other"}},
            ["lm_head_sha256 'l'", "'other'"],
        ),
    ],
)
def test_another_kind_of_capture_is_refused(folder, changes, words):
    with pytest.raises(ShardError) as caught:
        writer(folder, **changes)
    assert all(word in str(caught.value) for word in [*words, "choose another folder"])
    writer(folder, target={"name": "renamed", "config_sha256": "c", "tokenizer_sha256": "t", "lm_head_sha256": "l"})


def test_what_no_manifest_lists_does_not_exist(folder, tmp_path):
    listed = open_shards(folder)
    (folder / "shard-00099.safetensors").write_bytes(b"x")
    (folder / "shard-00004.safetensors.tmp").write_bytes(b"x")
    assert open_shards(folder, verify=True).data_hash == listed.data_hash
    writer(folder).close()
    assert {file.name for file in folder.glob("shard-*")} == {shard["file"] for shard in listed.manifest["shards"]}
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "shard-00000.safetensors").write_bytes(b"x")
    writer(tmp_path / "new").close()
    assert not list((tmp_path / "new").iterdir())


def test_two_writers_do_not_share_a_folder(folder):
    with writer(folder), pytest.raises(ShardError, match="another capture is using"):
        writer(folder)
    writer(folder).close()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda each: each.aux_hidden.__setitem__((3, 2), np.nan), "aux_hidden has 1 values that are NaN or infinite"),
        (lambda each: each.final_hidden.__setitem__(0, np.inf), "final_hidden has 4 values"),
    ],
)
def test_nan_is_not_taken(tmp_path, spoil, message):
    bad = document(5, 1)
    spoil(bad)
    with writer(tmp_path) as shards:
        shards.add(document(5, 0))
        with pytest.raises(ShardError, match=message) as caught:
            shards.add(bad)
        assert bad.name in str(caught.value)
    assert len(open_shards(tmp_path, verify=True)) == 1


def test_nan_in_bfloat16():
    values = np.array([0x7F80, 0xFF80, 0x7FC0, 0x7F7F, 0x0000, 0xFF7F], np.uint16)
    assert not_finite(values) == 3


@pytest.mark.parametrize(
    "spoil",
    [
        lambda each: {"loss_mask": each.loss_mask[:-1]},
        lambda each: {"aux_hidden": each.aux_hidden[:, :-1]},
        lambda each: {"final_hidden": each.final_hidden.astype(np.float64)},
        lambda each: {"input_ids": each.input_ids.astype(np.int64)},
    ],
)
def test_a_document_of_another_shape_is_not_taken(tmp_path, spoil):
    each = document(5, 1)
    with writer(tmp_path) as shards, pytest.raises(ShardError, match="expected"):
        shards.add(type(each)(**{**vars(each), **spoil(each)}))


def test_an_empty_document_is_not_taken(tmp_path):
    with writer(tmp_path) as shards, pytest.raises(ShardError, match="is empty"):
        shards.add(document(0, 1))


def test_a_shard_cut_short_is_refused(folder):
    file = folder / "shard-00001.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(ShardError, match=r"shard-00001\.safetensors has \d+ bytes, its header says \d+: it is cut"):
        open_shards(folder)


def test_a_changed_byte_is_found_by_verify(folder):
    file = folder / "shard-00002.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-30] ^= 1
    file.write_bytes(raw)
    open_shards(folder)
    with pytest.raises(ShardError, match=r"shard-00002\.safetensors has sha256 \w+, the manifest says \w+"):
        open_shards(folder, verify=True)


def test_nan_in_a_shard_is_found_by_verify(folder):
    file = folder / "shard-00000.safetensors"
    tensors = {name: np.array(tensor) for name, tensor in map_tensors(file).items()}
    tensors["final_hidden"][25] = np.nan
    write_tensors(file, tensors)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["shards"][0]["sha256"] = shard_writer.file_sha256(file)
    edit(folder, shards=manifest["shards"])
    with pytest.raises(ShardError, match=f"final_hidden of document {document(20, 1).name} has 4 values"):
        open_shards(folder, verify=True)


def spoilt(folder, **changes):
    shards = json.loads((folder / "manifest.json").read_text())["shards"]
    shards[0].update(changes)
    edit(folder, shards=shards)


HOSTILE = {
    "another format": (lambda f: edit(f, format=2), "has format 2, expected 1"),
    "no json": (lambda f: (f / "manifest.json").write_text("{"), "is not JSON"),
    "a list": (lambda f: (f / "manifest.json").write_text("[]"), "has format 'list'"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "is missing"),
    "no layers": (lambda f: edit(f, layer_ids=None), "'layer_ids' is None, expected list"),
    "a width in words": (lambda f: edit(f, hidden_size="4"), "'hidden_size' is '4'"),
    "a type unknown": (lambda f: edit(f, dtype="float8"), "dtype is 'float8', expected bfloat16 or float32"),
    "before the norm": (lambda f: edit(f, final_hidden="before_norm"), "final_hidden is 'before_norm'"),
    "two of three": (lambda f: edit(f, n_aux=2), "n_aux is 2, expected 3"),
    "another width": (lambda f: edit(f, hidden_size=8), r"aux_hidden is float32 \[40, 12\], the manifest says"),
    "no hash": (lambda f: edit(f, target={"name": "t"}), "target has no config_sha256"),
    "outside": (lambda f: spoilt(f, file="../x.safetensors"), "lies outside the folder"),
    "a shard gone": (lambda f: (f / "shard-00001.safetensors").unlink(), r"shard-00001\.safetensors is missing"),
    "fewer rows": (lambda f: spoilt(f, tokens=39), r"the manifest says int32 \[39\]"),
    "no rows": (lambda f: spoilt(f, tokens="many"), "a shard is described by"),
    "a total off": (lambda f: edit(f, documents=99), "says 99 documents, its shards have 7"),
    "no safetensors": (lambda f: (f / "shard-00000.safetensors").write_bytes(b"x" * 99), "is not safetensors"),
    "empty": (lambda f: (f / "shard-00000.safetensors").write_bytes(b""), "is not safetensors"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_broken_folder_is_refused_with_the_file(folder, what):
    spoil, message = HOSTILE[what]
    spoil(folder)
    with pytest.raises(ShardError, match=message) as caught:
        open_shards(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("offsets", [[0, 20, 20], [0, 30, 41], [1, 20, 40], [0, 45, 40]])
def test_offsets_that_do_not_rise_are_refused(folder, offsets):
    file = folder / "shard-00000.safetensors"
    tensors = {**map_tensors(file), "doc_offsets": np.array([0, *offsets[1:]] if offsets[0] == 0 else offsets)}
    write_tensors(file, {name: np.array(tensor) for name, tensor in tensors.items()})
    with pytest.raises(ShardError, match="doc_offsets"):
        open_shards(folder)


def test_every_tensor_is_aligned(tmp_path):
    tensors = {"a": np.ones(3, np.bool_), "b": np.arange(2), "c": np.ones(1, np.uint16), "d": np.ones(1, np.float32)}
    write_tensors(tmp_path / "x.safetensors", tensors)
    found = map_tensors(tmp_path / "x.safetensors")
    assert all(found[name].flags.aligned and np.array_equal(found[name], tensors[name]) for name in tensors)


def header(entry):
    text = json.dumps({"x": entry}).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "raw",
    [
        (2**60).to_bytes(8, "little") + b"{}",
        header({"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}),
        header({"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}) + b"\0" * 8,
        header({"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}) + b"\0" * 8,
        header({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}) + b"\0" * 8,
        header({"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}) + b"\0" * 8,
        header({"dtype": "F32", "data_offsets": [0, 8]}) + b"\0" * 8,
        header("no tensor"),
        (4).to_bytes(8, "little") + b"nono",
    ],
)
def test_hostile_tensor_files(tmp_path, raw):
    (tmp_path / "x.safetensors").write_bytes(raw)
    with pytest.raises(TensorFileError, match=r"x\.safetensors"):
        map_tensors(tmp_path / "x.safetensors")


def test_a_full_disk_leaves_what_was_valid(folder, monkeypatch):
    before = {file.name: file.read_bytes() for file in folder.iterdir()}

    def full(file, tensors):
        (file.with_name(file.name + ".tmp")).unlink(missing_ok=True)
        raise OSError(28, "No space left on device")

    shards = writer(folder, shard_bytes=SMALL)
    monkeypatch.setattr(shard_writer, "write_tensors", full)
    shards.add(document(20, 50))
    assert shards.waiting_bytes
    with pytest.raises(OSError, match="No space"):
        shards.add(document(20, 51))
    assert document(20, 51).name not in shards.names
    shards.close()
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert len(open_shards(folder, verify=True)) == 7


def test_a_disk_that_fills_while_a_shard_is_written(tmp_path, monkeypatch):
    real, calls = os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_tensors(tmp_path / "x.safetensors", {"x": np.zeros(3, np.float32)})
    assert not list(tmp_path.iterdir())


KILLED = """
import sys
from pathlib import Path
from tests.drafter.capturing import document, writer
shards = writer(Path(sys.argv[1]), shard_bytes=200_000)
seed = 0
while True:
    shards.add(document(500, seed))
    seed += 1
"""


def test_kill_at_any_moment_leaves_a_valid_folder(tmp_path):
    held = 0
    for round_number in range(6):
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], cwd=REPO)
        deadline = time.monotonic() + 60
        while not (tmp_path / "manifest.json").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3 + 0.037 * round_number)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert len(open_shards(tmp_path, verify=True)) >= held
        with writer(tmp_path, shard_bytes=200_000) as shards:
            held = shards.documents
            listed = {shard["file"] for shard in open_shards(tmp_path).manifest["shards"]}
            assert {file.name for file in tmp_path.iterdir()} - listed <= {"manifest.json"}
    assert held > 0


@pytest.mark.parametrize("tied", [False, True])
def test_identity_of_a_target(tmp_path, tied):
    first = target_identity(write_target(tmp_path / "a", tied=tied))
    assert first == target_identity(write_target(tmp_path / "b", tied=tied))
    changed = target_identity(write_target(tmp_path / "c", seed=1, tied=tied))
    assert {key for key in first if first[key] != changed[key]} == {"lm_head_sha256"}
    (tmp_path / "b" / "tokenizer.json").write_text("{ }")
    changed = target_identity(tmp_path / "b")
    assert {key for key in first if first[key] != changed[key]} == {"tokenizer_sha256"}


def test_identity_of_a_sharded_target_with_a_prefix(tmp_path):
    single = write_target(tmp_path / "a", prefix="language_model.")
    sharded = write_target(tmp_path / "b", prefix="language_model.")
    (sharded / "model.safetensors").rename(sharded / "model-00001-of-00001.safetensors")
    names = map_tensors(sharded / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    assert target_identity(single) == target_identity(sharded)
    head = "language_model.lm_head.weight"
    assert b"".join(span_chunks(output_head(single))) == names[head].tobytes()
    assert output_head(single).name == output_head(sharded).name == head


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "config.json cannot be read"),
        (lambda f: (f / "config.json").write_text("[]"), "is no model's configuration"),
        (lambda f: (f / "tokenizer.json").unlink(), r"has none of tokenizer\.json"),
        (lambda f: (f / "model.safetensors").unlink(), r"no tensor named lm_head\.weight"),
        (lambda f: (f / "model.safetensors").write_bytes(b"xx"), "is not safetensors"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "has no weight_map"),
    ],
)
def test_a_target_that_cannot_be_identified(tmp_path, spoil, message):
    spoil(write_target(tmp_path))
    with pytest.raises(TargetError, match=message):
        target_identity(tmp_path)


def test_shards_of_another_target_are_refused_with_both_hashes(tmp_path):
    target, other = write_target(tmp_path / "a"), write_target(tmp_path / "b", seed=1)
    with writer(tmp_path / "s", target={"name": "a", **target_identity(target)}) as shards:
        shards.add(document(5, 0))
    manifest = open_shards(tmp_path / "s").manifest
    check_target(manifest, target)
    with pytest.raises(ShardError) as caught:
        check_target(manifest, other)
    assert manifest["target"]["lm_head_sha256"] in str(caught.value)
    assert target_identity(other)["lm_head_sha256"] in str(caught.value)
    with pytest.raises(ShardError, match="cannot be read"):
        check_target(manifest, tmp_path / "nowhere")
