"""The tokenizer encodes any text, and the chat template tells conversations apart."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tests.tiny import tokenizer

TOKENS = tokenizer.train()


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    ids = TOKENS.encode(text, add_special_tokens=False)
    assert all(0 <= i < tokenizer.VOCAB_SIZE for i in ids)
    assert TOKENS.decode(ids, clean_up_tokenization_spaces=False) == text


def test_training_is_deterministic() -> None:
    assert tokenizer.train().backend_tokenizer.to_str() == TOKENS.backend_tokenizer.to_str()


def test_special_ids_are_where_the_models_expect_them() -> None:
    assert (TOKENS.pad_token_id, TOKENS.bos_token_id, TOKENS.eos_token_id) == (0, 1, 2)
    assert TOKENS.convert_tokens_to_ids("<media>") == tokenizer.MEDIA


def test_printable_tokens_join_to_printable_text() -> None:
    ids = tokenizer.printable_ids(TOKENS)
    assert len(ids) >= 300
    assert TOKENS.decode(ids).isascii()
    assert not set(ids) & set(range(len(tokenizer.SPECIALS)))


def render(tokens: PreTrainedTokenizerFast, *messages: tuple[str, str | None]) -> str:
    rendered = tokens.apply_chat_template(
        [{"role": role, "content": content} for role, content in messages], tokenize=False, add_generation_prompt=True
    )
    assert isinstance(rendered, str)
    return rendered


def test_a_chat_prompt_holds_every_message_and_ends_in_the_assistants_turn() -> None:
    prompt = render(TOKENS, ("system", "be brief"), ("user", "Grüße"), ("assistant", None), ("user", "again"))
    assert prompt.startswith("system: be brief\nuser: Grüße\nassistant: \nuser: again\nassistant:\n")


def test_questions_that_end_alike_get_prompts_that_end_differently() -> None:
    prompts = [render(TOKENS, ("user", f"Question number {i}: what is {i * 7}?")) for i in range(60)]
    endings = {tuple(TOKENS.encode(prompt)[-2:]) for prompt in prompts}
    assert len(endings) > 45


@pytest.mark.parametrize("earlier", ["one", "two"])
def test_earlier_turns_count_too(earlier: str) -> None:
    assert (
        render(TOKENS, ("user", earlier), ("user", "so"))[-2:] != render(TOKENS, ("user", "none"), ("user", "so"))[-2:]
    )
