"""The tokenizer settings that the models made here share: ChatML turns and their control tokens."""

from __future__ import annotations

from typing import Any

BASE_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Control tokens with ids 0, 1 and 2."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tokenizer_config(chat_template: str, *, max_model_len: int, bos: str = BASE_TOKENS[0]) -> dict[str, Any]:
    """Content of `tokenizer_config.json`, for transformers and everything that reads its files."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_model_len,
        "chat_template": chat_template,
    }
