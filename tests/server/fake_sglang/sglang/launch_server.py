"""FAKE `python -m sglang.launch_server`: answers what an Engine asks, and misbehaves as FAKE_SGLANG tells it.

FAKE_SGLANG is a list, with semicolons, of: die (at once), die-later (0.5 s after it was ready), never-ready, no-token,
change:NAME=JSON (resolved argument), stubborn (ignores SIGTERM, with a child that does too), hang (a request runs and
no token comes), no-plugin (captures nothing), accepts:HISTOGRAM (of each answer, 0,0,9,9 unless told), no-template
(chat is refused), no-statistics, chatty (prints a lot), die-once:FILE (as
die-later, unless FILE is there), shake:NAME=JSON (an entry of the capture's handshake). A request of the user slowN is
answered after N seconds.
"""

import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

CUES = [cue for cue in os.environ.get("FAKE_SGLANG", "").split(";") if cue]


def flags(argv):
    found, at = {}, 0
    while at < len(argv):
        end = next((i for i in range(at + 1, len(argv)) if argv[i].startswith("--")), len(argv))
        values = argv[at + 1 : end]
        found[argv[at][2:].replace("-", "_")] = True if not values else values[0] if len(values) == 1 else values
        at = end
    return found


def changes(kind):
    """What the cues of a kind change, as {name: value}."""
    pairs = [cue.removeprefix(kind).partition("=") for cue in CUES if cue.startswith(kind)]
    return {name: json.loads(value) for name, _, value in pairs}


ASKED = flags(sys.argv[1:])
KEYS = json.loads(Path(ASKED["config"]).read_text())
print("server_args=" + json.dumps({**ASKED, **KEYS}), flush=True)
print("Load weight begin. avail mem=1 GB", flush=True)
if "die" in CUES:
    print("RuntimeError: the fake was told to die", flush=True)
    sys.exit(3)
if "stubborn" in CUES:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", code])
    print(f"stubborn child {child.pid}", flush=True)

CAPTURES_ONLY = "enable_return_aux_hidden_states" in ASKED
LAYERS = [int(layer) for layer in ASKED.get("return_aux_hidden_state_layer_ids", ["0", "1", "2"])]
RESOLVED = {
    "model_path": ASKED["model_path"],
    "served_model_name": ASKED["served_model_name"],
    "context_length": int(ASKED["context_length"]),
    "max_running_requests": int(ASKED["max_running_requests"]),
    "dtype": ASKED["dtype"],
    "speculative_algorithm": None if CAPTURES_ONLY else ASKED.get("speculative_algorithm"),
    "disable_radix_cache": "disable_radix_cache" in ASKED,
    "aux_hidden_state_capture": ASKED["speculative_algorithm"].lower() if CAPTURES_ONLY else None,
    "return_aux_hidden_state_layer_ids": LAYERS if CAPTURES_ONLY else None,
    "speculative_num_steps": int(ASKED.get("speculative_num_steps", 0)),
    "speculative_eagle_topk": int(ASKED.get("speculative_eagle_topk", 10)),
    "speculative_num_draft_tokens": int(ASKED.get("speculative_num_draft_tokens", 12)),
    "speculative_draft_model_path": ASKED.get("speculative_draft_model_path"),
    "speculative_adaptive": "speculative_adaptive" in ASKED,
    "speculative_accept_threshold_single": 1.0,
    "speculative_accept_threshold_acc": 1.0,
    "environment": dict(os.environ),
    **KEYS,
}
RESOLVED |= changes("change:")
if (captured := os.environ.get("EYAS_CAPTURE_DIR")) and "no-plugin" not in CUES:
    handshake = {"format": 1, "host": platform.node(), "pid": os.getpid(), "sglang": "0.0.fake", "layer_ids": LAYERS}
    handshake |= {"inputs_to": [layer + 1 for layer in LAYERS], "convention": "output_of_layer", "hidden_size": 8}
    handshake |= {"dtype": "float32", "tp_rank": 0, **changes("shake:")}
    (Path(captured) / "handshake.json").write_text(json.dumps(handshake))


def details():
    if "no-statistics" in CUES:
        return None
    told = next((cue.removeprefix("accepts:") for cue in CUES if cue.startswith("accepts:")), "0,0,9,9")
    histogram = [int(steps) for steps in told.split(",")]
    correct = sum(accepted * steps for accepted, steps in enumerate(histogram))
    return {
        "spec_correct_drafts_histogram": histogram,
        "spec_verify_ct": sum(histogram),
        "spec_num_correct_drafts": correct,
    }


class Handler(BaseHTTPRequestHandler):
    def answer(self, status, body):
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        if self.path == "/ready":
            self.answer(503 if "never-ready" in CUES else 200, "")
        elif self.path == "/server_info":
            self.answer(200, {**RESOLVED, "version": "0.0.fake", "internal_states": [{}]})
        elif self.path == "/metrics":
            running = 1 if "hang" in CUES else 0
            self.answer(
                200, f'sglang:num_running_reqs{{a="b"}} {running}.0\nsglang:realtime_tokens_total{{a="b"}} 7.0\n'
            )
        elif self.path == "/health_generate":
            self.answer(503 if "hang" in CUES else 200, "")
        else:
            self.answer(404, "")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or "{}")
        if self.headers["authorization"] != f"Bearer {KEYS['api-key']}":
            self.answer(401, {"error": "Unauthorized"})
        elif "no-template" in CUES and "chat" in self.path:
            self.answer(400, {"error": "no chat template"})
        else:
            if str(body.get("user", "")).startswith("slow"):
                time.sleep(float(body["user"][4:]))
            extension = {"spec_tokens_details": details()} if "return_spec_tokens_details" in body else {}
            self.answer(500 if "no-token" in CUES else 200, {"choices": [{"text": "x"}], "sglext": extension})

    def log_message(self, *args):
        pass


if "chatty" in CUES:
    threading.Thread(target=lambda: [print(f"line {at} " + "x" * 100, flush=True) for at in range(4000)]).start()
once = next((Path(cue.removeprefix("die-once:")) for cue in CUES if cue.startswith("die-once:")), None)
if once and not once.exists():
    once.touch()
    CUES.append("die-later")
if "die-later" in CUES:
    threading.Thread(target=lambda: (time.sleep(2.0), print("fake: dying now", flush=True), os._exit(9))).start()
print("Uvicorn running", flush=True)
ThreadingHTTPServer(("127.0.0.1", int(ASKED["port"])), Handler).serve_forever()
