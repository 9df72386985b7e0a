"""The stream's filter alone: every cut of the bytes, and what is kept back."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.sse import AnswerStream

DETAILS = {"spec_verify_ct": 3, "spec_num_correct_drafts": 2, "spec_correct_drafts_histogram": [1, 2]}
USAGE = {"prompt_tokens": 1, "total_tokens": 4, "completion_tokens": 3}
WORDS = 'Ż🦅 "choices":[{ \n\n data: [DONE] {"sglext":1} ﷽'


def frame(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


TEXTS = ("", WORDS, "日本", "z")
PIECES = [frame({"id": "x", "choices": [{"index": 0, "delta": {"content": text}}]}) for text in TEXTS]
EXTENSION = frame({"id": "x", "choices": [], "usage": None, "sglext": {"spec_tokens_details": DETAILS}})
USED = frame({"id": "x", "choices": [], "usage": USAGE})
DONE = b"data: [DONE]\n\n"
STREAM = b"".join([*PIECES, EXTENSION, USED, DONE])


def run(chunks: list[bytes], *, wants_usage: bool = False, wants_details: bool = False) -> tuple[bytes, AnswerStream]:
    stream = AnswerStream(wants_usage=wants_usage, wants_details=wants_details)
    return b"".join(stream.feed(chunk) for chunk in chunks), stream


def cut(data: bytes, at: list[int]) -> list[bytes]:
    edges = [0, *sorted(at), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


@pytest.mark.parametrize("wants_usage", [False, True])
@pytest.mark.parametrize("wants_details", [False, True])
def test_every_cut_in_two_gives_the_same_bytes(wants_usage: bool, wants_details: bool) -> None:
    expected = b"".join([*PIECES, EXTENSION * wants_details, USED * wants_usage, DONE])
    for at in range(len(STREAM) + 1):
        got, stream = run(cut(STREAM, [at]), wants_usage=wants_usage, wants_details=wants_details)
        assert got == expected, at
        assert (stream.usage, stream.details, stream.done, stream.error) == (USAGE, DETAILS, True, None), at


@given(st.lists(st.integers(0, len(STREAM)), max_size=40))
def test_any_cuts_give_the_same_bytes(at: list[int]) -> None:
    assert run(cut(STREAM, at))[0] == b"".join([*PIECES, DONE])


def test_byte_by_byte_every_frame_comes_with_its_last_byte() -> None:
    stream = AnswerStream(wants_usage=True, wants_details=True)
    sent = [stream.feed(bytes([byte])) for byte in STREAM]
    assert [len(block) > 0 for block in sent].count(True) == len(PIECES) + 3
    ends = [at for at, block in enumerate(sent) if block]
    assert all(STREAM[: at + 1].endswith(b"\n\n") for at in ends)


def test_a_whole_frame_passes_at_once_though_the_next_one_is_unfinished() -> None:
    stream = AnswerStream(wants_usage=False, wants_details=False)
    assert stream.feed(PIECES[0] + PIECES[1][:9]) == PIECES[0]
    assert stream.feed(PIECES[1][9:]) == PIECES[1]


def test_other_extensions_stay_when_only_the_statistics_were_not_asked_for() -> None:
    both = frame({"choices": [], "sglext": {"spec_tokens_details": DETAILS, "output_ids": [[1, 2]]}})
    got, stream = run([both])
    assert json.loads(got.removeprefix(b"data: ")) == {"choices": [], "sglext": {"output_ids": [[1, 2]]}}
    assert got.endswith(b"\n\n")
    assert stream.details == DETAILS


def test_an_extension_without_statistics_passes_untouched() -> None:
    ids = b"event: sglext_ids\n" + frame({"choices": [], "sglext": {"input_ids": [1]}})
    assert run([ids])[0] == ids


def test_an_event_name_survives_the_rewriting() -> None:
    both = b"event: ext\n" + frame({"choices": [], "sglext": {"spec_tokens_details": DETAILS, "input_ids": [1]}})
    assert run([both])[0] == b"event: ext\n" + frame({"choices": [], "sglext": {"input_ids": [1]}})


def test_usage_in_a_piece_of_the_answer_is_the_clients_own() -> None:
    piece = frame({"choices": [{"index": 0, "delta": {}}], "usage": USAGE})
    got, stream = run([piece])
    assert got == piece
    assert stream.usage is None


@pytest.mark.parametrize(
    "odd",
    [
        b": a comment\n\n",
        b"\n\n",
        b"\n\n\n",
        b"data: no json\n\n",
        b"data: [1, 2]\n\n",
        b'data: "choices"\n\n',
        b"data: null\n\n",
        b"retry: 3\n\n",
        frame({"choices": []}),
        frame({"choices": [], "usage": None}),
        frame({"choices": [], "sglext": None}),
        frame({"choices": [], "sglext": [1]}),
        frame({"choices": None, "usage": 3}),
        frame({"error": None, "choices": []}),
        b'data: {"choices": [\ndata: ]}\n\n',
    ],
)
def test_what_is_not_understood_passes_as_it_is(odd: bytes) -> None:
    mixed = PIECES[1] + odd + PIECES[2] + DONE
    for at in range(len(mixed) + 1):
        got, stream = run(cut(mixed, [at]))
        assert got == mixed
        assert stream.done
        assert stream.error is None


def test_an_error_frame_is_noticed_and_passes() -> None:
    error = b'data: {"error": {"message": "no", "code": 400}}\n\n'
    got, stream = run([PIECES[0], error + DONE])
    assert got == PIECES[0] + error + DONE
    assert stream.error == {"message": "no", "code": 400}


def test_nothing_passes_after_the_end() -> None:
    assert run([PIECES[0] + DONE + PIECES[1]])[0] == PIECES[0] + DONE


def test_an_unfinished_frame_never_passes() -> None:
    assert run([PIECES[0], PIECES[1][:-1]])[0] == PIECES[0]


def test_a_frame_of_many_chunks_costs_no_more_than_its_length() -> None:
    """A rescan would cost the square: a thousand times as much here."""
    searched = 0

    class Counting(bytearray):
        def rfind(self, sub: bytes, start: int = 0) -> int:  # type: ignore[override]
            nonlocal searched
            searched += len(self) - start
            return super().rfind(sub, start)

    stream = AnswerStream(wants_usage=False, wants_details=False)
    stream._tail = Counting()
    big = frame({"choices": [{"delta": {"content": "x" * 100_000}}]})
    chunks = [big[at : at + 100] for at in range(0, len(big), 100)]
    assert b"".join(stream.feed(chunk) for chunk in chunks) == big
    assert searched <= len(big) + len(chunks)
