"""A byte-level BPE tokenizer of 512 tokens, trained on the text beside this file.

Every byte is in its alphabet, so it encodes any text. Its chat template is the smallest one that keeps roles apart.
"""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 512
PAD, BOS, EOS, MEDIA = range(4)  # MEDIA: the placeholder of an image, which no text can contain by accident
SPECIALS = ["<pad>", "<s>", "</s>", "<media>"]

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def train() -> PreTrainedTokenizerFast:
    """The tokenizer; the same text gives the same merges in the same order."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([Path(__file__).with_name("corpus.txt").read_text("utf-8")], trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, "the corpus is too short for so many merges"
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", extra_special_tokens=["<media>"]
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def printable_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Ids whose text is ASCII that a terminal can show, or a newline.

    A language made of these alone decodes to valid text, so a stream of it never waits for the rest of a character.
    """
    texts = [(i, tokenizer.decode([i])) for i in range(len(SPECIALS), VOCAB_SIZE)]
    return [i for i, text in texts if text.isascii() and (text.isprintable() or text == "\n")]
