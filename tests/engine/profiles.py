"""The profile that serves a tiny target: in fp32, so that equality is exact, and with every drafter of its pair."""

import json

from tests.tiny.pair import TinyPair

PROFILE = """\
[target]
path = "{target}"
served_name = "tiny-{name}"
trust_remote_code = {remote_code}
[engine]
device = "cpu"
dtype = "float32"
context_length = 1024
max_running_requests = {requests}
max_total_tokens = 65536
start_timeout_s = 850.0
env = {{OMP_NUM_THREADS = "1"}}
extra_args = {extra_args}
[capture]
layer_ids = {layer_ids}
convention = "{convention}"
[drafters.ngram]
algorithm = "NGRAM"
ngram = {{draft_tokens = 8}}
"""


def profile_text(pair: TinyPair, requests: int = 16, extra_args: tuple[str, ...] = ()) -> str:
    """The TOML of a profile that serves `pair.target` to so many requests at once."""
    text = PROFILE.format(
        target=pair.target,
        name=pair.name,
        remote_code=str(pair.trust_remote_code).lower(),
        requests=requests,
        extra_args=json.dumps(extra_args),
        layer_ids=list(pair.layer_ids),
        convention=pair.convention,
    )
    return text + "".join(f'[drafters.{name}]\npath = "{folder}"\n' for name, folder in pair.drafters.items())
