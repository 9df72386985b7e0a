"""python -m server serve|engine|plan|keys."""

import signal
import sys

if __name__ == "__main__":
    # While it imports there is nothing to clean up: Ctrl-C ends it at once, without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from server.cli import main

    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
