#!/usr/bin/env python3
"""Makes the golden data of test/unit_tokenizer.c: three small tokenizers, and the ids that the `tokenizers` package
gives texts.

    python3 test/golden/make_tokenizer.py [folder]        needs tokenizers; README.md has the version

The tokenizers are trained here on text that is made here. They have the parts of GPT-2's, Llama 3's and Qwen2's:
pattern, normalizer, ignore_merges, template, added tokens. The texts have every script of Unicode 16, emoji, all white
space, numbers, contractions, code, control characters, unnormalized text, and added tokens inside text.
"""
import json
import random
import sys
import unicodedata
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
          r"\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace("{1,3}", "")
WORDS = """the of and to in is that it was for on are with as his they be at one have this from or had by hot but some what
there we can out other were all your when up use word how said an each she which do their time if will way about many
then them would write like so these her long make thing see him two has look more day could go come did my sound no most
number who over know water than call first people may down side been now find any new work part take get place made live
where after back little only round man year came show every good me give our under name very through just form great
think say help low line before turn cause same mean differ move right boy old too does tell sentence set three want air
well also play small end put home read hand port large spell add even land here must big high such follow act why ask men
change went light kind off need house picture try us again animal point mother world near build self earth father""".split()
CODE = """#include <stdio.h>
int main(int argc, char **argv) {
    for (int i = 0; i < argc; i++) {
        printf("%d: %s\\n", i, argv[i]);
    }
    return 0;
}

def train(model, data, *, lr=1e-3, steps=1_000):
\tfor step, batch in enumerate(data):
\t\tloss = model(batch["input_ids"]).loss  # cross-entropy
\t\tif not step % 100: print(f"{step:6d} {loss.item():.4f}")
<p class="a">&nbsp;&lt;b&gt;</p>
SELECT * FROM t WHERE a <> 'it''s' AND b >= 0x7fFF;
"""
OTHER = """Le café coûte 12,50 € à l'été. Zażółć gęślą jaźń. Съешь же ещё этих мягких французских булок. Ξεσκεπάζω την ψυχοφθόρα
βδελυγμία. עטלף אבק נס דרך מזגן. نص حكيم له سر قاطع. ऋषियों को सताने वाले दुष्ट राक्षसों. いろはにほへと ちりぬるを。色は匂へど散りぬるを。
天地玄黃，宇宙洪荒。日月盈昃，辰宿列張。키스의 고유조건은 입술끼리 만나야 하고. ฉันกินกระจกได้ แต่มันไม่ทำให้ฉันเจ็บ. Tiếng Việt có dấu. 👍🏽 🎉🎉
"""


def training_text():
    generator = random.Random(1)
    for _ in range(600):
        words = generator.choices(WORDS, weights=range(len(WORDS), 0, -1), k=generator.randint(3, 14))
        tail = generator.choice([".", ",", "!", "?", " 19%d" % generator.randint(10, 99), "\n", "\n\n", "'s", "'ll go"])
        yield " ".join(words).capitalize() + tail
    yield from [CODE, OTHER] * 5


def train(name):
    tokenizer = Tokenizer(models.BPE(ignore_merges=name == "llama3"))
    if name == "gpt2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        pattern = Regex(LLAMA3 if name == "llama3" else QWEN2)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.normalizer = normalizers.NFC() if name == "qwen2" else None
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(vocab_size={"gpt2": 1000, "llama3": 1200, "qwen2": 1100}[name], show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator(training_text(), trainer)
    special = {"gpt2": ["<|endoftext|>"], "qwen2": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
               "llama3": ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|eot|>", "<|eot_id|>x"]}[name]
    tokenizer.add_special_tokens([AddedToken(text, normalized=name == "gpt2", special=True) for text in special])
    if name == "gpt2":
        tokenizer.add_tokens([AddedToken("<left>", lstrip=True, normalized=False),
                              AddedToken("<right>", rstrip=True, normalized=False),
                              AddedToken("<both>", lstrip=True, rstrip=True, normalized=True), AddedToken("über Ω")])
    if name == "qwen2":
        tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("<tool", normalized=True),
                              AddedToken("Ω é", normalized=True)])
    if name == "llama3":
        bos = tokenizer.token_to_id("<|begin_of_text|>")
        tokenizer.post_processor = processors.Sequence([
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing("<|begin_of_text|> $A", "<|begin_of_text|> $A <|begin_of_text|> $B:1",
                                          [("<|begin_of_text|>", bos)])])
    return tokenizer


def of_every_script():
    """Makes texts with letters, marks and digits of each script (the first word of a character's name is one), and with
    characters newer than the names that Python knows."""
    scripts = {}
    for code in range(0x80, 0x110000):
        character = chr(code)
        if unicodedata.category(character)[0] in "LMN":
            scripts.setdefault(unicodedata.name(character, "NAMELESS").split()[0], []).append(character)
    generator = random.Random(2)
    for characters in scripts.values():
        chosen = sorted(generator.sample(characters, min(len(characters), 6)))
        yield "".join(chosen) + " " + chosen[0] + "1" + chosen[-1] + "."
    newer = [0x1C89, 0xA7CB, 0x105C0, 0x10D40, 0x10D4A, 0x10EC2, 0x1123F, 0x11380, 0x113B8, 0x116D0, 0x11BC0, 0x11BF0,
             0x11F02, 0x11F50, 0x13460, 0x16100, 0x1611E, 0x16130, 0x16D40, 0x16D70, 0x1CCF0, 0x1D2C0, 0x1E030, 0x1E4D0,
             0x1E4F0, 0x1E5D0, 0x2EBF0, 0x31350, 0x1FAE8, 0x1CC00]
    for code in newer:
        yield chr(code) + chr(code + 1) + " " + chr(code) + "1 a" + chr(code + 1)


def texts():
    generator = random.Random(3)
    spaces = [chr(c) for c in [9, 10, 11, 12, 13, 32, 0x85, 0xA0, 0x1680, 0x180E, *range(0x2000, 0x2010), 0x2028, 0x2029,
                               0x202F, 0x205F, 0x2060, 0x3000, 0xFEFF]]
    yield from [" qxz qxzq qxz", "", " ", "a", "\n", "  ", " a", "a ", "  a  b   c", "a\n\n\nb", "a \n \n b", "\r\n\r\n", "\t\tx\t", " \n"]
    yield from ["x" + space * n + "y" + space for space in spaces for n in (1, 2, 3)]
    yield from ["".join(generator.choices(spaces + ["a", "1", "."], k=24)) for _ in range(20)]
    yield from ["1", "12", "123", "1234", "1234567890", "3.14159", "1,000,000", "0x7fff", "1e-5", "a1b22c333", "½ ² Ⅷ ٣٤٥ 一二三"]
    yield from ["it's", "IT'S", "I'll've we'd they're don't 'tis 'T'S 's", "'sſ 'ſ 'ſ'ſ 'K", "can''t 'll'll 'LL 'Re x'vE", "’s"]
    yield from [CODE, OTHER, CODE.replace("\n", "\r\n"), " ".join(WORDS), "".join(WORDS)]
    yield from ["".join(map(chr, range(0, 32))), "".join(map(chr, range(127, 256))), "a\0b", "\x1b[2J\x07", "\ufffd\ufffe\uffff"]
    yield from ["👍🏽👨‍👩‍👧‍👦🏳️‍🌈🇩🇪🇫🇷 1️⃣#️⃣ ❤️ ☺☻ 🫠🫡", "🎉" * 30, "a👍b 👍 👍👍\n👍", "\u200d\ufe0f\u20e3", "🏴\U000e0067\U000e0062\U000e007f"]
    yield from ["e\u0301a\u0323\u0302 \u1ea5 a\u0302\u0323", "\u1112\u1161\u11ab\u1100\u1173\u11af 한글 \uac00\u11a8 \u1100\u1161\u1161",
                "\u212b\u2126\u212a \uf900\ufa10 \u0958 \u09c7\u09be \u0b47\u0b3e \U0001d15e \U00011131\U00011127",
                "\u0301\u0323x", "q\u0307\u0323\u0345\u0301\u0334", "\u0344\u0390\u03b9\u0308\u0301 \u1f82 \u1fb7",
                "a\u0312\u0301 e\u0312\u0323 \uac00\u11a7 \uac00\u11c3", "e" + "\u0301\u0323\u0334" * 40, "\u05d0\u05b7\u05bc\u05c1 \u0e38\u0e48\u0e49 \u0f71\u0f72\u0f74 \u07fd\u0301 \u0d3b\u0301"]
    yield from ["hi<|endoftext|>there <|endoftext|> ", "<|endoftext|><|endoftext|>", "<|endoftext|", "a <left> b", "a  \u2003<left>  b",
                "a <right>  b", "a  <both> \n b", " <both> <both> ", "<left> <right> <left>", "so über Ω, über  Ω", "<right>  <left>",
                "<|eot_id|><|eot|><|eot_id|>x<|eot_id", "<|begin_of_text|>a<|end_of_text|>", "<|im_start|>user\nhi<|im_end|>\n",
                "<tool_call>{}<tool><tool_cal", "Ω é, \u2126 e\u0301!", "<|endoftext|> a", " <|endoftext|>a"]
    yield from ["a" * 300, " " * 301, "\n" * 100, "ab" * 500, "." * 65, "=" * 80 + "\n", " \n" * 40, "天" * 100, "\u0301" * 50]
    yield from of_every_script()
    everything = [c for c in map(chr, range(0x110000)) if not 0xD800 <= ord(c) < 0xE000]
    yield from ["".join(generator.choices(everything, k=10)) for _ in range(20)]
    common = list("abc 1'.\n\t\u00e9\u0301\u3042\U0001f389") + [" ", "'s", "the ", "  ", "<|endoftext|>"]
    yield from ["".join(generator.choices(common, k=40)) for _ in range(30)]


def write(path, value):
    path.write_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{path.name}: {path.stat().st_size} bytes")


def encode(tokenizer, corpus, special):
    return [tokenizer.encode(text, add_special_tokens=special).ids for text in corpus]


def main():
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent)
    corpus = list(texts())
    expected = {"texts": corpus}
    for name in ("gpt2", "llama3", "qwen2"):
        tokenizer = train(name)
        description = json.loads(tokenizer.to_str())
        if name == "gpt2":  # as in its own file: merges as text, no type
            description["model"]["merges"] = [" ".join(pair) for pair in description["model"]["merges"]]
            del description["model"]["type"], description["model"]["ignore_merges"]
        if name == "llama3":  # a token that no merges make
            description["model"]["vocab"]["\u0120qxz"] = description["added_tokens"][0]["id"]
            description["post_processor"]["processors"][1]["special_tokens"]["<|begin_of_text|>"]["ids"][0] += 1
            for token in description["added_tokens"]:  # the package numbers these on from the vocabulary
                token["id"] += 1
        write(folder / f"tokenizer_{name}.json", description)
        tokenizer = Tokenizer.from_file(str(folder / f"tokenizer_{name}.json"))
        expected[name] = encode(tokenizer, corpus, False)
        expected[name + "_special"] = encode(tokenizer, corpus[:40], True)
        if name == "gpt2":
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
            expected["gpt2_prefix"] = encode(tokenizer, corpus[:60], False)
    write(folder / "tokenizer_ids.json", expected)


if __name__ == "__main__":
    main()
