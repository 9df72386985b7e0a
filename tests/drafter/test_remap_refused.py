"""What remap refuses, and what stops it amid its work: nothing is left behind."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drafter.__main__ import main
from drafter.checkpoint import remap_cli
from drafter.data.tensorfile import write_tensors
from tests.drafter.remapping import HEAD, Remap, drafter_of, normal, tensors_of, verifier_of, write_map
from tests.server.drafters import HIDDEN, VOCAB


def lose_head(folder: Path) -> None:
    rest = {name: x for name, x in tensors_of(folder).items() if name != HEAD}
    write_tensors(folder / "model.safetensors", rest)


def add_tensor(name: str) -> Callable[[Path], None]:
    return lambda folder: write_tensors(folder / "model.safetensors", tensors_of(folder) | {name: normal(3)})


def config_of(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(config))

    return change


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def spoil_rows(folder: Path) -> None:
    tensors = tensors_of(folder)
    tensors[HEAD][9] = np.nan
    write_tensors(folder / "model.safetensors", tensors)


def quantise(folder: Path) -> None:
    write_tensors(folder / "model.safetensors", {HEAD: np.ones((VOCAB, HIDDEN), np.uint8)})


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lose_head, "0 tensors named lm_head.weight"),
        (add_tensor("model.lm_head.weight"), "2 tensors named lm_head.weight"),
        (add_tensor("lm_head.weight_scale"), "as quantised heads do"),
        (add_tensor("model.d2t"), "2 tensors named d2t"),
        (config_of(draft_vocab_size=4), "but draft_vocab_size is 4"),
        (config_of(tie_word_embeddings=True), "no rows to move"),
        (config_of(vocab_size=VOCAB + 1), "told in two ways"),
        (cut, "cut short"),
        (lambda f: (f / "config.json").write_text("["), "is not JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "is no JSON object"),
        (lambda f: (f / "config.json").unlink(), "config.json"),
        (lambda f: (f / "model.safetensors").unlink(), "no drafter folder"),
    ],
)
def test_a_drafter_that_cannot_be_remapped(
    remap: Remap, verifier: Path, spoil: Callable[[Path], Any], reason: str
) -> None:
    source = drafter_of(remap.folder / "d", [1, 2, 9], normal(3, HIDDEN))
    spoil(source)
    vocab = write_map(remap.folder / "new.safetensors", [2, 9])
    assert reason in remap.refused(source, vocab, verifier)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (spoil_rows, "not finite"),
        (quantise, "is U8 [64, 8], expected a matrix of BF16, F16, F32"),
        (lose_head, "no tensor named lm_head.weight"),
        (cut, "cut short"),
        (lambda f: (f / "config.json").unlink(), "config.json cannot be read"),
        (lambda f: (f / "config.json").write_text("3"), "no model's configuration"),
        (lambda f: (f / "config.json").write_text("[" * 100_000), "no model's configuration"),
        (lambda f: (f / "model.safetensors.index.json").write_text("[]"), "has no weight_map"),
        (
            lambda f: (f / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {HEAD: "../verifier/model.safetensors"}})
            ),
            "names a file that is not in its folder",
        ),
        (
            lambda f: (f / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {HEAD: "gone"}})),
            "gone, which is missing",
        ),
    ],
)
@pytest.mark.parametrize("new", [[2, 9], [2, 5]])
def test_a_verifier_that_cannot_be_used(
    remap: Remap, verifier: Path, spoil: Callable[[Path], Any], reason: str, new: list[int]
) -> None:
    source = drafter_of(remap.folder / "d", [1, 2, 5], normal(3, HIDDEN))
    spoil(verifier)
    if spoil is spoil_rows and 9 not in new:
        assert remap.run(source, write_map(remap.folder / "n.safetensors", new), verifier)["kept"] == 2
    else:
        assert reason in remap.refused(source, write_map(remap.folder / "n.safetensors", new), verifier)


def test_maps_that_do_not_fit(remap: Remap, verifier: Path) -> None:
    source = drafter_of(remap.folder / "d", [1, 2, 5], normal(3, HIDDEN))
    (remap.folder / "far.txt").write_text(f"1 {VOCAB}")
    (remap.folder / "two.txt").write_text("1 2")
    assert f"names the target id {VOCAB}" in remap.refused(source, remap.folder / "far.txt", verifier)
    said = remap.refused(source, source, verifier, rows_vocab=remap.folder / "two.txt")
    assert "maps 2 rows, the head" in said and "--rows-vocab" in said
    small = verifier_of(remap.folder / "small", normal(VOCAB - 1, HIDDEN))
    assert "told in two ways" in remap.refused(source, source, small)


def test_a_map_that_can_be_read_both_ways(remap: Remap, verifier: Path) -> None:
    source = drafter_of(remap.folder / "d", [1, 2, 5], normal(3, HIDDEN))
    file = remap.folder / "new.safetensors"
    write_tensors(file, {"d2t": np.array([2, 3, 9])})
    assert "--map-format" in remap.refused(source, file, verifier)
    found = remap.run(source, file, verifier, map_format="absolute")
    assert (tensors_of(found["folder"])["d2t"] + np.arange(3)).tolist() == [2, 3, 9]


def test_a_folder_that_exists_is_not_touched(remap: Remap, verifier: Path) -> None:
    source = drafter_of(remap.folder / "d", [1, 2, 5], normal(3, HIDDEN))
    assert "exists already" in remap.refused(source, source, verifier, out=source)
    assert "exists already" in remap.refused(source, source, verifier, out=source / "config.json")


def test_a_full_disk(remap: Remap, verifier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = drafter_of(remap.folder / "d", [1, 2, 5], normal(3, HIDDEN))
    usage = shutil.disk_usage(remap.folder)
    monkeypatch.setattr(remap_cli.shutil, "disk_usage", lambda path: usage._replace(free=10))
    assert "MB free" in remap.refused(source, source, verifier)


@pytest.mark.parametrize("moment", ["compare", "fit", "write"])
def test_an_interruption_at_any_stage_leaves_nothing(
    remap: Remap, verifier: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    source = drafter_of(remap.folder / "d", [1, 2, 5], normal(3, HIDDEN))
    bar = remap_cli._bar

    def interrupted(what: str, total: int) -> Any:
        if what == moment:
            raise KeyboardInterrupt
        return bar(what, total)

    monkeypatch.setattr(remap_cli, "_bar", interrupted)
    before = sorted(remap.folder.rglob("*"))
    out = remap.folder / "new" / "out"
    command = ["remap", str(source), "--vocab", str(source), "--verifier", str(verifier), "--init", "ridge"]
    assert main([*command, "--out", str(out)]) == 130
    assert "interrupted; nothing was left behind" in remap.capsys.readouterr().err
    assert sorted(remap.folder.rglob("*")) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(remap: Remap, number: int) -> None:
    """The real process, stopped in the middle of its work and then told to end."""
    wide, rows = 1024, 2048
    target = normal(rows, wide)
    folder = remap.folder / "d"
    ids = np.arange(rows // 2) * 2
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": rows, "draft_vocab_size": len(ids)}))
    write_tensors(
        folder / "model.safetensors",
        {HEAD: target[ids], "d2t": ids - np.arange(len(ids)), "t2d": np.arange(rows) % 2 == 0, "fc.weight": target},
    )
    verifier = verifier_of(remap.folder / "v", target)
    before = sorted(remap.folder.rglob("*"))
    command = [sys.executable, "-m", "drafter", "remap", str(folder), "--vocab", str(folder), "--init", "ridge"]
    with subprocess.Popen(
        [*command, "--verifier", str(verifier), "--out", str(remap.folder / "out")],
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as process:
        while not (remap.folder / ".out.tmp").exists() and process.poll() is None:
            time.sleep(0.001)
        process.send_signal(signal.SIGSTOP)
        begun = (remap.folder / ".out.tmp").exists()
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)
        _, said = process.communicate(timeout=60)
    assert begun, said
    assert process.returncode == 130 and "interrupted; nothing was left behind" in said and "Traceback" not in said
    assert sorted(remap.folder.rglob("*")) == before


def test_what_a_killed_remap_left_does_not_stand_in_the_way(remap: Remap, verifier: Path) -> None:
    source = drafter_of(remap.folder / "d", [1, 2, 5], normal(3, HIDDEN))
    left = remap.folder / ".out.tmp"
    left.mkdir()
    (left / "model.safetensors.tmp").write_bytes(b"half")
    command = ["remap", str(source), "--vocab", str(source), "--verifier", str(verifier), "--init", "verifier"]
    assert main([*command, "--out", str(remap.folder / "out")]) == 0
    assert sorted(file.name for file in (remap.folder / "out").iterdir()) == [
        "config.json",
        "eyas.json",
        "model.safetensors",
    ]
    assert not left.exists()
