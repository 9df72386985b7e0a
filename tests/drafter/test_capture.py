"""The capture client against a fake engine: what it keeps, in which order, what it refuses, and how it goes on."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from drafter.data import capture as capturing
from drafter.data import shard_writer, spool
from drafter.data.capture import CaptureError, capture, read_conversations
from drafter.data.shards import ShardError, check_target, open_shards
from drafter.data.spool import SpoolError
from tests.drafter import fake_capturing_engine as fakes
from tests.drafter.capturing import N_AUX, WIDTH, check, hidden, lines, write_lines, write_target
from tests.drafter.fake_capturing_engine import KEY

SHARD = 4000


def run(fake, tmp_path, entries, **options):
    file = write_lines(tmp_path / "answers.jsonl", entries)
    options = {"out": tmp_path / "out", "shard_bytes": SHARD, **options}
    return capture(
        read_conversations([file]),
        url=fake.url,
        engine_dir=fake.folder,
        headers={"authorization": f"Bearer {KEY}"},
        **options,
    )


@pytest.mark.parametrize("concurrency", [1, 5, 100])
@pytest.mark.parametrize(("chunk", "overlap"), [(1000, 0), (7, 0), (7, 3), (1, 0)])
def test_documents_in_the_order_of_the_lines(fake, tmp_path, concurrency, chunk, overlap):
    fake.chunk, fake.overlap, fake.delay = chunk, overlap, 0.002
    entries, told, estimates = lines(23), [], []
    result = run(fake, tmp_path, entries, concurrency=concurrency, on_tokens=told.append, on_estimate=estimates.append)
    shards = check(tmp_path / "out", entries)
    assert (result.documents, result.skipped, result.refused) == (23, 0, [])
    assert result.tokens == sum(told) == shards.manifest["tokens"] == estimates[0].tokens
    assert len(shards.manifest["shards"]) > 1
    assert not list(spool.spool_of(fake.folder).iterdir()), "the spool is left empty"
    assert fake.most_running == min(concurrency, 23) if concurrency == 1 else fake.most_running > 1
    assert fake.most_running <= concurrency
    check_target(shards.manifest, fake.target)
    assert shards.manifest["target"]["name"] == "fake"


def test_what_is_there_is_not_asked_for_again(fake, tmp_path):
    entries = lines(10)
    run(fake, tmp_path, entries[:6])
    asked = len(fake.answered)
    result = run(fake, tmp_path, [*entries, *entries[:3]])
    assert (result.documents, result.skipped) == (4, 9)
    assert len(fake.answered) == asked + 4
    check(tmp_path / "out", entries)
    assert run(fake, tmp_path, entries).documents == 0


def test_the_same_line_twice_is_captured_once(fake, tmp_path):
    entries = lines(4)
    result = run(fake, tmp_path, [*entries, *entries[:3]])
    assert (result.documents, result.skipped) == (4, 3)
    check(tmp_path / "out", entries)


def test_few_documents_wait_for_a_slow_one(fake, tmp_path):
    entries = lines(60)
    entries[0]["input_ids"][0] = fakes.SLOW
    before = []
    run(fake, tmp_path, entries, concurrency=3, on_tokens=lambda _: before.append(len(fake.answered)))
    assert before[0] <= 2 * 3, "every document that is read before its turn takes memory"
    check(tmp_path / "out", entries)


def test_rows_that_are_missing_are_waited_for(fake):
    ids = np.arange(9, dtype=np.int32)
    for start, end in ((5, 9), (0, 2), (2, 4)):
        fake.write("capture-x", ids[:end][start:], at=start)
        assert spool.join_parts(fake.folder, "capture-x", ids) is None
    fake.write("capture-x", ids[4:5], at=4)
    aux, final = spool.join_parts(fake.folder, "capture-x", ids)
    assert np.array_equal(aux, hidden(ids, N_AUX * WIDTH)) and np.array_equal(final, hidden(ids, WIDTH))


def test_the_estimate_is_what_it_takes(fake, tmp_path):
    seen = []
    result = run(fake, tmp_path, lines(40), on_estimate=seen.append)
    assert seen[0].documents == 40
    assert seen[0].bytes <= result.bytes <= seen[0].bytes + 1000 * len(list((tmp_path / "out").iterdir()))


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (fakes.SILENT, CaptureError, r"read .*answers\.jsonl:3 but its tensors did not come"),
        (fakes.OTHER_IDS, SpoolError, "holds other token ids than were sent"),
        (fakes.NAN, CaptureError, r"answers\.jsonl:3: document \w+: aux_hidden has \d+ values that are NaN"),
        (fakes.DEAD, CaptureError, "does not answer"),
    ],
)
def test_a_fault_stops_and_keeps_what_was_captured(fake, tmp_path, monkeypatch, fault, error, message):
    monkeypatch.setattr(capturing, "PARTS_TIMEOUT_S", 0.2)
    entries = lines(6)
    good = [*entries[:2], *entries[3:]]
    entries[2]["input_ids"][0] = fault
    with pytest.raises(error, match=message):
        run(fake, tmp_path, entries)
    check(tmp_path / "out", entries[:2])
    run(fake, tmp_path, good)
    check(tmp_path / "out", good)


def test_a_line_that_the_engine_refuses_is_named_and_the_rest_captured(fake, tmp_path):
    entries = lines(6)
    entries[2]["input_ids"][0] = fakes.REFUSED
    result = run(fake, tmp_path, entries)
    assert len(result.refused) == 1 and "answers.jsonl:3: " in result.refused[0] and "too long" in result.refused[0]
    check(tmp_path / "out", [*entries[:2], *entries[3:]])


def test_the_cap_stops_with_valid_shards(fake, tmp_path):
    entries = lines(40)
    with pytest.raises(CaptureError, match=r"reached its cap of 2e-05 GB: what is there is valid; raise --max-gb"):
        run(fake, tmp_path, entries, max_gb=2e-5)
    held = len(open_shards(tmp_path / "out", verify=True))
    assert 0 < held < 40
    assert sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors")) < 2e4 + 2000
    run(fake, tmp_path, entries)
    check(tmp_path / "out", entries)


def test_a_disk_without_room_is_seen_before_the_start(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(capturing, "FREE_BYTES", 10**18)
    with pytest.raises(CaptureError, match=r"40 documents take about .* GB free"):
        run(fake, tmp_path, lines(40))
    assert not fake.answered


def test_a_disk_that_fills_keeps_what_is_there(fake, tmp_path, monkeypatch):
    entries, free = lines(40), iter([10**12] * 15)

    def usage(path):
        return SimpleNamespace(free=next(free, 1000))

    monkeypatch.setattr(capturing.shutil, "disk_usage", usage)
    with pytest.raises(CaptureError, match=r"is full but for 0\.5 GB: what is there is valid"):
        run(fake, tmp_path, entries)
    monkeypatch.undo()
    assert 0 < len(open_shards(tmp_path / "out", verify=True)) < 40
    run(fake, tmp_path, entries)
    check(tmp_path / "out", entries)


def test_a_write_that_fails_names_the_folder(fake, tmp_path, monkeypatch):
    def full(file, tensors):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shard_writer, "write_tensors", full)
    with pytest.raises(CaptureError, match=r"out cannot be written \(No space left on device\): 0 documents are safe"):
        run(fake, tmp_path, lines(9))


def test_what_another_run_left_in_the_spool_is_cleared(fake, tmp_path):
    entries = lines(3)
    fake.write("capture-0000-" + "0" * 32, np.arange(5, dtype=np.int32))
    left = []
    run(fake, tmp_path, entries, on_estimate=lambda _: left.extend(spool.spool_of(fake.folder).iterdir()))
    assert not left, "before the first request"


def test_one_client_for_an_engine(fake, tmp_path):
    lock = capturing.lock_folder(spool.spool_of(fake.folder))
    with pytest.raises(ShardError, match="another capture is using"):
        run(fake, tmp_path, lines(3))
    os.close(lock)
    run(fake, tmp_path, lines(3))


def dead_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_process_that_nobody_collected_does_not_run():
    process = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    process.stdout.read()  # until it ended
    deadline = time.monotonic() + 10
    while spool.process_runs(process.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not spool.process_runs(process.pid)
    assert process.wait() == 0
    assert spool.process_runs(os.getpid())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f.folder / "handshake.json").unlink(), r"no engine captures into this folder.*--capture"),
        (lambda f: (f.folder / "handshake.json").write_text("{"), "cannot be read"),
        (lambda f: (f.folder / "handshake.json").write_text("{}"), "cannot be read"),
        (lambda f: f.shake_hands(format=2), "has format 2, expected 1"),
        (lambda f: f.shake_hands(pid=dead_pid()), "which no longer runs"),
    ],
)
def test_no_capture_without_a_handshake(fake, tmp_path, spoil, message):
    spoil(fake)
    with pytest.raises(SpoolError, match=message):
        run(fake, tmp_path, lines(3))
    assert not (tmp_path / "out").exists()


def test_an_engine_on_another_machine_that_sees_the_disk(fake, tmp_path):
    fake.shake_hands(host="another-machine", pid=dead_pid())
    run(fake, tmp_path, entries := lines(3))
    check(tmp_path / "out", entries)


def test_an_engine_elsewhere(fake, tmp_path):
    with pytest.raises(CaptureError, match="wants its key"):
        capture([], url=fake.url, engine_dir=fake.folder, out=tmp_path / "out")
    with pytest.raises(CaptureError, match="does not answer"):
        capture([], url="http://127.0.0.1:9", engine_dir=fake.folder, out=tmp_path / "out")
    fake.target = Path("org/model")
    with pytest.raises(CaptureError, match=r"org/model is no folder on this machine: .*--target"):
        run(fake, tmp_path, lines(3))
    run(fake, tmp_path, lines(3), target=write_target(tmp_path / "target"))


def test_another_target_does_not_join_a_folder(fake, tmp_path):
    run(fake, tmp_path, lines(3))
    write_target(fake.target, seed=1)
    with pytest.raises(ShardError, match="was captured with lm_head_sha256"):
        run(fake, tmp_path, lines(5))


BAD = {
    "no ids": ({"messages": []}, "has no input_ids: .*drafter generate"),
    "no answer": ({"messages": [], "input_ids": [1], "output_ids": []}, "has no output_ids"),
    "text": ({"messages": [], "input_ids": [1], "output_ids": ["a"]}, "is no token id"),
    "negative": ({"messages": [], "input_ids": [-1], "output_ids": [1]}, "is no token id"),
    "true": ({"messages": [], "input_ids": [True], "output_ids": [1]}, "is no token id"),
    "large": ({"messages": [], "input_ids": [2**31], "output_ids": [1]}, "is no token id"),
    "nested": ({"messages": [], "input_ids": [1], "output_ids": {"0": 1}}, "is no token id"),
    "all past": ({"messages": [], "input_ids": [1], "output_ids": [1, 2], "meta": {"past": 2}}, "has no output_ids"),
    "past in words": (
        {"messages": [], "input_ids": [1], "output_ids": [1, 2], "meta": {"past": "1"}},
        r"meta\.past is '1'",
    ),
    "meta a list": ({"messages": [], "input_ids": [1], "output_ids": [1, 2], "meta": [1]}, r"meta\.past is None"),
    "a list": ([1], "is no JSON object"),
}


@pytest.mark.parametrize("what", BAD)
def test_lines_that_cannot_be_captured(tmp_path, what):
    entry, message = BAD[what]
    file = write_lines(tmp_path / "a.jsonl", [*lines(1), entry])
    with pytest.raises(CaptureError, match=rf"a\.jsonl:2.*{message}"):
        read_conversations([file])


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(CaptureError, match="cannot be read"):
        read_conversations([tmp_path / "none.jsonl"])
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(CaptureError, match="no conversation"):
        read_conversations([tmp_path / "a.jsonl"])
    (tmp_path / "a.jsonl").write_text("{\n")
    with pytest.raises(CaptureError, match=r"a\.jsonl:1 is not JSON"):
        read_conversations([tmp_path / "a.jsonl"])
