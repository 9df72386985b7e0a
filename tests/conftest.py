"""For every test: what a child process inherits."""

import signal

# A shell that runs something in the background has it ignore SIGINT, and so all its children: a test of Ctrl-C must
# not depend on how the suite was started.
signal.signal(signal.SIGINT, signal.default_int_handler)
