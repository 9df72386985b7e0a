"""Gateway and engines together: `make serve`. One ends with the other, and nothing stays behind but what is kept."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from drafter.settings import read_settings
from server.admin import create_admin_app
from server.app import create_app
from server.arms import Arm
from server.auth import AdminKey, KeyRing
from server.config import ArmTable, GatewayTable, Profile, ProfileError, load_profile
from server.connection import Connection
from server.drafters import ActiveDrafter, resolve_drafter
from server.engine import Engine
from server.enginekeys import EngineKeys, read_keys
from server.gateway import LOOPBACK, Gateway
from server.health import UNKNOWN, RemoteArm
from server.keep import record_file
from server.known import vocab_size_of
from server.launch import ALONE, Node, ngram_obstacle
from server.local import LocalArm
from server.logs import configure_logs
from server.notify import notify
from server.plan import warned
from server.ports import loopback_of, port_obstacle
from server.shadow import Shadow
from server.tracing import start_tracing

INTERRUPT_DRAIN_S = 3.0  # how long open streams may go on after Ctrl-C
KEYS_LOOK_S = 2.0
# What SIGHUP takes up; everything else of a profile needs a new start.
RELOADABLE = ("keys_file", "limits", "max_inflight", "queue_limit", "queue_timeout_s")


@dataclass(frozen=True)
class Asked:
    """What the command line says beside the profile. `engine_url`: serve this engine, and start none. `node`: the first
    of several, where the profile has them."""

    drafter: str | None = None
    host: str | None = None
    port: int | None = None
    engine_url: str | None = None
    engine_keys: Path | None = None
    force: Collection[str] = ()
    node: Node = ALONE


class Listener(uvicorn.Server):
    """A server that leaves the process's signals to the service."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(profile: Profile, asked: Asked, version: str) -> int:
    """Serve until a signal or the only engine's end. Returns an exit code. Raises ValueError before anything starts."""
    port = profile.gateway.port if asked.port is None else asked.port
    admin_port = profile.gateway.admin_port
    told = {"host": asked.host or profile.gateway.host, "port": port}
    told["admin_port"] = (port + 1 if 0 < port < 65535 else 0) if admin_port is None else admin_port
    table = profile.gateway.model_copy(update=told)
    configure_logs(table.log_format)
    for host, number, fix in (
        (table.host, table.port, "--port"),
        (table.admin_host, table.admin_port, "gateway.admin_port in the profile"),
    ):
        obstacle = port_obstacle(host, number or 0)
        if obstacle:
            raise ProfileError(obstacle.replace("--port", fix))
    _allow_descriptors()
    return _Service(profile, asked, table, version).run()


def _allow_descriptors() -> None:
    """As many open files as this process may have: a request takes two, and a shell's limit is often 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def listener(app: object, host: str, port: int, certificate: Path | None = None, key: Path | None = None) -> Listener:
    """One process; HTTP by httptools on uvloop."""
    for file in (certificate, key):
        if file is not None and not os.access(file, os.R_OK):
            raise ProfileError(f"{file}, which [gateway] names for TLS, cannot be read.")
    return Listener(
        uvicorn.Config(
            app,  # type: ignore[arg-type]  # an ASGI application, which uvicorn names by a type of its own
            host=host,
            port=port,
            log_level="warning",
            log_config=None,
            access_log=False,
            lifespan="on",
            http=Connection,
            ws="none",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=3,
            server_header=False,
            ssl_certfile=certificate,
            ssl_keyfile=None if key is None else str(key),
        )
    )


def arm_tables(profile: Profile, asked: Asked) -> dict[str, ArmTable]:
    """The arms to serve, by name: the profile's, or the one that the command line asks for."""
    if asked.engine_url is not None:
        keys = None if asked.engine_keys is None else str(asked.engine_keys.resolve())
        return {"default": ArmTable(url=asked.engine_url, drafter=asked.drafter, engine_keys_file=keys)}
    if profile.arms and asked.drafter is not None:
        raise ProfileError(f"profile {profile.source} has [arms], each with its drafter: leave --drafter out.")
    return profile.arms or {"default": ArmTable(local=True, drafter=asked.drafter)}


class _Service:
    def __init__(self, profile: Profile, asked: Asked, table: GatewayTable, version: str) -> None:
        self.profile = profile
        self.asked = asked
        self.error: str | None = None
        self.code = 0
        self.locals: list[LocalArm] = []
        self.remotes: list[Arm] = []
        tables = arm_tables(profile, asked)
        alone = len(tables) == 1
        members, shadows = [], []
        for name, arm_table in tables.items():
            arm = self._remote(name, arm_table) if arm_table.url else self._local(name, arm_table, alone=alone)
            if arm_table.shadow:
                shadows.append(Shadow(arm, arm_table.shadow_share, arm_table.shadow_max_inflight))
            else:
                members.append(arm)
        settings = read_settings()
        keys = KeyRing(keys_path(profile, table), table.limits)
        admin = AdminKey(settings.admin_key_file)
        self.gateway = Gateway(table, members, version=version, keys=keys, admin=admin, shadows=shadows)
        self.spans: Any = None
        if table.tracing_endpoint:
            self.gateway.relay.tracing, self.spans = start_tracing(table.tracing_endpoint, version)
        if keys.path is None and table.host not in LOOPBACK:
            _say(f"warning: {table.host} is not loopback and there is no keys file: whoever reaches it may use it.")
        tls = [beside(profile, named) for named in (table.tls_certificate, table.tls_key)]
        self.public = listener(create_app(self.gateway), table.host, table.port, *tls)
        self.private = listener(create_admin_app(self.gateway, self.reload), table.admin_host, table.admin_port or 0)

    def run(self) -> int:
        try:
            with asyncio.Runner(loop_factory=self.public.config.get_loop_factory()) as runner:
                runner.run(self._serve())
        finally:
            # A second signal must not cut this short: the guard ends an engine within seconds.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            self._stop_engines()
            if self.spans is not None:
                self.spans.shutdown()
        if self.error is not None:
            _say(self.error)
            return 1
        return self.code

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.stopping, self.cut_short = asyncio.Event(), asyncio.Event()
        self.loop.add_signal_handler(signal.SIGINT, self._signalled, 130, INTERRUPT_DRAIN_S)
        self.loop.add_signal_handler(signal.SIGTERM, self._signalled, 0, self.gateway.table.drain_timeout_s)
        self.loop.add_signal_handler(signal.SIGHUP, self._reload_told)
        self.drain_s = 0.0
        servers = [asyncio.create_task(each.serve()) for each in (self.public, self.private)]
        others = [asyncio.create_task(self._watch())]
        for local in self.locals:
            local.start()
        stop = asyncio.create_task(self.stopping.wait())
        done, _ = await asyncio.wait((stop, *servers, *others), return_when=asyncio.FIRST_COMPLETED)
        if not self.stopping.is_set():
            found = next((task.exception() for task in done if task.exception()), None)
            self.error = f"the gateway ended by itself: {found!r}"
        notify("STOPPING=1")
        await self.gateway.drain(self.drain_s, self.cut_short)
        for task in (stop, *others):
            task.cancel()
        for each in (self.public, self.private):
            each.should_exit = True
        await asyncio.gather(*servers, *others, stop, return_exceptions=True)

    async def _watch(self) -> None:
        """Look after remote arms and the keys file."""
        while not self.public.started:
            await asyncio.sleep(0.01)
        if not self.locals:  # else the ready text says it, once there is something to ask
            scheme, config = "https" if self.public.config.is_ssl else "http", self.public.config
            arms = ", ".join(self.gateway.arms.names)
            _say(f"gateway at {scheme}://{loopback_of(config.host)}:{config.port}/v1 before {arms}")
            notify("READY=1", "STATUS=serving")  # live at once: /readyz says when an engine is ready
        upstream = self.gateway.relay.upstream
        async with asyncio.TaskGroup() as group:
            for arm in self.remotes:
                group.create_task(RemoteArm(self.gateway.arms, arm).watch(upstream))
            while True:
                await asyncio.sleep(KEYS_LOOK_S)
                self.gateway.refit()  # a breaker may have become half-open
                if self.gateway.admission.keys.changed():
                    self._reload_told()

    def _signalled(self, code: int, drain_s: float) -> None:
        if self.stopping.is_set():
            self.cut_short.set()
            return
        self.code, self.drain_s = code, drain_s
        self.stopping.set()

    def _reload_told(self) -> None:
        try:
            _say(f"reloaded: {self.reload()}.")
        except ValueError as error:
            _say(f"nothing was reloaded: {error}")

    def reload(self) -> str:
        """Read keys, limits and weights anew. Returns what they are. Raises ValueError; then nothing has changed."""
        found = load_profile(self.profile.source)
        tables, old = arm_tables(found, self.asked), arm_tables(self.profile, self.asked)
        fresh = {name: getattr(found.gateway, name) for name in RELOADABLE}
        table = self.gateway.table.model_copy(update=fresh)
        if keys_path(found, table) != self.gateway.admission.keys.path:
            raise ProfileError(
                f"profile {found.source}: gateway.keys_file is another: start the gateway again for that."
            )
        weights = {name: each.weight for name, each in tables.items() if name in old}
        self.gateway.change(table, weights)
        kept = self.profile.model_copy(
            update={
                "sha256": found.sha256,
                "gateway": self.profile.gateway.model_copy(update=fresh),
                "arms": {
                    name: old[name].model_copy(update={"weight": weights.get(name, 0.0)}) for name in self.profile.arms
                },
            }
        )
        shares = ", ".join(f"{name} {weight:g}" for name, weight in weights.items())
        said = f"{len(self.gateway.admission.keys.callers)} keys, weights {shares}"
        return said if kept == found else f"{said}; what else the profile changed needs a new start"

    def _local(self, name: str, table: ArmTable, *, alone: bool) -> Arm:
        profile, drafter = self.profile, table.drafter
        if table.env:
            environment = {**profile.engine.env, **table.env}
            profile = profile.model_copy(update={"engine": profile.engine.model_copy(update={"env": environment})})
        chosen = resolve_drafter(profile, drafter)
        obstacle = ngram_obstacle(os.environ) if chosen.algorithm == "NGRAM" else None
        if obstacle:
            _say(f"{obstacle}: serving without speculation.")
            drafter = "none"
        keep = profile.engine.on_gateway_exit == "keep"
        kept_as = record_file(read_settings().runs, profile.source, name) if keep else None
        make = partial(Engine, profile, drafter, node=self.asked.node, force=self.asked.force, keep_as=kept_as)
        arm = Arm(name, "", "", "", profile.target.served_name, chosen.name, weight=table.weight)
        local = LocalArm(
            arm,
            make,
            alone=alone,
            keep=keep,
            on_change=lambda: self._in_loop(self.gateway.refit),
            on_ready=self._ready,
            on_lost=self._lost,
            on_restart=lambda reason: self._in_loop(self._restarted, name, reason),
        )
        arm.drafter = local.engine.drafter.name
        show_findings(local.engine)
        self.locals.append(local)
        return arm

    def _remote(self, name: str, table: ArmTable) -> Arm:
        file = beside(self.profile, table.engine_keys_file)
        keys = read_keys(file) if file else EngineKeys("", "")
        arm = Arm(
            name,
            (table.url or "").rstrip("/"),
            keys.api,
            keys.admin,
            self.profile.target.served_name,
            table.drafter or UNKNOWN,
            vocab_size=vocab_size_of(self.profile.model_path),
            capacity=table.max_running_requests,
            weight=table.weight,
        )
        self.remotes.append(arm)
        return arm

    def _ready(self, engine: Engine, elapsed_s: float) -> None:
        config = self.public.config
        admin = f"http://{loopback_of(self.private.config.host)}:{self.private.config.port}"
        scheme = "https" if config.is_ssl else "http"
        print(ready_text(engine, scheme, config.host, config.port, elapsed_s, admin), flush=True)
        notify("READY=1", "STATUS=serving")

    def _lost(self, reason: str) -> None:
        def lost() -> None:
            if not self.stopping.is_set():
                self.error = reason
                self.stopping.set()

        self._in_loop(lost)

    def _restarted(self, name: str, reason: str) -> None:
        self.gateway.metrics.engine_restarts.labels(name, reason).inc()

    def _in_loop(self, call: object, *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody is left to be told
            self.loop.call_soon_threadsafe(call, *arguments)  # type: ignore[arg-type]

    def _stop_engines(self) -> None:
        for local in self.locals:
            kept = local.keep and local.engine.state == "ready"
            if self.error is None:
                _say("leaving the engine running, for the next gateway" if kept else "stopping the engine")
            local.stop()


def keys_path(profile: Profile, table: GatewayTable) -> Path | None:
    """The keys file: EYAS_KEYS_FILE, else the profile's."""
    return read_settings().keys_file or beside(profile, table.keys_file)


def beside(profile: Profile, named: str | None) -> Path | None:
    """A file that the profile names, taken from the profile's own folder."""
    return None if named is None else profile.source.parent / Path(named).expanduser()


def _say(text: str) -> None:
    print(f"eyas: {text}", file=sys.stderr, flush=True)


def show_findings(engine: Engine) -> None:
    """What the preflight warns of, before the engine starts."""
    for line in warned(engine.findings):
        print(f"eyas: {line}", file=sys.stderr, flush=True)


def speculation_text(drafter: ActiveDrafter) -> str:
    """One phrase: what speculates, and how far."""
    match drafter.algorithm:
        case "NONE":
            return "no speculation"
        case "NGRAM":
            return f"NGRAM speculation, {drafter.draft_tokens} tokens verified in a step"
        case "EAGLE3":
            return (
                f"EAGLE3 speculation by {drafter.name}, {drafter.num_steps} steps, top {drafter.topk}, "
                f"{drafter.draft_tokens} tokens verified in a step"
            )


def probe_text(engine: Engine) -> list[str]:
    """What the probe found, or why there was none; nothing where nothing was there to probe."""
    if engine.probe is not None:
        low = engine.probe.acceptance_length < engine.profile.probe.floor
        return [engine.probe.text + (f", under the floor of {engine.profile.probe.floor:.2f} (forced)" * low)]
    return [f"none: {engine.not_probed}"] if engine.drafter.algorithm == "EAGLE3" else []


def ready_text(engine: Engine, scheme: str, host: str, port: int, elapsed_s: float, admin: str) -> str:
    """The lines that say that it serves: URL, a curl to copy, what speculates, what is limited."""
    url = f"{scheme}://{loopback_of(host)}:{port}"
    body = {
        "model": engine.served_name,
        "messages": [{"role": "user", "content": "What is an eyas?"}],
        "max_tokens": 64,
    }
    lines = [
        f"eyas: ready after {elapsed_s:.0f} s at {url}/v1 (OpenAI API), metrics at {admin}/metrics",
        f"  serves   {engine.served_name} on SGLang {engine.version}, {speculation_text(engine.drafter)}",
        f"  try      curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{json.dumps(body)}'",
    ]
    lines += [f"  probe    {line}" for line in probe_text(engine)]
    if engine.profile.engine.device == "cpu":
        lines.append(
            "  limits   CPU: correctness and acceptance are real, speed says nothing about a GPU; "
            f"{engine.profile.engine.max_running_requests} requests at once, "
            f"{engine.profile.engine.context_length:,} tokens of context, no images"
        )
    lines.append(f"  log      {engine.log_file}")
    lines.append("  Ctrl-C stops everything.")
    return "\n".join(lines)
