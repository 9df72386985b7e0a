"""The real speculators package loads what convert writes and says the same, and the other way round."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from drafter.__main__ import main
from drafter.checkpoint.preflight import read_folder
from drafter.training.attention import Layout
from drafter.training.model import load_drafter
from drafter.training.target import load_target
from tests.tiny import TinyPair, build

pytestmark = pytest.mark.peers

REPO = Path(__file__).parents[2]
SIDE = Path(__file__).with_name("speculators_side.py")
ENVIRONMENT = {**os.environ, "TORCH_COMPILE_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
STEPS, ROWS = 3, 40


@pytest.fixture(scope="module")
def pair() -> TinyPair:
    return build("llama")


@pytest.fixture(scope="module")
def speculators() -> list[str]:
    """The command that runs the other side; its environment is made on first use."""
    # -o: this runs in .venv, which therefore is installed
    subprocess.run(["make", "-s", "-o", ".venv/.installed", "speculators-env"], cwd=REPO, check=True)
    return [str(REPO / ".cache" / "speculators" / "bin" / "python"), str(SIDE)]


@pytest.fixture
def states(tmp_path: Path, pair: TinyPair) -> Path:
    """What a target might hand over at 40 positions, and the tokens that follow each."""
    rng = np.random.default_rng(9)
    aux = rng.normal(size=(ROWS, 3 * pair.hidden_size)).astype(np.float32)
    np.savez(tmp_path / "states.npz", aux=aux, tokens=rng.integers(0, pair.vocab_size, ROWS))
    return tmp_path / "states.npz"


def run(command: list[str], *arguments: object) -> None:
    done = subprocess.run([*command, *map(str, arguments)], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def our_logits(folder: Path, target: Path, states: Path) -> np.ndarray:
    """The trainer's model on the same rows, [STEPS, T, U], each step fed with its own output and the true tokens.

    speculators pads the shifted tokens with 0 at the end, so the last rows of later steps are left out by the caller.
    """
    given = np.load(states)
    model = load_drafter(folder, load_target(target).embed_VH).eval()
    tokens = torch.from_numpy(given["tokens"])
    layout = Layout.of([ROWS], torch.ones(ROWS, dtype=torch.bool))
    found = []
    with torch.no_grad():
        hidden, memory = model.first(torch.from_numpy(given["aux"]), tokens, layout)
        found.append(model.logits(hidden))
        for step in range(1, STEPS):
            shifted = torch.cat([tokens[step:], tokens.new_zeros(step)])
            hidden = model.later(hidden, shifted, memory)
            found.append(model.logits(hidden))
    return torch.stack(found).numpy()


def assert_same(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.shape == theirs.shape == (STEPS, ROWS, ours.shape[2])
    assert theirs.std() > 0.1
    np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("drafter", ["mha_perfect", "mha_noised_b"])
def test_ours_there(tmp_path: Path, pair: TinyPair, speculators: list[str], states: Path, drafter: str) -> None:
    ours, out = pair.drafters[drafter], tmp_path / "there"
    assert main(["convert", str(ours), "--to", "speculators", "--target", str(pair.target), "--out", str(out)]) == 0
    run(speculators, "load", out, states, tmp_path / "theirs.npz")
    assert_same(our_logits(ours, pair.target, states), np.load(tmp_path / "theirs.npz")["logits"])


def test_theirs_here(tmp_path: Path, pair: TinyPair, speculators: list[str], states: Path) -> None:
    theirs, out = tmp_path / "theirs", tmp_path / "here"
    run(speculators, "make", theirs, pair.target, states, tmp_path / "theirs.npz")
    assert main(["convert", str(theirs), "--to", "sglang", "--target", str(pair.target), "--out", str(out)]) == 0
    assert read_folder(out).layer_ids == [0, 1, 2]  # a Llama's ids are outputs, theirs are inputs
    assert_same(our_logits(out, pair.target, states), np.load(tmp_path / "theirs.npz")["logits"])


def test_theirs_by_default_is_refused(
    tmp_path: Path, pair: TinyPair, speculators: list[str], states: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their trainer norms before the residual unless told otherwise; here that would be another drafter."""
    theirs, out = tmp_path / "theirs", tmp_path / "here"
    run(speculators, "make", theirs, pair.target, states, tmp_path / "theirs.npz", "norm_before_residual=true")
    assert main(["convert", str(theirs), "--to", "sglang", "--target", str(pair.target), "--out", str(out)]) == 1
    assert "norm_before_residual is true" in capsys.readouterr().err
    assert not out.exists()
