"""[engine] of a profile: flags of the SGLang process, and those that a profile may not set by itself."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from server.table import Count, Seconds, Share, Table

# Flags that Eyas sets itself from the profile's own keys, or that would let a result be faked or a key leak.
OWNED_FLAGS = frozenset(
    (
        "--model-path",
        "--model",
        "--served-model-name",
        "--trust-remote-code",
        "--device",
        "--tp",
        "--tp-size",
        "--tensor-parallel-size",
        "--nnodes",
        "--node-rank",
        "--dist-init-addr",
        "--dtype",
        "--quantization",
        "--context-length",
        "--max-running-requests",
        "--mem-fraction-static",
        "--host",
        "--port",
        "--api-key",
        "--admin-api-key",
        "--config",
        "--enable-metrics",
        "--revision",
        "--speculative-algorithm",
        "--speculative-draft-model-path",
        "--speculative-draft-model",
        "--speculative-num-steps",
        "--speculative-eagle-topk",
        "--speculative-num-draft-tokens",
        "--speculative-adaptive",
        "--speculative-adaptive-config",
        "--speculative-draft-attention-backend",
        "--speculative-draft-model-quantization",
        "--speculative-draft-model-revision",
        "--reasoning-parser",
        "--tool-call-parser",
        "--attention-backend",
        "--prefill-attention-backend",
        "--decode-attention-backend",
        "--kv-cache-dtype",
        "--page-size",
        "--max-total-tokens",
        "--enable-return-aux-hidden-states",
        "--return-aux-hidden-state-layer-ids",
    )
)
# SGLang renames SGL_X to SGLANG_X at its start.
FAKING_ENVIRONMENT = re.compile(r"^SGL(ANG)?_(SIMULATE|DSPARK_SIMULATE)")
VARIABLE = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")


class EngineTable(Table):
    """Flags of the SGLang process. `env` and `extra_args` carry what has no key of its own.

    on_gateway_exit: `keep` leaves a local engine running when its gateway ends, and the next gateway takes it over
    where it would start the same. log_max_bytes, log_files: the engine's log is turned over at that size, and so many
    are kept.
    """

    device: Literal["cpu", "cuda"]
    tp: Count = 1
    nodes: Count = 1
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    context_length: Count
    max_running_requests: Count
    max_total_tokens: Count | None = None
    mem_fraction: Share | None = None
    page_size: Count | None = None
    attention_backend: str | None = None
    prefill_attention_backend: str | None = None
    decode_attention_backend: str | None = None
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    env: dict[str, str] = Field(default_factory=dict)
    extra_args: list[str] = Field(default_factory=list)
    start_timeout_s: Seconds = 300.0
    hang_timeout_s: Seconds = 120.0
    on_gateway_exit: Literal["stop", "keep"] = "stop"
    log_max_bytes: Annotated[int, Field(ge=64 * 1024)] = 64 * 1024 * 1024
    log_files: Count = 5

    @model_validator(mode="after")
    def _nothing_owned(self) -> EngineTable:
        for arg in self.extra_args:
            flag = arg.split("=", 1)[0]
            # argparse takes any unambiguous beginning of a flag for the flag itself.
            owned = next((known for known in sorted(OWNED_FLAGS) if len(flag) > 2 and known.startswith(flag)), None)
            if owned:
                raise ValueError(f"extra_args has {flag}, but {owned} is set from a key of the profile: use that key")
        check_environment(self.env)
        if self.tp % self.nodes:
            raise ValueError(f"tp is {self.tp}, which {self.nodes} nodes cannot share evenly: make it a multiple")
        return self


def check_environment(env: dict[str, str]) -> None:
    """Raises ValueError for a variable of an engine that none can hold, fakes acceptance, or is Eyas's own."""
    for name, value in env.items():
        if not VARIABLE.match(name) or "\0" in value:
            raise ValueError(f"env has {name!r} = {value!r}, which no environment can hold: correct it")
        if FAKING_ENVIRONMENT.match(name):
            raise ValueError(f"env has {name}, which fakes acceptance: remove it")
        if name.startswith("EYAS_"):
            raise ValueError(f"env has {name}, which is for Eyas itself to set: remove it")
