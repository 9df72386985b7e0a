"""What tests on the real SGLang share: its engines, and the order that starts each of them once."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine.pool import EnginePool
from tests.engine.served import CAPTURING, SERVED, Served, place
from tests.tiny import TinyPair, build

HERE = Path(__file__).parent


@pytest.hookimpl(trylast=True)  # after pytest's own order
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of this folder by engine; all others stay where they are."""
    places = [index for index, item in enumerate(items) if HERE in item.path.parents]
    for index, item in zip(places, sorted((items[index] for index in places), key=place), strict=True):
        items[index] = item


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePool]:
    pool = EnginePool(tmp_path_factory.mktemp("engines"))
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def tiny() -> Callable[[str], TinyPair]:
    """`tiny("llama")` or `tiny("kimi")`: trained once, then cached."""
    return build


@pytest.fixture(scope="session")
def get_served(
    engines: EnginePool, tiny: Callable[[str], TinyPair], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Served]:
    """`get_served("llama-chain")`: any of SERVED by its name."""
    folder = tmp_path_factory.mktemp("capturing")

    def get(name: str) -> Served:
        target, drafter, options = SERVED[name]
        capture = {"capture_dir": folder} if name in CAPTURING else {}
        return Served(name, tiny(target), drafter, options | capture, engines, capture.get("capture_dir"))

    return get


@pytest.fixture(scope="session")
def probed(get_served: Callable[[str], Served]) -> Callable[[str], list[int]]:
    """`probed("llama-chain")`: what the steps of that engine's probe accepted, at its first start."""
    known: dict[str, list[int]] = {}

    def ask(name: str) -> list[int]:
        if name not in known:
            probe = get_served(name).engine.probe
            assert probe is not None
            known[name] = probe.histogram
        return known[name]

    return ask


@pytest.fixture(scope="session")
def served(request: pytest.FixtureRequest, get_served: Callable[[str], Served]) -> Served:
    """The engine that `on(…)` names."""
    return get_served(request.param)
