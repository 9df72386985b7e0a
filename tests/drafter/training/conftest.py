"""What the tests of training share."""

import pytest
import torch

from drafter.data.shards import Document
from tests.drafter.training.shard_folder import captured
from tests.tiny import language, tokenizer
from tests.tiny.language import Language
from tests.tiny.pair import SEED, TinyPair, build
from tests.tiny.targets import greedy, load


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def llama() -> TinyPair:
    return build("llama")


@pytest.fixture(scope="session")
def kimi() -> TinyPair:
    return build("kimi")


@pytest.fixture(scope="session")
def tongue() -> Language:
    return language.build(tokenizer.train(), SEED)


@pytest.fixture(scope="session")
def answered(llama, tongue) -> list[Document]:
    """Prompts of unlike lengths with greedy answers of unlike lengths, and six tokens past each."""
    generator = torch.Generator().manual_seed(11)
    prompts = [tongue.prompts(1, length, generator)[0].tolist() for length in (5, 9, 12, 7, 16, 6, 11, 8)]
    texts = greedy(load(llama.reference), prompts, 60)
    lengths = (54, 40, 54, 2, 31, 54, 12, 50)
    spans = [(len(prompt), len(prompt) + length) for prompt, length in zip(prompts, lengths, strict=True)]
    cut = [text[: stop + 6] for text, (_, stop) in zip(texts, spans, strict=True)]
    return captured(llama, cut, spans)


@pytest.fixture(scope="session")
def spoken(llama, tongue) -> list[Document]:
    """Many short sampled texts to learn from, the answer after eight tokens of prompt."""
    generator = torch.Generator().manual_seed(12)
    texts = tongue.sample(160, 40, generator, surprise=0.1).tolist()
    return captured(llama, texts, [(8, 40 - n % 7) for n in range(len(texts))])


@pytest.fixture(scope="session")
def kimi_spoken(kimi, tongue) -> list[Document]:
    """Some short sampled texts of the tiny Kimi."""
    texts = tongue.sample(40, 40, torch.Generator().manual_seed(12), surprise=0.1).tolist()
    return captured(kimi, texts, [(8, 40 - n % 7) for n in range(len(texts))])
