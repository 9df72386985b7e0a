"""Capture on the real engine, fp32: what lands in the shards is what transformers computes, however it was read.

Alone or sixteen at a time, whole, or in chunks while a drafter serves: the same tensors.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from drafter.data import spool
from drafter.data.capture import CaptureError, Reading, capture, read_conversations
from drafter.data.shards import ShardFolder, check_target, open_shards
from server.engine import Engine, EngineError
from tests.engine.pool import EnginePool
from tests.engine.served import CAPTURING, CHUNK, Served, on
from tests.tiny import TinyPair, targets

pytestmark = pytest.mark.engine

REPO = Path(__file__).parents[2]
LENGTHS = (3, 5, 17, 40, 64, 65, 90, 128, 129, 200, 260, 300, 11, 33, 8, 70)
ANSWER, PAST = 24, 4
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}
FINAL = -1  # transformers' last hidden state is after the final norm


class References:
    """Conversations of a target, greedy by transformers, and the hidden states of transformers; made once a target."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[list[Reading], list[np.ndarray], list[np.ndarray]]] = {}

    def get(self, pair: TinyPair) -> tuple[list[Reading], list[np.ndarray], list[np.ndarray]]:
        if pair.name not in self._made:
            model = targets.load(pair.reference)
            rng = np.random.default_rng(11)
            prompts = [rng.integers(10, pair.vocab_size - 10, length).tolist() for length in LENGTHS]
            texts = targets.greedy(model, prompts, ANSWER)
            conversations, aux, final = [], [], []
            for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
                answer = np.array(text[len(prompt) :], np.int32)
                conversations.append(Reading(f"line {index}", np.array(prompt, np.int32), answer, PAST))
                out = model(torch.tensor([text]), output_hidden_states=True, use_cache=False)
                aux.append(torch.cat([out.hidden_states[i][0] for i in pair.inputs_to], dim=-1).numpy())
                final.append(out.hidden_states[FINAL][0].numpy())
            self._made[pair.name] = (conversations, aux, final)
        return self._made[pair.name]


@pytest.fixture(scope="session")
def references() -> References:
    return References()


@pytest.fixture
def folder(served: Served) -> Path:
    """Where the engine captures to."""
    assert served.folder
    return served.folder


def captured(engine: Engine, conversations: list[Reading], out: Path, concurrency: int = 16) -> ShardFolder:
    assert engine.capture
    capture(
        conversations,
        url=engine.url,
        engine_dir=engine.capture.folder,
        out=out,
        headers=engine.headers,
        concurrency=concurrency,
        shard_bytes=200_000,
    )
    return open_shards(out, verify=True)


@on(*CAPTURING)
def test_captured_states_are_those_of_transformers(served: Served, references: References, tmp_path: Path) -> None:
    pair = served.pair
    conversations, aux, final = references.get(pair)
    names = [name for name in load_file(pair.target / "model.safetensors") if name.endswith("lm_head.weight")]
    head_VH = load_file(pair.target / "model.safetensors")[names[0]].numpy()
    for concurrency in (16, 1):
        shards = captured(served.engine, conversations, tmp_path / str(concurrency), concurrency)
        manifest = shards.manifest
        assert (manifest["layer_ids"], manifest["convention"]) == (list(pair.layer_ids), pair.convention)
        assert (manifest["dtype"], manifest["hidden_size"]) == ("float32", pair.hidden_size)
        check_target(manifest, pair.target)
        assert len(shards) == len(conversations)
        for index, conversation in enumerate(conversations):
            found = shards.document(index)
            assert np.array_equal(found.input_ids, conversation.ids)
            assert found.loss_mask.sum() == ANSWER - PAST and not found.loss_mask[-PAST:].any()
            np.testing.assert_allclose(found.aux_hidden, aux[index], **TOLERANCE)
            np.testing.assert_allclose(found.final_hidden, final[index], **TOLERANCE)
            # The final states are what the head reads: its greedy choices are the answer.
            prompt = len(conversation.input_ids)
            chosen = (found.final_hidden[prompt - 1 : -1] @ head_VH.T).argmax(-1)
            assert chosen.tolist() == conversation.output_ids.tolist()


def test_layers_are_told_apart(tiny: Any, references: References) -> None:
    """The comparison above could fail: another layer, order or norm is far outside its tolerance."""
    for target in ("llama", "kimi"):
        _, aux, final = references.get(tiny(target))
        width = final[0].shape[-1]
        parts = [aux[5][:, at : at + width] for at in range(0, aux[5].shape[-1], width)] + [final[5]]
        for i, one in enumerate(parts):
            for other in parts[:i]:
                assert np.abs(one - other).max() > 0.1


@on("llama-chunked")
def test_other_requests_leave_nothing_behind(served: Served, folder: Path) -> None:
    engine = served.engine
    body = {"input_ids": [20] * 200, "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
    answer = httpx.post(f"{engine.url}/generate", json=body, headers=engine.headers, timeout=120)
    assert answer.status_code == 200
    assert not list(spool.spool_of(folder).iterdir())


@on("llama-chunked")
def test_chunks_are_really_chunks(served: Served, references: References, folder: Path) -> None:
    engine = served.engine
    conversations, aux, _ = references.get(served.pair)
    longest = max(range(len(LENGTHS)), key=lambda index: LENGTHS[index])
    ids, rid = conversations[longest].ids, spool.RID_PREFIX + "chunks"
    body = {"input_ids": ids.tolist(), "rid": rid, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    httpx.post(f"{engine.url}/generate", json=body, headers=engine.headers, timeout=120).raise_for_status()
    parts = list(spool.spool_of(folder).glob(f"{rid}-*"))
    assert len(parts) == -(-len(ids) // CHUNK)
    joined = spool.join_parts(folder, rid, ids)
    assert joined is not None
    np.testing.assert_allclose(joined[0], aux[longest], **TOLERANCE)
    spool.delete_parts(folder, rid)


@on("llama-capture")
def test_a_text_too_long_is_refused_and_named(served: Served, folder: Path, tmp_path: Path) -> None:
    engine = served.engine
    long = Reading("line 7", np.full(2000, 20, np.int32), np.full(4, 21, np.int32), 0)
    short = Reading("line 8", np.full(20, 20, np.int32), np.full(4, 21, np.int32), 0)
    result = capture(
        [long, short], url=engine.url, engine_dir=folder, out=tmp_path, headers=engine.headers, concurrency=2
    )
    assert result.documents == 1 and len(result.refused) == 1
    assert result.refused[0].startswith("line 7: ") and "1024" in result.refused[0]


@pytest.fixture
def file(tiny: Any, references: References, tmp_path: Path) -> Iterator[Path]:
    lines = [
        json.dumps(
            {
                "messages": [],
                "input_ids": [int(i) + shift for i in each.input_ids],
                "output_ids": each.output_ids.tolist(),
                "meta": {"past": PAST},
            }
        )
        for shift in range(8)
        for each in references.get(tiny("llama"))[0]
    ]
    (tmp_path / "answers.jsonl").write_text("\n".join(lines))
    yield tmp_path / "answers.jsonl"


def client(engine: Engine, file: Path, out: Path) -> subprocess.Popen[str]:
    assert engine.capture
    where = ["--url", engine.url, "--dir", str(engine.capture.folder), "--key-file", str(engine.key_file)]
    small = ["--shard-mb", "0.5", "--concurrency", "4"]
    return subprocess.Popen(
        [sys.executable, "-m", "drafter", "capture", str(file), *where, "--out", str(out), *small],
        cwd=REPO,
        stderr=subprocess.PIPE,
        text=True,
    )


def same(one: Path, other: Path, file: Path) -> None:
    """The same documents in the same order; the states to the tolerance of another batch."""
    first, second = open_shards(one, verify=True), open_shards(other, verify=True)
    assert len(first) == len(second) == len(read_conversations([file]))
    for index in range(len(first)):
        a, b = first.document(index), second.document(index)
        assert np.array_equal(a.input_ids, b.input_ids) and np.array_equal(a.loss_mask, b.loss_mask)
        np.testing.assert_allclose(a.aux_hidden, b.aux_hidden, **TOLERANCE)
        np.testing.assert_allclose(a.final_hidden, b.final_hidden, **TOLERANCE)


@on("llama-capture")
def test_a_killed_client_goes_on_where_it_was(served: Served, folder: Path, tmp_path: Path, file: Path) -> None:
    engine = served.engine
    assert client(engine, file, tmp_path / "whole").wait() == 0
    process = client(engine, file, tmp_path / "out")
    deadline = time.monotonic() + 120
    while not (tmp_path / "out" / "manifest.json").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    held = len(open_shards(tmp_path / "out", verify=True))
    assert 0 < held < len(read_conversations([file]))
    assert client(engine, file, tmp_path / "out").wait() == 0
    same(tmp_path / "whole", tmp_path / "out", file)
    whole, out = (open_shards(tmp_path / name).manifest["shards"] for name in ("whole", "out"))
    assert [(each["file"], each["tokens"]) for each in whole] == [(each["file"], each["tokens"]) for each in out]
    assert not list(spool.spool_of(folder).iterdir())


@on("llama-capture")
def test_a_killed_engine_is_named_and_a_new_one_goes_on(
    served: Served, folder: Path, tmp_path: Path, file: Path
) -> None:
    engine = served.engine
    process = client(engine, file, tmp_path / "out")
    deadline = time.monotonic() + 120
    while not (tmp_path / "out" / "manifest.json").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(spool.read_handshake(folder).pid, signal.SIGKILL)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 1 and "Traceback" not in said
    assert "start the engine and run the same command again" in said
    held = len(open_shards(tmp_path / "out", verify=True))
    assert 0 < held < len(read_conversations([file]))
    with pytest.raises((CaptureError, spool.SpoolError)):
        capture([], url=engine.url, engine_dir=folder, out=tmp_path / "out", headers=engine.headers)
    served.pool.stop()
    engine = served.engine
    assert client(engine, file, tmp_path / "out").wait() == 0
    assert client(engine, file, tmp_path / "whole").wait() == 0
    same(tmp_path / "whole", tmp_path / "out", file)


def test_the_other_convention_is_refused(engines: EnginePool, tiny: Any, tmp_path: Path) -> None:
    engines.stop()
    profile = engines.profile(tiny("llama"))
    assert profile.capture
    wrong = profile.model_copy(update={"capture": profile.capture.model_copy(update={"convention": "input_to_layer"})})
    engine = Engine(wrong, "none", run_dir=tmp_path / "run", capture_dir=tmp_path / "capture")
    with pytest.raises(
        EngineError, match=r"are the inputs to layers \[0, 1, 2\], but this engine captures .* \[1, 2, 3\]"
    ):
        engine.start()
    assert engine.state == "stopped"
