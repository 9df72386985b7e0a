"""What a check has to say: one line with severity, what was found, what was expected and what to do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Generic, Literal, TypeVar

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
Subject = TypeVar("Subject")


@dataclass(frozen=True)
class Finding:
    """One line of a table of checks. `check` is the name that --force takes; the check itself leaves it empty."""

    severity: Severity
    found: str
    expected: str
    fix: str
    check: str = ""

    @property
    def sentence(self) -> str:
        """The finding as an error message says it."""
        return f"{self.found}, expected {self.expected}: {self.fix}."


@dataclass(frozen=True)
class Check(Generic[Subject]):
    """One check: its stable name and its function. It is left out where a check of `after` found an error."""

    name: str
    run: Callable[[Subject], Iterable[Finding]]
    after: tuple[str, ...] = ()


def error(found: str, expected: str, fix: str) -> Finding:
    """What would be served wrongly, or not at all."""
    return Finding("error", found, expected, fix)


def warning(found: str, expected: str, fix: str) -> Finding:
    """What may be meant."""
    return Finding("warning", found, expected, fix)


def info(found: str, expected: str, fix: str) -> Finding:
    """What is good to know."""
    return Finding("info", found, expected, fix)


def run_checks(checks: Sequence[Check[Subject]], subject: Subject, forced: Collection[str] = ()) -> list[Finding]:
    """Every finding, in the order of the checks; and what the errors that are forced past leave unchecked."""
    findings: list[Finding] = []
    unchecked: dict[str, list[str]] = {}
    for check in checks:
        failed = {finding.check for finding in findings if finding.severity == "error"}
        if not failed.intersection(check.after):
            findings += [replace(finding, check=check.name) for finding in check.run(subject)]
        for name in sorted(failed.intersection(check.after, forced)):
            unchecked.setdefault(name, []).append(check.name)
    for name, others in unchecked.items():
        said = warning(
            f"not checked: {', '.join(others)}", f"{name} to hold, without which they cannot be", f"mend {name}"
        )
        findings.append(replace(said, check=name))
    return findings


def in_the_way(findings: Iterable[Finding], forced: Collection[str] = ()) -> list[Finding]:
    """The errors that nobody forced past."""
    return [finding for finding in findings if finding.severity == "error" and finding.check not in forced]


def as_json(finding: Finding, forced: Collection[str] = ()) -> dict[str, str | bool]:
    """A finding as `--json` prints it."""
    return asdict(finding) | {"forced": finding.severity == "error" and finding.check in forced}


def render(findings: Sequence[Finding], forced: Collection[str] = ()) -> str:
    """One line a finding, the errors first."""
    if not findings:
        return ""
    names = [finding.check + (" (forced)" if finding.check in forced else "") for finding in findings]
    width = max(map(len, names))
    ranked = sorted(zip(findings, names, strict=True), key=lambda pair: SEVERITIES.index(pair[0].severity))
    return "\n".join(f"{finding.severity:<7}  {name:<{width}}  {finding.sentence}" for finding, name in ranked)
