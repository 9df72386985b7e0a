"""`check-engine` on the installed SGLang, and on copies of it that lack something."""

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

from server import check_engine
from server.cli import main
from server.config import load_profile
from server.drafters import resolve_drafter
from server.launch import Node, build_launch

REPO = Path(__file__).parents[2]
PROFILES = sorted((REPO / "deploy/profiles").glob("*.toml"))


def test_the_installed_engine_has_everything(capsys):
    assert main(["check-engine"]) == 0
    version = importlib.metadata.version("sglang")
    assert capsys.readouterr().out.startswith(f"sglang {version} has all ")


@pytest.fixture
def copy(tmp_path):
    """The files of the installed SGLang that are looked at, to be broken."""
    package, to = check_engine.installed(), tmp_path / "sglang"
    files = {need.file for need in check_engine.needs()} | {"srt/server_args.py"}
    files |= {str(file.relative_to(package)) for file in (package / "srt/arg_groups").rglob("*.py")}
    for file in files:
        (to / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(package / file, to / file)
    return to


BROKEN = {
    "renamed": ("srt/layers/logits_processor.py", "def forward(", "def forward_all(", "not in it"),
    "other-parameters": ("srt/speculative/eagle_utils.py", "seq_lens", "lens", "expected ("),
    "no-longer-called": ("srt/speculative/eagle_utils.py", "_verify_coins(", "_coins(", "no longer calls"),
    "field": ("srt/entrypoints/openai/protocol.py", "return_spec_tokens_details:", "spec_details:", "not in it"),
    "route": ("srt/entrypoints/http_server.py", '"/abort_request"', '"/abort"', "not in it"),
    "metric": ("srt/observability/metrics_collector.py", "sglang:realtime_tokens_total", "sglang:tokens", "not in it"),
    "flag": ("srt/arg_groups/fields/spec.py", "speculative_num_steps:", "num_steps:", "no such argument"),
    "switch": ("srt/utils/common.py", "SGLANG_USE_CPU_ENGINE", "SGLANG_CPU", "not in it"),
}


@pytest.mark.parametrize(("file", "before", "after", "reason"), BROKEN.values(), ids=BROKEN)
def test_what_is_missing_is_named(copy, capsys, file, before, after, reason):
    assert main(["check-engine", "--sglang", str(copy)]) == 0
    text = (copy / file).read_text()
    assert before in text
    (copy / file).write_text(text.replace(before, after))
    check_engine._tree.cache_clear()
    check_engine._strings.cache_clear()
    capsys.readouterr()
    assert main(["check-engine", "--sglang", str(copy), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["missing"]
    assert any(reason in each["reason"] for each in found), found
    assert main(["check-engine", "--sglang", str(copy)]) == 1
    shown = capsys.readouterr().err
    assert found[0]["what"] in shown and "carry Eyas over" in shown


def test_a_file_that_has_gone(copy, capsys):
    (copy / "srt/plugins/hook_registry.py").unlink()
    assert main(["check-engine", "--sglang", str(copy)]) == 1
    assert "srt/plugins/hook_registry.py: HookType: the file has gone" in capsys.readouterr().err


def test_a_folder_that_is_no_sglang(tmp_path, capsys):
    assert main(["check-engine", "--sglang", str(tmp_path)]) == 1
    assert "is not the folder of an sglang package" in capsys.readouterr().err


def test_everything_that_the_cpu_engine_replaces_is_checked(monkeypatch):
    """The stand-in's own table is code that needs torch: here it is run with what it would do to SGLang noted."""
    from sgl_kernel import plugin

    replaced, touched = {}, set()
    monkeypatch.setattr(
        plugin, "replace", lambda module, path, parameters, make: replaced.update({(module, path): parameters})
    )

    def owner_of(module, path):
        touched.add((module, path))
        name = path.rpartition(".")[2]
        function = types.FunctionType(
            compile(f"def f(): {'; '.join(plugin.VERIFY_CALLS)}", "", "exec").co_consts[0], {}
        )
        return types.SimpleNamespace(**{name: function if path == "eagle_sample" else None}), name

    monkeypatch.setattr(plugin, "owner_of", owner_of)
    for patch in (plugin.patch_sampling, plugin.patch_plain, plugin.patch_linear, plugin.patch_rotary):
        patch()

    checked = {(need.file, need.what): need for need in check_engine.CPU_ENGINE}
    for (module, path), parameters in replaced.items():
        assert checked[check_engine._hook(module), path].parameters == parameters
    assert {(check_engine._hook(module), path) for module, path in touched} <= set(checked)
    assert checked[check_engine.EAGLE, "eagle_sample"].calls == plugin.VERIFY_CALLS
    assert len(replaced) >= 10


@pytest.mark.parametrize("profile", PROFILES, ids=lambda file: file.stem)
def test_every_flag_of_the_profiles_is_checked(profile):
    loaded, known = load_profile(profile), set(check_engine.flags())
    node = Node(first="first:20000" if loaded.engine.nodes > 1 else None)
    for name in ["none", "ngram", *loaded.drafters]:
        drafter = resolve_drafter(loaded, name, here=False)
        argv = build_launch(loaded, drafter, port=1, config_file="x.yaml", node=node).argv
        own = {word for word in argv if word.startswith("--")} - set(loaded.engine.extra_args)
        assert own <= known


def test_every_metric_of_the_engine_that_deploy_names_is_checked():
    files = [*(REPO / "deploy/prometheus").glob("*.yml"), *(REPO / "deploy/grafana").rglob("*.json")]
    named = {name for file in files for name in re.findall(r"sglang:(\w+)", file.read_text())}
    checked = {need.what.removeprefix("sglang:") for need in check_engine.METRICS}
    assert named - checked == set()


def test_sglang_is_not_imported():
    """The check runs where the new SGLang cannot be imported: on a laptop, in a bare environment."""
    program = (
        "import sys; from server.cli import main; code = main(['check-engine']);"
        "print(code, 'sglang' in sys.modules, 'torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", program], cwd=REPO, capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines()[-1] == "0 False False"
