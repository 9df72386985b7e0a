"""More than two hundred ways to spoil a drafter folder, each with the checks that may name it.

Every mutation works on a folder with Llama-style names (`midlayer.…`), of any size, so that a test with an engine can
use the same ones on a trained drafter. `names` is empty where the mutation is harmless.
"""

from collections.abc import Iterator

from tests.drafter import spoilt_files, spoilt_tensors
from tests.drafter.mutation import Mutation


def mutations() -> Iterator[Mutation]:
    """All of them."""
    yield from spoilt_files.truncated()
    yield from spoilt_tensors.wrong_dtype()
    yield from spoilt_tensors.wrong_shape()
    yield from spoilt_tensors.missing()
    yield from spoilt_tensors.extra()
    yield from spoilt_tensors.swapped_maps()
    yield from spoilt_tensors.absolute_for_offset()
    yield from spoilt_tensors.not_finite()
    yield from spoilt_tensors.duplicates()
    yield from spoilt_tensors.out_of_range()
    yield from spoilt_files.header_bombs()
    yield from spoilt_files.links_out()
    yield from spoilt_files.pickles()
    yield from spoilt_files.configs()
