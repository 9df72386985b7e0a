"""remap on what is not as it seems: foreign maps, numbers that are none, folders of other things."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drafter.__main__ import main
from drafter.checkpoint.headstart import Likeness, describe
from drafter.data.tensorfile import write_tensors
from tests.drafter.remapping import DTYPES, HEAD, Remap, cast, drafter_of, normal, tensors_of, verifier_of, write_map
from tests.server.drafters import HIDDEN, VOCAB

OLD, OTHER = [1, 2, 5, 9], [1, 3, 5, 9]


def test_a_map_that_the_manifest_contradicts(remap: Remap, verifier: Path) -> None:
    """Rows moved under a foreign map would be signed anew, and no later check could tell."""
    made = remap.run(drafter_of(remap.folder / "d", OLD, normal(4, HIDDEN)), remap.folder / "d", verifier)["folder"]
    right = write_map(remap.folder / "right.safetensors", OLD)
    foreign = write_map(remap.folder / "foreign.safetensors", OTHER)
    kept = tensors_of(made)[HEAD]
    spoilt = tensors_of(made) | tensors_of_map(foreign)
    write_tensors(made / "model.safetensors", spoilt)
    said = "says that lm_head was trained under"
    assert said in remap.refused(made, right, verifier)
    assert said in remap.refused(made, made, verifier, rows_vocab=foreign)
    found = remap.run(made, right, verifier, rows_vocab=right)
    assert np.array_equal(tensors_of(found["folder"])[HEAD], kept)
    (made / "eyas.json").unlink()
    assert remap.run(made, right, verifier)["initialised"] == 1


def tensors_of_map(file: Path) -> dict[str, np.ndarray]:
    shutil.copyfile(file, file.parent / "model.safetensors")
    return tensors_of(file.parent)


def test_likeness_that_is_none_names_the_map(remap: Remap, verifier: Path) -> None:
    """A cosine near 0 has two reasons: another basis, or rows of other tokens."""
    for cosine, named in ((0.01, True), (-0.05, True), (0.4, False), (0.99, False)):
        said = describe(Likeness(100, cosine, 1.0, "ridge"))
        assert ("--rows-vocab" in said) == named and said.startswith(f"mean cosine {cosine:.3f}")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("whose", ["drafter", "verifier"])
def test_numbers_that_are_none(remap: Remap, whose: str, dtype: str, number: float) -> None:
    """In any shared row, at any place of it."""
    mine, theirs = normal(4, HIDDEN), normal(VOCAB, HIDDEN, seed=3)
    mine = theirs[OLD] * 2
    bits = {"drafter": mine, "verifier": theirs}[whose]
    bits[2 if whose == "drafter" else 5, 3] = 0
    heads = {"drafter": cast(mine, dtype), "verifier": cast(theirs, dtype)}
    spoil = {"BF16": {np.inf: 0x7F80, -np.inf: 0xFF80}.get(number, 0x7FC0)}.get(dtype, number)
    heads[whose][2 if whose == "drafter" else 5, 3] = spoil
    source = drafter_of(remap.folder / "d", OLD, heads["drafter"])
    target = verifier_of(remap.folder / "v", heads["verifier"])
    new = write_map(remap.folder / "n.safetensors", OTHER)
    assert "not finite" in remap.refused(source, new, target, "verifier")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("init", ["verifier", "scaled", "ridge"])
def test_rows_that_the_drafters_type_cannot_hold(remap: Remap, init: str) -> None:
    theirs = normal(VOCAB, HIDDEN, seed=3) * np.float32(10)
    mine = (theirs[OLD] / 10).astype(np.float16)
    theirs[3] = 1e7
    source = drafter_of(remap.folder / "d", OLD, mine)
    target = verifier_of(remap.folder / "v", theirs)
    new = write_map(remap.folder / "n.safetensors", OTHER)
    assert "beyond float16" in remap.refused(source, new, target, init)
    theirs[3] = np.finfo(np.float32).max  # rounds up to what bf16 calls infinite
    write_tensors(target / "model.safetensors", {HEAD: theirs})
    source = drafter_of(remap.folder / "e", OLD, cast(mine.astype(np.float32) * 10, "BF16"))
    assert init != "verifier" or "beyond BF16" in remap.refused(source, new, target, init)


def test_a_target_is_no_drafter(remap: Remap, verifier: Path) -> None:
    new = write_map(remap.folder / "n.safetensors", OTHER)
    assert "name the drafter's folder" in remap.refused(verifier, new, verifier)


def test_a_second_head_is_named_with_its_file(remap: Remap, verifier: Path) -> None:
    source = drafter_of(remap.folder / "d", OLD, normal(4, HIDDEN))
    write_tensors(source / "stray.safetensors", {HEAD: normal(4, HIDDEN)})
    said = remap.refused(source, source, verifier)
    assert "stray.safetensors" in said and "remove" in said
    assert main(["diff", str(source), str(source)]) == 1
    assert "stray.safetensors" in remap.capsys.readouterr().err


@pytest.mark.parametrize(
    ("tensors", "index", "reason"),
    [
        ({"model.embed_tokens.weight": 1}, False, "tie_word_embeddings = true"),
        ({"lm_head.weight_packed": 1, "lm_head.weight_scale": 1}, False, "unquantised"),
        ({"model.norm.weight": 1}, False, "give the folder that holds the target's weights"),
        ({HEAD: 1}, True, "which is missing: copy it"),
    ],
)
def test_a_verifier_without_a_head_says_what_to_do(
    remap: Remap, tensors: dict[str, int], index: bool, reason: str
) -> None:
    target = verifier_of(remap.folder / "v", normal(VOCAB, HIDDEN))
    write_tensors(target / "model.safetensors", {name: normal(VOCAB, HIDDEN) for name in tensors})
    if index:
        (target / "model.safetensors").unlink()
        named = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
        (target / "model.safetensors.index.json").write_text(json.dumps(named))
    source = drafter_of(remap.folder / "d", OLD, normal(4, HIDDEN))
    assert reason in remap.refused(source, source, target)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", ["pipe", "device"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "eyas.json", "tokenizer_config.json"])
def test_what_never_ends_is_not_read(remap: Remap, verifier: Path, name: str, what: str) -> None:
    """A pipe waits for its writer, /dev/zero goes on for ever: in a drafter's folder, and in a target's."""
    source = drafter_of(remap.folder / "d", OLD, normal(4, HIDDEN))
    (verifier / "config.json").write_text(json.dumps({"vocab_size": VOCAB, "hidden_size": HIDDEN}))
    (verifier / "tokenizer.json").unlink()

    def spoil(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name) if what == "pipe" else (folder / name).symlink_to("/dev/zero")

    def said(*words: Any) -> str:
        code = main([str(word) for word in words])
        shown = remap.capsys.readouterr()
        return f"{code} {shown.out} {shown.err}"

    good = drafter_of(remap.folder / "good", OLD, normal(4, HIDDEN))
    out = ["--verifier", verifier, "--init", "verifier", "--out", remap.folder / "out"]
    if name != "tokenizer_config.json":
        spoil(source)
        for words in (["diff", source, good], ["remap", source, "--vocab", good, *out], ["inspect", source]):
            ends = said(*words)
            assert "plain file" in ends or (name == "eyas.json" and words[0] == "diff"), words
    if name != "eyas.json":
        spoil(verifier)
        assert "0 error" in (ends := said("preflight", good, "--target", verifier)) or "plain file" in ends
        ends = said("remap", good, "--vocab", good, *out)
        assert ends.startswith("0") if name == "tokenizer_config.json" else "plain file" in ends
