"""What the verbs of training share: the form of their help, --threads and --json, and torch, imported last."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from drafter.arguments import whole


def add_command(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str, about: str, examples: str
) -> argparse.ArgumentParser:
    """Add the verb `name`; `text` is its line in the list of verbs, `about` and `examples` stand around its flags."""
    return subparsers.add_parser(
        name, help=text, description=about, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_common(command: argparse.ArgumentParser) -> None:
    """Add --threads and --json."""
    command.add_argument("--threads", type=whole(), metavar="N", help="torch's threads (default: its own choice)")
    command.add_argument("--json", action="store_true", help="one JSON object on stdout, and nothing else")


def torch_of(arguments: argparse.Namespace) -> Any:
    """torch, with as many threads as were asked for. Exits with 1 and the fix where it is not installed."""
    try:
        import torch
    except ModuleNotFoundError:
        print("eyas: training needs torch, which is not installed: pip install 'eyas[drafter]'.", file=sys.stderr)
        raise SystemExit(1) from None
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    return torch
