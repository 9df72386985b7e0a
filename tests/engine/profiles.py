"""The profile that serves a tiny target: in fp32, so that equality is exact, and with every drafter of its pair."""

import json
import os

from tests.tiny.pair import TinyPair

PROFILE = """\
[target]
path = "{target}"
served_name = "tiny-{name}"
trust_remote_code = {remote_code}
[engine]
device = "cpu"
dtype = "float32"
tp = {tp}
context_length = 1024
max_running_requests = {requests}
max_total_tokens = 65536
start_timeout_s = 850.0
env = {env}
extra_args = {extra_args}
{parser}[capture]
layer_ids = {layer_ids}
convention = "{convention}"
[drafters.ngram]
algorithm = "NGRAM"
ngram = {{draft_tokens = 8}}
"""


def profile_text(
    pair: TinyPair,
    requests: int = 16,
    extra_args: tuple[str, ...] = (),
    tp: int = 1,
    tool_call_parser: str | None = None,
) -> str:
    """The TOML of a profile that serves `pair.target` to so many requests at once, over `tp` ranks on gloo."""
    env = cores_of_two_ranks() if tp == 2 else {"OMP_NUM_THREADS": "1"}
    text = PROFILE.format(
        target=pair.target,
        name=pair.name,
        remote_code=str(pair.trust_remote_code).lower(),
        requests=requests,
        tp=tp,
        env="{" + ", ".join(f'{name} = "{value}"' for name, value in env.items()) + "}",
        extra_args=json.dumps(extra_args),
        parser=f'tool_call_parser = "{tool_call_parser}"\n' if tool_call_parser else "",
        layer_ids=list(pair.layer_ids),
        convention=pair.convention,
    )
    return text + "".join(f'[drafters.{name}]\npath = "{folder}"\n' for name, folder in pair.drafters.items())


def cores_of_two_ranks() -> dict[str, str]:
    """SGLang binds each rank to cores of its own; here to those that the tests may use, which may be one."""
    cores = sorted(os.sched_getaffinity(0))
    return {"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}", "OMP_NUM_THREADS": "1"}
