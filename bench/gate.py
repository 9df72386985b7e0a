"""python -m bench.gate REPORT --policy FILE: may this drafter be promoted? Yes, not yet, or no, with the reasons.

A report is evidence about what was measured and nothing else, so one that was simulated, mixes engines, or is about
weights that have changed since is refused before any figure is looked at.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bench.evidence import counted, has_interval, load_of, speed_against
from bench.lossless import NEAR_TIE
from bench.stats import Counts, acceptance_length, difference, holm, mean_difference
from drafter.checkpoint.folder import DrafterError, open_folder
from drafter.report import Report, ReportError, file_sha256, flag_groups, read_report

Load = tuple[int, str]  # concurrency, thinking
Decision = Literal["promote", "hold", "reject"]
EXIT_CODES: dict[Decision, int] = {"promote": 0, "hold": 3, "reject": 4}
TEXT = """\
examples:
  python -m bench.gate runs/new/report.json --policy policy.toml
  python -m bench.gate report.json --policy policy.toml --json >verdict.json && echo promoted

policy, as TOML; every key is optional but `drafter`:
  drafter = "new"                 the variant that is to be promoted
  incumbent = "old"               what it has to beat (default: nothing but no speculation)
  min_acceptance_length = 1.8     without looping answers; the whole interval must lie above it
  margin = 0.02                   how much acceptance length it may lose against the incumbent
  min_speedup = 1.05              tokens/s against no speculation, in the same report; the whole interval above it
  min_speedup_vs_incumbent = 1.0
  must_win_at = [1, 4]            concurrencies at which all of this is asked for (default: every one measured)
  must_not_lose = ["coding"]      categories in which it may not be worse than the incumbent (or "all")
  min_greedy_equal = 1.0          share of answers equal to plain decoding, asked for in float32; in other types an
                                  answer that leaves plain decoding where there was no near tie holds it
  scores = "scores.json"          a quality check of your own: {variant: {prompt id: score}}, higher is better; the
                                  mean may not drop against no speculation (path from the policy's folder)
  scores_margin = 0.0             how much it may drop

A report whose figures are not what its requests give was edited and is refused, as is one of weights or an NGRAM corpus
that have changed since; weights that are not on this machine hold.
A drafter that changes what is sampled (--check-sampling) is rejected. Engines that the bench did not start hold.

exit codes: 0 promote, 3 hold (not enough evidence), 4 reject, 1 the report is refused, 2 usage
"""


class PolicyError(ValueError):
    """A policy that cannot be meant, or that this report cannot answer."""


class Policy(BaseModel):
    """What a drafter must show. See TEXT."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    drafter: str
    incumbent: str | None = None
    min_acceptance_length: Annotated[float, Field(ge=1)] | None = None
    margin: Annotated[float, Field(ge=0)] = 0.0
    min_speedup: Annotated[float, Field(gt=0)] = 1.0
    min_speedup_vs_incumbent: Annotated[float, Field(gt=0)] | None = None
    must_win_at: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)] | Literal["all"] = "all"
    must_not_lose: list[str] | Literal["all"] = []
    min_greedy_equal: Annotated[float, Field(ge=0, le=1)] = 1.0
    scores: str | None = None
    scores_margin: Annotated[float, Field(ge=0)] = 0.0


@dataclass(frozen=True)
class Finding:
    """One check: what it says for the drafter, and why."""

    decision: Decision
    reason: str


@dataclass(frozen=True)
class Verdict:
    """The worst of the findings decides: one rejection rejects, one hold holds."""

    findings: tuple[Finding, ...]

    @property
    def decision(self) -> Decision:
        found = {finding.decision for finding in self.findings}
        return "reject" if "reject" in found else "hold" if "hold" in found else "promote"

    def as_json(self) -> dict[str, Any]:
        """The verdict as a report carries it, with what each check said."""
        decisive = [each.reason for each in self.findings if each.decision == self.decision]
        checks = [{"decision": each.decision, "reason": each.reason} for each in self.findings]
        return {"decision": self.decision, "reasons": decisive, "checks": checks}


def read_policy(file: Path) -> Policy:
    """Raises PolicyError."""
    try:
        found = Policy(**tomllib.loads(file.read_text("utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise PolicyError(f"policy {file} cannot be read ({error}).") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise PolicyError(f"policy {file}: {key}: {first['msg'].lower()} (see --help for the keys).") from None
    return found.model_copy(update={"scores": str(file.parent / found.scores)}) if found.scores else found


def judge(report: Report, policy: Policy) -> Verdict:
    """Hold a report against a policy. Raises PolicyError where it has not what the policy asks of it, ReportError where
    it is no evidence."""
    check_evidence(report)
    if policy.incumbent == policy.drafter:
        raise PolicyError(f"drafter and incumbent are both {policy.drafter!r}: nothing beats itself, name another.")
    findings = []
    if report["provenance"]["engine_env"] != "ours":
        reason = "an engine was started by others, so faked acceptance cannot be excluded: let the bench start it"
        findings.append(Finding("hold", reason))
    mine, plain = _variants(report, policy.drafter), _variants(report, "none")
    if any("acceptance_length" in variant for variant in plain.values()):
        raise ReportError("the variant 'none' speculated, so nothing here is plain decoding. Measure again.")
    gone = next(
        (path for variant in mine.values() if (path := _drafter_path(variant["flags"])) and not path.is_dir()), None
    )
    if gone is not None:
        findings.append(Finding("hold", f"{gone} is not here, so whether it has changed since cannot be seen"))
    loads = [load for load in mine if policy.must_win_at == "all" or load[0] in policy.must_win_at]
    missing = [] if policy.must_win_at == "all" else sorted(set(policy.must_win_at) - {load[0] for load in loads})
    if missing:
        measured = sorted({load[0] for load in mine})
        raise PolicyError(f"must_win_at asks for concurrency {missing}, the report has {measured}: measure there too.")
    old = _variants(report, policy.incumbent) if policy.incumbent is not None else {}
    for load in loads:
        found = _at_load(mine[load], _same(plain, load, "none"), policy)
        if policy.incumbent is not None:
            incumbent = _same(old, load, policy.incumbent)
            found += _against(mine[load], incumbent, policy)
            if policy.min_speedup_vs_incumbent is not None:
                found.append(_speed(mine[load], incumbent, policy.min_speedup_vs_incumbent))
        findings += [Finding(each.decision, each.reason + _where(mine, load)) for each in found]
    if policy.scores is not None:
        findings.append(_scores(policy, mine[loads[0]]))
    return Verdict(tuple(findings))


def _at_load(new: Mapping[str, Any], plain: Mapping[str, Any], policy: Policy) -> list[Finding]:
    """What one load says for the drafter, the incumbent aside."""
    if not has_interval(new):
        raise PolicyError(f"{policy.drafter!r} has no acceptance length in this report: it did not speculate.")
    findings = [_speed(new, plain, policy.min_speedup)]
    if policy.min_acceptance_length is not None:
        findings.append(_floor(new, policy.min_acceptance_length))
    if new["temperature"] == 0:
        findings += _equal(new, plain, policy.min_greedy_equal) if new["dtype"] == "float32" else _nearly(new)
    if "sampling" in new:
        p_value, limit = new["sampling"]["p_value"], new["sampling"]["error_rate"]
        reason = f"what it samples against plain decoding: p {p_value:.4f}, below {limit:g} it differs"
        findings.append(Finding("reject" if new["sampling"]["differs"] else "promote", reason))
    return findings


def check_evidence(report: Report) -> None:
    """Raise ReportError unless the report is evidence: measured, on one engine, of weights that are still the same."""
    if report["simulated"]:
        raise ReportError("the report was simulated: the engine was told how many tokens to accept. Measure again.")
    ok = [variant for variant in report["variants"] if variant["status"] == "ok"]
    for key in ("engine_version", "dtype", "temperature", "max_tokens", "answers_each"):
        values = {json.dumps(variant.get(key)) for variant in ok}
        if len(values) > 1:
            raise ReportError(f"the variants were measured with {key} {' and '.join(sorted(values))}: measure alike.")
    shared = [_shared_flags(variant["flags"]) for variant in ok]
    different = {flag for flags in shared for flag in flags if not all(flag in each for each in shared)}
    if different:
        raise ReportError(
            f"the variants were measured with other flags ({', '.join(sorted(different))}): measure alike."
        )
    for variant in ok:
        if "blocks" not in variant:
            raise ReportError(f"{variant['drafter']!r} has no 'blocks', so its tokens/s cannot be counted again.")
        _check_unchanged(variant)


def _shared_flags(flags: Sequence[str]) -> set[str]:
    """Flags that have nothing to do with the drafter or with this one process."""
    own = ("--speculative-", "--port", "--config")
    return {" ".join(group) for group in flag_groups(flags) if not group[0].startswith(own)}


def _check_unchanged(variant: Mapping[str, Any]) -> None:
    """Raise ReportError where the drafter, or NGRAM's corpus, is not what was measured."""
    ngram = variant.get("ngram", {})
    corpus, measured = ngram.get("external_corpus_path"), ngram.get("external_corpus_sha256")
    if measured is not None and Path(corpus).is_file() and file_sha256(Path(corpus)) != measured:
        raise ReportError(f"the corpus {corpus} has changed since it was measured ({measured}). Measure again.")
    sha256, path = variant.get("drafter_sha256"), _drafter_path(variant["flags"])
    if path is not None and sha256 is None:
        raise ReportError(
            f"{variant['drafter']!r} has no 'drafter_sha256', so nothing says which weights were measured."
        )
    if path is None or not path.is_dir():
        return
    try:
        found = open_folder(path).sha256
    except DrafterError as error:
        raise ReportError(f"the drafter that was measured is broken now: {error}") from None
    if found != sha256:
        raise ReportError(f"{path} has sha256 {found}, {sha256} was measured: it has changed since. Measure again.")


def _drafter_path(flags: Sequence[str]) -> Path | None:
    flag = "--speculative-draft-model-path"
    return Path(flags[flags.index(flag) + 1]) if flag in flags[:-1] else None


def _variants(report: Report, name: str) -> dict[Load, Mapping[str, Any]]:
    """A drafter's variants by load. Raises PolicyError where there is none, or it failed."""
    mine = [variant for variant in report["variants"] if variant["drafter"] == name]
    if not mine:
        names = ", ".join(dict.fromkeys(variant["drafter"] for variant in report["variants"]))
        raise PolicyError(f"the report has no variant {name!r}, only {names}: measure it beside the others.")
    for variant in mine:
        if variant["status"] != "ok":
            raise PolicyError(f"variant {name!r} failed: {variant['error'].splitlines()[0]}")
    return {load_of(variant): variant for variant in mine}


def _same(variants: Mapping[Load, Mapping[str, Any]], load: Load, name: str) -> Mapping[str, Any]:
    """The variant measured at the same load. Raises ReportError: figures of two loads cannot be compared."""
    if load not in variants:
        measured = " and ".join(f"{load[0]} (thinking {load[1]})" for load in [*variants, load])
        raise ReportError(f"{name!r} and the drafter were measured with concurrency {measured}: measure alike.")
    return variants[load]


def _where(variants: Mapping[Load, Mapping[str, Any]], load: Load) -> str:
    thinking = f", thinking {load[1]}" if len({each[1] for each in variants}) > 1 else ""
    return f", at concurrency {load[0]}{thinking}" if len(variants) > 1 else ""


def _speed(new: Mapping[str, Any], old: Mapping[str, Any], least: float) -> Finding:
    """Below the least is a rejection, whatever the interval says: nobody promotes what was slower."""
    ratio, bounds = speed_against(new, old)
    within = f" ({bounds[0]:.2f} to {bounds[1]:.2f})" if bounds else ""
    reason = f"tokens/s x{ratio:.2f}{within} against {old['drafter']}, at least x{least:.2f} is asked for"
    sure = bounds is not None and bounds[0] >= least
    return Finding("reject" if ratio < least else "promote" if sure else "hold", reason)


def _floor(new: Mapping[str, Any], least: float) -> Finding:
    calm = {**new, "requests": [request for request in new["requests"] if not request["looping"]]}
    if not has_interval(calm) or not any(sum(request["histogram"]) for request in calm["requests"]):
        return Finding("hold", "too few answers without loops to know the acceptance length")
    counts, _, categories = counted(calm)
    found = acceptance_length(counts, categories)
    reason = f"acceptance length {found.value:.3f} ({found.low:.3f} to {found.high:.3f}) without loops, floor {least:g}"
    return Finding("promote" if found.low >= least else "reject" if found.high < least else "hold", reason)


def _equal(new: Mapping[str, Any], plain: Mapping[str, Any], least: float) -> list[Finding]:
    """By the answers' own hashes: the report's count is against its baseline, which may be another drafter."""
    mine, theirs = (
        {(row["prompt_id"], row.get("repeat"), row.get("answer")): row["output_sha256"] for row in each["requests"]}
        for each in (new, plain)
    )
    if mine.keys() != theirs.keys():
        return [Finding("hold", "plain decoding was not asked the same, so its answers cannot be compared")]
    equal = sum(mine[key] == theirs[key] for key in mine)
    reason = f"{equal} of {len(mine)} greedy answers equal plain decoding, {least:.0%} are asked for"
    return [Finding("promote" if equal / len(mine) >= least else "reject", reason)]


def _nearly(new: Mapping[str, Any]) -> list[Finding]:
    """Where rounding may change an answer: only a change that was no near tie tells against the engine."""
    differences = new.get("greedy_equal", {}).get("differences", [])
    limit = NEAR_TIE.get(new["dtype"], 0.0)
    far = [each for each in differences if abs(each.get("gap", 0.0)) > limit]
    if not far:
        return []
    first = far[0]
    return [
        Finding(
            "hold",
            f"{len(far)} of {len(differences)} answers that differ left plain decoding where there was no near tie, "
            f"first {first['prompt_id']} at token {first['position']} ({first['gap']:+.2f} nats): look into it",
        )
    ]


def _scores(policy: Policy, new: Mapping[str, Any]) -> Finding:
    """The quality check: the same prompts scored with and without the drafter."""
    assert policy.scores is not None
    try:
        scores = json.loads(Path(policy.scores).read_text("utf-8"))
        mine, plain = scores[policy.drafter], scores["none"]
        both = [prompt for prompt in mine if prompt in plain]
        before, after = (np.array([float(each[prompt]) for prompt in both]) for each in (plain, mine))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PolicyError(f"scores {policy.scores} are not {{variant: {{prompt id: score}}}} ({error!r}).") from None
    categories = {request["prompt_id"]: request["category"] for request in new["requests"]}
    if len(both) < 2 or not set(both) <= set(categories) or len(both) < max(len(mine), len(plain)):
        raise PolicyError(f"scores {policy.scores} are not of the same prompts of this report: score them all.")
    found = mean_difference(before, after, [categories[prompt] for prompt in both])
    return _no_worse("mean score", found.value, found.low, found.high, policy.scores_margin, "no speculation")


def _against(new: Mapping[str, Any], old: Mapping[str, Any], policy: Policy) -> list[Finding]:
    """Acceptance against the incumbent: in all, and in each category that may not lose."""
    if not has_interval(old):
        raise PolicyError(f"the incumbent {policy.incumbent!r} did not speculate: leave `incumbent` out.")
    (mine, prompts, categories), (theirs, others, _) = counted(new), counted(old)
    if prompts != others:
        raise PolicyError(f"{policy.drafter!r} and {policy.incumbent!r} answered different prompts: measure together.")
    whole = difference(theirs, mine, categories)
    findings = [_no_worse("acceptance length", whole.value, whole.low, whole.high, policy.margin)]
    names = sorted(set(categories)) if policy.must_not_lose == "all" else policy.must_not_lose
    unknown = set(names) - set(categories)
    if unknown:
        raise PolicyError(f"must_not_lose names {sorted(unknown)}, the report has {sorted(set(categories))}.")
    parts = {}
    for name in names:
        kept = [place for place, each in enumerate(categories) if each == name]
        if len(kept) < 2:
            findings.append(Finding("hold", f"{name}: one prompt says nothing about others"))
            continue
        before, after = (Counts(each.accepted[kept], each.steps[kept]) for each in (theirs, mine))
        parts[name] = difference(before, after, [name] * len(kept))
    adjusted = holm({name: each.p for name, each in parts.items()})
    for name, each in parts.items():
        lost = each.value < -policy.margin and adjusted[name] < 0.05
        reason = f"{name}: {each.value:+.3f} acceptance length (p {adjusted[name]:.3f} over {len(parts)} categories)"
        findings.append(Finding("reject" if lost else "promote", reason))
    return findings


def _no_worse(what: str, value: float, low: float, high: float, margin: float, whom: str = "the incumbent") -> Finding:
    reason = f"{what} {value:+.3f} ({low:+.3f} to {high:+.3f}) against {whom}, {-margin:+.3f} is allowed"
    return Finding("promote" if low >= -margin else "reject" if high < -margin else "hold", reason)


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    top = argparse.ArgumentParser(
        prog="gate", description=__doc__, epilog=TEXT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("report", type=Path, metavar="REPORT", help="report.json of bench/accept_len.py")
    top.add_argument("--policy", type=Path, required=True, metavar="FILE", help="what is asked for, as TOML")
    top.add_argument("--json", action="store_true", help="print the verdict as one JSON object, and nothing else")
    return top


def main(argv: list[str] | None = None) -> int:
    """Judge, say why, and return the exit code."""
    args = parser().parse_args(argv)
    try:
        verdict = judge(read_report(args.report), read_policy(args.policy))
    except PolicyError as error:
        print(f"gate: {error}", file=sys.stderr)
        return 2
    except ReportError as error:
        print(f"gate: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(verdict.as_json()))
    else:
        print(verdict.decision)
        for finding in verdict.findings:
            print(f"  {finding.decision:8} {finding.reason}")
    return EXIT_CODES[verdict.decision]


if __name__ == "__main__":
    sys.exit(main())
