"""The profile by which tests start fake_sglang in the place of the engine. It ends in [engine]: more may follow."""

from pathlib import Path

FAKE = Path(__file__).parent / "fake_sglang"  # goes first on PYTHONPATH
PROFILE = """
[target]
path = "./model"
served_name = "fake"
[engine]
device = "cpu"
dtype = "float32"
context_length = 512
max_running_requests = 4
start_timeout_s = 20.0
hang_timeout_s = 1.0
"""
MINE = """
[drafters.mine]
path = "./mine"
"""
NGRAM = """
[drafters.ngram]
algorithm = "NGRAM"
ngram = {draft_tokens = 12}
"""
