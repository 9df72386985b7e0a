"""Token ids to shards: a running engine prefills each conversation, its plugin writes the tensors, this joins them.

Loss masks, order, checksums, the disk and resuming are decided here, in a process of our own, since SGLang swallows a
plugin's errors. Documents lie in the folder in the order of the conversations, whatever was interrupted.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np
import orjson

from drafter.data import spool
from drafter.data.conversations import Conversation, ConversationError, read_with_ids
from drafter.data.shard_writer import SHARD_BYTES, ShardWriter, lock_folder
from drafter.data.shards import Document, ShardError, document_name, token_bytes
from drafter.data.target import TargetError, target_identity

CONCURRENCY = 16
CONNECT_TIMEOUT_S = 10.0
REQUEST_TIMEOUT_S = 600.0
PARTS_TIMEOUT_S = 30.0
PARTS_POLL_S = 0.02
FREE_BYTES = 512 * 1024 * 1024  # left on the disk for others
GB = 1e9


class CaptureError(ValueError):
    """A capture that cannot start or go on: what was found and what to do. What is in the folder stays valid."""


@dataclass(frozen=True)
class Reading:
    """What the engine is to read: int32 ids of a prompt and an answer. The last `past` lie past the answer's end."""

    where: str
    input_ids: np.ndarray
    output_ids: np.ndarray
    past: int

    @classmethod
    def of(cls, conversation: Conversation) -> Reading:
        """From a conversation of a file."""
        return cls(
            conversation.where,
            np.array(conversation.input_ids, np.int32),
            np.array(conversation.output_ids, np.int32),
            conversation.past,
        )

    @property
    def ids(self) -> np.ndarray:
        """int32 [T]: what the engine reads."""
        return np.concatenate([self.input_ids, self.output_ids])

    @property
    def loss_mask(self) -> np.ndarray:
        """bool [T]: True on the answer."""
        mask = np.zeros(len(self.input_ids) + len(self.output_ids), np.bool_)
        mask[len(self.input_ids) : len(mask) - self.past] = True
        return mask


@dataclass(frozen=True)
class Estimate:
    """What a capture will take: documents and tokens still to be read, bytes on the disk, bytes that are free."""

    documents: int
    tokens: int
    bytes: int
    free_bytes: int
    skipped: int


@dataclass
class Result:
    """What a capture did. `refused` are lines that the engine would not read, each with its reason."""

    documents: int = 0
    tokens: int = 0
    seconds: float = 0.0
    skipped: int = 0
    bytes: int = 0
    refused: list[str] = field(default_factory=list)


class Refused(Exception):
    """The engine would not read one conversation."""


def read_conversations(files: Iterable[Path]) -> list[Reading]:
    """All conversations of the files. Raises CaptureError for the first that cannot be captured."""
    try:
        found = [Reading.of(each) for file in files for each in read_with_ids(file)]
    except ConversationError as error:
        raise CaptureError(str(error)) from None
    if not found:
        raise CaptureError("no conversation in the files: make some with `python -m drafter generate`.")
    return found


def capture(
    conversations: Sequence[Reading],
    *,
    url: str,
    engine_dir: Path,
    out: Path,
    headers: Mapping[str, str] | None = None,
    target: Path | None = None,
    concurrency: int = CONCURRENCY,
    max_gb: float | None = None,
    shard_bytes: int = SHARD_BYTES,
    on_estimate: Callable[[Estimate], None] = lambda estimate: None,
    on_tokens: Callable[[int], None] = lambda tokens: None,
) -> Result:
    """Capture what is not in `out` yet.

    url: the engine's own address; headers: its key. engine_dir: the folder that it was started with (`--capture`).
    target: the target's folder, where the engine's own name for it is none on this machine. max_gb: the largest size of
    `out`, in 10^9 bytes. on_estimate is called before the first request, on_tokens as each document arrives.

    Raises CaptureError, ShardError or SpoolError; what was captured until then is in the folder, and a further call
    goes on from there.
    """
    handshake = spool.read_handshake(engine_dir)
    lock = lock_folder(spool.spool_of(engine_dir))
    try:
        spool.clear(engine_dir)
        client = _Client(url.rstrip("/"), dict(headers or {}), engine_dir, concurrency, secrets.token_hex(4))
        name, model_path = asyncio.run(client.identify())
        writer = ShardWriter(
            out,
            target={"name": name, **_identity(target or Path(model_path))},
            layer_ids=handshake.layer_ids,
            convention=handshake.convention,
            hidden_size=handshake.hidden_size,
            dtype=handshake.dtype,
            shard_bytes=shard_bytes,
        )
        per_token = token_bytes(len(handshake.layer_ids), handshake.hidden_size, handshake.dtype)
        room = _Room(writer, None if max_gb is None else max_gb * GB)
        return _run(client, conversations, writer, room, per_token, on_estimate, on_tokens)
    except OSError as error:
        raise CaptureError(f"{error.filename} cannot be used ({error.strerror}).") from None
    finally:
        spool.clear(engine_dir)
        os.close(lock)


def _identity(target: Path) -> dict[str, str]:
    if not target.is_dir():
        raise CaptureError(
            f"the engine's target {target} is no folder on this machine: name the folder with its weights by --target."
        )
    try:
        return target_identity(target)
    except TargetError as error:
        raise CaptureError(str(error)) from None


def _run(
    client: _Client,
    conversations: Sequence[Reading],
    writer: ShardWriter,
    room: _Room,
    per_token: int,
    on_estimate: Callable[[Estimate], None],
    on_tokens: Callable[[int], None],
) -> Result:
    result = Result()
    try:
        todo, seen = [], set(writer.names)
        for conversation in conversations:
            name = document_name(conversation.ids)
            if name not in seen:
                todo.append((name, conversation))
                seen.add(name)
        result.skipped = len(conversations) - len(todo)
        tokens = sum(len(each.input_ids) + len(each.output_ids) for _, each in todo)
        estimate = Estimate(len(todo), tokens, tokens * per_token, room.free_bytes(), result.skipped)
        on_estimate(estimate)
        room.check_estimate(estimate)

        def take(document: Document) -> None:
            room.check(len(document.input_ids) * per_token)
            writer.add(document)
            result.documents += 1
            result.tokens += len(document.input_ids)
            on_tokens(len(document.input_ids))

        began = time.perf_counter()
        try:
            result.refused = asyncio.run(client.fetch_all(todo, take))
        finally:
            result.seconds = time.perf_counter() - began
            writer.close()
        result.bytes = writer.bytes
    except OSError as error:
        raise CaptureError(
            f"{writer.path} cannot be written ({error.strerror}): {writer.documents} documents are safe there. "
            "Make room and run the same command again."
        ) from None
    finally:
        writer.close()
    return result


class _Room:
    """How much may still be written: the cap on the folder, and what is free on its disk."""

    def __init__(self, writer: ShardWriter, cap: float | None) -> None:
        self._writer = writer
        self._cap = cap

    def free_bytes(self) -> int:
        return shutil.disk_usage(self._writer.path).free

    def check_estimate(self, estimate: Estimate) -> None:
        """Raises CaptureError where the whole capture would not fit on the disk and no cap stops it before."""
        left = self.free_bytes() - FREE_BYTES
        capped = estimate.bytes if self._cap is None else min(estimate.bytes, self._cap - self._writer.bytes)
        if capped > left:
            raise CaptureError(
                f"{estimate.documents} documents take about {estimate.bytes / GB:.2f} GB, and {self._writer.path} has "
                f"{self.free_bytes() / GB:.2f} GB free (of which {FREE_BYTES / GB:.1f} stay free): make room, choose "
                "another disk, or set --max-gb to capture a part."
            )

    def check(self, wanted: int) -> None:
        """Raises CaptureError where so many bytes more would pass the cap or fill the disk."""
        if self._cap is not None and self._writer.bytes + wanted > self._cap:
            raise CaptureError(
                f"{self._writer.path} reached its cap of {self._cap / GB:g} GB: what is there is valid; raise --max-gb "
                "and run the same command again for the rest."
            )
        if self.free_bytes() - self._writer.waiting_bytes - wanted < FREE_BYTES:
            raise CaptureError(
                f"the disk of {self._writer.path} is full but for {FREE_BYTES / GB:.1f} GB: what is there is valid; "
                "make room and run the same command again for the rest."
            )


@dataclass(frozen=True)
class _Client:
    """Asks one engine. `run` sets this run's requests apart from those of one that was killed."""

    url: str
    headers: dict[str, str] = field(repr=False)
    engine_dir: Path
    concurrency: int
    run: str

    async def identify(self) -> tuple[str, str]:
        """(served name, path of the target) of the engine. Raises CaptureError."""
        async with self._session() as session:
            try:
                async with session.get(f"{self.url}/model_info") as response:
                    body = await response.read()
                    if response.status != 200:
                        raise CaptureError(self._words(response.status, body))
                    answer = orjson.loads(body)
                    return str(answer["served_model_name"]), str(answer["model_path"])
            except (aiohttp.ClientError, TimeoutError) as error:
                raise CaptureError(self._unreachable(error)) from None
            except (orjson.JSONDecodeError, KeyError):
                raise CaptureError(f"{self.url} is no SGLang engine: give the address that it printed.") from None

    async def fetch_all(self, todo: Sequence[tuple[str, Reading]], take: Callable[[Document], None]) -> list[str]:
        """Give `take` every document, in order; the lines that the engine would not read come back.

        So many requests run at once, and no more than twice as many documents wait for one before them.
        """
        refused: list[str] = []
        permits = asyncio.Semaphore(self.concurrency)
        window: deque[tuple[Reading, asyncio.Task[Document]]] = deque()

        async def finish() -> None:
            conversation, task = window.popleft()
            try:
                take(await task)
            except ShardError as error:
                raise CaptureError(f"{conversation.where}: {error}") from None
            except Refused as reason:
                refused.append(f"{conversation.where}: {reason}")

        async with self._session() as session:
            try:
                for name, conversation in todo:
                    window.append(
                        (conversation, asyncio.create_task(self._fetch(session, permits, name, conversation)))
                    )
                    if len(window) >= 2 * self.concurrency:
                        await finish()
                while window:
                    await finish()
            finally:
                tasks = [task for _, task in window]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        return refused

    async def _fetch(
        self, session: aiohttp.ClientSession, permits: asyncio.Semaphore, name: str, conversation: Reading
    ) -> Document:
        rid, ids = f"{spool.RID_PREFIX}{self.run}-{name}", conversation.ids
        body = {"input_ids": ids.tolist(), "rid": rid, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        async with permits:
            try:
                async with session.post(f"{self.url}/generate", data=orjson.dumps(body)) as response:
                    answer = await response.read()
                    if response.status == 400:
                        raise Refused(answer.decode(errors="replace")[:300])
                    if response.status != 200:
                        raise CaptureError(self._words(response.status, answer))
            except (aiohttp.ClientError, TimeoutError) as error:
                raise CaptureError(self._unreachable(error)) from None
            aux_hidden, final_hidden = await self._collect(rid, ids, conversation.where)
        return Document(ids, conversation.loss_mask, aux_hidden, final_hidden, name)

    async def _collect(self, rid: str, ids: np.ndarray, where: str) -> tuple[np.ndarray, np.ndarray]:
        """The tensors of a request that was answered: they are on the disk already, or never will be."""
        deadline = time.monotonic() + PARTS_TIMEOUT_S
        while True:
            joined = await asyncio.to_thread(spool.join_parts, self.engine_dir, rid, ids)
            if joined is not None:
                await asyncio.to_thread(spool.delete_parts, self.engine_dir, rid)
                return joined
            if time.monotonic() > deadline:
                raise CaptureError(
                    f"the engine read {where} but its tensors did not come to {self.engine_dir}: does the engine at "
                    f"{self.url} capture into this folder, and is its disk full (its log says so)?"
                )
            await asyncio.sleep(PARTS_POLL_S)

    def _session(self) -> aiohttp.ClientSession:
        # SGLang closes an idle connection after 5 s; ours must go first, or a request meets a closed one.
        return aiohttp.ClientSession(
            headers={"content-type": "application/json", **self.headers},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=REQUEST_TIMEOUT_S),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
        )

    def _words(self, status: int, body: bytes) -> str:
        if status in (401, 403):
            return f"the engine at {self.url} wants its key ({status}): name the file that it printed, --key-file."
        return f"the engine at {self.url} answered {status}: {body.decode(errors='replace')[:300]}"

    def _unreachable(self, error: Exception) -> str:
        return (
            f"the engine at {self.url} does not answer ({type(error).__name__}): what was captured is kept; start the "
            "engine and run the same command again."
        )
