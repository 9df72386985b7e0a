"""Keys: hashed at rest, told apart, reloaded, and refused without a word too many."""

from __future__ import annotations

import contextlib
import hashlib
import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from server import auth
from server.auth import AdminKey, KeyRing, KeysError, add_key, read_keys, revoke_key
from server.config import Limits
from server.errors import ApiError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def ring(file: Path, **default: int) -> KeyRing:
    return KeyRing(file, Limits(**default))


def test_a_key_lets_in_and_is_nowhere_in_the_file(file: Path) -> None:
    key_id, key = add_key(file, "team a", Limits(requests_per_minute=7))
    assert key.startswith(f"eyas_{key_id}_")
    assert key.rpartition("_")[2] not in file.read_text()
    assert hashlib.sha256(key.encode()).hexdigest() in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    caller = ring(file, tokens_per_minute=5).who(f"Bearer {key}".encode())
    assert caller.key_id == key_id
    assert caller.limits == Limits(requests_per_minute=7, tokens_per_minute=5)
    assert ring(file).who(f"bearer  {key} ".encode()).key_id == key_id


@pytest.mark.parametrize("how", ["none", "empty", "basic", "shape", "other secret", "unknown id", "hash"])
def test_what_is_no_key_is_refused_with_401(file: Path, how: str) -> None:
    key_id, key = add_key(file, "a", Limits())
    header = {
        "none": None,
        "empty": b"Bearer ",
        "basic": b"Basic " + key.encode(),
        "shape": b"Bearer sk-1234",
        "other secret": f"Bearer eyas_{key_id}_{'x' * 43}".encode(),
        "unknown id": f"Bearer eyas_00000000_{key[14:]}".encode(),
        "hash": b"Bearer " + hashlib.sha256(key.encode()).hexdigest().encode(),
    }[how]
    with pytest.raises(ApiError) as refused:
        ring(file).who(header)
    assert refused.value.status == 401
    assert refused.value.headers["www-authenticate"].startswith("Bearer")
    assert key[14:] not in refused.value.message


def test_hashes_are_compared_in_constant_time_also_for_an_unknown_id(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key_id, key = add_key(file, "a", Limits())
    seen = []
    real = auth.hmac.compare_digest
    monkeypatch.setattr(auth.hmac, "compare_digest", lambda a, b: seen.append((len(a), len(b))) or real(a, b))
    keys = ring(file)
    for header in (f"Bearer {key}", f"Bearer eyas_{key_id}_{'x' * 43}", f"Bearer eyas_00000000_{'x' * 43}", "Bearer x"):
        with contextlib.suppress(ApiError):
            keys.who(header.encode())
    assert seen == [(32, 32)] * 4


def test_without_a_file_everyone_is_one_caller() -> None:
    caller = KeyRing(None, Limits(requests_per_minute=3)).who(None)
    assert (caller.key_id, caller.limits.requests_per_minute) == ("none", 3)


def test_reload_takes_new_keys_and_drops_revoked_ones(file: Path) -> None:
    first, key = add_key(file, "a", Limits())
    keys = ring(file)
    assert not keys.changed()
    second, other = add_key(file, "b", Limits())
    revoke_key(file, first)
    assert keys.changed()
    assert keys.who(f"Bearer {key}".encode()).key_id == first
    keys.reload(Limits())
    assert keys.who(f"Bearer {other}".encode()).key_id == second
    with pytest.raises(ApiError):
        keys.who(f"Bearer {key}".encode())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no JSON object"),
        ("[]", "no JSON object"),
        ('{"format": 2, "keys": {}}', "format"),
        ('{"format": 1, "keys": {"zz": {}}}', "keys.zz"),
        ('{"format": 1, "keys": {"00000000": {"name": "a", "sha256": "eyas_secret", "created": "x"}}}', "sha256"),
        (
            '{"format": 1, "keys": {"00000000": {"name": "a", "sha256": "%s", "created": "x", "rpm": 3}}}' % ("0" * 64),
            "rpm",
        ),
    ],
)
def test_a_bad_file_changes_nothing_and_says_why_once(file: Path, text: str, told: str) -> None:
    _, key = add_key(file, "a", Limits())
    keys = ring(file)
    file.write_text(text)
    assert keys.changed()
    with pytest.raises(KeysError, match=told) as refused:
        keys.reload(Limits())
    assert str(file) in str(refused.value) and "eyas_secret" not in str(refused.value)
    assert keys.who(f"Bearer {key}".encode())
    assert not keys.changed()


def test_a_file_that_is_gone_is_refused(file: Path) -> None:
    with pytest.raises(KeysError, match="does not exist"):
        ring(file)


def test_the_admin_key_wants_a_private_file(tmp_path: Path) -> None:
    file = tmp_path / "admin"
    file.write_text("0123456789abcdef0\n")
    file.chmod(0o644)
    with pytest.raises(KeysError, match="chmod 600"):
        AdminKey(file)
    file.chmod(0o600)
    key = AdminKey(file)
    key.check(b"0123456789abcdef0")
    for wrong in (None, b"", b"0123456789abcdef1"):
        with pytest.raises(ApiError) as refused:
            key.check(wrong)
        assert refused.value.status == 403
    file.write_text("short")
    with pytest.raises(KeysError, match="16 or more"):
        AdminKey(file)
    with pytest.raises(ApiError, match="EYAS_ADMIN_KEY_FILE"):
        AdminKey(None).check(b"")


def test_the_verbs(tmp_path: Path) -> None:
    def keys(*argv: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "server", "keys", *argv, "--file", str(tmp_path / "k.json")]
        return subprocess.run(command, capture_output=True, text=True)

    made = keys("add", "team a", "--tokens-per-minute", "1000")
    assert made.returncode == 0, made.stderr
    key = made.stdout.splitlines()[-1]
    listed = keys("list", "--json")
    shown = json.loads(listed.stdout)["keys"]
    (key_id,) = shown
    assert key.split("_")[1] == key_id
    assert shown[key_id]["name"] == "team a" and shown[key_id]["tokens_per_minute"] == 1000
    assert "sha256" not in shown[key_id] and key not in listed.stdout
    assert "team a" in keys("list").stdout
    wrong = keys("revoke", "ffffffff")
    assert wrong.returncode == 1 and "has no key 'ffffffff'" in wrong.stderr and "Traceback" not in wrong.stderr
    assert keys("revoke", key_id).returncode == 0
    assert read_keys(tmp_path / "k.json").keys == {}
    assert keys("add", "x", "--max-inflight", "0").returncode == 2
