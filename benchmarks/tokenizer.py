"""A tokenizer for clients that cannot do without one: a word is a token, so lengths are exact both ways."""

from __future__ import annotations

from pathlib import Path

_WORDS = 32_000


def make_tokenizer(folder: Path) -> None:
    """Write it in the form that transformers loads."""
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415 - slow, and not needed for --help
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    words = {f"w{number}": number for number in range(_WORDS)} | {"<unk>": _WORDS, "</s>": _WORDS + 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))  # noqa: S106 - no secret
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>", pad_token="</s>")  # noqa: S106
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    fast.save_pretrained(str(folder))
