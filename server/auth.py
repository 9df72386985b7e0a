"""Who may come in: the keys file, hashed at rest, and the lookup that each request pays.

A key is `eyas_ID_SECRET`; the file holds SHA-256 of the whole. A slow, salted hash is for secrets that people choose:
these are 256 random bits, which no table and no guessing reaches, and a slow hash would cost every request its time.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import orjson
from pydantic import Field, ValidationError, model_validator

from server.config import Limits
from server.errors import ApiError
from server.table import Sha256, Table, Word

KEY = re.compile(rb"eyas_([0-9a-f]{8})_[A-Za-z0-9_-]{43}")
BEARER = b"bearer "
UNKNOWN = hashlib.sha256(b"").digest()  # compared with where the id is unknown, so that this takes as long
ANYONE = "none"  # the key_id of a gateway without keys


class KeysError(ValueError):
    """A keys file that cannot be used: says the file, what was found and the fix."""


class KeyEntry(Limits):
    """One key of the file. `name` is for people; the key's id is what metrics and logs show."""

    name: Word
    sha256: Sha256
    created: Word


class KeysFile(Table):
    format: Annotated[int, Field(ge=1, le=1)]
    keys: dict[Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")], KeyEntry]

    @model_validator(mode="after")
    def _each_once(self) -> KeysFile:
        if len({entry.sha256 for entry in self.keys.values()}) != len(self.keys):
            raise ValueError("two keys have the same sha256: revoke one of them")
        return self


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom a request belongs to, for its limits, the metrics and the log."""

    key_id: str
    limits: Limits


class KeyRing:
    """The keys of one file, in memory. Without a file everyone is the one caller ANYONE, under `default` limits.

    `default`: limits of a key that sets none of its own. Raises KeysError where the file cannot be used.
    """

    def __init__(self, path: Path | None, default: Limits) -> None:
        self.path = path
        self._anyone = Caller(ANYONE, default)
        self._callers: dict[bytes, tuple[bytes, Caller]] = {}
        self._stamp: tuple[int, int, int] | None = None
        self.reload(default)

    def reload(self, default: Limits) -> None:
        """Read the file again. Raises KeysError, and then everything stays as it was."""
        stamp = self._stamp_now()
        self._stamp = stamp  # a broken file is told of once, not at each look
        if self.path is not None:
            found = read_keys(self.path)
            self._callers = {
                key_id.encode(): (bytes.fromhex(entry.sha256), Caller(key_id, _with_default(entry, default)))
                for key_id, entry in found.keys.items()
            }
        self._anyone = Caller(ANYONE, default)

    def changed(self) -> bool:
        """Whether the file is another than the one last read."""
        return self.path is not None and self._stamp_now() != self._stamp

    @property
    def callers(self) -> list[Caller]:
        """Everyone who may come in."""
        return [self._anyone] if self.path is None else [caller for _, caller in self._callers.values()]

    def who(self, authorization: bytes | None) -> Caller:
        """The caller who sent this `authorization` header. Raises ApiError 401.

        The id only picks the line; what decides is a comparison of hashes that takes the same time for each.
        """
        if self.path is None:
            return self._anyone
        key = bearer(authorization)
        if key is None:
            raise _unauthorized("no API key: send it as 'Authorization: Bearer KEY'.")
        shaped = KEY.fullmatch(key)
        digest, caller = self._callers.get(shaped[1], (UNKNOWN, None)) if shaped else (UNKNOWN, None)
        if not hmac.compare_digest(hashlib.sha256(key).digest(), digest) or caller is None:
            raise _unauthorized("this API key is not known here.")
        return caller

    def _stamp_now(self) -> tuple[int, int, int] | None:
        with contextlib.suppress(OSError):
            if self.path is not None:
                found = self.path.stat()
                return found.st_mtime_ns, found.st_size, found.st_ino
        return None


class AdminKey:
    """The one key of the admin surface, from a 0600 file; only its hash is kept. Without a file nobody is admin.

    Raises KeysError where the file cannot be used.
    """

    def __init__(self, path: Path | None) -> None:
        self._digest = None if path is None else hashlib.sha256(_read_secret(path)).digest()

    @property
    def exists(self) -> bool:
        return self._digest is not None

    def check(self, presented: bytes | None) -> None:
        """Raises ApiError 403 unless `presented` is the key."""
        if self._digest is None:
            raise ApiError(403, "this gateway has no admin key: set EYAS_ADMIN_KEY_FILE.", code="no_admin_key")
        if not hmac.compare_digest(hashlib.sha256(presented or b"").digest(), self._digest):
            raise ApiError(403, "this needs the gateway's admin key.", code="admin_key_required")


def bearer(authorization: bytes | None) -> bytes | None:
    """The key in an `authorization` header, None without one."""
    return authorization[7:].strip() if authorization and authorization[:7].lower() == BEARER else None


def read_keys(path: Path) -> KeysFile:
    """The file's keys. Raises KeysError."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise KeysError(
            f"keys file {path} does not exist: make a key with `python -m server keys add NAME --file {path}`."
        ) from None
    except OSError as error:
        raise KeysError(f"keys file {path} cannot be read ({error.strerror}).") from None
    try:
        return KeysFile(**orjson.loads(raw))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        told = first["msg"].removeprefix("Value error, ")
        # Not the value found: a key pasted in place of its hash must not reach a log.
        raise KeysError(f"keys file {path}: {where}: {told}. Correct it, or use `python -m server keys`.") from None
    except (orjson.JSONDecodeError, TypeError) as error:
        raise KeysError(f"keys file {path} is no JSON object of keys ({error}).") from None


def add_key(path: Path, name: str, limits: Limits) -> tuple[str, str]:
    """Make a key and write its hash to the file, which is made where it is missing. Returns (id, key)."""
    with _locked(path) as keys:
        key_id = secrets.token_hex(4)
        while key_id in keys:
            key_id = secrets.token_hex(4)
        key = f"eyas_{key_id}_{secrets.token_urlsafe(32)}"
        created = datetime.now(UTC).isoformat(timespec="seconds")
        hashed = hashlib.sha256(key.encode()).hexdigest()
        try:
            keys[key_id] = KeyEntry(name=name, sha256=hashed, created=created, **limits.model_dump())
        except ValidationError:
            raise KeysError(f"{name!r} is no name for a key: use visible characters on one line.") from None
    return key_id, key


def revoke_key(path: Path, key_id: str) -> None:
    """Take a key out of the file. Raises KeysError where it does not hold it."""
    with _locked(path) as keys:
        if key_id not in keys:
            raise KeysError(f"keys file {path} has no key {key_id!r}: `python -m server keys list` shows them.")
        del keys[key_id]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[dict[str, KeyEntry]]:
    """The file's keys, to change; written at the end, whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with Path(f"{path}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            keys = dict(read_keys(path).keys) if path.exists() else {}
            yield keys
            _write(path, KeysFile(format=1, keys=keys))
    except OSError as error:
        raise KeysError(f"keys file {path} cannot be written ({error.strerror}).") from None


def _write(path: Path, found: KeysFile) -> None:
    temporary = Path(f"{path}.tmp")
    data = orjson.dumps(found.model_dump(exclude_none=True), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _read_secret(path: Path) -> bytes:
    try:
        mode = path.stat().st_mode
        secret = path.read_bytes().strip()
    except OSError as error:
        raise KeysError(f"admin key file {path} cannot be read ({error.strerror}).") from None
    if mode & (stat.S_IWGRP | stat.S_IRWXO):  # a group may read: Kubernetes gives its secrets to one
        raise KeysError(f"admin key file {path} can be read by others: chmod 600 {path}.")
    if len(secret) < 16:
        raise KeysError(f"admin key file {path} holds {len(secret)} characters, expected a secret of 16 or more.")
    return secret


def _with_default(entry: KeyEntry, default: Limits) -> Limits:
    own = {name: getattr(entry, name) for name in Limits.model_fields}
    return Limits(**{name: getattr(default, name) if value is None else value for name, value in own.items()})


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": 'Bearer realm="eyas"'})
