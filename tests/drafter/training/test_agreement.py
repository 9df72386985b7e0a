"""Before the first step: faults put into the shards or the drafter, one at a time, are told by their names."""

import dataclasses
import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter.__main__ import main
from drafter.checkpoint.manifest import read_manifest
from drafter.checkpoint.maps import read_map
from drafter.checkpoint.vocab import DraftVocab
from drafter.data.shards import Document
from drafter.training.errors import TrainingError
from tests.drafter.training.probe_report import write_probe
from tests.drafter.training.shard_folder import captured, write_shards
from tests.drafter.training.test_styles import FEW, train
from tests.tiny.pair import TinyPair
from tests.tiny.targets import greedy, load

NAME = "mha_noised_a"


@pytest.fixture(scope="module")
def texts(llama, tongue) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """Greedy answers and where they lie, with four tokens past each."""
    prompts = tongue.prompts(48, 10, torch.Generator().manual_seed(21)).tolist()
    written = greedy(load(llama.reference), prompts, 52)
    return written, [(10, 58 - n % 5) for n in range(len(written))]


@pytest.fixture(scope="module")
def answers(llama, texts) -> list[Document]:
    return captured(llama, *texts)


@pytest.fixture
def probe(tmp_path, llama, answers) -> Path:
    return write_probe(tmp_path / "report.json", llama.drafters[NAME], llama.reference, answers)


def start(
    tmp_path: Path, pair: TinyPair, documents: list[Document], *more: object, drafter: Path | None = None
) -> None:
    shards = write_shards(tmp_path / "shards", documents, pair)
    parent = drafter or pair.drafters[NAME]
    train("--shards", shards, "--target", pair.target, *FEW, "--from", parent, "--out", tmp_path / "run", *more)


def test_what_was_served_is_walked_first(tmp_path, llama, answers, probe, capsys):
    start(tmp_path, llama, answers, "--probe", probe)
    served = json.loads(probe.read_text())["variants"][0]["acceptance_length"]
    found = read_manifest(tmp_path / "run" / "drafter")["training"]["before"]["probe"]
    assert found == {"walked": round(served, 4), "served": round(served, 4), "answers": 48, "paired": True}
    assert (
        f"it walks at {served:.3f} on the captured features, and was served at {served:.3f}" in capsys.readouterr().err
    )


def test_a_run_that_is_resumed_knows_what_was_found_before_it(tmp_path, llama, answers, probe):
    start(tmp_path, llama, answers, "--probe", probe)
    found = read_manifest(tmp_path / "run" / "drafter")["training"]["before"]
    for folder in (tmp_path / "shards", tmp_path / "run" / "drafter"):
        shutil.rmtree(folder)
    start(tmp_path, llama, answers, "--probe", probe)
    assert read_manifest(tmp_path / "run" / "drafter")["training"]["before"] == found


def test_other_answers_are_walked_where_none_is_shared(tmp_path, llama, answers, probe):
    start(tmp_path, llama, [*answers[:24], *answers[25:]], "--probe", changed(probe, output_sha256="0" * 64))
    found = read_manifest(tmp_path / "run" / "drafter")["training"]["before"]["probe"]
    assert not found["paired"] and abs(found["walked"] - found["served"]) < 0.1


def changed(probe: Path, **request: object) -> Path:
    report = json.loads(probe.read_text())
    for each in report["variants"][0]["requests"]:
        each |= request
    probe.write_text(json.dumps(report))
    return probe


def rolled(by: int):
    return lambda pair, texts, answers: [
        dataclasses.replace(each, aux_hidden=np.roll(each.aux_hidden, by, axis=0)) for each in answers
    ]


def other_layers(by: int):
    return lambda pair, texts, answers: captured(
        dataclasses.replace(pair, inputs_to=tuple(layer + by for layer in pair.inputs_to)), *texts
    )


def after_the_layers_norm(pair, texts, answers):
    """A capture that took what enters attention, in the place of what enters the layer."""
    layers = load(pair.reference).model.layers
    found = []
    for each in answers:
        blocks = torch.from_numpy(each.aux_hidden).chunk(3, dim=-1)
        normed = [layers[i].input_layernorm(block) for i, block in zip(pair.inputs_to, blocks, strict=True)]
        found.append(dataclasses.replace(each, aux_hidden=torch.cat(normed, dim=-1).detach().numpy()))
    return found


def before_the_final_norm(pair, texts, answers):
    model = load(pair.reference)
    model.model.norm = torch.nn.Identity()
    found = []
    for each in answers:
        with torch.no_grad():
            out = model(torch.from_numpy(each.input_ids).long()[None], output_hidden_states=True, use_cache=False)
        found.append(dataclasses.replace(each, final_hidden=out.hidden_states[-1][0].numpy()))
    return found


@pytest.mark.parametrize(
    ("fault", "first"),
    [
        (rolled(1), r"positions: the captured features lie one position too late .*so walked it reaches 2\.\d+"),
        (rolled(-1), r"positions: the captured features lie one position too early .*so walked it reaches 2\.\d+"),
        (
            other_layers(-1),
            r"layers: the shards hold other states than those of \[0, 1, 2\]: they are those of layers 1 lower",
        ),
        (after_the_layers_norm, r"norm: the captured states of layer 0 are after a norm"),
    ],
)
def test_a_fault_of_the_shards_is_named(tmp_path, llama, texts, answers, probe, fault, first):
    wrong = fault(llama, texts, answers)
    with pytest.raises(
        TrainingError, match=rf"reached 2\.\d+ when it was served .* and [12]\.\d+ .* Likely cause: {first}"
    ):
        start(tmp_path, llama, wrong, "--probe", probe)
    assert not (tmp_path / "run" / "log.jsonl").exists()


def test_layers_that_a_latent_drafter_was_not_served_with_are_named(tmp_path, kimi, tongue):
    """On the tiny Kimi, whose text model is computed anew from inside the model that also sees."""
    prompts = tongue.prompts(24, 10, torch.Generator().manual_seed(22)).tolist()
    written = greedy(load(kimi.reference), prompts, 40)
    spans = [(10, 46)] * len(written)
    drafter = kimi.drafters["mla_noised_a"]
    probe = write_probe(tmp_path / "report.json", drafter, kimi.reference, captured(kimi, written, spans))
    wrong = captured(dataclasses.replace(kimi, inputs_to=(1, 2, 3)), written, spans)
    with pytest.raises(
        TrainingError, match=r"other states than those of \[2, 3, 4\]: they are those of layers 1 lower"
    ):
        start(tmp_path, kimi, wrong, "--probe", probe, drafter=drafter)


def test_a_drafter_of_other_layers_than_its_folder_says(tmp_path, llama, texts, answers):
    """Trained and served on the layers below those that its config and the shards both name."""
    lower = other_layers(-1)(llama, texts, answers)
    first = write_shards(tmp_path / "lower", lower, llama)
    read_map(llama.drafters[NAME]).sorted()[0].save(tmp_path / "vocab.safetensors")
    new = ("--vocab", tmp_path / "vocab.safetensors", "--out", tmp_path / "new", "--export-fp32", "--steps", 90)
    few = ("--ttt-steps", 3, "--batch-tokens", 600, "--held-share", 0.1, "--fp32", "--eval-documents", 4, "--lr", 1e-2)
    train("--shards", first, "--target", llama.target, *few, *new)
    drafter = tmp_path / "new" / "drafter"
    probe = write_probe(tmp_path / "report.json", drafter, llama.reference, lower)
    with pytest.raises(
        TrainingError, match=r"Likely cause: layers: .* one lower than those captured \(\[-1, 0, 1\] in"
    ):
        start(tmp_path, llama, answers, "--probe", probe, drafter=drafter)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (before_the_final_norm, "a size that is .* off the 1 .* before the final norm, where they must be after it"),
        (
            lambda pair, texts, answers: [
                dataclasses.replace(each, final_hidden=np.roll(each.final_hidden, 1, axis=0)) for each in answers
            ],
            "taken for states one position late",
        ),
    ],
)
def test_a_fault_of_the_teacher_is_named(tmp_path, llama, texts, answers, fault, message):
    with pytest.raises(TrainingError, match=message):
        start(tmp_path, llama, fault(llama, texts, answers))


def respoilt(tmp_path: Path, drafter: Path, config=lambda config: None, weights=lambda weights: None) -> Path:
    """The drafter in another folder of the same name, changed."""
    folder = tmp_path / "changed" / drafter.name
    shutil.copytree(drafter, folder)
    found = json.loads((folder / "config.json").read_text())
    config(found)
    (folder / "config.json").write_text(json.dumps(found))
    tensors = load_file(folder / "model.safetensors")
    weights(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def one_token_more(weights: dict[str, torch.Tensor]) -> None:
    """A new map in the place of the old one: an early id in, the last one out, and no row of lm_head moved."""
    ids = weights["d2t"] + torch.arange(len(weights["d2t"]))
    absent = int((~weights["t2d"]).nonzero()[0, 0])
    ids = torch.cat([ids[:-1], torch.tensor([absent])]).sort().values
    weights["d2t"] = ids - torch.arange(len(ids))
    weights["t2d"] = torch.zeros_like(weights["t2d"]).index_fill(0, ids, True)


@pytest.mark.parametrize(
    ("change", "first"),
    [
        ({"weights": one_token_more}, "d2t: the drafter's rows stand for other tokens"),
        ({"config": lambda config: config.update(rope_theta=100.0)}, "rope: the drafter was trained with its target's"),
    ],
)
def test_a_fault_of_the_drafter_is_named(tmp_path, llama, answers, probe, change, first):
    drafter = respoilt(tmp_path, llama.drafters[NAME], **change)
    with pytest.raises(TrainingError, match=rf"the folder was changed since.* Likely cause: {first}"):
        start(tmp_path, llama, answers, "--probe", probe, drafter=drafter)


def remapped(tmp_path: Path, pair: TinyPair, dropped: int = 40) -> tuple[Path, Path]:
    """A drafter in a folder of its own and, beside it, moved to a vocabulary without some of its tokens."""
    parent = respoilt(tmp_path, pair.drafters[NAME])
    old, _ = read_map(parent).sorted()
    absent = np.setdiff1d(np.arange(pair.vocab_size), old.target_ids)
    kept = np.random.default_rng(0).permutation(old.target_ids)[dropped:]
    DraftVocab(np.sort(np.concatenate([kept, absent[:dropped]])), pair.vocab_size).save(tmp_path / "new.safetensors")
    out = parent.parent / "moved"
    call = ["remap", str(parent), "--vocab", str(tmp_path / "new.safetensors"), "--verifier", str(pair.target)]
    assert main([*call, "--init", "scaled", "--out", str(out)]) == 0
    return parent, out


def test_another_vocabulary_is_refused_until_the_drafter_is_remapped(tmp_path, llama, answers, probe, capsys):
    parent, moved = remapped(tmp_path, llama)
    new = tmp_path / "new.safetensors"
    with pytest.raises(
        TrainingError, match=r"has the vocabulary .* of which it has 216\): .* Move its rows first: "
    ) as told:
        start(tmp_path, llama, answers, "--vocab", new, drafter=parent)
    shutil.rmtree(tmp_path / "shards")
    words = shlex.split(str(told.value).split("first: ")[1])
    assert words[:3] == ["python", "-m", "drafter"] and main(words[3:]) == 0

    start(tmp_path, llama, answers, "--vocab", new, "--probe", probe, drafter=moved)
    found = read_manifest(tmp_path / "run" / "drafter")
    before, served = found["training"]["before"], json.loads(probe.read_text())["variants"][0]["acceptance_length"]
    assert before["probe"]["walked"] == round(served, 4), "its parent was walked, with its own vocabulary"
    assert before["remap"]["kept"] == 216 and before["remap"]["before"] == before["remap"]["after"] > 0.4
    assert found["origin"]["kind"] == "finetune" and found["origin"]["parent"] == "moved"


def test_rows_that_were_moved_wrongly_are_told(tmp_path, llama, answers):
    _, moved = remapped(tmp_path, llama)
    tensors = load_file(moved / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].roll(1, 0)
    save_file(tensors, moved / "model.safetensors")
    (moved / "eyas.json").unlink()
    parent = moved.parent / NAME
    with pytest.raises(
        TrainingError, match=r"on tokens that were kept .* was right 0\.\d+ .* before .* and 0\.\d+ after"
    ):
        start(tmp_path, llama, answers, "--remapped-from", parent, drafter=moved)


def test_a_remapped_drafter_without_its_parent(tmp_path, llama, answers):
    parent, moved = remapped(tmp_path, llama)
    parent.rename(parent.with_name("away"))
    with pytest.raises(
        TrainingError, match=r"was remapped from mha_noised_a, which is not beside it: .*--remapped-from"
    ):
        start(tmp_path, llama, answers, drafter=moved)


def test_a_report_of_another_drafter_is_refused(tmp_path, llama, answers):
    probe = write_probe(tmp_path / "r.json", llama.drafters["mha_perfect"], llama.reference, answers[:8])
    with pytest.raises(
        TrainingError, match=r"r.json measured .*mha_perfect \([0-9a-f]{12}\), not the drafter mha_noised_a"
    ):
        start(tmp_path, llama, answers, "--probe", probe)


def test_a_report_that_is_not_greedy_is_refused(tmp_path, llama, answers):
    probe = write_probe(tmp_path / "r.json", llama.drafters[NAME], llama.reference, answers[:8], temperature=0.7)
    with pytest.raises(TrainingError, match=r"temperature 0\.7, and a walk is greedy"):
        start(tmp_path, llama, answers, "--probe", probe)
