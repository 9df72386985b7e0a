"""python -m drafter <verb>: from prompts to a drafter that an engine serves, one step a verb."""

from __future__ import annotations

import argparse
import sys

from drafter.checkpoint.cli import add_vocab
from drafter.checkpoint.convert_cli import add_convert, add_inspect
from drafter.checkpoint.diff_cli import add_diff
from drafter.checkpoint.folder_cli import add_preflight
from drafter.checkpoint.remap_cli import add_remap
from drafter.data.capture_cli import add_capture
from drafter.data.generate_cli import add_generate
from drafter.data.transcript_cli import add_tokenize
from drafter.speedup_cli import add_speedup
from drafter.training.evaluate_cli import add_evaluate
from drafter.training.train_cli import add_train
from drafter.verdict_cli import add_verdict

STEPS = """\
the steps, each resumable by running the same command again:
  generate   the target writes prompts and answers them
  tokenize   or chats that you have, as the ids that its engine would see
  vocab      which tokens the drafter may propose, counted in those answers
  capture    an engine reads them, and writes down what it would feed a drafter
  train      the drafter learns to go on as the target does
  verdict    its log, or another trainer's: go on, stop, or promote to the bench
  evaluate   what an engine would accept of it
  speedup    what that is worth on a machine, measured or on paper
and with drafters of any origin:
  inspect    what a drafter folder is
  preflight  what an engine would not tell about it
  diff       two draft vocabularies side by side
  remap      a drafter's rows moved to another vocabulary
  convert    a drafter in another tool's format
The whole way, from an empty folder: deploy/recipes/smollm2.sh

exit codes: 0 fine, 1 failure, 2 usage, 130 interrupted; of verdict: 0 promote, 3 continue, 4 stop.
Errors go to stderr, one sentence and the fix.
"""


def parser() -> argparse.ArgumentParser:
    """The arguments of every verb."""
    top = argparse.ArgumentParser(
        prog="python -m drafter",
        description=__doc__,
        epilog=STEPS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="VERB")
    for add in (add_generate, add_tokenize, add_vocab, add_capture, add_train, add_verdict, add_evaluate, add_speedup):
        add(commands)
    for add in (add_inspect, add_preflight, add_diff, add_remap, add_convert):
        add(commands)
    return top


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        code: int = args.run(args)
        return code
    except (ValueError, RuntimeError) as error:  # ours, each one sentence
        print(f"{args.command}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{args.command}: {_sentence(error, args)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{args.command}: interrupted; what was written is kept, run the same command to go on.", file=sys.stderr)
        return 130


def _sentence(error: OSError, args: argparse.Namespace) -> str:
    """What failed and at which file; a write to an open file, as on a full disk, does not say which."""
    reason = error.strerror or str(error)
    if error.filename is not None:
        return f"{error.filename}: {reason}: check that it exists, is of the right kind, and may be read or written."
    return f"{reason} (while writing to {args.out}, if not to the screen)." if hasattr(args, "out") else f"{reason}."


if __name__ == "__main__":
    sys.exit(main())
