"""diff: figures that agree with sets, the case at full size, counts, special tokens, and what cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from bench.remap import case_maps
from drafter.__main__ import main
from drafter.checkpoint.vocab import DraftVocab
from tests.server.drafters import DRAFT_VOCAB, TARGET_IDS, VOCAB, llama_tensors, write_drafter

SIZE = 24
FOLDER_FIXTURE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def run(capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, Any]:
    assert main(["diff", *map(str, args), "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    found: dict[str, Any] = json.loads(shown.out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    assert main(["diff", *map(str, args)]) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1
    return shown.err


def write_map(file: Path, ids: list[int], size: int = SIZE, absolute: bool = False) -> Path:
    stored = np.array(ids, dtype=np.int64) - (0 if absolute else np.arange(len(ids)))
    save_file({"d2t": stored, "t2d": np.isin(np.arange(size), ids)}, file)
    return file


unordered = st.permutations(range(SIZE)).flatmap(lambda ids: st.integers(1, SIZE).map(lambda n: list(ids[:n])))


@FOLDER_FIXTURE
@given(a=unordered, b=unordered, absolute=st.booleans(), counts=st.lists(st.integers(0, 9), min_size=1, max_size=SIZE))
def test_figures_agree_with_sets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], a: list[int], b: list[int], absolute: bool, counts: list[int]
) -> None:
    counts[0] += 1
    (tmp_path / "counts.json").write_text(json.dumps(counts))
    files = write_map(tmp_path / "a.safetensors", a), write_map(tmp_path / "b.safetensors", b, absolute=absolute)
    found = run(capsys, *files, "--counts", tmp_path / "counts.json")
    assert found["identical_positions"] == sum(x == y for x, y in zip(a, b, strict=False))
    assert found["shared"] == len(set(a) & set(b))
    assert (found["only_in_a"], found["only_in_b"]) == (len(set(a) - set(b)), len(set(b) - set(a)))
    for side, ids in (("a", a), ("b", b)):
        covered = sum(count for token, count in enumerate(counts) if token in ids)
        assert found[f"coverage_{side}"] == pytest.approx(covered / sum(counts))
        assert found[f"vocab_hash_{side}"] == DraftVocab(np.array(sorted(ids)), SIZE).hash
        assert found[f"ascending_{side}"] == (ids == sorted(ids)) and found[f"size_{side}"] == len(ids)


@pytest.mark.parametrize("swap", [False, True])
def test_the_case_at_full_size(tmp_path: Path, capsys: pytest.CaptureFixture[str], swap: bool) -> None:
    vocabs = case_maps(seed=3)[:: -1 if swap else 1]
    assert [(len(vocab), vocab.target_vocab_size) for vocab in vocabs] == [(32_000, 163_840)] * 2
    for name, vocab in zip("ab", vocabs, strict=True):
        vocab.save(tmp_path / f"{name}.safetensors")
    found = run(capsys, tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    first, second = (set(vocab.target_ids.tolist()) for vocab in vocabs)
    assert len(first & second) == 25_750
    assert {key: found[key] for key in ("identical_positions", "shared", "only_in_a", "only_in_b")} == {
        "identical_positions": 252,
        "shared": 25_750,
        "only_in_a": 6_250,
        "only_in_b": 6_250,
    }
    assert main(["diff", str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")]) == 0
    shown = capsys.readouterr().out
    assert "252 of 32,000 positions mean the same token" in shown
    assert "25,750 tokens are in both, 6,250 in A alone, 6,250 in B alone" in shown


def test_folders_lists_and_maps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = list(map(int, TARGET_IDS))
    folder = write_drafter(tmp_path / "d")
    turned = ids[::-1]
    tensors = llama_tensors() | {"d2t": np.array(turned) - np.arange(DRAFT_VOCAB)}
    other = write_drafter(tmp_path / "turned", tensors)
    (tmp_path / "ids.txt").write_text("\n".join(map(str, ids)))
    assert run(capsys, folder, tmp_path / "ids.txt")["identical_positions"] == DRAFT_VOCAB
    found = run(capsys, folder, other)
    assert found["shared"] == DRAFT_VOCAB and found["target_vocab_size"] == VOCAB
    assert found["identical_positions"] == sum(x == y for x, y in zip(ids, turned, strict=True))
    main(["diff", str(folder), str(other)])
    assert "same tokens in another order" in capsys.readouterr().out
    main(["diff", str(folder), str(folder)])
    assert "the same map" in capsys.readouterr().out


def test_a_map_that_can_be_read_both_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"d2t": np.array([0, 2, 5])}, tmp_path / "a.safetensors")
    (tmp_path / "b.txt").write_text("0 2 5")
    files = tmp_path / "a.safetensors", tmp_path / "b.txt"
    assert "--map-format offset or --map-format absolute" in refused(capsys, *files)
    assert run(capsys, *files, "--map-format", "absolute")["identical_positions"] == 3
    assert run(capsys, *files, "--map-format", "offset")["identical_positions"] == 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("counts.json", "[5, 0, 3, 2]"),
        ("counts.json", '{"0": 5, "2": 3, "3": 2}'),
        ("counts.txt", "0 5\n2 3\n\n3 2\n"),
        ("counts.txt", "0 4\n3 1\n2 3\n   \n0 1\n3 1\n"),
        ("counts.json", '{"0": 4, "2": 1, "3": 2, "0": 1, "2": 2}'),
        (
            "counts.jsonl",
            '{"messages": [], "input_ids": [1, 1], "output_ids": [0, 0, 0, 0, 0, 2, 2, 2, 3, 3], "meta": {"past": 0}}',
        ),
    ],
)
def test_counts_of_every_form(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    a, b = write_map(tmp_path / "a.safetensors", [0, 1]), write_map(tmp_path / "b.safetensors", [2, 0, 3])
    found = run(capsys, a, b, "--counts", tmp_path / name)
    assert (found["coverage_a"], found["coverage_b"]) == (0.5, 1.0)
    main(["diff", str(a), str(b), "--counts", str(tmp_path / name)])
    assert "A covers 50.00% of the counted tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("counts.json", None, "holds no token counts"),
        ("counts.json", "{", "holds no token counts"),
        ("counts.json", "3", "holds no token counts"),
        ("counts.json", "[]", "holds no token counts"),
        ("counts.json", "[[1]]", "holds no token counts"),
        ("counts.json", '{"a": 1}', "holds no token counts"),
        ("counts.json", "[-1, 2]", "holds no token counts"),
        ("counts.json", "[1.5, 2]", "holds no token counts"),
        ("counts.json", '{"1": 1.0}', "holds no token counts"),
        ("counts.json", "[true]", "holds no token counts"),
        ("counts.json", '{"1": {"2": 3}}', "holds no token counts"),
        ("counts.txt", "1 2.5", "holds no token counts"),
        ("counts.json", f'{{"{10**12}": 1}}', "counts the token 1000000000000"),
        ("counts.json", f"[{10**30}]", "holds no token counts"),
        ("counts.json", "[" * 100_000, "holds no token counts"),
        ("counts.json", "[0, 0]", "counts no token"),
        ("counts.txt", "1 2 3", "holds no token counts"),
        ("counts.txt", f"{SIZE} 1", f"counts the token {SIZE} of a target with {SIZE}"),
        ("counts.jsonl", "", "holds no conversation"),
    ],
)
def test_counts_that_are_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str | None, reason: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    a = write_map(tmp_path / "a.safetensors", [0, 1])
    said = refused(capsys, a, a, "--counts", tmp_path / name)
    assert reason in said and str(tmp_path / name) in said


def test_maps_of_different_targets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write_map(tmp_path / "a.safetensors", [1], 10), write_map(tmp_path / "b.safetensors", [1], 11)
    assert "told in two ways" in refused(capsys, a, b)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"text_config": {"vocab_size": SIZE}}))
    tokens = {20: "<|im_end|>", 21: "<think>", 22: "<|tool_call_begin|>", 19: "<|media_pad|>", 18: "<|reserved_7|>"}
    decoder = {str(token): {"content": text, "special": token != 21} for token, text in tokens.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    return folder


def test_special_tokens_and_their_cost(tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_map(tmp_path / "a.safetensors", [1, 19, 20, 21, 22])
    (tmp_path / "b.txt").write_text("1 20")
    found = run(capsys, a, tmp_path / "b.txt", "--target", target)
    assert found["missing_specials_a"] == []
    assert [(each["id"], each["kind"]) for each in found["missing_specials_b"]] == [
        (19, "media"),
        (21, "think"),
        (22, "tool"),
    ]
    assert found["target_vocab_size"] == SIZE
    main(["diff", str(a), str(tmp_path / "b.txt"), "--target", str(target)])
    shown = capsys.readouterr().out
    assert "A lacks no special token" in shown
    assert "B lacks <think> (21): each change into or out of thinking" in shown
    assert "B lacks <|tool_call_begin|> (22): each tool call" in shown
    assert "B lacks <|media_pad|> (19): nothing in answers of text" in shown
    assert "im_end" not in shown


def test_kimi_is_known_without_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.safetensors"
    DraftVocab(np.array([5, 163_586, 163_606]), 163_840).save(file)
    found = run(capsys, file, file)
    lacking = {each["id"] for each in found["missing_specials_a"]}
    assert {163_595, 163_599, 163_602, 163_605, 163_607} <= lacking and not {163_586, 163_606} & lacking


def test_without_a_target_the_special_tokens_are_not_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_map(tmp_path / "a.safetensors", [0, 1])
    assert run(capsys, a, a)["missing_specials_a"] is None
    main(["diff", str(a), str(a)])
    assert "to see which special tokens it lacks" in capsys.readouterr().out


def test_vocab_forces_in_what_structures_an_answer(
    tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"messages": [], "input_ids": [1], "output_ids": [7, 7, 8], "meta": {"past": 0}}
    (tmp_path / "train.jsonl").write_text(json.dumps(row))
    out = tmp_path / "vocab.safetensors"
    command = ["vocab", "--conversations", str(tmp_path / "train.jsonl"), "--target", str(target), "--size", "6"]
    assert main([*command, "--out", str(out), "--json"]) == 0
    assert DraftVocab.load(out).target_ids.tolist() == [7, 18, 19, 20, 21, 22]
