"""The text-only processor that the tiny Kimi checkpoint ships as remote code.

SGLang asks a multimodal model for a processor even when no image will come; this one tokenizes and knows nothing of
pixels. It is copied into the checkpoint's folder and runs inside the engine.
"""

from typing import ClassVar

from transformers import PreTrainedTokenizerBase, ProcessorMixin
from transformers.image_processing_utils import BaseImageProcessor


class TinyMedia(BaseImageProcessor):
    """The numbers that SGLang reads off the media processor of Kimi-K2.5."""

    media_proc_cfg: ClassVar[dict[str, object]] = {
        "patch_size": 14,
        "merge_kernel_size": 2,
        "in_patch_limit": 64,
        "patch_limit_on_one_side": 8,
        "fixed_output_tokens": None,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }


class TinyKimiProcessor(ProcessorMixin):
    """A tokenizer with a media processor beside it that never sees an image."""

    attributes: ClassVar[list[str]] = ["tokenizer"]
    tokenizer_class = "AutoTokenizer"

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None = None, **kwargs: object) -> None:
        super().__init__(tokenizer)
        self.image_processor = self.media_processor = TinyMedia()
