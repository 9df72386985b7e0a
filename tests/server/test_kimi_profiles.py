"""The Kimi-K2.5 profiles: what SGLang's own argument code makes of them on the platform of each, and broken ones.

No GPU, no weights. Golden values are in golden/; `python -m tests.server.resolution` writes them anew.
"""

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from server.cli import main
from server.config import load_profile
from server.drafters import resolve_drafter
from server.launch import Node, build_launch
from tests.server.resolution import (
    DATA,
    GOLDEN,
    PROFILES,
    RENEW,
    argv_of,
    difference,
    platform_of,
    read_golden,
    resolve,
    resolve_all,
    text_of,
)

BLOCKS = ["lightseek-mla", "lightseek-mha", "k2-direct", "k2-direct-outputs", "k2-remapped", "scratch", "ngram"]
B200, INT4, H200, RTX, TWO = (
    f"kimi-k2.5-{name}.toml" for name in ("nvfp4-8xb200", "int4-8xb200", "8xh200", "8xrtx6000-pcie", "2node")
)


@dataclass(frozen=True)
class Fault:
    """A profile with `edits`, that `plan` refuses with `says`. `sglang` is a part of its own refusal, or None where it
    resolves without a word and fails, or disappoints, later."""

    profile: str
    drafter: str
    edits: tuple[tuple[str, str], ...]
    says: tuple[str, ...]
    sglang: str | None


def extra(flag: str) -> tuple[str, str]:
    return ('"--model-loader-extra-config"', f'{flag}, "--model-loader-extra-config"')


FAULTS = {
    "ngram as a tree": Fault(
        B200, "ngram", (("max_bfs_breadth = 1 ", "max_bfs_breadth = 10 "),), ("max_bfs_breadth = 1",), "page_size"
    ),
    "an EAGLE3 tree": Fault(
        B200, "lightseek-mla", (("topk = 1", "topk = 4\ndraft_tokens = 8"),), ("set topk = 1",), "topk"
    ),
    "an MHA drafter on the target's backend": Fault(
        B200,
        "k2-direct",
        (('attention_backend = "flashinfer"\n', ""),),
        ('attention_backend = "flashinfer"', "trtllm_mla"),
        None,
    ),
    "more context than the drafter": Fault(
        B200,
        "k2-direct",
        (("context_length = 131072", "context_length = 262144"),),
        ("set context_length = 131072",),
        None,
    ),
    "NVFP4 asked of INT4 weights": Fault(
        INT4,
        "none",
        (("tp = 8\n", 'tp = 8\nquantization = "modelopt_fp4"\n'),),
        ("nvidia/Kimi-K2.5-NVFP4",),
        "does not match",
    ),
    "NVFP4 on Hopper": Fault(
        H200,
        "none",
        (("moonshotai/Kimi-K2.5", "nvidia/Kimi-K2.5-NVFP4"), ("tp = 8\n", 'tp = 8\nquantization = "modelopt_fp4"\n')),
        ("moonshotai/Kimi-K2.5",),
        None,
    ),
    "Blackwell's attention on Hopper": Fault(
        H200,
        "none",
        (("tp = 8\n", 'tp = 8\nattention_backend = "trtllm_mla"\n'),),
        ("leave attention_backend out",),
        "SM100",
    ),
    "B200's attention on SM120": Fault(
        RTX, "none", (('attention_backend = "triton"', 'attention_backend = "cutedsl_mla"'),), ('"triton"',), "SM100"
    ),
    "weights larger than mem_fraction": Fault(
        B200, "none", (("mem_fraction = 0.85", "mem_fraction = 0.4"),), ("set mem_fraction above 0.43",), None
    ),
    "one machine where two are needed": Fault(
        TWO, "none", (("tp = 16\nnodes = 2", "tp = 8"),), ("more GPUs (tp, nodes)",), None
    ),
    "no room for one request": Fault(
        RTX, "none", (("context_length = 131072", "context_length = 262144"),), ("set context_length = 156672",), None
    ),
    "heads that cannot be shared": Fault(B200, "none", (("tp = 8\n", "tp = 6\n"),), ("set tp = 4",), None),
    "more ranks than GPUs": Fault(B200, "none", (("tp = 8\n", "tp = 16\n"),), ("set tp = 8",), None),
    "the weight cache": Fault(
        B200,
        "lightseek-mla",
        (extra('"--weight-cache-mode", "client"'),),
        ("--weight-cache-mode", "remove it"),
        "weight",
    ),
    "rejection sampling with 32,000 tokens": Fault(
        B200, "k2-direct", (extra('"--speculative-use-rejection-sampling"'),), ("remove it",), None
    ),
    "a token map": Fault(B200, "k2-direct", (extra('"--speculative-token-map", "x"'),), ("remove it",), None),
    "attention data parallelism": Fault(
        B200, "lightseek-mla", (extra('"--enable-dp-attention"'),), ("remove it",), None
    ),
    "the PCIe all-reduce under determinism": Fault(
        RTX, "none", (extra('"--enable-deterministic-inference"'),), ("remove one of the two",), None
    ),
    "ids under the other convention": Fault(
        B200,
        "k2-direct",
        (('convention = "input_to_layer"\nattention', 'convention = "output_of_layer"\nattention'),),
        ('convention = "input_to_layer"', "override_layer_ids = [3, 31, 59]"),
        None,
    ),
    "layers beyond the target": Fault(
        B200,
        "k2-direct-outputs",
        (("override_layer_ids = [3, 31, 59]", "override_layer_ids = [3, 31, 61]"),),
        ("0 to 60",),
        None,
    ),
    "faked acceptance": Fault(
        B200, "none", (("[speculation]", 'env = {SGLANG_SIMULATE_ACC_LEN = "3"}\n[speculation]'),), ("remove it",), None
    ),
    "steps and tokens that disagree": Fault(
        B200, "none", (("topk = 1", "topk = 1\ndraft_tokens = 8"),), ("3 steps always has 4",), None
    ),
    "a key of another name": Fault(
        B200, "none", (("mem_fraction", "mem_fractoin"),), ("did you mean 'mem_fraction'",), None
    ),
}
NOT_LOADED = (
    "faked acceptance",
    "steps and tokens that disagree",
    "a key of another name",
)  # there is nothing to resolve


def broken(folder: Path, fault: Fault) -> Path:
    text = next(file for file in PROFILES if file.name == fault.profile).read_text()
    for old, new in fault.edits:
        assert old in text, old
        text = text.replace(old, new)
    file = folder / fault.profile
    file.write_text(text)
    return file


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return resolve_all(tmp_path_factory.mktemp("kimi"))


@pytest.fixture(scope="module")
def faults_resolved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    cases = {}
    for at, (name, fault) in enumerate(FAULTS.items()):
        if name in NOT_LOADED:
            continue
        folder = tmp_path_factory.mktemp(f"fault-{at}")
        profile = load_profile(broken(folder, fault))
        drafter = resolve_drafter(profile, fault.drafter, here=False)
        node = Node(0, "10.0.0.1:20000") if profile.engine.nodes > 1 else Node()
        launch = build_launch(profile, drafter, port=30000, config_file="k.yaml", node=node)
        cases[name] = {"argv": argv_of(folder, profile, drafter, launch), "platform": platform_of(profile)}
    return resolve(cases)


def test_every_profile_has_every_drafter():
    serving = [file for file in PROFILES if file not in DATA]
    assert sorted(file.name for file in serving) == sorted([B200, INT4, H200, RTX, TWO])
    tables = {file.name: tomllib.loads(file.read_text()) for file in serving}
    for name, table in tables.items():
        assert list(table["drafters"]) == BLOCKS, name
        for block in BLOCKS[:-1]:
            mine, theirs = (dict(each["drafters"][block]) for each in (table, tables[B200]))
            backends = {each.pop("attention_backend", None) for each in (mine, theirs)}
            assert mine == theirs, (name, block)
            assert (backends == {None}) == (block == "lightseek-mla"), (name, block)
            assert "layer_ids" not in mine or mine["convention"]


@pytest.mark.engine
@pytest.mark.parametrize("file", PROFILES, ids=lambda file: file.stem)
def test_sglang_resolves_the_profile_as_it_did(resolved, file):
    """Every drafter, none, a capture, and the second node where there is one."""
    cases, found = resolved[file]
    assert len(cases) >= (1 if file in DATA else len(BLOCKS) + 2)
    changed = difference(file, found)
    assert not changed, f"{file.stem} resolves otherwise than golden. If it is meant: {RENEW}\n{changed}"
    assert (GOLDEN / f"{file.stem}.json").read_text() == text_of(found)


@pytest.mark.engine
@pytest.mark.parametrize("file", PROFILES, ids=lambda file: file.stem)
def test_sglang_changes_nothing_that_was_asked(resolved, file):
    """What an engine's start compares with /server_info is already so in the arguments."""
    cases, found = resolved[file]
    for name, case in cases.items():
        asked, got = case["expected"], found[name]
        assert "refused" not in got, (name, got)
        compared = (set(asked) & set(got)) - {"dtype"}
        assert len(compared) >= 4
        assert {key: got[key] for key in compared} == {key: asked[key] for key in compared}, name


@pytest.mark.engine
@pytest.mark.parametrize("name", [name for name in FAULTS if name not in NOT_LOADED])
def test_what_sglang_itself_says_of_a_broken_profile(faults_resolved, name):
    """Most faults pass its arguments in silence: that is why a plan looks for them."""
    fault, found = FAULTS[name], faults_resolved[name]
    if fault.sglang is None:
        assert "refused" not in found, f"SGLang refuses it now: {found}"
    else:
        assert fault.sglang in found.get("refused", "(accepted)"), found


@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_profile_is_refused_with_the_fix(tmp_path, name, capsys):
    fault = FAULTS[name]
    code = main(["plan", "--profile", str(broken(tmp_path, fault)), "--drafter", fault.drafter])
    shown = capsys.readouterr()
    assert code == 1 and shown.out == ""
    assert shown.err.startswith("eyas: profile ") and shown.err.count("\n") == 1
    for part in fault.says:
        assert part in shown.err


@pytest.mark.parametrize("file", PROFILES, ids=lambda file: file.stem)
def test_the_golden_values_that_matter(file):
    """Read by a person once: attention and experts by GPU, and drafters that keep off the target's MLA backend."""
    found = read_golden(file)
    if file in DATA:
        assert all(values["speculative_algorithm"] is None for values in found.values())
        assert "-capture-" not in file.name or found["capture"]["return_aux_hidden_state_layer_ids"] == [2, 30, 58]
        return
    attention = {B200: "trtllm_mla", INT4: "trtllm_mla", H200: "fa3", RTX: "triton", TWO: "fa3"}[file.name]
    for case, values in found.items():
        assert values["attention_backend"] == attention, case
        draft = values["speculative_draft_attention_backend"]
        if case in ("lightseek-mha", "k2-direct", "k2-direct-outputs", "k2-remapped", "scratch"):
            assert draft == ("triton" if file.name == RTX else "flashinfer"), case
    assert found["capture"]["return_aux_hidden_state_layer_ids"] == [2, 30, 58]
    override = json.loads(found["k2-direct-outputs"]["json_model_override_args"])
    assert override["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [3, 31, 59]
    assert found["ngram"]["speculative_ngram_max_bfs_breadth"] == 1
    fused = {B200: "auto", INT4: "auto", H200: "auto", RTX: None, TWO: None}[file.name]
    assert {values["flashinfer_allreduce_fusion_backend"] for values in found.values()} == {fused}
    assert found["none"]["speculative_algorithm"] is None
    assert found["none"]["disable_custom_all_reduce"] == (file.name == RTX)
    nodes = {values["node_rank"] for values in found.values()}
    assert nodes == ({0, 1} if file.name == TWO else {0})
