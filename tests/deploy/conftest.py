"""What tests of the CPU engine share."""

import importlib
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def sglang():
    """`sglang("module")` imports a module of SGLang as on a CPU, which it decides once a process by its environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_USE_CPU_ENGINE", "1")

        def load(name: str) -> ModuleType:
            return importlib.import_module(name)

        assert load("sglang.srt.utils").is_cpu()
        yield load
