"""`python -m server keys add|list|revoke`: the keys file from the command line."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from drafter.arguments import whole
from drafter.settings import read_settings
from server.auth import KeysError, add_key, read_keys, revoke_key
from server.config import Limits


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The verbs and their arguments."""
    verbs = command.add_subparsers(dest="verb", required=True, metavar="VERB")
    adding = verbs.add_parser("add", help="make a key; it is shown once, and only its hash is kept")
    adding.add_argument("name", help="whose it is, for people")
    for flag, text in (
        ("--requests-per-minute", "requests that it may make in a minute"),
        ("--tokens-per-minute", "tokens, of prompts and answers together, in a minute"),
        ("--max-inflight", "requests that may run at once"),
    ):
        adding.add_argument(flag, type=whole(), metavar="N", help=f"{text}, on each gateway (default: the profile's)")
    listing = verbs.add_parser("list", help="the keys, without the keys themselves")
    listing.add_argument("--json", action="store_true", help="one JSON object on stdout, and nothing else")
    revoking = verbs.add_parser("revoke", help="take a key back; running gateways notice within seconds")
    revoking.add_argument("id", help="the key's id, the eight digits after eyas_")
    for verb in (adding, listing, revoking):
        verb.add_argument("--file", type=Path, metavar="FILE", help="the keys file (default: EYAS_KEYS_FILE)")


def run(arguments: argparse.Namespace) -> int:
    """One verb. Raises KeysError."""
    path = arguments.file or read_settings().keys_file
    if path is None:
        raise KeysError("which keys file? Use --file, or set EYAS_KEYS_FILE.")
    if arguments.verb == "add":
        limits = Limits(
            requests_per_minute=arguments.requests_per_minute,
            tokens_per_minute=arguments.tokens_per_minute,
            max_inflight=arguments.max_inflight,
        )
        key_id, key = add_key(path, arguments.name, limits)
        print(f"key {key_id} for {arguments.name}, shown this once:\n{key}")
    elif arguments.verb == "revoke":
        revoke_key(path, arguments.id)
        print(f"key {arguments.id} is revoked.")
    else:
        _list(path, arguments.json)
    return 0


def _list(path: Path, as_json: bool) -> None:
    shown = {
        key_id: entry.model_dump(exclude={"sha256"}, exclude_none=True)
        for key_id, entry in read_keys(path).keys.items()
    }
    if as_json:
        print(json.dumps({"keys": shown}))
        return
    for key_id, entry in shown.items():
        limits = ", ".join(f"{name} {entry[name]}" for name in Limits.model_fields if name in entry)
        print(f"{key_id}  {entry['created']}  {entry['name']}" + (f"  ({limits})" if limits else ""))
