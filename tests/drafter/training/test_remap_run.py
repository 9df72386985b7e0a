"""A training run over another vocabulary: AdamW's moments move with the rows of lm_head, and the run goes on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter.__main__ import main
from drafter.checkpoint.maps import read_map
from drafter.checkpoint.vocab import DraftVocab
from drafter.data.shards import open_shards
from drafter.training.documents import Documents
from drafter.training.initial import new_drafter
from drafter.training.model import Eagle3
from drafter.training.runstate import Progress, load_run, load_tensors, save_run, save_tensors
from drafter.training.shape import Shape, drafter_config
from drafter.training.target import load_target
from drafter.training.train import Options, Run
from tests.drafter.training.random_drafter import H, V, config, drafter
from tests.drafter.training.shard_folder import write_shards

HEAD = "lm_head.weight"


def adamw(model: Eagle3, head: bool, steps: int) -> torch.optim.AdamW:
    """An optimiser that has taken so many steps on random gradients; without `head` that one was frozen."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for name, parameter in model.named_parameters():
            frozen = name == HEAD and not head
            parameter.grad = None if frozen else torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return optimizer


def identity(model: Eagle3) -> dict:
    return {"vocab_hash": model.vocab.hash, "config": model.config, "data_hash": "d", "lr": 1e-3}


def verifier_of(folder: Path) -> torch.Tensor:
    folder.mkdir()
    head = torch.randn(V, H, generator=torch.Generator().manual_seed(9))
    save_file({HEAD: head}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"vocab_size": V}))
    return head


@pytest.fixture
def run(tmp_path: Path):
    """`run(head)`: (the model, its optimiser) of a run in tmp_path / "run", its vocabulary beside."""

    def make(head: bool) -> tuple[Eagle3, torch.optim.AdamW]:
        model = drafter()
        optimizer = adamw(model, head, 3)
        (tmp_path / "run").mkdir()
        save_run(tmp_path / "run" / "checkpoint.safetensors", model, optimizer, Progress(step=3), identity(model))
        save_tensors(tmp_path / "run" / "best.safetensors", dict(model.named_parameters()), {"step": 2})
        (tmp_path / "run" / "log.jsonl").write_text('{"global_step": 3}\n')
        model.vocab.save(tmp_path / "old.safetensors")
        return model, optimizer

    return make


def command(tmp_path: Path, *extra: str) -> list[str]:
    verifier = str(tmp_path / "verifier")
    given = ["remap", str(tmp_path / "run"), "--vocab", str(tmp_path / "new.safetensors"), "--verifier", verifier]
    return [*given, "--init", "verifier", "--out", str(tmp_path / "out"), *extra]


@pytest.mark.parametrize("head", [True, False])
def test_moments_move_with_their_rows_and_the_run_goes_on(tmp_path: Path, run, head: bool) -> None:
    model, optimizer = run(head)
    target = verifier_of(tmp_path / "verifier")
    old = model.vocab.target_ids.tolist()
    missing = sorted(set(range(V)) - set(old))
    vocab = DraftVocab(np.array(sorted([*old[:150], *missing[::7]])), V)
    vocab.save(tmp_path / "new.safetensors")
    assert main(command(tmp_path, "--rows-vocab", str(tmp_path / "old.safetensors"))) == 0

    again = Eagle3(config(2) | {"draft_vocab_size": len(vocab)}, vocab, model.embed_VH)
    resumed = torch.optim.AdamW(again.parameters(), lr=1e-3)
    progress = load_run(tmp_path / "out" / "checkpoint.safetensors", again, resumed, identity(again))
    assert progress == Progress(step=3)
    places = {token: row for row, token in enumerate(old)}
    for row, token in enumerate(vocab.target_ids.tolist()):
        expected = model.lm_head.weight[places[token]] if token in places else target[token]
        assert torch.equal(again.lm_head.weight[row], expected)
    state, before = (o.state.get(m.lm_head.weight, {}) for o, m in ((resumed, again), (optimizer, model)))
    assert state.keys() == before.keys() == ({"step", "exp_avg", "exp_avg_sq"} if head else set())
    for name in ("exp_avg", "exp_avg_sq") if head else ():
        for row, token in enumerate(vocab.target_ids.tolist()):
            moved = before[name][places[token]] if token in places else torch.zeros(H)
            assert torch.equal(state[name][row], moved)
    for (name, a), b in zip(model.named_parameters(), again.parameters(), strict=True):
        if name != HEAD:
            assert torch.equal(a, b)
            for key, value in optimizer.state[a].items():
                assert torch.equal(resumed.state[b][key], value)

    best, facts = load_tensors(tmp_path / "out" / "best.safetensors")
    assert facts == {"step": 2} and torch.equal(best[HEAD], again.lm_head.weight)
    assert (tmp_path / "out" / "log.jsonl").read_text() == '{"global_step": 3}\n'
    assert DraftVocab.load(tmp_path / "out" / "vocab.safetensors").hash == vocab.hash
    adamw(again, head, 1)


def test_an_identity_remap_of_a_run_changes_no_tensor(tmp_path: Path, run) -> None:
    model, _ = run(True)
    verifier_of(tmp_path / "verifier")
    model.vocab.save(tmp_path / "new.safetensors")
    assert main(command(tmp_path, "--rows-vocab", str(tmp_path / "old.safetensors"))) == 0
    for name in ("checkpoint.safetensors", "best.safetensors"):
        before, after = (load_file(tmp_path / folder / name) for folder in ("run", "out"))
        assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


def test_a_runs_map_must_be_the_one_it_was_trained_under(tmp_path: Path, run, capsys) -> None:
    model, _ = run(False)
    verifier_of(tmp_path / "verifier")
    model.vocab.save(tmp_path / "new.safetensors")
    assert main(command(tmp_path)) == 1
    assert "a run, which holds no map" in capsys.readouterr().err
    ids = model.vocab.target_ids.copy()
    ids[0] = min(set(range(int(ids[1]))) - {int(ids[0])})
    DraftVocab(ids, V).save(tmp_path / "other.safetensors")
    assert main(command(tmp_path, "--rows-vocab", str(tmp_path / "other.safetensors"))) == 1
    assert f"trained under the vocabulary {model.vocab.hash[:16]}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_run_that_went_on_from_a_drafter_is_none_of_its_own(tmp_path: Path, run, capsys) -> None:
    model, optimizer = run(False)
    verifier_of(tmp_path / "verifier")
    file = tmp_path / "run" / "checkpoint.safetensors"
    save_run(file, model, optimizer, Progress(step=3), identity(model) | {"parent": "drafters/a"})
    assert main(command(tmp_path, "--rows-vocab", str(tmp_path / "old.safetensors"))) == 1
    assert "went on from drafters/a" in capsys.readouterr().err


def test_the_trainer_goes_on_with_what_was_moved(tmp_path: Path, llama, spoken) -> None:
    """The real trainer on the tiny Llama: its head learns, its vocabulary changes half-way, and it takes the run up."""
    target = load_target(llama.target)
    shards = write_shards(tmp_path / "shards", spoken, llama)
    old, _ = read_map(llama.drafters["mha_perfect"]).sorted()
    absent = np.setdiff1d(np.arange(llama.vocab_size), old.target_ids)
    new = DraftVocab(np.sort(np.concatenate([old.target_ids[5:], absent[:20]])), llama.vocab_size)
    for name, vocab in (("old", old), ("new", new)):
        vocab.save(tmp_path / f"{name}.safetensors")

    def begin(vocab: DraftVocab, out: Path) -> Run:
        model = new_drafter(drafter_config(target, list(llama.layer_ids), vocab, Shape()), vocab, target, 0)
        documents = Documents(open_shards(shards), target, 0.2, 2048, out)
        options = Options(steps=6, batch_tokens=200, ttt_steps=2, eval_every=3, eval_documents=4, head_from=0.0)
        return Run(model, documents, target, options, out, {"vocab_hash": vocab.hash, "parent": None})

    first = begin(old, tmp_path / "run")
    first.start()
    first.train(stop_after=4)
    call = ["remap", str(tmp_path / "run"), "--vocab", str(tmp_path / "new.safetensors"), "--rows-vocab"]
    call += [str(tmp_path / "old.safetensors"), "--verifier", str(llama.target), "--init", "verifier"]
    assert main([*call, "--out", str(tmp_path / "out")]) == 0
    again = begin(new, tmp_path / "out")
    again.start()
    assert again.progress.step == 4
    moments = again.optimizer.state[again.model.lm_head.weight]["exp_avg_sq"]
    rows = old.rows[new.target_ids]
    assert torch.equal(
        moments[rows >= 0], first.optimizer.state[first.model.lm_head.weight]["exp_avg_sq"][rows[rows >= 0]]
    )
    assert moments[rows >= 0].any() and not moments[rows < 0].any()
    again.train()
    assert again.progress.step == 6 and again.best_weights()[HEAD].shape == (len(new), llama.hidden_size)


@pytest.mark.parametrize("facts", [None, {}, {"identity": {}}, {"identity": {"config": 3, "vocab_hash": "a"}}])
def test_a_checkpoint_that_does_not_say_what_it_is_of(tmp_path: Path, facts, capsys) -> None:
    verifier_of(tmp_path / "verifier")
    (tmp_path / "run").mkdir()
    file = tmp_path / "run" / "checkpoint.safetensors"
    save_file({HEAD: torch.zeros(2, H)}, file, metadata=None if facts is None else {"facts": json.dumps(facts)})
    assert main(command(tmp_path)) == 1
    shown = capsys.readouterr().err
    assert str(file) in shown and "does not say what run it is of" in shown and shown.count("\n") == 1
