"""Training runs on the tiny Llama: they learn, resume bit for bit, refuse what does not fit, and export what serves."""

import argparse
import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch

from drafter.checkpoint.folder import open_folder
from drafter.checkpoint.manifest import read_manifest
from drafter.checkpoint.preflight import read_folder
from drafter.checkpoint.vocab import DraftVocab
from drafter.data.shards import ShardError, join_shards, open_shards
from drafter.training.compatible import differences
from drafter.training.defaults import FINETUNE, SCRATCH
from drafter.training.documents import Documents, split_fraction
from drafter.training.errors import TrainingError
from drafter.training.evaluate_cli import add_evaluate
from drafter.training.initial import fit_fc, new_drafter
from drafter.training.model import load_drafter
from drafter.training.shape import Shape, drafter_config
from drafter.training.target import load_target
from drafter.training.train import Options, Run
from drafter.training.train_cli import add_train
from tests.drafter.training.shard_folder import write_shards
from tests.tiny.eagle import load

SMALL = {"batch_tokens": 200, "ttt_steps": 2, "warmup": 5, "eval_every": 4, "eval_documents": 8, "bf16": False}


def new_run(llama, shards, out, vocab_file, **changes) -> Run:
    target, vocab = load_target(llama.target), DraftVocab.load(vocab_file)
    documents = Documents(open_shards(shards), target, 0.2, 2048, out)
    model = new_drafter(drafter_config(target, list(llama.layer_ids), vocab, Shape()), vocab, target, 0)
    fit_fc(model, documents, 0)
    return Run(model, documents, target, Options(**(SMALL | changes)), out, {"data_hash": "d"})


@pytest.mark.parametrize("change", [{"steps": 13}, {"epochs": 0.4, "head_from": 0.5}, {"steps": 9, "bf16": True}])
def test_resume_is_bitwise(tmp_path, llama, shards, vocab_file, change):
    whole = new_run(llama, shards, tmp_path / "whole", vocab_file, **change)
    whole.start()
    whole.train()
    steps = whole.progress.step
    assert steps > 8
    for stop in (3, 6, None):
        part = new_run(llama, shards, tmp_path / "part", vocab_file, **change)
        part.start()
        part.train(stop_after=stop)
    assert part.progress.step == steps and part.progress.best_step == whole.progress.best_step
    for (name, a), (_, b) in zip(whole.model.named_parameters(), part.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    logs = [[json.loads(line) for line in (tmp_path / n / "log.jsonl").open()] for n in ("whole", "part")]
    assert [line | {"seconds": 0} for line in logs[0]] == [line | {"seconds": 0} for line in logs[1]]


def test_a_killed_run_goes_on_from_its_checkpoint_with_the_same_log(tmp_path, llama, shards, vocab_file):
    """Steps after the last checkpoint are lost and done again; their lines in the log are not there twice."""
    whole = new_run(llama, shards, tmp_path / "whole", vocab_file, steps=12)
    whole.start()
    whole.train()
    killed = new_run(llama, shards, tmp_path / "killed", vocab_file, steps=12)
    killed.start()
    killed.train(stop_after=5)
    kept = (tmp_path / "killed" / "checkpoint.safetensors").read_bytes()
    killed.train(stop_after=9)
    (tmp_path / "killed" / "checkpoint.safetensors").write_bytes(kept)
    again = new_run(llama, shards, tmp_path / "killed", vocab_file, steps=12)
    again.start()
    assert again.progress.step == 5
    again.train()
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True))
    steps = [
        [json.loads(line)["global_step"] for line in (tmp_path / n / "log.jsonl").open()] for n in ("whole", "killed")
    ]
    assert steps[0] == steps[1]


def test_another_run_is_not_taken_up(tmp_path, llama, shards, vocab_file):
    run = new_run(llama, shards, tmp_path / "run", vocab_file, steps=2)
    run.start()
    run.train()
    with pytest.raises(TrainingError, match=r"a run with lr 0.003, this one has 0.01"):
        new_run(llama, shards, tmp_path / "run", vocab_file, steps=2, lr=0.01).start()
    (tmp_path / "run" / "checkpoint.safetensors").write_bytes(b"cut")
    with pytest.raises(TrainingError, match="is no checkpoint"):
        new_run(llama, shards, tmp_path / "run", vocab_file, steps=2).start()


def test_the_curriculum_and_the_rate():
    options = Options(steps=100, ttt_steps=4, warmup=10, lr=1.0, min_lr=0.03)
    assert [options.draft_steps(p) for p in (0, 0.24, 0.25, 0.5, 0.75, 1.0)] == [1, 1, 2, 3, 4, 4]
    assert dataclasses.replace(options, curriculum=False).draft_steps(0) == 4
    assert options.rate(0, 0.0) == pytest.approx(0.1)
    assert options.rate(50, 0.5) == pytest.approx(0.03 + 0.97 / 2)
    assert options.rate(99, 1.0) == pytest.approx(0.03)


def test_patience_stops_a_run_that_gains_nothing(tmp_path, llama, shards, vocab_file):
    run = new_run(
        llama, shards, tmp_path / "run", vocab_file, steps=400, lr=1e-12, patience=2, eval_every=2, curriculum=False
    )
    run.start()
    run.train()
    assert run.progress.step <= 8


def test_batches_hold_every_document_once(tmp_path, llama, shards):
    documents = Documents(open_shards(shards), load_target(llama.target), 0.2, 30, tmp_path)
    batches = documents.epoch(documents.train, 100, 1, 0)
    assert sorted(i for batch in batches for i in batch) == sorted(documents.train)
    assert max(documents.tokens(batch) for batch in batches) <= 100
    assert batches == documents.epoch(documents.train, 100, 1, 0) != documents.epoch(documents.train, 100, 1, 1)
    assert documents.length(0) == 30 and len(documents.batch([0]).tokens_T) == 30


def test_the_split_follows_the_prompt(spoken, tmp_path, llama):
    first = spoken[0]
    other_answer = dataclasses.replace(first, input_ids=np.where(first.loss_mask, 7, first.input_ids).astype(np.int32))
    other_prompt = dataclasses.replace(first, input_ids=np.where(first.loss_mask, first.input_ids, 7).astype(np.int32))
    assert split_fraction(first) == split_fraction(other_answer) != split_fraction(other_prompt)
    documents = Documents(
        open_shards(write_shards(tmp_path / "s", spoken, llama)), load_target(llama.target), 0.2, 2048, tmp_path
    )
    turned = Documents(
        open_shards(write_shards(tmp_path / "t", spoken[::-1], llama)), load_target(llama.target), 0.2, 2048, tmp_path
    )
    assert {len(spoken) - 1 - i for i in turned.held} == set(documents.held)


def command(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    add_train(subparsers)
    add_evaluate(subparsers)
    parsed = parser.parse_args([str(a) for a in arguments])
    code: int = parsed.run(parsed)
    return code


FEW = ("--steps", 3, "--ttt-steps", 2, "--batch-tokens", 200, "--held-share", 0.2, "--fp32")


@pytest.mark.parametrize("precision", [(), ("--export-fp32",)])
def test_the_exported_folder_is_a_drafter(tmp_path, llama, shards, vocab_file, answered, capsys, precision):
    out = tmp_path / "run"
    command(
        "train",
        "--shards",
        shards,
        "--target",
        llama.target,
        "--vocab",
        vocab_file,
        "--out",
        out,
        "--json",
        *FEW,
        *precision,
    )
    printed = json.loads(capsys.readouterr().out)
    folder = read_folder(out / "drafter")
    assert printed["drafter"] == str(folder.path) and printed["steps"] == 3
    assert folder.layer_ids == list(llama.layer_ids)
    assert folder.tensors["fc.weight"].dtype == ("F32" if precision else "BF16")
    assert (folder.tensors["d2t"].dtype, folder.tensors["t2d"].dtype) == ("I64", "BOOL")
    manifest = read_manifest(folder.path)
    assert manifest["origin"]["kind"] == "scratch" and manifest["state"] == "candidate"
    assert manifest["vocab_hash"] == DraftVocab.load(vocab_file).hash
    assert manifest["training"]["options"]["ttt_steps"] == 2
    assert manifest["training"]["seconds"] > 0
    assert manifest["training"]["curve"][-1]["step"] == manifest["training"]["steps"]
    best = max(each["accept_len_positions"] for each in manifest["training"]["curve"])
    assert best == pytest.approx(manifest["training"]["best"]["accept_len_positions"], abs=1e-4)

    embed = load_target(llama.target).embed_VH
    model, slow = load_drafter(folder.path, embed), load(folder.path, embed)
    for name, tensor in model.named_parameters():
        torch.testing.assert_close(tensor, slow.weights[name].float(), rtol=0, atol=0)
    greedy = write_shards(tmp_path / "greedy", answered, llama)
    assert command("evaluate", "--drafter", folder.path, "--shards", greedy, "--target", llama.target, "--json") == 0
    assert json.loads(capsys.readouterr().out)["num_steps"] == 3
    with pytest.raises(TrainingError, match="finished run"):
        command("train", "--shards", shards, "--target", llama.target, "--vocab", vocab_file, "--out", out, *FEW)


def test_a_drafter_is_trained_on(tmp_path, llama, shards, capsys):
    parent = llama.drafters["mha_noised_a"]
    common = ("train", "--shards", shards, "--target", llama.target, "--from", parent, "--json", *FEW)
    command(*common, "--out", tmp_path / "run", "--lr", 1e-4)
    printed = json.loads(capsys.readouterr().out)
    assert printed["first"]["full_acc_0"] > 0.3
    assert read_manifest(tmp_path / "run" / "drafter")["origin"]["parent"] == parent.name


def test_shards_of_several_folders_are_one(tmp_path, llama, spoken):
    parts = [write_shards(tmp_path / name, part, llama) for name, part in (("a", spoken[:90]), ("b", spoken[90:]))]
    first, second = (open_shards(part) for part in parts)
    both = join_shards([first, second])
    assert both.names() == first.names() + second.names() and both.manifest["documents"] == len(both) == len(spoken)
    assert np.array_equal(both.document(95).aux_hidden, second.document(5).aux_hidden)
    hashes = {each.data_hash for each in (first, second, both, join_shards([second, first]))}
    assert len(hashes) == 4
    common = ("train", "--target", llama.target, "--from", llama.drafters["mha_noised_a"], *FEW)
    command(*common, "--shards", parts[0], "--shards", parts[1], "--out", tmp_path / "run")
    manifest = read_manifest(tmp_path / "run" / "drafter")
    assert manifest["origin"]["data_hash"] == both.data_hash
    assert manifest["origin"]["kind"] == "finetune"
    assert manifest["origin"]["parent_sha256"] == open_folder(llama.drafters["mha_noised_a"]).sha256


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_ids": [0, 1, 3]}, r"b has layer_ids \[0, 1, 3\], .*a has \[0, 1, 2\]"),
        ({"target": {"config_sha256": "0f"}}, "b has config_sha256 '0f'"),
        ({}, "a and .*b hold the same shard"),
    ],
)
def test_shards_that_do_not_go_together(tmp_path, llama, spoken, changes, message):
    a = open_shards(write_shards(tmp_path / "a", spoken[:20], llama))
    b = open_shards(write_shards(tmp_path / "b", spoken[: 20 if not changes else 30], llama, **changes))
    with pytest.raises(ShardError, match=message):
        join_shards([a, b])


def test_going_on_has_defaults_of_its_own(tmp_path, llama, shards, vocab_file):
    """The rate falls with the width; a head of the target's own stays, another learns on; no curriculum."""
    few = (*FEW[:2], *FEW[4:])
    command(
        "train", "--shards", shards, "--target", llama.target, "--vocab", vocab_file, "--out", tmp_path / "new", *few
    )
    common = ("train", "--shards", shards, "--target", llama.target, *few)
    command(*common, "--from", tmp_path / "new" / "drafter", "--force", "--out", tmp_path / "own", "--clip", 2)
    command(*common, "--from", llama.drafters["mha_noised_a"], "--out", tmp_path / "on")
    new, own, on = (read_manifest(tmp_path / name / "drafter")["training"]["options"] for name in ("new", "own", "on"))
    wanted = ("lr", "warmup", "clip", "ttt_steps", "head_from", "head_lr", "curriculum")
    assert [new[key] for key in wanted] == [3e-3, 0.015, 0.5, 5, 1.0, 0.3, True]
    assert [own[key] for key in wanted] == [pytest.approx(6e-4), 0.015, 2.0, 5, 1.0, 1.0, False]
    assert [on[key] for key in wanted] == [pytest.approx(6e-4), 0.015, 0.5, 5, 0.0, 1.0, False]
    assert (
        SCRATCH.lr(7168) == 1e-4 and FINETUNE.lr(7168) == 2e-5 and FINETUNE.lr(576) == pytest.approx(2.49e-4, rel=1e-2)
    )


def test_every_difference_of_a_parent_is_named(tmp_path, llama, shards):
    folder = tmp_path / "parent"
    shutil.copytree(llama.drafters["mha_noised_a"], folder)
    config = json.loads((folder / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [0, 1, 3]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "eyas.json").write_text(
        json.dumps({"format": 1, "target": {"config_sha256": "0f", "lm_head_sha256": "1f"}, "capture": {}})
    )
    with pytest.raises(TrainingError, match=r"layer_ids \[0, 1, 3\], .*; config_sha256 0f, .*; lm_head_sha256 1f, "):
        command("train", "--shards", shards, "--target", llama.target, "--from", folder, "--out", tmp_path / "r", *FEW)
    wanted = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 99}
    said = differences(config | wanted, load_target(llama.target))
    assert said[0] == "rope theta 1e+06 without scaling, the target's is theta 10000 without scaling"
    assert "rms_norm_eps 1e-05, the target's is 1e-06" in said and len(said) == 3


def test_a_start_must_be_one_of_two(tmp_path, llama, shards):
    common = ("train", "--shards", shards, "--target", llama.target, "--out", tmp_path / "r", *FEW)
    with pytest.raises(TrainingError, match="give --vocab FILE for a new drafter, or --from DIR"):
        command(*common)
    with pytest.raises(TrainingError, match="--probe: of a drafter that is trained on"):
        command(*common, "--vocab", "v", "--probe", "r.json")


def test_a_drafter_that_is_nearly_always_wrong_is_refused(tmp_path, llama, shards, spoken):
    turned = [dataclasses.replace(d, final_hidden=np.roll(d.final_hidden, 7, axis=0)) for d in spoken]
    wrong = write_shards(tmp_path / "wrong", turned, llama)
    common = ("train", "--shards", wrong, "--target", llama.target, "--from", llama.drafters["mha_noised_a"], *FEW)
    with pytest.raises(TrainingError, match=r"full_acc_0 0\.0.* before the first step, below 0\.1"):
        command(*common, "--out", tmp_path / "a")
    assert command(*common, "--out", tmp_path / "b", "--force") == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": {"config_sha256": "0f"}}, r"config_sha256 is 0f.*[0-9a-f]{64}"),
        ({"target": {"tokenizer_sha256": "0f"}}, r"tokenizer_sha256 is 0f"),
        ({"target": {"lm_head_sha256": "0f"}}, r"lm_head_sha256 is 0f"),
        ({"hidden_size": 65}, "the manifest says float32"),
        ({"layer_ids": [0, 1, 3]}, r"layer_ids \[0, 1, 2\].* have \[0, 1, 3\]"),
        ({"final_hidden": "before_norm"}, "before_norm"),
    ],
)
def test_shards_of_something_else_are_refused(tmp_path, llama, spoken, changes, message):
    wrong = write_shards(tmp_path / "wrong", spoken[:20], llama, **changes)
    with pytest.raises((TrainingError, ShardError), match=message):
        command(
            "train", "--shards", wrong, "--target", llama.target, "--from", llama.drafters["mha_perfect"],
            "--out", tmp_path / "run", *FEW,
        )  # fmt: skip


def test_a_parent_of_another_target_is_refused(tmp_path, llama, shards, vocab_file):
    first = tmp_path / "first"
    command("train", "--shards", shards, "--target", llama.target, "--vocab", vocab_file, "--out", first, *FEW)
    for key, where in (("lm_head_sha256", "target"), ("convention", "capture")):
        manifest = read_manifest(first / "drafter")
        wanted = manifest[where][key]
        manifest[where][key] = "another"
        (first / "drafter" / "eyas.json").write_text(json.dumps(manifest))
        with pytest.raises(TrainingError, match=f"has {key} another, the shards in .* have {wanted}"):
            command(
                "train", "--shards", shards, "--target", llama.target, "--from", first / "drafter",
                "--out", tmp_path / "b", *FEW,
            )  # fmt: skip
        manifest[where][key] = wanted
        (first / "drafter" / "eyas.json").write_text(json.dumps(manifest))


def silent(document):
    return {"loss_mask": np.zeros_like(document.loss_mask)}


def spoilt(name, value):
    def change(document):
        array = getattr(document, name).copy()
        array[5, 3] = value
        return {name: array}

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (silent, r"shards, document .*: no token is marked as generated"),
        (spoilt("aux_hidden", np.nan), r"shards, document .*: aux_hidden at position 5 is NaN or infinite"),
        (spoilt("final_hidden", np.inf), r"shards, document .*: final_hidden at position 5 is NaN or infinite"),
    ],
)
@pytest.mark.parametrize("half", [False, True])
def test_documents_that_cannot_be_learnt_from(tmp_path, llama, spoken, change, message, half):
    documents = [*spoken[:20]]
    documents[7] = dataclasses.replace(documents[7], **change(documents[7]))
    if half:  # bf16 is the upper half of fp32
        documents = [
            dataclasses.replace(
                d,
                aux_hidden=(d.aux_hidden.view(np.uint32) >> 16).astype(np.uint16),
                final_hidden=(d.final_hidden.view(np.uint32) >> 16).astype(np.uint16),
            )
            for d in documents
        ]

    class InMemory:
        path, data_hash = tmp_path / "shards", "0"

        def __len__(self):
            return len(documents)

        def document(self, index):
            return documents[index]

    with pytest.raises(TrainingError, match=message):
        Documents(InMemory(), load_target(llama.target), 0.2, 2048, tmp_path)


def test_no_budget_is_refused():
    with pytest.raises(TrainingError, match="no budget"):
        Options()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_drafter_learns_from_scratch(tmp_path, llama, shards, vocab_file, answered):
    from drafter.training.evaluate import evaluate

    run = new_run(llama, shards, tmp_path / "run", vocab_file, minutes=1.0, eval_every=100, ttt_steps=3, lr=5e-3)
    greedy = open_shards(write_shards(tmp_path / "greedy", answered, llama))
    before, walked = run.start(), evaluate(run.model, greedy, 3).summary()
    run.train()
    run.model.load_state_dict(run.best_weights())
    after = evaluate(run.model, greedy, 3).summary()
    assert run.progress.best > before["accept_len_positions"] + 0.5
    assert after["acceptance_length"] > walked["acceptance_length"] + 0.5
