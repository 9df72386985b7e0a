"""How a gateway changes and ends: draining, reloading, engines kept and taken over, restarts, remote arms, its logs."""

import json
import os
import re
import resource
import signal
import ssl
import subprocess
import sys
import threading
import time

import httpx
import psutil
import pytest

from server.auth import add_key, revoke_key
from server.config import Limits
from server.ports import free_port
from tests.server.fake_engine import ADMIN_KEY, API_KEY
from tests.server.test_engine import PROFILE, gone
from tests.server.test_serve import Served

READY = "Ctrl-C stops everything"
# Made for this test alone (openssl req -x509 -newkey ec -subj /CN=127.0.0.1), valid for 100 years.
CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBjzCCATagAwIBAgIUVUJx0q+8E2+ZLUciF4kWJAxdvh0wCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJMTI3LjAuMC4xMCAXDTI2MTEzMDE4MjMzM1oYDzIxMjYxMTA2
MTgyMzMzWjAUMRIwEAYDVQQDDAkxMjcuMC4wLjEwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAARx7FidPiNAr/Qim/dGPDo94rWbIftbcwIse0Mh9UFNEPFJfYDIT0I4
HtPxMAGYGA61XGVn58gqOnZIyy0VW+mxo2QwYjAdBgNVHQ4EFgQUf2JRGAVI9Ekp
mJHiuNJzIXW/2uIwHwYDVR0jBBgwFoAUf2JRGAVI9EkpmJHiuNJzIXW/2uIwDwYD
VR0TAQH/BAUwAwEB/zAPBgNVHREECDAGhwR/AAABMAoGCCqGSM49BAMCA0cAMEQC
IAseUppSj+XRT4ssbeY2j8F1P/1af13FI6q/g/DC9sIBAiBsGOOudvnYe+sdoIri
l2khvZMq73d3egEF8vtIMp2C1w==
-----END CERTIFICATE-----
"""
CERTIFICATES_KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgmPx1TjY7hY99E5m+
YQIzelsGlVlwViEYkarM23JbE8KhRANCAARx7FidPiNAr/Qim/dGPDo94rWbIftb
cwIse0Mh9UFNEPFJfYDIT0I4HtPxMAGYGA61XGVn58gqOnZIyy0VW+mx
-----END PRIVATE KEY-----
"""


@pytest.fixture
def gateway(tmp_path):
    """Starts `serve` on a profile with changes; the admin listener is at `.admin`."""
    (tmp_path / "model").mkdir()
    started = []

    def start(*argv, extra="", engine="", **options):
        profile = tmp_path / "profile.toml"
        profile.write_text(PROFILE.replace("[engine]", f"[engine]\n{engine}") + extra)
        port = free_port()
        served = Served(tmp_path, "serve", "--profile", str(profile), "--port", str(port), *argv, **options)
        served.profile, served.url, served.admin = profile, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"
        started.append(served)
        return served

    yield start
    for served in started:
        if served.process.poll() is None:
            served.process.kill()
            served.process.wait()
    for file in tmp_path.glob("home/runs/kept/*.json"):
        kept = json.loads(file.read_text())
        if psutil.pid_exists(kept["pid"]):
            os.kill(kept["pid"], signal.SIGTERM)


def ask(url, user="", key=None, **options):
    body = {"model": "fake", "prompt": "hi", "user": user}
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.post(f"{url}/v1/completions", json=body, headers={**headers, **options}, timeout=60)


class Asking(threading.Thread):
    """A request in the background."""

    def __init__(self, url, user):
        super().__init__(daemon=True)
        self.run = lambda: setattr(self, "answer", ask(url, user))
        self.answer = None
        self.start()


def wait_for(holds, within=45.0):
    deadline = time.monotonic() + within
    while not holds():
        assert time.monotonic() < deadline, "what the test waits for did not happen"
        time.sleep(0.05)


def inflight(served):
    return "eyas_inflight_requests 1.0" in httpx.get(f"{served.admin}/metrics").text


def test_sigterm_lets_running_requests_end_and_says_what_it_waits_for(gateway):
    served = gateway().wait_for(READY)
    running = Asking(served.url, "slow3")
    wait_for(lambda: inflight(served))
    served.process.send_signal(signal.SIGTERM)
    served.wait_for("waiting for 1 request")
    refused = ask(served.url)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_stopping")
    assert refused.headers["retry-after"]
    assert httpx.get(f"{served.url}/readyz").json()["status"] == "draining"
    assert httpx.get(f"{served.admin}/healthz").status_code == 200
    running.join(20)
    assert running.answer.status_code == 200
    assert served.end() == 0
    assert "of key none on arm default" in served.text and "Traceback" not in served.text


@pytest.mark.parametrize("how", ["limit", "second signal"])
def test_a_drain_has_a_limit_and_a_second_signal_cuts_it_short(gateway, how):
    limit = 0.3 if how == "limit" else 60
    served = gateway(extra=f"\n[gateway]\ndrain_timeout_s = {limit:.1f}\n").wait_for(READY)
    running = Asking(served.url, "slow30")
    wait_for(lambda: inflight(served))
    served.process.send_signal(signal.SIGTERM)
    if how == "second signal":
        served.wait_for("waiting for 1 request")
        served.process.send_signal(signal.SIGTERM)
    running.join(20)
    assert (running.answer.status_code, running.answer.json()["error"]["code"]) == (503, "server_stopping")
    assert served.end() == 0
    assert "stopping without 1 request" in served.text


def test_sighup_takes_up_keys_limits_and_weights_and_a_bad_file_changes_nothing(gateway, tmp_path):
    keys = tmp_path / "keys.json"
    _, first = add_key(keys, "a", Limits())
    served = gateway(extra='\n[gateway]\nkeys_file = "keys.json"\n').wait_for(READY)
    assert ask(served.url).status_code == 401
    answer = ask(served.url, key=first)
    assert answer.status_code == 200 and "x-ratelimit-limit-requests" not in answer.headers
    good = served.profile.read_text()
    served.profile.write_text(good + "[gateway.limits]\nrequests_per_minute = 2\n")
    served.process.send_signal(signal.SIGHUP)
    served.wait_for("reloaded: 1 keys")
    assert ask(served.url, key=first).headers["x-ratelimit-limit-requests"] == "2"
    served.profile.write_text(good + "[gateway.limits]\nrequests_per_minut = 2\n")
    served.process.send_signal(signal.SIGHUP)
    served.wait_for("nothing was reloaded: profile")
    assert "did you mean 'requests_per_minute'" in served.text
    statuses = [ask(served.url, key=first).status_code for _ in range(3)]
    assert statuses.count(429) >= 1
    served.profile.write_text(good.replace("context_length = ", "context_length = 1") + "[gateway.limits]\n")
    served.process.send_signal(signal.SIGHUP)
    served.wait_for("what else the profile changed needs a new start")
    assert served.end(signal.SIGTERM) == 0


def test_a_changed_keys_file_is_noticed(gateway, tmp_path):
    keys = tmp_path / "keys.json"
    first, key = add_key(keys, "a", Limits())
    served = gateway(EYAS_KEYS_FILE=str(keys)).wait_for(READY)
    assert ask(served.url, key=key).status_code == 200
    _, other = add_key(keys, "b", Limits())
    revoke_key(keys, first)
    wait_for(lambda: ask(served.url, key=other).status_code == 200)
    assert ask(served.url, key=key).status_code == 401
    keys.write_text("{")
    served.wait_for("nothing was reloaded: keys file")
    assert ask(served.url, key=other).status_code == 200


def test_a_gateway_with_a_keys_file_that_cannot_be_used_does_not_start(gateway, tmp_path):
    served = gateway(EYAS_KEYS_FILE=str(tmp_path / "none.json"))
    assert served.end() == 1
    assert "none.json does not exist" in served.text and "Traceback" not in served.text


def engines():
    """The fake engines that run, by pid."""
    found = set()
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        words = process.info["cmdline"] or []
        if (
            "sglang.launch_server" in words
            and "guard" not in " ".join(words[:5])
            and process.info["status"] != "zombie"
        ):
            found.add((process.info["pid"], words[words.index("--model-path") + 1]))
    return found


def engine_of(tmp_path):
    found = [pid for pid, model in engines() if model == str(tmp_path / "model")]
    assert len(found) <= 1
    return found[0] if found else None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_an_engine_is_kept_and_taken_over(gateway, tmp_path, number):
    keep = 'on_gateway_exit = "keep"'
    first = gateway(engine=keep).wait_for(READY)
    engine = engine_of(tmp_path)
    assert engine
    first.end(number)
    assert "stopping the engine" not in first.text
    time.sleep(0.5)
    assert engine_of(tmp_path) == engine
    second = gateway(engine=keep).wait_for(READY)
    assert "taking over the engine that runs" in second.text
    assert engine_of(tmp_path) == engine
    assert ask(second.url).status_code == 200
    second.end(signal.SIGTERM)
    assert "leaving the engine running" in second.text
    # other arguments: the kept engine is stopped, and a new one started
    third = gateway(engine=keep + "\nmax_total_tokens = 4096").wait_for(READY)
    assert "it was started with other arguments" in third.text
    assert engine_of(tmp_path) not in (None, engine)
    assert gone([psutil.Process(pid) for pid, _ in engines() if pid == engine])
    third.end(signal.SIGTERM)


def test_an_engine_that_is_kept_is_not_taken_for_another_process(gateway, tmp_path):
    keep = 'on_gateway_exit = "keep"'
    first = gateway(engine=keep).wait_for(READY)
    first.end(signal.SIGTERM)
    (record,) = tmp_path.glob("home/runs/kept/*.json")
    kept = json.loads(record.read_text())
    os.kill(kept["pid"], signal.SIGTERM)
    wait_for(lambda: engine_of(tmp_path) is None)
    record.write_text(json.dumps({**kept, "pid": os.getpid()}))  # the pid was given to somebody else
    second = gateway(engine=keep).wait_for(READY)
    assert "taking over" not in second.text
    assert ask(second.url).status_code == 200
    second.end(signal.SIGTERM)


def test_an_engine_that_dies_is_started_again_where_another_arm_serves_on(gateway, tmp_path):
    arms = (
        f'\n[arms.a]\nlocal = true\nenv = {{ FAKE_SGLANG = "die-once:{tmp_path}/died" }}\n'
        "[arms.b]\nlocal = true\nweight = 0.5\n"
    )
    served = gateway(extra=arms).wait_for("arm a: starting the process")
    wait_for(lambda: httpx.get(f"{served.url}/readyz").status_code == 200, within=20)
    wait_for(lambda: (tmp_path / "died").exists())
    metric = re.compile(r'eyas_engine_restarts_total\{arm="a",reason="dead"\} 1.0')
    wait_for(lambda: metric.search(httpx.get(f"{served.admin}/metrics").text), within=30)
    wait_for(lambda: 'eyas_engine_up{arm="a"} 1.0' in httpx.get(f"{served.admin}/metrics").text, within=30)
    assert ask(served.url).status_code == 200
    family = served.family
    assert served.end(signal.SIGTERM) == 0
    assert gone(family)


def test_a_remote_engine_by_url(gateway, tmp_path, fake):
    keys = tmp_path / "engine.json"
    keys.write_text(json.dumps({"api-key": API_KEY, "admin-api-key": ADMIN_KEY}))
    (tmp_path / "model/config.json").write_text('{"vocab_size": 100}')
    served = gateway("--engine-url", fake.url, "--engine-keys", str(keys), "--drafter", "little-eagle")
    wait_for(lambda: served.process.poll() is not None or up(served))
    body = {"model": "fake", "prompt": "hi"}
    answer = httpx.post(f"{served.url}/v1/completions", json=body)
    assert answer.status_code == 200 and answer.headers["x-eyas-drafter"] == "little-eagle"
    refused = httpx.post(f"{served.url}/v1/completions", json={**body, "prompt": [100]})
    assert refused.status_code == 400, "an engine dies of a token that its target does not know"
    served.wait_for(f"gateway at {served.url}/v1")
    fake.stop_listening()
    wait_for(lambda: httpx.get(f"{served.url}/readyz").status_code == 503, within=30)
    assert served.end(signal.SIGTERM) == 0
    assert engine_of(tmp_path) is None


def up(served):
    try:
        return httpx.get(f"{served.url}/readyz").status_code == 200
    except httpx.TransportError:
        return False


def test_the_admin_surface_wants_the_admin_key(gateway, tmp_path):
    secret = tmp_path / "admin.key"
    secret.write_text("an-admin-key-of-some-length")
    secret.chmod(0o600)
    served = gateway(EYAS_ADMIN_KEY_FILE=str(secret)).wait_for(READY)
    admin = {"authorization": "Bearer an-admin-key-of-some-length"}
    assert httpx.get(f"{served.admin}/metrics").status_code == 200
    assert httpx.get(f"{served.admin}/admin/status").status_code == 403
    status = httpx.get(f"{served.admin}/admin/status", headers=admin).json()
    assert status["arms"][0]["state"] == "ready" and "key" not in json.dumps(status)
    assert httpx.get(f"{served.url}/admin/status", headers=admin).status_code == 404
    moved = httpx.put(f"{served.admin}/admin/arms/default/weight", headers=admin, json={"weight": 0})
    assert moved.json()["arms"][0]["weight"] == 0
    assert httpx.get(f"{served.url}/readyz").status_code == 503
    for bad in ({"weight": -1}, {"weight": "a"}, {}, []):
        answer = httpx.put(f"{served.admin}/admin/arms/default/weight", headers=admin, json=bad)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "weight"
    assert httpx.put(f"{served.admin}/admin/arms/x/weight", headers=admin, json={"weight": 1}).status_code == 404
    assert httpx.post(f"{served.admin}/admin/reload", headers=admin).json()["status"] == "ok"
    assert ask(served.url).status_code == 200
    wish = {"x-eyas-arm": "default"}
    assert ask(served.url, **wish).status_code == 403
    assert ask(served.url, **wish, **{"x-eyas-admin-key": "an-admin-key-of-some-length"}).status_code == 200
    assert ask(served.url, **{"x-eyas-arm": "z", "x-eyas-admin-key": "an-admin-key-of-some-length"}).status_code == 404


def test_metrics_leave_the_public_port_where_it_is_not_loopback(gateway):
    served = gateway("--host", "0.0.0.0").wait_for(READY)
    assert httpx.get(f"{served.url}/metrics").status_code == 404
    assert httpx.get(f"{served.admin}/metrics").status_code == 200
    assert "is not loopback and there is no keys file" in served.text


def test_the_engines_log_is_turned_over(gateway, tmp_path):
    served = gateway(engine="log_max_bytes = 65536\nlog_files = 3", cues="chatty").wait_for(READY)
    (log,) = tmp_path.glob("home/runs/engine-*/engine.log")
    wait_for(lambda: sum(part.stat().st_size for part in log.parent.glob("engine.log*")) > 2 * 65536)
    time.sleep(0.5)
    parts = sorted(log.parent.glob("engine.log*"))
    assert [part.name for part in parts] == ["engine.log", "engine.log.1", "engine.log.2"]
    assert all(part.stat().st_mode & 0o077 == 0 and part.stat().st_size < 65536 + 70000 for part in parts)
    lines = [int(each) for part in reversed(parts) for each in re.findall(r"^line (\d+) ", part.read_text(), re.M)]
    assert lines == list(range(lines[0], lines[0] + len(lines))), "lines were lost between two files"
    assert served.end(signal.SIGINT) == 130


def test_json_logs_tell_each_request_without_its_words(gateway):
    served = gateway(extra='\n[gateway]\nlog_format = "json"\n').wait_for(READY)
    body = {"model": "fake", "prompt": "a secret plan", "user": "somebody"}
    httpx.post(f"{served.url}/v1/completions", json=body, headers={"x-request-id": "my-id"})
    httpx.post(f"{served.url}/v1/completions", json={**body, "model": "gpt-unknown"})
    assert served.end(signal.SIGTERM) == 0
    lines = [json.loads(line) for line in served.err.read_text().splitlines() if line.startswith("{")]
    told = [line for line in lines if line["logger"] == "eyas.requests"]
    assert [line["status"] for line in told] == [200, 404]
    assert told[0]["request_id"] == "my-id" and told[0]["key_id"] == "none" and told[0]["arm"] == "default"
    assert "secret" not in served.text and "somebody" not in served.text and "gpt-unknown" not in served.text


def test_keys_on_the_command_line_reach_no_log(gateway, tmp_path):
    served = gateway(cues="die-later").wait_for(READY)
    (keys,) = tmp_path.glob("home/runs/engine-*/engine.yaml")
    secrets = json.loads(keys.read_text()).values()
    served.end(within=20)
    assert not any(secret in served.text for secret in secrets)


def test_help_states_where_tls_ends():
    shown = subprocess.run([sys.executable, "-m", "server", "--help"], capture_output=True, text=True).stdout
    assert "terminate TLS in front of it" in shown and "tls_certificate" in shown


def test_tls_by_itself(gateway, tmp_path):
    (tmp_path / "cert.pem").write_text(CERTIFICATE)
    extra = '\n[gateway]\ntls_certificate = "cert.pem"\ntls_key = "key.pem"\n'
    served = gateway(extra=extra)
    assert served.end() == 1
    assert "key.pem, which [gateway] names for TLS, cannot be read" in served.text and "Traceback" not in served.text
    (tmp_path / "key.pem").write_text(CERTIFICATES_KEY)
    served = gateway(extra=extra).wait_for(READY)
    assert f"curl {served.url.replace('http', 'https')}" in served.text
    secure = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
    assert httpx.get(f"{served.url.replace('http', 'https')}/readyz", verify=secure).status_code == 200
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{served.url}/readyz")
    assert served.end(signal.SIGTERM) == 0


def test_a_shells_limit_of_open_files_is_raised_to_what_is_allowed(gateway):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1024), hard))
    try:
        served = gateway().wait_for(READY)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert psutil.Process(served.process.pid).rlimit(psutil.RLIMIT_NOFILE) == (hard, hard)
