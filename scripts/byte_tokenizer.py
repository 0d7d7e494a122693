"""The files of a tokenizer whose tokens are bytes, 0 to 255, and <|endoftext|>, 256: with these beside a model
transformers' AutoTokenizer opens it."""

import json

END_OF_TEXT = "<|endoftext|>"
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}


def alphabet():
    """Returns the characters that stand for the bytes 0 to 255, by GPT-2: a printable byte stands for itself, the others
    are numbered from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def files():
    """Returns {name: bytes}."""
    vocab = {character: byte for byte, character in enumerate(alphabet())} | {END_OF_TEXT: 256}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": 256, "content": END_OF_TEXT, **FLAGS}],
        "normalizer": None, "pre_tokenizer": LEVEL, "post_processor": None, "decoder": LEVEL,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocab, "merges": []},
    }  # fmt: skip
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "clean_up_tokenization_spaces": False}
    return {name: json.dumps(value, indent=1, ensure_ascii=False).encode() + b"\n" for name, value in (("tokenizer.json", tokenizer), ("tokenizer_config.json", config))}
