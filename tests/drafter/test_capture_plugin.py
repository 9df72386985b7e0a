"""The plugin: which rows it writes, which it leaves alone, and that it is loud where SGLang is not what it expects."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from drafter.data import capture_plugin as plugin
from drafter.data.capture_plugin import Changed, Hook, Recorder
from drafter.data.spool import RID_PREFIX, convention_of, join_parts, part_file, read_handshake, spool_of
from drafter.data.tensorfile import map_tensors

H, LAYERS = 4, [0, 1, 2]
REPO = Path(__file__).parents[2]


class FakeProcessor(torch.nn.Module):
    """FAKE of SGLang's LogitsProcessor, by its place in a model alone."""


class FakeTarget(torch.nn.Module):
    """FAKE of a target that was told which layers to keep."""

    def __init__(self, kept: list[int] | None, processors: int = 1) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        self.model.layers_to_capture = [] if kept is None else kept
        self.heads = torch.nn.ModuleList(FakeProcessor() for _ in range(processors))


def states(rows: int, width: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def batch(
    ids: torch.Tensor, lengths: list[int], prefixes: list[int], rids: list[str], mode: str = "EXTEND"
) -> SimpleNamespace:
    return SimpleNamespace(
        input_ids=ids,
        forward_mode=SimpleNamespace(name=mode),
        extend_seq_lens_cpu=lengths,
        extend_prefix_lens_cpu=prefixes,
        rids=rids,
    )


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    made = Recorder(tmp_path, "0.0.fake")
    made.adopt(target := FakeTarget([1, 2, 3]), LAYERS, FakeProcessor)
    made.head = target.heads[0]
    return made


def rid(name: str) -> str:
    return RID_PREFIX + name


def files(folder: Path) -> list[str]:
    return sorted(file.name for file in spool_of(folder).glob("*"))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_go_to_their_request(recorder, tmp_path, packed, dtype):
    aux, final, ids = states(9, 3 * H, 1, dtype), states(9, H, 2, dtype), torch.arange(9)
    given = aux if packed else list(aux.split(H, dim=-1))
    rids = [rid("a"), "of-somebody-else", rid("b")]
    recorder.record(recorder.head, final, given, batch(ids, [4, 2, 3], [0, 0, 5], rids))
    assert files(tmp_path) == [f"{rid('a')}-00000000.safetensors", f"{rid('b')}-00000005.safetensors"]
    for name, start, rows in (("a", 0, slice(0, 4)), ("b", 5, slice(6, 9))):
        part = map_tensors(part_file(tmp_path, rid(name), start))
        bits = np.uint16 if dtype == torch.bfloat16 else np.float32
        assert part["input_ids"].tolist() == ids[rows].tolist() and part["input_ids"].dtype == np.int32
        for found, wanted in ((part["aux_hidden"], aux), (part["final_hidden"], final)):
            assert found.dtype == bits
            assert np.array_equal(found, wanted[rows].view(torch.uint16).numpy() if bits is np.uint16 else wanted[rows])


def test_chunks_of_a_request_are_joined(recorder, tmp_path):
    aux, final, ids = states(7, 3 * H, 1), states(7, H, 2), torch.arange(7)
    for start, end in ((4, 7), (0, 4)):
        part = slice(start, end)
        recorder.record(recorder.head, final[part], aux[part], batch(ids[part], [end - start], [start], [rid("a")]))
        joined = join_parts(tmp_path, rid("a"), ids.to(torch.int32).numpy())
        assert (joined is None) == (start == 4)
    assert np.array_equal(joined[0], aux) and np.array_equal(joined[1], final)


@pytest.mark.parametrize("mode", ["DECODE", "TARGET_VERIFY", "DRAFT_EXTEND_V2", "IDLE", "PREBUILT"])
def test_forwards_that_read_no_prompt_are_left_out(recorder, tmp_path, mode):
    recorder.record(
        recorder.head, states(2, H, 1), states(2, 3 * H, 2), batch(torch.arange(2), [2], [0], [rid("a")], mode)
    )
    assert not files(tmp_path) and not (tmp_path / "handshake.json").exists()


def test_the_drafters_own_forwards_are_left_out(recorder, tmp_path):
    recorder.record(FakeProcessor(), states(2, H, 1), [states(2, H, 2)], batch(torch.arange(2), [2], [0], [rid("a")]))
    assert not files(tmp_path)


def test_rows_of_padding_are_left_out(recorder, tmp_path):
    recorder.record(recorder.head, states(8, H, 1), states(8, 3 * H, 2), batch(torch.arange(8), [3], [0], [rid("a")]))
    assert map_tensors(part_file(tmp_path, rid("a"), 0))["input_ids"].tolist() == [0, 1, 2]


def test_what_is_written_stays_when_the_buffer_is_used_again(recorder, tmp_path):
    aux, final = states(2, 3 * H, 1), states(2, H, 2)
    kept = aux.clone()
    recorder.record(recorder.head, final, aux, batch(torch.arange(2), [2], [0], [rid("a")]))
    aux.zero_()
    assert np.array_equal(map_tensors(part_file(tmp_path, rid("a"), 0))["aux_hidden"], kept)


def test_the_handshake_says_what_was_seen(recorder, tmp_path):
    recorder.record(recorder.head, states(2, H, 1), states(2, 3 * H, 2), batch(torch.arange(2), [2], [0], ["warm-up"]))
    found = read_handshake(tmp_path)
    assert (found.pid, found.sglang, found.layer_ids) == (os.getpid(), "0.0.fake", LAYERS)
    assert (found.inputs_to, found.convention, found.hidden_size) == ([1, 2, 3], "output_of_layer", H)
    assert (found.dtype, found.tp_rank) == ("float32", 0)
    assert not files(tmp_path)


@pytest.mark.parametrize(
    ("final", "aux", "message"),
    [
        (states(4, H, 1), states(4, 2 * H, 2), "came with"),
        (states(3, H, 1), states(4, 3 * H, 2), "came with"),
        (states(4, H, 1), states(3, 3 * H, 2), "came with"),
        (states(4, H, 1), states(4, 3 * H, 2, torch.bfloat16), "expected both bfloat16 or both float32"),
        (states(4, H, 1, torch.float16), states(4, 3 * H, 2, torch.float16), "states are torch.float16"),
    ],
)
def test_tensors_that_do_not_fit_are_an_error(recorder, tmp_path, final, aux, message):
    with pytest.raises(Changed, match=message):
        recorder.record(recorder.head, final, aux, batch(torch.arange(4), [4], [0], [rid("a")]))
    assert not files(tmp_path)


def test_a_spool_that_cannot_be_written_does_not_stop_the_engine(recorder, tmp_path, capsys):
    rows = (states(2, H, 1), states(2, 3 * H, 2))
    recorder.record(recorder.head, *rows, batch(torch.arange(2), [2], [0], [rid("a")]))
    for file in spool_of(tmp_path).iterdir():
        file.unlink()
    spool_of(tmp_path).rmdir()
    recorder.record(recorder.head, *rows, batch(torch.arange(2), [2], [0], [rid("a")]))
    assert "eyas capture: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "layer_ids", "message"),
    [
        (FakeTarget(None), LAYERS, "has 0 lists of layers to capture and 1 logits processors"),
        (FakeTarget([1, 2, 3], processors=2), LAYERS, "2 logits processors"),
        (FakeTarget([1, 2, 4]), LAYERS, r"\[0, 1, 2\] were resolved to the inputs of layers \[1, 2, 4\]"),
        (FakeTarget([1, 2, 3]), None, "no layer ids were given"),
    ],
)
def test_a_target_that_is_not_understood_is_an_error(tmp_path, target, layer_ids, message):
    with pytest.raises(Changed, match=message):
        Recorder(tmp_path, "0.0.fake").adopt(target, layer_ids, FakeProcessor)


def test_conventions():
    assert convention_of([1, 14, 26], [2, 15, 27]) == "output_of_layer"
    assert convention_of([2, 30, 58], [2, 30, 58]) == "input_to_layer"
    assert convention_of([2, 30, 58], [2, 31, 58]) is None


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    def make(**contents: Any) -> str:
        made = ModuleType("made_up")
        vars(made).update(contents)
        monkeypatch.setitem(sys.modules, "made_up", made)
        return "made_up"

    return make


def test_functions_are_checked_before_they_are_hooked(module):
    class Owner:
        def forward(self, a, b=None):
            pass

    name = module(Owner=Owner, function=lambda c: None)
    plugin.check(Hook(name, "Owner.forward", "self a b"))
    plugin.check(Hook(name, "function", "c"))
    for hook, message in (
        (Hook(name, "Owner.forward", "self a"), r"takes \(self a b\), expected \(self a\)"),
        (Hook(name, "Owner.gone", "self"), r"has no Owner\.gone"),
        (Hook(name, "Gone.forward", "self"), r"has no Gone\.forward"),
        (Hook("made_up_too", "f", ""), "made_up_too cannot be imported"),
    ):
        with pytest.raises(Changed, match=message):
            plugin.check(hook)


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python as one of the engine's processes would be run."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
    env = {**kept, "SGLANG_USE_CPU_ENGINE": "1", "SGLANG_PLUGINS": "eyas_capture", **env}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=env, cwd=REPO)


def test_without_its_variable_it_does_nothing_and_imports_nothing():
    shown = run(
        "import sys; from drafter.data.capture_plugin import register; register(); "
        "heavy = {'torch', 'sglang', 'safetensors.torch'} & set(sys.modules); sys.exit(str(heavy) if heavy else 0)"
    )
    assert shown.returncode == 0, shown.stderr


LOAD = "from sglang.srt.plugins import load_plugins; load_plugins(); print('went on')"
PROCESSOR = "from sglang.srt.layers.logits_processor import LogitsProcessor as P\n"


def test_sglang_loads_it_and_both_functions_are_wrapped(tmp_path):
    code = (
        f"{LOAD}\n{PROCESSOR}"
        "import sglang.srt.model_executor.model_runner as runner\n"
        "print(hasattr(P.forward, '__wrapped__'), hasattr(runner.configure_aux_hidden_state_capture, '__wrapped__'))"
    )
    shown = run(code, EYAS_CAPTURE_DIR=str(tmp_path))
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines()[-2:] == ["went on", "True True"]


def test_a_changed_signature_ends_the_process_where_it_captures(tmp_path):
    """A child of the process, which shares its imports, has no variable and goes on with the function as it was."""
    without = (
        "import os\nif os.fork() == 0:\n    del os.environ['EYAS_CAPTURE_DIR']\n"
        f"    {LOAD}\n    print(hasattr(P.forward, '__wrapped__'), flush=True)\n    os._exit(0)\nos.wait()\n"
    )
    changed = f"P.forward = lambda self, ids, hidden: None\n{LOAD}"
    shown = run(f"{PROCESSOR}{without}{changed}", EYAS_CAPTURE_DIR=str(tmp_path))
    assert shown.returncode == 1
    assert shown.stdout.splitlines()[-2:] == ["went on", "False"]
    last = shown.stderr.splitlines()[-1]
    assert last.startswith("eyas capture does not fit this engine: sglang.srt.layers.logits_processor.LogitsProcessor")
    assert "takes (self ids hidden), expected (self input_ids" in last
