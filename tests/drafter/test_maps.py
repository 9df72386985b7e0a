"""Maps are read in their file's order, offset or absolute by evidence alone, and refused where both readings fit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from drafter.checkpoint.maps import read_d2t, read_map
from drafter.checkpoint.vocab import VocabError
from tests.server.drafters import DRAFT_VOCAB, TARGET_IDS, VOCAB, llama_tensors, write_drafter

HERE = Path("map")


def fits(ids: list[int], size: int | None, marked: set[int] | None) -> bool:
    """By hand: distinct, in range, and the tokens that t2d marks."""
    inside = all(token >= 0 and (size is None or token < size) for token in ids)
    return inside and len(set(ids)) == len(ids) and (marked is None or set(ids) == marked)


@given(st.data())
def test_the_reading_is_the_one_that_fits(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 12))
    stored = data.draw(st.lists(st.integers(-4, size), min_size=1, max_size=size))
    known = data.draw(st.booleans())
    marked = data.draw(st.none() | st.sets(st.integers(0, size - 1)))
    t2d = None if marked is None else np.isin(np.arange(size), list(marked))
    limit = size if known or marked is not None else None
    shifted = [row + token for row, token in enumerate(stored)]
    found = {name: ids for name, ids in (("offset", shifted), ("absolute", stored)) if fits(ids, limit, marked)}
    call = (HERE, np.array(stored), t2d, size if known else None)
    for name in ("offset", "absolute") if t2d is None else ():
        if name in found:
            assert read_d2t(*call, name)[0].tolist() == found[name]
        else:
            with pytest.raises(VocabError, match=f"d2t read as {name}"):
                read_d2t(*call, name)
    if not found:
        with pytest.raises(VocabError, match=r"is no map: read as offset it .*; read as absolute it "):
            read_d2t(*call)
    elif len(found) == 2 and stored != shifted:
        with pytest.raises(VocabError, match="--map-format offset or --map-format absolute"):
            read_d2t(*call)
    else:
        ids, reading, evidence = read_d2t(*call)
        assert ids.tolist() == found[reading] and (evidence or stored == shifted)


@given(st.permutations(range(12)).flatmap(lambda ids: st.integers(2, 11).map(lambda n: ids[:n])), st.booleans())
def test_t2d_decides_and_the_order_is_kept(ids: list[int], absolute: bool) -> None:
    stored = np.array(ids) if absolute else np.array(ids) - np.arange(len(ids))
    t2d = np.isin(np.arange(12), ids)
    found, reading, evidence = read_d2t(HERE, stored, t2d, 12)
    assert found.tolist() == ids and reading == ("absolute" if absolute else "offset")
    assert "that t2d marks" in evidence[0]


def write_map(file: Path, stored: list[int] | np.ndarray, t2d: np.ndarray | None = None) -> Path:
    save_file({"d2t": np.array(stored)} | ({} if t2d is None else {"t2d": t2d}), file)
    return file


def test_a_drafter_folder(tmp_path: Path) -> None:
    found = read_map(write_drafter(tmp_path / "d"))
    assert found.target_ids.tolist() == list(TARGET_IDS) and found.reading == "offset" and found.ascending
    assert found.target_vocab_size == VOCAB and found.t2d is not None and found.t2d.sum() == DRAFT_VOCAB


def test_a_drafter_in_frequency_order(tmp_path: Path) -> None:
    ids = np.array(TARGET_IDS)[::-1]
    tensors = llama_tensors() | {"d2t": ids - np.arange(len(ids))}
    found = read_map(write_drafter(tmp_path / "d", tensors))
    assert found.target_ids.tolist() == ids.tolist() and not found.ascending
    vocab, order = found.sorted()
    assert vocab.target_ids.tolist() == sorted(ids) == ids[order].tolist()


def test_a_drafter_over_every_token(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in llama_tensors().items() if name not in ("d2t", "t2d", "lm_head.weight")}
    found = read_map(write_drafter(tmp_path / "d", tensors, draft_vocab_size=None))
    assert found.target_ids.tolist() == list(range(VOCAB)) and found.reading == "identity"


@pytest.mark.parametrize("told", [DRAFT_VOCAB, None, VOCAB])
def test_a_drafter_that_lost_its_map(tmp_path: Path, told: int | None) -> None:
    tensors = {name: tensor for name, tensor in llama_tensors().items() if name not in ("d2t", "t2d")}
    with pytest.raises(VocabError, match=f"over {DRAFT_VOCAB} of {VOCAB} tokens .* but has no d2t"):
        read_map(write_drafter(tmp_path / "d", tensors, draft_vocab_size=told))


@pytest.mark.parametrize("nested", ["transformer_layer_config", "text_config"])
def test_a_config_of_another_format(tmp_path: Path, nested: str) -> None:
    folder = write_drafter(tmp_path / "d")
    config = json.loads((folder / "config.json").read_text())
    config[nested] = {"vocab_size": config.pop("vocab_size")}
    (folder / "config.json").write_text(json.dumps(config))
    assert read_map(folder).target_vocab_size == VOCAB


@pytest.mark.parametrize(("name", "content"), [("ids.json", "[5, 3, 9]"), ("ids.txt", "5\n3\n9\n"), ("ids", " 5 3\t9")])
def test_a_list_of_ids(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    found = read_map(tmp_path / name)
    assert found.target_ids.tolist() == [5, 3, 9] and found.target_vocab_size is None and found.reading == "list"
    with pytest.raises(VocabError, match="how many tokens its target has"):
        found.sorted()
    assert found.sorted(10)[0].target_ids.tolist() == [3, 5, 9]
    assert read_map(tmp_path / name, target_vocab_size=10).target_vocab_size == 10


def test_sizes_that_disagree(tmp_path: Path) -> None:
    file = write_map(tmp_path / "map.safetensors", [1, 1], np.array([False, True, True]))
    assert read_map(file).target_ids.tolist() == [1, 2]
    with pytest.raises(VocabError, match=r"told in two ways \(the target 4, t2d 3\)"):
        read_map(file, target_vocab_size=4)
    with pytest.raises(VocabError, match="told in two ways"):
        read_map(file).sorted(4)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("ids.json", "{", "no list of token ids"),
        ("ids.json", '{"a": 1}', "no list of token ids"),
        ("ids.json", "[]", "no list of token ids"),
        ("ids.json", "[1, true]", "no list of token ids"),
        ("ids.json", "[1.5]", "no list of token ids"),
        ("ids.json", f"[{2**70}]", "no list of token ids"),
        ("ids.json", "[" * 100_000, "no list of token ids"),
        ("ids.txt", "", "no list of token ids"),
        ("ids.txt", "1 two", "no list of token ids"),
        ("ids.txt", "\x00\xff", "no list of token ids"),
        ("ids.txt", "1 2 1", "names the target id 1 twice"),
        ("ids.txt", "-1", "names the target id -1"),
        ("map.safetensors", "no tensors", "cut short"),
        ("missing.txt", None, "cannot be read"),
        ("missing.safetensors", None, "is missing"),
    ],
)
def test_a_file_that_is_no_map(tmp_path: Path, name: str, content: str | None, reason: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(VocabError, match=reason) as caught:
        read_map(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"other": np.ones(3)}, "is F64|type F64|has no d2t"),
        ({"t2d": np.array([True])}, "has no d2t"),
        ({"d2t": np.ones(3, np.float32)}, "expected integers"),
        ({"d2t": np.ones((1, 1), np.int64)}, "expected integers"),
        ({"d2t": np.zeros(0, np.int64)}, "expected integers"),
        ({"d2t": np.zeros(2, np.int64), "t2d": np.ones(2, np.float32)}, "t2d is float32"),
        ({"d2t": np.zeros(2, np.int64), "model.d2t": np.zeros(2, np.int64)}, "2 tensors named d2t"),
        ({"d2t": np.zeros(2, np.int64), "t2d": np.array([True, False, True])}, "t2d .* does not"),
        ({"d2t": np.array([0, -1])}, "names the target id 0 twice; read as absolute it names the target id -1"),
    ],
)
def test_tensors_that_are_no_map(tmp_path: Path, tensors: dict[str, np.ndarray], reason: str) -> None:
    save_file(tensors, tmp_path / "map.safetensors")
    with pytest.raises(VocabError, match=reason):
        read_map(tmp_path / "map.safetensors")
