"""One SGLang process: started from a profile, waited for, watched, and stopped with everything it started.

Its keys travel in a 0600 file and are scrubbed from every line that leaves its log.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import socket
import subprocess
import sys
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
from server import guard, keep, probe
from server.capture import CapturePlan, check_handshake, plan_capture, prepare_folder
from server.config import Profile
from server.deployment import deployment
from server.drafters import ActiveDrafter, check_drafter, is_local, resolve_drafter, with_resolved
from server.enginekeys import EngineKeys, new_keys
from server.keep import KeptProcess
from server.launch import ALONE, SGLANG_VERSION, Node, build_launch, changed_arguments, check_node, child_environment
from server.obstacles import refuse

State = Literal["new", "starting", "ready", "dead", "hung", "stopped"]
Progress = Callable[[str], None]
POLL_S = 0.25
WATCH_S = 2.0
PROBE_TIMEOUT_S = 30.0  # /health_generate itself gives up after 20 s
TAIL_LINES = 20
PORTS = range(20000, 32000)
# The stages of a start, by what SGLang logs.
STAGES = (
    (re.compile(r"Load weight begin"), "loading the target's weights"),
    (re.compile(r"KV Cache is allocated|Memory pool end"), "allocating the cache"),
    (re.compile(r"Uvicorn running|Application startup complete"), "warming up"),
)
# Lines that say nothing about this engine: model classes that cannot be imported here, and access logs.
PORT_LOST = re.compile(r"address already in use", re.IGNORECASE)
NOISE = re.compile(r'Ignore import error|"(GET|POST) /|^\s*$|kill_process_tree|Received sigquit')
# What may be read out of /server_info, which also carries both keys.
RESOLVED = re.compile(
    r"^(model_path|served_model_name|context_length|dtype|quantization|kv_cache_dtype|page_size|tp_size|device|version"
    r"|max_running_requests|max_total_num_tokens|disable_radix_cache|aux_hidden_state_capture"
    r"|return_aux_hidden_state_layer_ids|.*attention_backend|moe_runner_backend|speculative_\w+)$"
)


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
        self._process: subprocess.Popen[bytes] | KeptProcess | None = None
        self._keep_as = keep_as
        self._adopted = False
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
        return vocab_size_of(self.profile)

    def start(self, progress: Progress | None = None) -> None:
        """Start and block until one token was generated. Raises EngineError; then nothing is left running."""
        assert self.state == "new", "an Engine is started once"
        model = self.profile.model_path
        if is_local(model) and not Path(model).is_dir():
            fix = "run `make install`" if self.profile.target.package else "correct target.path in the profile"
            raise EngineError(f"the target's folder {model} does not exist: {fix}.")
        say = progress or (lambda _: None)
        try:
            self._adopted = self._adopt(say)
            if not self._adopted:
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
        process = self._process
        if process is not None:
            if process.stdin is None:  # it was to outlive us
                process.terminate()
            else:
                with contextlib.suppress(OSError):
                    process.stdin.close()  # the guard ends the group
            try:
                process.wait(guard.GRACE_S + 5)
            except (subprocess.TimeoutExpired, psutil.TimeoutExpired):
                for child in psutil.Process(process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
                process.kill()
                process.wait()
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
        found = self.resolved.get("max_running_requests_per_dp") or self.resolved.get("max_running_requests")
        return found if isinstance(found, int) else None

    @property
    def adopted(self) -> bool:
        """Whether it had been started by an earlier process."""
        return self._adopted

    def log_tail(self, lines: int = TAIL_LINES) -> list[str]:
        """The last lines of the engine's log that say something, scrubbed of keys."""
        try:
            text = self.log_file.read_text(errors="replace")
        except FileNotFoundError:
            return []
        kept = [line for line in self.scrub(text).splitlines() if not NOISE.search(line)]
        return kept[-lines:]

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
            _write_private(self.key_file, EngineKeys(self.api_key, self.admin_key).document)
            _write_private(self.log_file, b"")
        except OSError as error:
            raise EngineError(
                f"the engine's run folder {self._run_dir} cannot be written ({error.strerror})."
            ) from None
        if self.capture:
            try:
                prepare_folder(self.capture.folder)
            except SpoolError as error:
                raise EngineError(str(error)) from None
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
        environment = child_environment(launch, os.environ, self._simulate_accept_len)
        engine, kept = self.profile.engine, ["--keep"] if self._keep_as else []
        log_to = [str(self.log_file), str(engine.log_max_bytes), str(engine.log_files)]
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, *kept, *log_to, *launch.argv],
                stdin=subprocess.DEVNULL if self._keep_as else subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self._run_dir,
                start_new_session=True,
            )
        self.state = "starting"

    def _arguments_sha256(self) -> str:
        launch = build_launch(self.profile, self.drafter, port=0, config_file=self.key_file.name, node=self.node)
        return keep.arguments_sha256(launch.argv, launch.environment, SGLANG_VERSION)

    def _adopt(self, say: Progress) -> bool:
        """Take over the engine that is written down, where it is what would be started now; else stop it."""
        kept = keep.read_record(self._keep_as) if self._keep_as else None
        if kept is None:
            return False
        self._run_dir, self._port, self._process = Path(kept.run_dir), kept.port, keep.KeptProcess(kept)
        try:
            keys = json.loads(self.key_file.read_bytes())
            self.api_key, self.admin_key = keys["api-key"], keys["admin-api-key"]
            known = True
        except (OSError, ValueError, KeyError, TypeError):
            known = False
        if known and kept.arguments_sha256 == self._arguments_sha256():
            say("taking over the engine that runs")
            launch = build_launch(
                self.profile, self.drafter, port=kept.port, config_file=str(self.key_file), node=self.node
            )
            self.argv, self._expected, self.state = launch.argv, launch.expected, "starting"
            return True
        say("stopping the kept engine: it was started with other arguments" if known else "stopping the kept engine")
        self.stop()
        self._stopping.clear()
        assert self._keep_as
        self._keep_as.unlink(missing_ok=True)
        self._run_dir = self._port = self._process = None
        return False

    def _write_down(self) -> None:
        if self._keep_as is None or self._adopted:
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
                if PORT_LOST.search(log):
                    raise self._failure(f"the engine's port {self._port} was taken while it started: start it again")
                reached = next((name for pattern, name in reversed(STAGES) if pattern.search(log)), stage)
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
            info = client.get(f"{self.url}/server_info", headers=self.headers)
            info.raise_for_status()
        answer = info.json()
        self.resolved = {name: value for name, value in answer.items() if RESOLVED.match(name)}
        self.version = str(answer["version"])
        states = answer.get("internal_states") or [{}]
        self.resolved["max_running_requests_per_dp"] = states[0].get("effective_max_running_requests_per_dp")

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
        self.not_probed = self._why_not_probed()
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

    def _why_not_probed(self) -> str:
        if self._adopted:
            return "it was when the engine started"
        match self.drafter.algorithm:
            case "NONE":
                return "nothing speculates"
            case "NGRAM":
                return "NGRAM has seen nothing yet to draft from"
            case "EAGLE3" if self.simulated:
                return "acceptance is simulated"
            case "EAGLE3" if self.profile.probe.off is not None:
                return f"the profile turns it off: {self.profile.probe.off}"
        return ""

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
        """Until stop(): notice that the process died, or that requests run and no token comes."""
        assert self._process
        limit = self.profile.engine.hang_timeout_s
        seen, since = -1.0, time.monotonic()
        with httpx.Client(timeout=5.0, trust_env=False) as client:
            while not self._stopping.wait(min(WATCH_S, limit / 4)):
                if (code := self._process.poll()) is not None:
                    self._end("dead", f"the engine died (exit code {code})")
                    return
                running, tokens = self._activity(client)
                if running == 0 or tokens != seen:
                    seen, since = tokens, time.monotonic()
                elif time.monotonic() - since > limit and not self._answers(client):
                    self._end("hung", f"{running:.0f} requests ran for {limit:.0f} s without a token")
                    return

    def _end(self, state: State, detail: str) -> None:
        if self._stopping.is_set():
            return
        self.state, self.detail = state, detail
        if self.on_end:
            self.on_end(self)

    def _activity(self, client: httpx.Client) -> tuple[float, float]:
        """(requests that run, tokens computed so far), from the engine's own metrics.

        An engine whose HTTP side does not answer counts as one that runs something and makes nothing.
        """
        try:
            text = client.get(f"{self.url}/metrics").text
        except httpx.TransportError:
            return 1.0, -1.0
        running = tokens = 0.0
        for line in text.splitlines():
            if line.startswith("sglang:num_running_reqs{"):
                running += float(line.rpartition(" ")[2])
            elif line.startswith("sglang:realtime_tokens_total{"):
                tokens += float(line.rpartition(" ")[2])
        return running, tokens

    def _answers(self, client: httpx.Client) -> bool:
        """Whether the engine still generates: the last word before it is called hung."""
        with contextlib.suppress(httpx.TransportError):
            return client.get(f"{self.url}/health_generate", timeout=PROBE_TIMEOUT_S).status_code == httpx.codes.OK
        return False


def vocab_size_of(profile: Profile) -> int | None:
    """Tokens that the profile's target knows, where its config.json is on this machine."""
    try:
        config = json.loads((Path(profile.model_path) / "config.json").read_bytes())
        return int((config.get("text_config") or config)["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def port_obstacle(host: str, port: int) -> str | None:
    """Why no server could listen there now, in one sentence with the fix, or None."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"port {port} of {host} is taken: stop what listens there, or use --port."
            if error.errno == errno.EACCES:
                return f"port {port} of {host} needs privileges: use --port with one above 1023."
            return f"{host} is no address of this machine ({error.strerror or error}): use --host with one that is."
    return None


def loopback_of(host: str) -> str:
    """How this machine reaches a server that listens on `host`, as the host of a URL."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{shown}]" if ":" in shown else shown


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    return port_obstacle(host, port) is None


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on at the moment.

    Below the ephemeral range, from which an outgoing connection could take it before the engine listens.
    """
    ports = iter(lambda: PORTS.start + secrets.randbelow(len(PORTS)), None)
    return next(port for port in ports if port_is_free("127.0.0.1", port))


def _write_private(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
