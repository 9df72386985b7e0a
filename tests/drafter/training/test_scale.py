"""What a run says before it allocates, its curves for TensorBoard, attention off the CPU, and batches in pieces."""

import struct

import pytest
import torch

from drafter.data.shards import open_shards
from drafter.training import attention
from drafter.training.attention import Layout, attend
from drafter.training.curves import Curves
from drafter.training.errors import TrainingError
from drafter.training.estimate import blank, estimate, free_memory
from drafter.training.ranks import Ranks
from tests.drafter.training.random_drafter import config, drafter

ALONE = Ranks(torch.device("cpu"))
KIMI = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "vocab_size": 163840,
    "draft_vocab_size": 32000,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]},
}
SIZES = {"batch_tokens": 4096, "max_length": 2048, "accumulate": 1, "ttt_steps": 5, "bf16": True}


class Kimis:
    """Shards of a hundred thousand samples, as far as an estimate looks."""

    manifest = {"n_aux": 3, "dtype": "bfloat16", "tokens": 200_000_000}  # noqa: RUF012


def test_kimi_is_estimated_from_sizes():
    alone = estimate(KIMI, Kimis(), ALONE, **SIZES)
    assert sum(p.numel() for p in blank(KIMI).parameters()) == pytest.approx(1.19e9, rel=0.01)
    assert alone.memory["weights, gradients, moments"] == pytest.approx(19.1e9, rel=0.01)
    assert alone.memory["features"] == pytest.approx(2 * 8192 * 57_349, rel=0.01)  # 57 KB a token
    eight = estimate(KIMI, Kimis(), Ranks(torch.device("cpu"), 0, 8), **SIZES)
    assert eight.memory["weights, gradients, moments"] < 0.7 * alone.memory["weights, gradients, moments"]
    assert sum(eight.memory.values()) < sum(alone.memory.values())


def test_a_cap_refuses_with_the_parts(tmp_path):
    with pytest.raises(
        TrainingError, match=r"each of 1 ranks needs about .* weights.* 19\.1, .* 20\.0 --memory-cap says"
    ):
        estimate(KIMI, Kimis(), ALONE, **SIZES).check(ALONE, 20, tmp_path)
    estimate(KIMI, Kimis(), ALONE, **SIZES).check(ALONE, 500, tmp_path / "not" / "there")


def test_ranks_of_one_machine_share_its_memory(monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 16e9}))
    assert [free_memory(Ranks(torch.device("cpu"), 0, 8, beside)) for beside in (1, 8)] == [16e9, 2e9]


def test_a_full_disk_is_told_before(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10**9}))
    with pytest.raises(TrainingError, match=r"has 1\.00 GB free, .* need 43\.\d\d GB"):
        estimate(KIMI, Kimis(), ALONE, **SIZES).check(ALONE, 500, tmp_path)


def test_the_command_refuses_before_it_loads(tmp_path, llama, shards, vocab_file, monkeypatch):
    from tests.drafter.training.test_train import FEW, command

    monkeypatch.setattr("drafter.training.initial.new_drafter", lambda *given: pytest.fail("it was made"))
    given = ("--shards", shards, "--target", llama.target, "--vocab", vocab_file, "--out", tmp_path / "run")
    with pytest.raises(TrainingError, match="--memory-cap says"):
        command("train", *given, *FEW, "--memory-cap", 0.1)
    assert not (tmp_path / "run").exists()


def test_hidden_states_are_not_read_where_they_are_not_asked_for(tmp_path, llama, shards):
    from drafter.training.documents import Documents
    from drafter.training.target import load_target

    documents = Documents(open_shards(shards), load_target(llama.target), 0.2, 2048, tmp_path)
    marks, whole = documents.batch([0, 3], hidden=False), documents.batch([0, 3])
    assert marks.aux_TA.shape[1] == marks.final_TH.shape[1] == 0
    assert torch.equal(marks.best_T, whole.best_T) and torch.equal(marks.last_T, whole.last_T)


def crc32c(content: bytes) -> int:
    """Bit by bit, by the definition."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_curves_are_records_that_tensorboard_reads(tmp_path):
    assert crc32c(b"123456789") == 0xE3069283  # the check value of CRC-32C
    curves = Curves(tmp_path)
    curves.add(300, {"train/loss": 1.5, "val/full_acc_0_epoch": 0.25})
    file = next(tmp_path.glob("events.out.tfevents.*"))
    content, events = file.read_bytes(), []
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        for part, at in ((content[:8], 8), (content[12 : 12 + length], 12 + length)):
            crc = crc32c(part)
            masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
            assert struct.unpack("<I", content[at : at + 4]) == (masked,)
        events.append(content[12 : 12 + length])
        content = content[16 + length :]
    assert events[0].endswith(b"\x1a\x0dbrain.Event:2") and events[0][0] == 0x09 and events[0][9:11] == b"\x10\x00"
    assert events[1][9:12] == b"\x10\xac\x02"  # step 300 as a varint
    assert b"\x0a\x0atrain/loss\x15" + struct.pack("<f", 1.5) in events[1]
    assert b"val/full_acc_0_epoch\x15" + struct.pack("<f", 0.25) in events[1]


def test_attention_written_out_equals_the_operator(monkeypatch):
    """What a GPU computes, here: forward and all gradients, chains included, against torch's operator for CPUs."""
    generator = torch.Generator().manual_seed(4)
    rows, query_P = [7, 3], torch.tensor([True] * 6 + [False, True, True, True])
    layout = Layout.of(rows, query_P)

    def random(*shape):
        return torch.randn(*shape, generator=generator).requires_grad_()

    q, k, v = random(9, 4, 8), random(10, 2, 8), random(10, 2, 8)
    own = [random(9, 2, 8) for _ in range(4)]
    weight = torch.randn(9, 4, 8, generator=generator)
    found = []
    for written in (False, True):
        monkeypatch.setattr(attention, "has_operator", lambda x, written=written: not written)
        out = attend(q, layout.pad_keys(k), layout.pad_keys(v), layout, own[:2], own[2:])
        found.append([out, *torch.autograd.grad((out * weight).sum(), [q, k, v, *own])])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_config_of_the_tests_is_counted():
    model = drafter()
    assert sum(p.numel() for p in blank(config(2) | {"vocab_size": 512}).parameters()) == sum(
        p.numel() for p in model.parameters()
    )
