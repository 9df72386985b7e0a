"""One SGLang process: started from a profile, waited for, watched, and stopped with everything it started.

Its keys travel in a 0600 file and are scrubbed from every line that leaves its log.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import httpx
import psutil

from drafter.data.spool import SpoolError
from drafter.settings import read_settings
from server import keep, probe
from server.capture import CapturePlan, check_handshake, plan_capture, prepare_folder
from server.config import Profile
from server.deployment import deployment
from server.drafters import ActiveDrafter, check_drafter, is_local, resolve_drafter
from server.enginekeys import EngineKeys, KeyFileError, new_keys, read_keys
from server.enginelog import last_words, lost_its_port, stage_of
from server.known import vocab_size_of
from server.launch import ALONE, SGLANG_VERSION, Launch, Node, build_launch, check_node, child_environment
from server.obstacles import refuse
from server.ports import free_port, loopback_of, port_is_free
from server.process import EngineProcess, end_process, start_guarded, write_private
from server.resolved import ask_resolved, changed_arguments, with_resolved
from server.watch import watch

State = Literal["new", "starting", "ready", "dead", "hung", "stopped"]
Progress = Callable[[str], None]
POLL_S = 0.25
TAIL_LINES = 20


class EngineError(RuntimeError):
    """An engine that did not start, changed what it was asked, or died. The message ends in its last log lines."""


class Engine:
    """One engine. A context manager: `with Engine(profile, drafter="ngram") as engine:` blocks until it is ready.

    profile: the deployment. drafter: a reserved name, a name of the profile, a folder, or None for its default.
    port: None takes a free one. run_dir: where the log and the key file go (default: a new folder under
    EYAS_HOME/runs). num_steps, topk, draft_tokens override the profile's for an EAGLE3 drafter.
    simulate_accept_len: every verify step accepts so many tokens, whatever the drafter says (cost measurement only).
    capture_dir: the engine writes the hidden states of the prompts of `python -m drafter capture` there; with the
    drafter "none" it captures the layers of the profile's [capture], else those that its drafter is fed.
    keys: the engine's keys (default: new ones). host: where it listens.
    node: which of a profile's nodes this is; the first alone answers requests, and the others are ready when they have
    loaded. force: names of checks whose errors are passed over. `findings` holds what the preflight found,
    `probe` what the drafter reached on the fixed prompts after the start; `not_probed` is why it is None.
    keep_as: the engine may outlive this process, and is written down in this file; one that is written down already,
    and would be started the same, is taken over instead.

    Raises LaunchError or DrafterError for a combination that cannot be served.
    """

    def __init__(
        self,
        profile: Profile,
        drafter: str | None = None,
        *,
        port: int | None = None,
        run_dir: Path | None = None,
        num_steps: int | None = None,
        topk: int | None = None,
        draft_tokens: int | None = None,
        simulate_accept_len: float | None = None,
        capture_dir: Path | None = None,
        keys: EngineKeys | None = None,
        host: str = "127.0.0.1",
        node: Node = ALONE,
        force: Collection[str] = (),
        keep_as: Path | None = None,
    ) -> None:
        check_node(profile, node)
        self.profile = profile
        self.host = host
        self.node = node
        self.drafter: ActiveDrafter = resolve_drafter(
            profile, drafter, num_steps=num_steps, topk=topk, draft_tokens=draft_tokens
        )
        self.findings = check_drafter(profile, self.drafter, force)
        if profile.engine.device == "cuda":
            refuse(deployment(profile, self.drafter))
        self.probe: probe.Probe | None = None
        self.not_probed = ""
        self.capture: CapturePlan | None = plan_capture(profile, self.drafter, capture_dir) if capture_dir else None
        self.adopted = False  # whether an earlier process had started it
        self.state: State = "new"
        self.detail = ""
        self.served_name = profile.target.served_name
        self.simulated = simulate_accept_len is not None
        self.version = ""
        self.argv: list[str] = []
        self.resolved: dict[str, Any] = {}
        keys = keys or new_keys()
        self.api_key, self.admin_key = keys.api, keys.admin
        self.on_end: Callable[[Engine], None] | None = None
        self._force = frozenset(force)
        self._simulate_accept_len = simulate_accept_len
        self._run_dir = run_dir
        self._port = port
        self._process: EngineProcess | None = None
        self._keep_as = keep_as
        self._stopping = threading.Event()
        self._watcher: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Where this machine reaches it."""
        return f"http://{loopback_of(self.host)}:{self._port}"

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"}

    @property
    def admin_headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.admin_key}"}

    @property
    def run_dir(self) -> Path:
        assert self._run_dir, "the run folder is made by start()"
        return self._run_dir

    @property
    def log_file(self) -> Path:
        return self.run_dir / "engine.log"

    @property
    def key_file(self) -> Path:
        return self.run_dir / "engine.yaml"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def vocab_size(self) -> int | None:
        """Tokens that the target knows, where its config.json is on this machine."""
        return vocab_size_of(self.profile.model_path)

    def start(self, progress: Progress | None = None) -> None:
        """Start and block until one token was generated. Raises EngineError; then nothing is left running."""
        assert self.state == "new", "an Engine is started once"
        model = self.profile.model_path
        if is_local(model) and not Path(model).is_dir():
            fix = "run `make install`" if self.profile.target.package else "correct target.path in the profile"
            raise EngineError(f"the target's folder {model} does not exist: {fix}.")
        say = progress or (lambda _: None)
        try:
            self.adopted = self._adopt(say)
            if not self.adopted:
                self._spawn()
            deadline = self._wait_ready(say)
            if self.node.rank == 0:  # the others hold a part of the model and answer nothing
                self._ask_first(say, deadline)
                self._compare()
                self._check_capture()
                self._probe(say)
            self._write_down()
        except BaseException:
            self.stop()
            raise
        self.state = "ready"
        self._watcher = threading.Thread(target=self._watch, name="engine-watch", daemon=True)
        self._watcher.start()

    def stop(self) -> None:
        """Stop the whole process group. Safe to call again, and from another thread while start() waits."""
        self._stopping.set()
        if self._process is not None:
            end_process(self._process)
        if self._run_dir:
            with contextlib.suppress(OSError):
                self.key_file.unlink(missing_ok=True)
        if self.state not in ("dead", "hung"):
            self.state = "stopped"

    def leave(self) -> None:
        """Let go of an engine that is to be kept: it goes on without this process."""
        assert self._keep_as, "only an engine with keep_as outlives its starter"
        self._stopping.set()

    @property
    def capacity(self) -> int | None:
        """Answers that the engine makes at once, as it says itself once it is ready."""
        return self.resolved.get("capacity")

    def log_tail(self, lines: int = TAIL_LINES) -> list[str]:
        """The last lines of the engine's log that say something, scrubbed of keys."""
        try:
            text = self.log_file.read_text(errors="replace")
        except FileNotFoundError:
            return []
        return last_words(self.scrub(text), lines)

    def scrub(self, text: str) -> str:
        """The text without this engine's keys."""
        return text.replace(self.api_key, "***").replace(self.admin_key, "***")

    def _spawn(self) -> None:
        if self._port is None:
            self._port = free_port()
        elif not port_is_free(self.host, self._port):
            raise EngineError(f"port {self._port} is taken: stop what listens there, or choose another port.")
        if self._run_dir is None:
            stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
            self._run_dir = read_settings().runs / f"engine-{stamp}-{secrets.token_hex(3)}"
        try:
            self._run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_private(self.key_file, EngineKeys(self.api_key, self.admin_key).document)
            write_private(self.log_file, b"")
        except OSError as error:
            raise EngineError(
                f"the engine's run folder {self._run_dir} cannot be written ({error.strerror})."
            ) from None
        if self.capture:
            try:
                prepare_folder(self.capture.folder)
            except SpoolError as error:
                raise EngineError(str(error)) from None
        launch = self._launch()
        environment = child_environment(launch, os.environ, self._simulate_accept_len)
        self._process = start_guarded(
            launch.argv, environment, self.log_file, self.profile.engine, outlives=self._keep_as is not None
        )
        self.state = "starting"

    def _launch(self) -> Launch:
        """What this engine is started with, or was; its command and what to expect of it are noted."""
        assert self._port is not None
        launch = build_launch(
            self.profile,
            self.drafter,
            port=self._port,
            config_file=str(self.key_file),
            capture=self.capture,
            host=self.host,
            node=self.node,
        )
        self.argv, self._expected = launch.argv, launch.expected
        return launch

    def _arguments_sha256(self) -> str:
        launch = build_launch(self.profile, self.drafter, port=0, config_file=self.key_file.name, node=self.node)
        return keep.arguments_sha256(launch.argv, launch.environment, SGLANG_VERSION)

    def _adopt(self, say: Progress) -> bool:
        """Take over the engine that is written down, where it is what would be started now; else stop it."""
        kept = keep.read_record(self._keep_as) if self._keep_as else None
        if kept is None:
            return False
        self._run_dir, self._port, self._process = Path(kept.run_dir), kept.port, keep.KeptProcess(kept)
        known = False
        with contextlib.suppress(KeyFileError):
            keys = read_keys(self.key_file)
            if known := bool(keys.api and keys.admin):
                self.api_key, self.admin_key = keys.api, keys.admin
        if known and kept.arguments_sha256 == self._arguments_sha256():
            say("taking over the engine that runs")
            self._launch()
            self.state = "starting"
            return True
        say("stopping the kept engine: it was started with other arguments" if known else "stopping the kept engine")
        self.stop()
        self._stopping.clear()
        assert self._keep_as
        self._keep_as.unlink(missing_ok=True)
        self._run_dir = self._port = self._process = None
        return False

    def _write_down(self) -> None:
        if self._keep_as is None or self.adopted:
            return
        assert self._process and self._port
        pid = self._process.pid
        kept = keep.Kept(pid, keep.started_at(pid), self._arguments_sha256(), self._port, str(self.run_dir))
        keep.write_record(self._keep_as, kept)

    def _wait_ready(self, say: Progress) -> float:
        """Until the engine says ready; returns when the start is overdue."""
        timeout = self.profile.engine.start_timeout_s
        deadline = time.monotonic() + timeout
        stage = "starting the process"
        route = "ready" if self.node.rank == 0 else "health"  # all that SGLang has on other nodes
        say(stage)
        with httpx.Client(timeout=10.0, trust_env=False) as client:
            while True:
                self._check_alive(stage)
                if time.monotonic() > deadline:
                    raise self._failure(
                        f"the engine was not ready after {timeout:.0f} s (the profile's start_timeout_s), while {stage}"
                    )
                with contextlib.suppress(httpx.TransportError):
                    if client.get(f"{self.url}/{route}").status_code == httpx.codes.OK:
                        break
                log = self.log_file.read_text(errors="replace")
                if lost_its_port(log):
                    raise self._failure(f"the engine's port {self._port} was taken while it started: start it again")
                reached = stage_of(log) or stage
                if reached != stage:
                    stage = reached
                    say(stage)
                if self._stopping.wait(POLL_S):
                    raise EngineError("the engine was stopped while it started.")
        return deadline

    def _ask_first(self, say: Progress, deadline: float) -> None:
        """One token, and what the engine says that it runs."""
        say("generating one token")
        with httpx.Client(timeout=10.0, trust_env=False) as client:
            self._generate_one(client, deadline - time.monotonic())
            self.resolved, self.version = ask_resolved(client, self.url, self.headers)

    def _generate_one(self, client: httpx.Client, timeout: float) -> None:
        body = {"model": self.served_name, "prompt": "Hello", "max_tokens": 1, "temperature": 0}
        try:
            answer = client.post(
                f"{self.url}/v1/completions", json=body, headers=self.headers, timeout=max(timeout, POLL_S)
            )
        except httpx.TransportError as error:
            self._check_alive("generating its first token")
            raise self._failure(f"the engine said ready but generated no token ({type(error).__name__})") from None
        if answer.status_code != httpx.codes.OK:
            raise self._failure(f"the engine said ready but answered {answer.status_code}: {answer.text[:300]}")

    def _compare(self) -> None:
        changed = changed_arguments(self._expected, self.resolved)
        if changed:
            raise EngineError(
                "the engine changed what it was asked to run, without a word; it was stopped.\n  "
                + "\n  ".join(changed)
                + "\nCorrect the profile so that it asks for what it gets."
            )
        self.drafter = with_resolved(self.drafter, self.resolved)

    def _check_capture(self) -> None:
        assert self._process
        if self.capture:
            processes = {child.pid for child in psutil.Process(self._process.pid).children(recursive=True)}
            try:
                check_handshake(self.capture, processes)
            except SpoolError as error:
                raise EngineError(str(error)) from None

    def _probe(self, say: Progress) -> None:
        off = self.profile.probe.off
        self.not_probed = probe.why_not(self.drafter.algorithm, adopted=self.adopted, simulated=self.simulated, off=off)
        if self.not_probed:
            return
        say("probing the drafter")
        floor = self.profile.probe.floor
        try:
            self.probe = probe.ask(self.url, self.served_name, self.headers, self.profile.engine.start_timeout_s)
        except probe.ProbeError as error:
            self._check_alive("probing the drafter")
            raise self._failure(str(error).rstrip(".")) from None
        if self.probe.acceptance_length < floor and probe.NAME not in self._force:
            raise EngineError(self.probe.failure(self.drafter.name, floor))
        with httpx.Client(timeout=10.0, trust_env=False) as client:  # it leaves no prefix behind
            client.post(f"{self.url}/flush_cache", headers=self.admin_headers)

    def _check_alive(self, stage: str) -> None:
        assert self._process
        code = self._process.poll()
        if code is not None and not self._stopping.is_set():
            self.state = "dead"
            raise self._failure(f"the engine died (exit code {code}) while {stage}")

    def _failure(self, what: str) -> EngineError:
        tail = "\n  ".join(self.log_tail())
        return EngineError(f"{what}. Its last log lines ({self.log_file}):\n  {tail}")

    def _watch(self) -> None:
        assert self._process
        ended = watch(self.url, self._process, self.profile.engine.hang_timeout_s, self._stopping)
        if ended and not self._stopping.is_set():
            self.state, self.detail = ended
            if self.on_end:
                self.on_end(self)
