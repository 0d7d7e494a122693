#!/usr/bin/env python3
"""Makes the golden data of test/unit_tokenizer_fallback.c: a small tokenizer of byte-fallback BPE, and the ids and texts
that the `tokenizers` package gives in each form of formats/tokenizer_fallback.h.

    python3 test/golden/make_fallback.py [folder]        needs tokenizers; README.md has the version

The vocabulary is trained here on make_tokenizer.py's text. test/long/tokenizer_ids.py has the forms, and compares ten
million tokens more.
"""
import json
import random
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "long")]
import make_tokenizer  # noqa: E402
import tokenizer_ids  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402


def main():
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent)
    make = list(make_tokenizer.training_text())
    tokenizer_ids.training_text = lambda: make
    model = tokenizer_ids.trained(760, False)
    texts = ["", " ", "  ", "a", " a", "  a", "a b", "the  world ", "\u2581a\u2581 \u2581", "<0x41> <0x0A>", "a</s>b", "a</s> b", " </s>", "</s></s>x</s",
             "<s> the <|left|>  <|left|> a", "the <|right|>  of \u3000<|both|>\u3000 a", "a\tb\nc\r\n", "\0", "e\u0301 \u00e9 \u1ec7", "\U0001f600 \u65e5\u672c",
             "<n m> <n m>", "\u2581</s>a", make_tokenizer.CODE[:120], make_tokenizer.OTHER[:120]]
    hard = tokenizer_ids.hard_texts(5, [make_tokenizer.CODE, make_tokenizer.OTHER])
    texts += [text for text in (next(hard) for _ in range(80)) if 0 < len(text) < 36]
    golden = {"texts": texts, "forms": {}}
    for name, description in tokenizer_ids.forms(model):
        tokenizer = Tokenizer.from_str(json.dumps(description))
        ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        golden["forms"][name] = {
            "file": {key: description[key] for key in ("added_tokens", "normalizer", "pre_tokenizer", "decoder")},
            "ignore_merges": description["model"]["ignore_merges"], "ids": ids,
            "decoded": [tokenizer.decode(some, skip_special_tokens=False) for some in ids[:24]],
        }
    base = next(tokenizer_ids.forms(model))[1]
    bos = {"id": "<s>", "ids": [1], "tokens": ["<s>"]}
    base["post_processor"] = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                              "pair": [], "special_tokens": {"<s>": bos}}
    Tokenizer.from_str(json.dumps({**base, "post_processor": {**base["post_processor"], "pair": base["post_processor"]["single"] + [{"Sequence": {"id": "B", "type_id": 1}}]}}))
    make_tokenizer.write(folder / "tokenizer_llama2.json", base)
    make_tokenizer.write(folder / "tokenizer_llama2_ids.json", golden)


if __name__ == "__main__":
    main()
