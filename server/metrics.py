"""What the gateway counts, as Prometheus metrics in a registry of its own.

The engine has no counters of accepted and proposed draft tokens and none by position: every request's own statistics
are added up here, by the one definition in `drafter.acceptance`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from drafter.acceptance import acceptance_length, accepted_tokens, histogram_of_details, verify_steps
from server.counters import Count, Counter, Histogram

if TYPE_CHECKING:
    from server.admission import Admission
    from server.arms import Arms

logger = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
WHOSE = ("model", "drafter", "arm")
KINDS = (("prompt", "prompt_tokens"), ("completion", "completion_tokens"))
Whose = tuple[str, str, str]

_ACCEPTANCE = (1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 2.75, 3.0, 3.25, 3.5, 4.0, 5.0, 6.0, 8.0, 12.0)
_WAIT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_OVERHEAD_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25)
_TPOT_S = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
_TTFT_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
)


class Metrics:
    """One gateway's metrics; every label's values are bounded by the profile, never taken from a client."""

    def __init__(self, version: str) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            made = Counter(f"eyas_{name}", text, labels)
            self.registry.register(made)
            return made

        def histogram(name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()) -> Histogram:
            made = Histogram(f"eyas_{name}", text, labels, buckets)
            self.registry.register(made)
            return made

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"eyas_{name}", text, labels, registry=self.registry)

        self.requests = counter(
            "requests", "Requests by the status they ended with (499: the client left).", ("route", "code", "arm")
        )
        self.rejected = counter("rejected", "Requests that no engine saw.", ("reason",))
        self.inflight = gauge("inflight_requests", "Requests with an engine now.")
        self.tokens = counter("tokens", "Tokens of finished requests.", ("kind", "key_id"))
        self.ttft = histogram("ttft_seconds", "Streams: from the request's head to the first frame.", _TTFT_S, WHOSE)
        self.tpot = histogram(
            "tpot_seconds", "Streams of one answer: time for each token after the first frame.", _TPOT_S, WHOSE
        )
        self.overhead = histogram(
            "overhead_seconds", "The gateway's own time from the body's last byte to the engine's call.", _OVERHEAD_S
        )
        self.disconnects = counter("client_disconnects", "Clients that left before their answer's end.", ("phase",))
        self.aborts = counter("upstream_aborts", "Aborts told to an engine, by their result.", ("result",))
        self.stream_errors = counter("stream_errors", "Streams that ended in an error frame.", ("kind",))
        self.spec_verify_steps = counter("spec_verify_steps", "Verify steps of finished requests.", WHOSE)
        self.spec_draft_tokens = counter("spec_draft_tokens", "Draft tokens proposed in them.", WHOSE)
        self.spec_accepted_tokens = counter("spec_accepted_tokens", "Draft tokens accepted in them.", WHOSE)
        self.spec_accepted_per_pos = counter(
            "spec_accepted_tokens_per_pos",
            "Draft tokens accepted in them, by position in the draft (0 is the first).",
            (*WHOSE, "position"),
        )
        self.spec_acceptance_length = histogram(
            "spec_request_acceptance_length",
            "Tokens per verify step of a request, bonus token included.",
            _ACCEPTANCE,
            WHOSE,
        )
        self.spec_unreported = counter(
            "spec_unreported_requests", "Finished requests without usable speculation statistics.", WHOSE
        )
        self.queue_depth = gauge("queue_depth", "Requests that wait for a slot.")
        self.queue_wait = histogram("queue_wait_seconds", "How long those waited that had to.", _WAIT_S)
        self.shadow_requests = counter("shadow_requests", "Requests copied to a shadow arm.", ("arm", "result"))
        self.empty_answers = counter("empty_answers", "Finished conversations of which an answer said nothing.", WHOSE)
        self.leaked_tool_tokens = counter(
            "leaked_tool_tokens", "Finished requests with a tool call's tokens in their text.", WHOSE
        )
        self.engine_up = gauge("engine_up", "1 while the arm takes requests.", ("arm",))
        self.engine_restarts = counter("engine_restarts", "Engines started again, by why.", ("arm", "reason"))
        self.engine_uptime = gauge("engine_uptime_seconds", "Since the arm's engine became ready.", ("arm",))
        self._arms: dict[Whose, ArmMetrics] = {}
        gauge("build_info", "Always 1; the labels say what runs.", ("version",)).labels(version).set(1)

    def watch(self, arms: Arms, admission: Admission) -> None:
        """Report their state at each scrape. Several engines of one name are up while one of them is."""
        self.queue_depth.set_function(lambda: admission.waiting)

        def up(name: str) -> bool:
            return any(arm.state == "ready" for arm in arms.members if arm.name == name)

        def uptime(name: str) -> float:
            since = [arm.ready_since for arm in arms.members if arm.name == name and arm.state == "ready"]
            return monotonic() - min(since) if since else 0.0

        for name in arms.names:
            self.engine_up.labels(name).set_function(partial(up, name))
            self.engine_uptime.labels(name).set_function(partial(uptime, name))

    def of(self, whose: Whose) -> ArmMetrics:
        """What is counted of one arm and drafter."""
        found = self._arms.get(whose)
        if found is None:
            found = self._arms[whose] = ArmMetrics(self, whose)
        return found

    def add_usage(self, usage: Mapping[str, Any] | None, key_id: str = "none") -> None:
        """Count a finished request's tokens; an engine that reports none counts none."""
        for kind, name in KINDS:
            count = (usage or {}).get(name)
            if isinstance(count, int) and count > 0:
                self.tokens.labels(kind, key_id).inc(count)

    def render(self) -> bytes:
        """Everything in Prometheus' text format, whose media type is CONTENT_TYPE."""
        return generate_latest(self.registry)


class ArmMetrics:
    """The metrics of one arm and drafter."""

    def __init__(self, metrics: Metrics, whose: Whose) -> None:
        self.whose = whose
        self.ttft = metrics.ttft.labels(*whose)
        self.tpot = metrics.tpot.labels(*whose)
        self.empty_answers = metrics.empty_answers.labels(*whose)
        self.leaked_tool_tokens = metrics.leaked_tool_tokens.labels(*whose)
        self._verify_steps = metrics.spec_verify_steps.labels(*whose)
        self._draft_tokens = metrics.spec_draft_tokens.labels(*whose)
        self._accepted_tokens = metrics.spec_accepted_tokens.labels(*whose)
        self._acceptance_length = metrics.spec_acceptance_length.labels(*whose)
        self._unreported = metrics.spec_unreported.labels(*whose)
        self._accepted_per_pos = metrics.spec_accepted_per_pos
        self._positions: list[Count] = []

    def add_speculation(self, details: Any) -> None:
        """Add a finished request's `spec_tokens_details` (an object, or a list of them for n answers).

        For a list of prompts with n = 1 SGLang 0.5.23 reports the first prompt alone; only that one is added.
        """
        if details is None:
            self._unreported.inc()
            return
        try:
            histogram = histogram_of_details(details)
            proposed = _proposed(details, histogram)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            _, drafter, arm = self.whose
            logger.warning("speculation statistics of drafter %s on arm %s are unusable: %s", drafter, arm, error)
            self._unreported.inc()
            return
        length = acceptance_length(histogram)
        if length is None:
            self._unreported.inc()
            return
        self._verify_steps.inc(verify_steps(histogram))
        self._draft_tokens.inc(proposed)
        self._accepted_tokens.inc(accepted_tokens(histogram))
        for position in range(len(self._positions), len(histogram) - 1):
            self._positions.append(self._accepted_per_pos.labels(*self.whose, str(position)))
        reached = 0
        for position in range(len(histogram) - 2, -1, -1):
            reached += histogram[position + 1]
            self._positions[position].inc(reached)
        self._acceptance_length.observe(length)


def _proposed(details: Any, histogram: list[int]) -> int:
    """Draft tokens that the engine says it proposed. Raises ValueError where it accepted more than that."""
    answers = [details] if isinstance(details, Mapping) else details
    proposed = sum(answer["spec_num_proposed_drafts"] for answer in answers)
    if not isinstance(proposed, int) or proposed < accepted_tokens(histogram):
        raise ValueError(f"the engine says it proposed {proposed!r} draft tokens and its histogram is {histogram}.")
    return proposed
