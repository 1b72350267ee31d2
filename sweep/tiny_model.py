"""Make a tiny random-weight Qwen2 with a byte-level BPE tokenizer, so that a sweep can run where no model can be had.

Its answers are noise and its weights 10 MB; what it exercises is real: vLLM's loader, scheduler, KV cache and API.
Run as `python -m sweep.tiny_model FOLDER`; needs the `cpu` or `gpu` extra (torch, transformers, tokenizers).
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

# Long enough that every merge of a small vocabulary is learned from it; the words themselves mean nothing.
_CORPUS = (
    "the quick brown fox jumps over the lazy dog",
    "a server takes requests and answers them one token at a time",
    "prefill is bound by compute and decode is bound by memory bandwidth",
    "paged attention keeps the cache in blocks of a fixed number of tokens",
    "what the scheduler admits in one step decides how long the others wait",
)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# head_dim 64 suits every attention backend; 2.6 million parameters.
_VOCABULARY = 1024
_CONFIG = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def make(folder: Path) -> bool:
    """Write the model to `folder` and return True; leave a complete one alone and return False.

    The folder appears whole or not at all: it is built beside its place and renamed.
    """
    if (folder / "model.safetensors").is_file():
        return False
    import torch  # noqa: PLC0415 - seconds of import, only when a model is made
    from transformers import Qwen2Config, Qwen2ForCausalLM, logging  # noqa: PLC0415

    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        logging.disable_progress_bar()
        torch.manual_seed(0)
        bos, _, eos = range(len(_SPECIAL))
        config = Qwen2Config(**_CONFIG, bos_token_id=bos, eos_token_id=eos)
        Qwen2ForCausalLM(config).save_pretrained(building)
        _write_tokenizer(building)
        if folder.exists():
            shutil.rmtree(folder)
        building.replace(folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return True


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "Qwen2TokenizerFast",
        "model_max_length": _CONFIG["max_position_embeddings"],
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": _CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def main() -> int:
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m sweep.tiny_model FOLDER\n")
        return 2
    folder = Path(sys.argv[1])
    made = make(folder)
    sys.stderr.write(f"tiny model {'made in' if made else 'is there:'} {folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
