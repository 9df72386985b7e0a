"""The profiles by which Kimi-K2.5 writes and is read for its drafter."""

from server.config import load_profile
from tests.server.resolution import REPO

FOLDER = REPO / "deploy/profiles"
PROFILES = {name: FOLDER / f"kimi-k2.5-{name}-8xb200.toml" for name in ("generate", "capture")}


def test_what_is_captured_is_what_is_served():
    """The same target in the same form, and the layers that the serving profile's drafters are fed."""
    serving = load_profile(FOLDER / "kimi-k2.5-nvfp4-8xb200.toml")
    for file in PROFILES.values():
        profile = load_profile(file)
        assert profile.target == serving.target
        for key in ("device", "tp", "dtype", "quantization", "kv_cache_dtype", "page_size"):
            assert getattr(profile.engine, key) == getattr(serving.engine, key), key
        assert profile.default_drafter == "none" and not profile.drafters
    assert load_profile(PROFILES["capture"]).capture == serving.capture
