"""python -m tests.tiny: builds the tiny models ahead of the tests that want them, and prints where they lie.

Each folder gets a profile.toml, so that `python -m server` and `bench/accept_len.py` can serve it.
"""

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from tests.engine.profiles import profile_text
from tests.tiny.pair import NAMES, build


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tiny", description="Build the tiny models, or find them.")
    parser.add_argument("--out", type=Path, help="folder to build in (default: $EYAS_TEST_CACHE, or .cache/tiny)")
    parser.add_argument("--only", choices=NAMES, help="one model alone")
    parser.add_argument("--force", action="store_true", help="build anew what is there already")
    arguments = parser.parse_args()
    names = [arguments.only] if arguments.only else list(NAMES)
    # each build runs on one core; a fresh interpreter keeps torch's threads out of the fork
    with ProcessPoolExecutor(len(names), mp_context=get_context("spawn")) as pool:
        for pair in pool.map(partial(build, root=arguments.out, force=arguments.force), names):
            (pair.folder / "profile.toml").write_text(profile_text(pair))
            print(pair.folder)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        print(f"tiny: {error}: name another folder with --out", file=sys.stderr)
        sys.exit(1)
