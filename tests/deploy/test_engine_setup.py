"""Installing the CPU engine: refused where real kernels belong, and free of cost for every other Python start."""

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOM = Path(__file__).parents[2] / "deploy" / "cpu"


def load_setup():
    spec = importlib.util.spec_from_file_location("eyas_cpu_engine_setup", ROOM / "setup.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class FakeDriver:
    """libcuda.so.1 as ctypes would load it."""

    def __init__(self, devices, status=0):
        self.devices, self.status = devices, status

    def cuInit(self, flags):
        return self.status

    def cuDeviceGetCount(self, count):
        count._obj.value = self.devices
        return 0


def missing(name):
    raise OSError(name)


@pytest.mark.parametrize(
    ("load", "devices"),
    [
        (missing, 0),
        (lambda name: FakeDriver(0), 0),
        (lambda name: FakeDriver(8), 8),
        (lambda name: FakeDriver(8, status=100), 0),  # CUDA_ERROR_NO_DEVICE
    ],
    ids=["no driver", "driver without devices", "eight devices", "driver that cannot start"],
)
def test_devices_are_counted_by_the_driver(load, devices):
    assert load_setup().cuda_devices(load) == devices


def test_a_machine_with_a_cuda_device_is_refused():
    reason = load_setup().refusal(devices=lambda: 2, version_of=lambda name: None)
    assert "2 CUDA device(s)" in reason
    assert "pip install sglang-kernel" in reason
    assert "\n" not in reason


def fake_distribution(folder, name, version):
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.parametrize("name", ["sglang-kernel", "sgl-kernel"])
def test_a_real_kernel_package_is_not_shadowed(name, tmp_path, monkeypatch):
    setup = load_setup()
    assert setup.refusal(devices=lambda: 0) is None
    fake_distribution(tmp_path, name, "0.4.6")
    monkeypatch.syspath_prepend(str(tmp_path))
    reason = setup.refusal(devices=lambda: 0)
    assert f"{name} 0.4.6 is installed" in reason
    assert f"pip uninstall {name}" in reason


def test_setup_itself_stops_with_the_sentence(tmp_path):
    """As pip runs it: nothing is built, and the sentence is what the user reads."""
    fake_distribution(tmp_path, "sgl-kernel", "1.0")
    shown = subprocess.run(
        [sys.executable, "setup.py", "--version"],
        cwd=ROOM,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert shown.returncode == 1
    assert shown.stdout == ""
    assert re.fullmatch(r"eyas-cpu-engine: sgl-kernel 1\.0 is installed .*\n", shown.stderr)


def test_the_wheel_holds_every_module_and_nothing_stale(tmp_path):
    copy = tmp_path / "room"
    stale = copy / "build" / "lib" / "sgl_kernel"
    stale.mkdir(parents=True)
    (stale / "renamed_long_ago.py").write_text("")
    for file in (path for path in ROOM.rglob("*") if path.is_file() and path.suffix in (".py", ".toml", ".pth")):
        place = file.relative_to(ROOM)
        if place.parts[0] != "build":
            (copy / place).parent.mkdir(parents=True, exist_ok=True)
            (copy / place).write_bytes(file.read_bytes())
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(copy)],
        check=True,
        capture_output=True,
        timeout=120,
    )
    (wheel,) = tmp_path.glob("eyas_cpu_engine-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    modules = {f"sgl_kernel/{path.name}" for path in (ROOM / "sgl_kernel").glob("*.py")}
    assert names == modules | {"eyas_torchvision.py", "eyas_cpu_engine.pth"}


def test_the_installed_engine_is_this_one():
    """Tests of the engine test what is installed, so that must be what lies here: else `make install`."""
    distribution = importlib.metadata.distribution("eyas-cpu-engine")
    for path in [*(ROOM / "sgl_kernel").glob("*.py"), ROOM / "eyas_torchvision.py", ROOM / "eyas_cpu_engine.pth"]:
        installed = Path(str(distribution.locate_file(path.relative_to(ROOM))))
        assert installed.read_bytes() == path.read_bytes(), f"{path.name} differs: pip install --no-deps ./deploy/cpu"


def python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment or None
    )


def test_another_python_start_imports_next_to_nothing():
    shown = python("import sys; print([n for n in ('torch', 'numpy', 'importlib.abc') if n in sys.modules])")
    assert shown.stdout.strip() == "[]"
    costs = []
    for _ in range(3):  # the machine may be busy: the quickest start counts
        timed = subprocess.run(
            [sys.executable, "-X", "importtime", "-c", ""], capture_output=True, text=True, timeout=60
        )
        (cost,) = re.findall(r"\| +(\d+) \| +eyas_torchvision$", timed.stderr, re.MULTILINE)
        costs.append(int(cost))
    assert min(costs) < 2_000, "microseconds, with all that it imports"


def test_torchvision_imports_beside_this_torch():
    """Its compiled operators do not load beside a CPU build of torch, and it would fail on the missing ones."""
    shown = python("import torchvision; from torchvision.ops import nms; print(torchvision.__version__)")
    assert (shown.returncode, shown.stderr) == (0, "")


def test_beside_a_cuda_device_the_import_fails_with_the_fix():
    shown = python("import torch; torch.cuda.is_available = lambda: True; import sgl_kernel")
    assert shown.returncode == 1
    assert shown.stderr.splitlines()[-1].startswith("ImportError: sgl_kernel is the CPU stand-in of eyas-cpu-engine")
    assert "pip uninstall eyas-cpu-engine" in shown.stderr
