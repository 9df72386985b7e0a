"""What every test shares: the signals of its children, how often a law is tried, and a word on tests left out."""

import signal
from collections import Counter

import pytest
from hypothesis import settings

# A shell that runs something in the background has it ignore SIGINT, and so all its children: a test of Ctrl-C must
# not depend on how the suite was started.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: what an example takes says more about the machine than about the code.
settings.register_profile("quick", max_examples=30, deadline=None)
settings.register_profile("thorough", max_examples=300, deadline=None)
settings.load_profile("quick")  # --hypothesis-profile takes the other

# Marks whose tests may be left out, and how they are run.
LEFT_OUT = {
    "slow": "make test-all",
    "peers": "make speculators-env peers-env test-all",
    "ops": "make ops-env test",
    "engine": "make test",
}
left_out: Counter[str] = Counter()


def pytest_deselected(items: list[pytest.Item]) -> None:
    left_out.update(mark for item in items if (mark := next(filter(item.get_closest_marker, LEFT_OUT), None)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for mark, count in sorted(left_out.items()):
        terminalreporter.write_line(f"left out: {count} tests marked {mark} (`{LEFT_OUT[mark]}` runs them)")
