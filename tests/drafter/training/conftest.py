"""What the tests of training share."""

import pytest
import torch

from tests.tiny.pair import TinyPair, build


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def llama() -> TinyPair:
    return build("llama")
