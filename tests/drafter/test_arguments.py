"""Numbers on a command line: what is read, and what is a usage error."""

import argparse

import pytest

from drafter.arguments import number, whole


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (whole(), "1", 1),
        (whole(0), "0", 0),
        (number(), "0", 0.0),
        (number(), "1e-3", 1e-3),
        (number(0, 1), "1", 1.0),
        (number(above=True), "1e9", 1e9),
    ],
)
def test_what_is_in_a_range_is_read(kind, text, value):
    assert kind(text) == value


@pytest.mark.parametrize(
    ("kind", "texts", "wanted"),
    [
        (whole(), ("0", "-1", "1.5", "x", "", "1_0", "nan"), "a whole number of 1 or more"),
        (whole(0), ("-1", ""), "a whole number of 0 or more"),
        (number(), ("-0.1", "nan", "inf", "-inf", "x", ""), "a finite number of 0 or more"),
        (number(0, 1), ("-0.1", "1.1", "nan", "inf"), "a finite number from 0 to 1"),
        (number(above=True), ("0", "-1", "nan", "inf"), "a finite number above 0"),
    ],
)
def test_what_is_out_of_it_is_refused_with_what_was_found(kind, texts, wanted):
    for text in texts:
        with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is not {wanted}"):
            kind(text)
