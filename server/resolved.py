"""What an engine says that it runs (`/server_info`), and what of it was asked for otherwise.

SGLang changes arguments without a word, so what it resolved is compared with what the launch expects.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import httpx

from server.drafters import ActiveDrafter

# What may be read out of /server_info, which also carries both keys.
RESOLVED = re.compile(
    r"^(model_path|served_model_name|context_length|dtype|quantization|kv_cache_dtype|page_size|tp_size|device|version"
    r"|max_running_requests|max_total_num_tokens|disable_radix_cache|aux_hidden_state_capture"
    r"|return_aux_hidden_state_layer_ids|.*attention_backend|moe_runner_backend|speculative_\w+)$"
)


def resolved_arguments(info: Mapping[str, Any]) -> dict[str, Any]:
    """Of an answer of `/server_info`, what may be shown: neither its keys nor its environment."""
    return {name: value for name, value in info.items() if RESOLVED.match(name)}


def ask_resolved(client: httpx.Client, url: str, headers: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """(resolved arguments, SGLang's version) of the engine at `url`. Raises httpx.HTTPError.

    `capacity` among them is what it runs at once.
    """
    answer = client.get(f"{url}/server_info", headers=dict(headers)).raise_for_status().json()
    return resolved_arguments(answer) | {"capacity": capacity_of(answer)}, str(answer["version"])


def capacity_of(info: Mapping[str, Any]) -> int | None:
    """Answers at once, over all data-parallel ranks, by an engine's /server_info; None where it does not say."""
    states = info.get("internal_states")
    first = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    each = first.get("effective_max_running_requests_per_dp") or info.get("max_running_requests")
    dp = info.get("dp_size")
    if type(each) is not int or each < 1:
        return None
    return each * (dp if type(dp) is int and dp > 0 else 1)


def changed_arguments(expected: Mapping[str, Any], resolved: Mapping[str, Any]) -> list[str]:
    """One line for each argument that the engine changed by itself."""
    return [
        f"{name}: asked for {wanted!r}, the engine runs with {resolved.get(name)!r}"
        for name, wanted in expected.items()
        if resolved.get(name) != wanted
    ]


def with_resolved(drafter: ActiveDrafter, resolved: Mapping[str, Any]) -> ActiveDrafter:
    """The drafter with the steps, topk and draft tokens that the engine really runs."""
    if drafter.algorithm == "NONE":
        return drafter
    return replace(
        drafter,
        num_steps=resolved["speculative_num_steps"],
        topk=resolved["speculative_eagle_topk"],
        draft_tokens=resolved["speculative_num_draft_tokens"],
    )
