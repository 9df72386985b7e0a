"""The verbs about one drafter folder: preflight."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from drafter.checkpoint.deployment import read_deployment
from drafter.checkpoint.findings import Finding, as_json, in_the_way, render
from drafter.checkpoint.folder import DrafterError, open_folder
from drafter.checkpoint.preflight import NAMES, READABLE, check_names, preflight
from drafter.checkpoint.subject import Subject, read_target

PREFLIGHT = f"""\
examples:
  python -m drafter preflight DIR --target DIR
  python -m drafter preflight DIR --target DIR --profile deploy/profiles/cpu-smollm2.toml --json
  python -m drafter preflight DIR --target DIR --force rope --force t2d

An engine is not started past an error; --force NAME passes over the errors of one check, here and in `python -m
server`.
A map whose ids are permuted is legal to every check here: the probe after an engine's start finds it.

checks: {", ".join(NAMES)}
exit codes: 0 nothing in the way, 1 an error, 2 usage.
"""


def add_preflight(commands: Any) -> None:
    """The verb `preflight`."""
    command = commands.add_parser(
        "preflight",
        help="what an engine would not tell about a drafter, before it starts",
        description="Check a drafter folder, one finding a line. Needs no GPU, no torch and no engine.",
        epilog=PREFLIGHT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = command.add_argument
    add("folder", type=Path, metavar="DIR", help="the drafter")
    add("--target", type=Path, required=True, metavar="DIR", help="the target that it would draft for")
    add("--profile", type=Path, metavar="TOML", help="the profile that would serve it")
    add("--force", action="append", default=[], metavar="NAME", help="pass over a check's errors; repeatable")
    add("--json", action="store_true", help="print one JSON object on stdout, and nothing else there")
    command.set_defaults(run=run_preflight)


def run_preflight(args: argparse.Namespace) -> int:
    """Check, print the table, and say whether anything is in the way. Raises DrafterError or ValueError."""
    check_names(args.force)
    target = read_target(args.target)
    deployment = read_deployment(args.profile, args.folder) if args.profile else None
    try:
        folder = open_folder(args.folder)
    except DrafterError as unreadable:
        sha256, findings = None, [_unreadable(str(unreadable))]
    else:
        sha256, findings = folder.sha256, preflight(Subject(folder, target, deployment), args.force)
    stopped = in_the_way(findings, args.force)
    if args.json:
        print(
            json.dumps(
                {
                    "drafter": str(args.folder),
                    "sha256": sha256,
                    "ok": not stopped,
                    "findings": [as_json(finding, args.force) for finding in findings],
                }
            )
        )
    else:
        if findings:
            print(render(findings, args.force))
        counted = {kind: sum(each.severity == kind for each in findings) for kind in ("error", "warning", "info")}
        shown = ", ".join(f"{count} {kind}{'s' * (count != 1 and kind != 'info')}" for kind, count in counted.items())
        print(f"{args.folder}: {shown}; {'an engine is not started' if stopped else 'nothing is in the way'}.")
    return 1 if stopped else 0


def _unreadable(sentence: str) -> Finding:
    found, _, fix = sentence.rstrip(".").rpartition(": ")
    return Finding("error", found, "a drafter folder that can be read", fix, READABLE)
