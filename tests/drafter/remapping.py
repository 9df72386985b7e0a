"""Drafters, verifiers and vocabulary maps of a few rows, and the remap command on them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drafter.__main__ import main
from drafter.data.tensorfile import map_tensors, to_bf16, write_tensors
from tests.server.drafters import VOCAB, llama_tensors, write_drafter

DTYPES = ("F32", "F16", "BF16")
HEAD = "lm_head.weight"


def cast(x: np.ndarray, dtype: str) -> np.ndarray:
    return to_bf16(x) if dtype == "BF16" else x.astype({"F32": np.float32, "F16": np.float16}[dtype])


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def write_map(file: Path, ids: list[int]) -> Path:
    """In the order given, with t2d."""
    stored = np.array(ids, dtype=np.int64) - np.arange(len(ids))
    write_tensors(file, {"d2t": stored, "t2d": np.isin(np.arange(VOCAB), ids)})
    return file


def drafter_of(path: Path, ids: list[int], head: np.ndarray, **config: Any) -> Path:
    """A drafter over these tokens in this order, every other tensor random."""
    tensors = {name: normal(*x.shape, seed=i) for i, (name, x) in enumerate(llama_tensors().items()) if x.ndim}
    tensors |= {HEAD: head, "d2t": np.array(ids) - np.arange(len(ids)), "t2d": np.isin(np.arange(VOCAB), ids)}
    folder = write_drafter(path, draft_vocab_size=len(ids), **config)
    write_tensors(folder / "model.safetensors", tensors)
    return folder


def verifier_of(path: Path, head: np.ndarray, name: str = HEAD, tied: bool = False) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"text_config": {"tie_word_embeddings": tied}}))
    (path / "tokenizer.json").write_text("{}")
    write_tensors(path / "model.safetensors", {name: head, "model.norm.weight": normal(head.shape[1])})
    return path


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    return {name: np.array(tensor) for name, tensor in map_tensors(folder / "model.safetensors").items()}


@dataclass
class Remap:
    """The command on files in one folder; `last` is what it said on stderr."""

    folder: Path
    capsys: pytest.CaptureFixture[str]
    last: str = ""

    def run(self, source: Path, vocab: Path, verifier: Path, init: str = "verifier", **flags: Any) -> dict[str, Any]:
        """Into a new folder; what --json says, with the folder under "folder"."""
        out = self.folder / f"out-{len(list(self.folder.iterdir()))}"
        code, shown = self._main(source, vocab, verifier, init, out, flags)
        assert code == 0, shown.err
        self.last = shown.err
        return json.loads(shown.out) | {"folder": out}

    def refused(self, source: Path, vocab: Path, verifier: Path, init: str = "verifier", **flags: Any) -> str:
        """What it says where it fails, with nothing left behind."""
        before = sorted(self.folder.rglob("*"))
        code, shown = self._main(source, vocab, verifier, init, flags.pop("out", self.folder / "out" / "deep"), flags)
        assert code == 1 and shown.out == "" and "Traceback" not in shown.err
        assert sorted(self.folder.rglob("*")) == before
        return str(shown.err)

    def _main(self, source: Path, vocab: Path, verifier: Path, init: str, out: Path, flags: dict[str, Any]) -> Any:
        words = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        command = ["remap", str(source), "--vocab", str(vocab), "--verifier", str(verifier), "--init", init]
        code = main([*command, "--out", str(out), *words, "--json"])
        return code, self.capsys.readouterr()
