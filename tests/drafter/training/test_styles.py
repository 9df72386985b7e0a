"""Both draft styles on the tiny Kimi, by the command: from nothing, from a folder, and exported as SGLang reads."""

import argparse
import json
from pathlib import Path

import pytest
import torch

from drafter.checkpoint.preflight import read_folder
from drafter.training.attention import Layout
from drafter.training.errors import TrainingError
from drafter.training.model import load_drafter
from drafter.training.target import load_target
from drafter.training.train_cli import add_train
from tests.drafter.training.shard_folder import write_shards
from tests.tiny.eagle import load

FEW = ("--steps", 3, "--ttt-steps", 2, "--batch-tokens", 200, "--held-share", 0.2, "--fp32", "--eval-documents", 4)
SIZES = ("--q-lora-rank", 40, "--kv-lora-rank", 24, "--nope-dim", 12, "--rope-dim", 8, "--value-dim", 20)


def train(*arguments: object) -> None:
    parser = argparse.ArgumentParser()
    add_train(parser.add_subparsers())
    parsed = parser.parse_args([str(each) for each in ("train", *arguments)])
    assert parsed.run(parsed) == 0


@pytest.fixture
def shards(tmp_path, kimi, kimi_spoken) -> Path:
    return write_shards(tmp_path / "shards", kimi_spoken, kimi)


@pytest.fixture
def vocab_file(tmp_path, kimi) -> Path:
    file = tmp_path / "vocab.safetensors"
    load_drafter(kimi.drafters["mla_perfect"], load_target(kimi.target).embed_VH).vocab.save(file)
    return file


@pytest.mark.parametrize(
    ("style", "sizes"),
    [("mla", ()), ("mla", (*SIZES, "--heads", 2, "--export-fp32")), ("mha", ("--kv-heads", 2, "--export-fp32"))],
)
def test_a_new_drafter_of_either_style(tmp_path, kimi, shards, vocab_file, style, sizes, kimi_spoken):
    common = ("--shards", shards, "--target", kimi.target, *FEW)
    train(*common, "--vocab", vocab_file, "--out", tmp_path / "run", "--style", style, *sizes, "--curriculum")
    folder = read_folder(tmp_path / "run" / "drafter")
    rope = folder.config["rope_scaling"]
    assert (folder.config["rope_theta"], rope["rope_type"], rope["factor"]) == (50000.0, "yarn", 4.0)
    if sizes[:2] == SIZES[:2]:
        names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        assert [folder.config[name] for name in names] == [40, 24, 12, 8, 20]

    if style == "mla":  # the reference knows plain ropes alone for the other style
        embed = load_target(kimi.target).embed_VH
        model, slow = load_drafter(folder.path, embed), load(folder.path, embed)
        slow.weights = {name: each if name in ("d2t", "t2d") else each.float() for name, each in slow.weights.items()}
        document = kimi_spoken[0]
        aux, tokens = torch.from_numpy(document.aux_hidden)[:-1], torch.from_numpy(document.input_ids).long()[1:]
        layout = Layout.of([len(tokens)], torch.ones(len(tokens), dtype=torch.bool))
        hidden, _ = model.first(aux, tokens, layout)
        _, wanted = slow.step(slow.fuse(aux[None]), tokens[None], [])
        torch.testing.assert_close(model.logits(hidden), wanted[0], rtol=1e-4, atol=1e-4)

    train(*common, "--from", folder.path, "--out", tmp_path / "on", "--force")  # it has learnt nothing yet
    again = read_folder(tmp_path / "on" / "drafter").config
    assert again | {"torch_dtype": 0} == folder.config | {"torch_dtype": 0}


@pytest.mark.parametrize("name", ["mla_noised_a", "mha_noised_a"])
def test_a_drafter_of_either_style_is_trained_on(tmp_path, kimi, shards, name, capsys):
    parent = kimi.drafters[name]
    train("--shards", shards, "--target", kimi.target, *FEW, "--from", parent, "--out", tmp_path / "run", "--json")
    assert json.loads(capsys.readouterr().out)["first"]["full_acc_0"] > 0.3
    config = json.loads((parent / "config.json").read_text())
    kept = read_folder(tmp_path / "run" / "drafter").config
    assert {key: kept[key] for key in config if key != "torch_dtype"} == {
        key: value for key, value in config.items() if key != "torch_dtype"
    }


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--style", "mla", "--kv-heads", 2), "--kv-heads: sizes of grouped heads"),
        (("--rope-dim", 8), "--rope-dim: sizes of latent attention"),
        (("--style", "mla", "--value-dim", 40), "v_head_dim 40 is more than a key's width"),
    ],
)
def test_sizes_of_the_other_style_are_refused(tmp_path, kimi, shards, vocab_file, flags, message):
    with pytest.raises(TrainingError, match=message):
        train("--shards", shards, "--target", kimi.target, *FEW, "--vocab", vocab_file, "--out", tmp_path / "r", *flags)


def test_latent_attention_for_a_target_without_it(tmp_path, llama, spoken):
    shards = write_shards(tmp_path / "shards", spoken[:20], llama)
    vocab_file = tmp_path / "vocab.safetensors"
    load_drafter(llama.drafters["mha_perfect"], load_target(llama.target).embed_VH).vocab.save(vocab_file)
    common = ("--shards", shards, "--target", llama.target, *FEW, "--vocab", vocab_file, "--style", "mla")
    with pytest.raises(TrainingError, match="give --q-lora-rank, --kv-lora-rank, --nope-dim, --rope-dim, --value-dim"):
        train(*common, "--out", tmp_path / "a")
    train(*common, "--out", tmp_path / "b", *SIZES)
    assert read_folder(tmp_path / "b" / "drafter").architecture == "Eagle3DeepseekV2ForCausalLM"


def test_a_drafter_that_is_trained_on_keeps_its_shape(tmp_path, kimi, shards):
    with pytest.raises(TrainingError, match=r"--heads: .*mla_perfect has its own shape"):
        train(
            "--shards", shards, "--target", kimi.target, *FEW, "--from", kimi.drafters["mla_perfect"],
            "--out", tmp_path / "r", "--heads", 2,
        )  # fmt: skip
