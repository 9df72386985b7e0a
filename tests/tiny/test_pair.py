"""The built pairs are what they promise, and building is safe, repeatable and done once."""

import hashlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tests.tiny import NAMES, TinyPair, build, eagle, language, pair, targets, tokenizer
from tests.tiny.drafters import DRAFT_VOCAB, STEPS
from tests.tiny.tokenizer import EOS, VOCAB_SIZE

CHATS = 16


@pytest.fixture(scope="module", params=NAMES)
def built(request: pytest.FixtureRequest) -> TinyPair:
    return build(request.param)


@pytest.fixture(scope="module")
def answers(built: TinyPair) -> tuple[list[list[int]], list[list[int]]]:
    """Chat prompts of every length that the builder never saw, and the prompts with their greedy answers."""
    tokens = AutoTokenizer.from_pretrained(built.reference)
    questions = [f"What is {i} times {i * i}" + " and why" * (i % 5) + "?" for i in range(CHATS)]
    prompts = [
        tokens.encode(
            tokens.apply_chat_template(
                [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
            )
        )
        for question in questions
    ]
    return prompts, targets.greedy(targets.load(built.reference), prompts, 64 + STEPS)


def test_greedy_answers_differ_and_do_not_loop(answers: tuple[list[list[int]], list[list[int]]]) -> None:
    written = [text[len(prompt) :] for prompt, text in zip(*answers, strict=True)]
    assert len({tuple(answer) for answer in written}) > CHATS * 2 / 3
    for answer in written:
        grams = [tuple(answer[i : i + 4]) for i in range(len(answer) - 3)]
        assert len(set(grams)) / len(grams) > 0.7


def test_answers_end_where_the_language_ends_them(built: TinyPair) -> None:
    """The greedy walk passes the end token twice in a round; there the target's own greedy choice is to stop."""
    tongue = language.build(tokenizer.train(), pair.SEED)
    tokens_BT = tongue.sample(160, 64, torch.Generator().manual_seed(8), surprise=0.0)
    ends_BT = (tongue.successors(tokens_BT)[..., 0] == EOS)[:, language.LONGEST_PROMPT :]
    chosen_BT = targets.load(built.reference)(tokens_BT).logits[:, language.LONGEST_PROMPT :].argmax(-1)
    assert ends_BT.sum() >= 10
    assert (chosen_BT[ends_BT] == EOS).float().mean() > 0.8
    assert (chosen_BT[~ends_BT] == EOS).float().mean() < 0.01


def test_sampling_has_entropy(built: TinyPair, answers: tuple[list[list[int]], list[list[int]]]) -> None:
    model = targets.load(built.reference)
    chances = [
        model(torch.tensor([text])).logits[0, len(prompt) :].softmax(-1) for prompt, text in zip(*answers, strict=True)
    ]
    chance_TV = torch.cat(chances)
    entropy_T = torch.special.entr(chance_TV).sum(-1)
    assert entropy_T.mean().item() > 1.5
    assert entropy_T.min().item() > 0.5
    top = chance_TV.topk(2).values
    assert (
        (top[:, 0] - top[:, 1]) > 0.02
    ).float().mean().item() > 0.97  # greedy choices are clear: fp32 noise is no coin


def test_drafters_accept_what_was_promised_on_prompts_they_never_saw(
    built: TinyPair, answers: tuple[list[list[int]], list[list[int]]]
) -> None:
    prompts, texts = answers
    model = targets.load(built.reference)
    aux = [targets.aux_hidden(model, torch.tensor([text]), built.inputs_to)[0] for text in texts]
    lengths = {}
    for name, folder in built.drafters.items():
        drafter = eagle.load(folder, model.get_input_embeddings().weight)
        histogram = [0] * (STEPS + 1)
        for prompt, text, aux_1TA in zip(prompts, texts, aux, strict=True):
            guesses = drafter.propose(aux_1TA[:, :-1], torch.tensor([text])[:, 1:], STEPS)[0].tolist()
            walked = eagle.walk(text, guesses, len(prompt), len(prompt) + 64)
            histogram = [a + b for a, b in zip(histogram, walked, strict=True)]
        lengths[name] = eagle.acceptance_length(histogram)
    for style in pair.RECIPES[built.name].styles:
        assert lengths[f"{style}_perfect"] > 3.7, lengths
        assert 1.3 < lengths[f"{style}_noised_b"] < lengths[f"{style}_noised_a"] < 3.0, lengths


def test_measured_acceptance(built: TinyPair) -> None:
    for style in pair.RECIPES[built.name].styles:
        perfect, a, b = (built.acceptance(f"{style}_{kind}") for kind in ("perfect", "noised_a", "noised_b"))
        assert perfect["acceptance_length"] >= 3.8
        assert a["acceptance_length"] == pytest.approx(2.2, abs=0.02)
        assert a["acceptance_length"] - b["acceptance_length"] == pytest.approx(0.1, abs=0.03)
        assert 0 < perfect["out_of_vocabulary"] < 0.05
        for measured in (perfect, a, b):
            histogram = measured["histogram"]
            assert measured["acceptance_length"] == eagle.acceptance_length(histogram)
            assert sum((i + 1) * h for i, h in enumerate(histogram)) >= measured["answers"] * (
                measured["tokens_each"] - 1
            )


def test_drafter_folders_are_what_sglang_reads(built: TinyPair) -> None:
    assert set(built.drafters) == {
        f"{style}_{kind}" for style in pair.RECIPES[built.name].styles for kind in ("perfect", "noised_a", "noised_b")
    }
    for name, folder in built.drafters.items():
        config = json.loads((folder / "config.json").read_text())
        assert config["architectures"] == [eagle.MLA if name.startswith("mla") else eagle.MHA]
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == list(built.layer_ids)
        weights = load_file(folder / "model.safetensors")
        ids = weights["d2t"] + torch.arange(DRAFT_VOCAB)
        assert weights["d2t"].dtype == torch.int64
        assert ids.tolist() == weights["t2d"].nonzero().flatten().tolist()  # ascending, unique and in range
        assert len(weights["t2d"]) == VOCAB_SIZE and EOS in ids
        assert weights["lm_head.weight"].shape == (config["draft_vocab_size"], config["hidden_size"])
        assert all(tensor.dtype == torch.float32 for key, tensor in weights.items() if key not in ("d2t", "t2d"))
    assert built.draft_vocab_size == DRAFT_VOCAB and built.vocab_size == VOCAB_SIZE


def test_kimi_checkpoint_is_the_text_model_under_another_name() -> None:
    kimi = build("kimi")
    inner = load_file(kimi.reference / "model.safetensors")
    outer = load_file(kimi.target / "model.safetensors")
    assert {f"language_model.{name}" for name in inner} == set(outer)
    assert all(torch.equal(tensor, outer[f"language_model.{name}"]) for name, tensor in inner.items())


def test_two_builds_are_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On any number of threads. The Kimi alone, which has everything that the Llama has; a few steps of training."""
    name = "kimi"
    recipe = pair.RECIPES[name]
    short = pair.Recipe(recipe.layer_ids, recipe.convention, recipe.inputs_to, recipe.styles, target_steps=9)
    monkeypatch.setitem(pair.RECIPES, name, short)
    monkeypatch.setattr(pair, "DRAFTER_STEPS", 7)
    threads = torch.get_num_threads()
    try:
        for folder, count in ((tmp_path / "one", 1), (tmp_path / "two", 2)):
            torch.set_num_threads(count)
            pair.construct(name, folder, lambda line: None)
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    assert len(digests(tmp_path / "one")) >= 15


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def constructions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that were built, by a builder that writes one small drafter slowly."""
    calls: list[Path] = []

    def construct(name: str, folder: Path, say: Callable[[str], None]) -> None:
        calls.append(folder)
        drafter = folder / "drafters" / "mha_perfect"
        drafter.mkdir(parents=True)
        time.sleep(0.2)
        (drafter / "config.json").write_text('{"vocab_size": 512, "draft_vocab_size": 256, "hidden_size": 64}')

    monkeypatch.setattr(pair, "construct", construct)
    return calls


def test_the_second_build_comes_from_the_cache(constructions: list[Path], tmp_path: Path) -> None:
    first, second = build("llama", tmp_path), build("llama", tmp_path)
    assert first == second
    assert len(constructions) == 1
    assert first.folder.name == f"llama-{pair.source_hash()}"
    build("llama", tmp_path, force=True)
    assert len(constructions) == 2


def test_the_environment_names_the_cache(
    constructions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EYAS_TEST_CACHE", str(tmp_path / "elsewhere"))
    assert build("llama").folder.parent == tmp_path / "elsewhere"


def test_builders_at_the_same_time_build_once(constructions: list[Path], tmp_path: Path) -> None:
    found: list[TinyPair] = []
    threads = [threading.Thread(target=lambda: found.append(build("llama", tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(constructions) == 1
    assert len(found) == 4 and len({str(each.folder) for each in found}) == 1


def test_what_a_killed_build_left_is_not_taken_for_a_pair(constructions: list[Path], tmp_path: Path) -> None:
    half = tmp_path / f"llama-{pair.source_hash()}.tmp" / "drafters" / "mha_wrong"
    half.mkdir(parents=True)
    assert list(build("llama", tmp_path).drafters) == ["mha_perfect"]


def test_a_failed_build_leaves_nothing_that_looks_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def construct(name: str, folder: Path, say: Callable[[str], None]) -> None:
        (folder / "drafters").mkdir(parents=True)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(pair, "construct", construct)
    with pytest.raises(RuntimeError, match="out of memory"):
        build("llama", tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir() and path.suffix != ".tmp"]


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="no tiny model is called 'gpt': choose one of llama, kimi"):
        build("gpt")


def test_command_line_refuses_what_it_does_not_know() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.tiny", "--only", "gpt"],
        cwd=pair.HERE.parent.parent,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 2
    assert "invalid choice: 'gpt'" in ran.stderr


def test_command_line_says_where_it_cannot_write(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("not a folder")
    ran = subprocess.run(
        [sys.executable, "-m", "tests.tiny", "--out", str(taken), "--only", "llama"],
        cwd=pair.HERE.parent.parent,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 1
    assert "--out" in ran.stderr and "Traceback" not in ran.stderr
