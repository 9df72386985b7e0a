"""A byte-level BPE tokenizer of 512 tokens, trained on the text beside this file, and a chat template.

Every byte is in its alphabet, so it encodes any text.
"""

from pathlib import Path
from string import ascii_letters

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 512
SPECIALS = ["<pad>", "<s>", "</s>", "<media>"]
PAD, BOS, EOS, MEDIA = range(4)  # MEDIA stands for an image

# The prompt ends in two letters that depend on the whole conversation: the targets remember two tokens, and would
# otherwise give the same greedy answer to every question.
CHAT_TEMPLATE = """
{%- set letters = "LETTERS" -%}
{%- set seen = namespace(sum=0) -%}
{%- for message in messages -%}
{%- set text = message['content'] or '' -%}
{{- message['role'] ~ ': ' ~ text ~ '\\n' -}}
{%- for letter in letters ~ '0123456789 ' -%}
{%- set seen.sum = (seen.sum * 31 + text.count(letter)) % 2704 -%}
{%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- 'assistant:\\n' ~ letters[seen.sum // 52] ~ letters[seen.sum % 52] -}}
{%- endif -%}
""".replace("LETTERS", ascii_letters)


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
        tokenizer_object=tokenizer,
        pad_token=SPECIALS[PAD],
        bos_token=SPECIALS[BOS],
        eos_token=SPECIALS[EOS],
        extra_special_tokens=[SPECIALS[MEDIA]],
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def printable_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Ids whose text is ASCII that a terminal can show, or a newline.

    A language made of these alone decodes to valid text, so a stream of it never waits for the rest of a character.
    """
    texts = [(i, tokenizer.decode([i])) for i in range(len(SPECIALS), VOCAB_SIZE)]
    return [i for i, text in texts if text.isascii() and (text.isprintable() or text == "\n")]
