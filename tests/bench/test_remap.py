"""bench.remap on small files: the case's overlap, honest figures, and nothing left on the disk."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench import remap
from bench.remap import SMALL, Sizes, case_maps, main, make
from drafter.checkpoint.preflight import read_folder


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    "sizes", [Sizes(), SMALL, Sizes(40, 10, 1, 8), Sizes(40, 10, 0, 8), Sizes(30, 11, 9, 10), Sizes(20, 12, 3, 4)]
)
def test_two_maps_overlap_as_asked(sizes: Sizes, seed: int) -> None:
    a, b = case_maps(sizes, seed)
    assert len(a) == len(b) == sizes.draft_vocab
    assert int((a.target_ids == b.target_ids).sum()) == sizes.identical
    assert len(set(a.target_ids.tolist()) & set(b.target_ids.tolist())) == sizes.shared


def test_what_it_makes_is_a_drafter_and_full_size_is_kimis(tmp_path: Path) -> None:
    files = make(tmp_path, SMALL)
    folder = read_folder(files.drafter)
    assert folder.tensors["lm_head.weight"].shape == (SMALL.draft_vocab, SMALL.hidden)
    kimi = Sizes()
    assert (kimi.draft_vocab, kimi.hidden, kimi.target_vocab) == (32_000, 7_168, 163_840)
    weights = sum(int(np.prod(shape)) for shape in kimi.tensors().values()) + kimi.draft_vocab * kimi.hidden
    assert 2 * weights / 1e9 == pytest.approx(2.4, abs=0.05)


@pytest.mark.parametrize("init", ["verifier", "scaled", "ridge"])
@pytest.mark.parametrize("cold", [False, True])
def test_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str], init: str, cold: bool) -> None:
    flags = ["--small", "--json", "--init", init, "--dir", str(tmp_path), *(["--cold"] if cold else [])]
    assert main([*flags, "--runs", "2"]) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert {"ratio_vs_cp", "peak_rss_mb", "runs", "machine", "command"} <= found.keys()
    ratios = [run["remap_seconds"] / run["cp_seconds"] for run in found["runs"]]
    assert len(ratios) == 2 and found["ratio_vs_cp"] == pytest.approx(sum(ratios) / 2)
    assert found["cold"] == cold and found["init"] == init
    assert 20 < found["peak_rss_mb"] < 500
    for run in found["runs"]:
        assert (run["kept"], run["initialised"], run["dropped"]) == (SMALL.shared, 78, 78)
        assert run["mean_cosine"] == pytest.approx(1 / np.sqrt(1.04), abs=0.01)
    assert "Traceback" not in shown.err and not list(tmp_path.iterdir())


def test_a_failure_is_told_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoilt(folder: Path, sizes: Sizes) -> remap.Files:
        files = make(folder, sizes)
        (files.verifier / "config.json").unlink()
        return files

    monkeypatch.setattr(remap, "make", spoilt)
    assert main(["--small", "--dir", str(tmp_path)]) == 1
    assert "remap: " in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_no_runs_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--runs", "0"])
    assert caught.value.code == 2
