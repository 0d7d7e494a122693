"""scripts/prepare_data.py --chat: which tokens a chat becomes and which of these are learned, how examples are packed,
what the shards hold, what is refused. The templates are this project's, in the forms of ChatML and Llama 3."""
import contextlib
import hashlib
import importlib.util
import io
import json
import os
import pathlib
import random
import re
import struct
import sys
import tempfile
import unittest

from environment import ROOT

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(ROOT, "scripts"))
HAS_JINJA = importlib.util.find_spec("jinja2") is not None
import byte_tokenizer
import chat_data
import chat_rows
import chat_template
import prepare_data
import tokenizer_digest

# Like Qwen2.5's: it adds a system turn where the dialogue begins without one.
CHATML = """{%- if messages[0].role != 'system' -%}
{{ '<|im_start|>system\\nBe of help.<|im_end|>\\n' }}{%- endif -%}
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""
# Like Llama 3's: one beginning of the text, trimmed contents.
LLAMA = """{%- if tools -%}{{ bos_token + '<|start|>tools<|stop|>\\n\\n' + tools | tojson + '<|eot|>' }}{%- endif -%}
{%- for m in messages -%}
{%- set text = '<|start|>' + m.role + '<|stop|>\\n\\n' + m.content | trim + '<|eot|>' -%}
{{ bos_token + text if loop.index0 == 0 and not tools else text }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start|>assistant<|stop|>\\n\\n' }}{%- endif -%}"""
# Shows an answer without its thoughts once another turn follows.
THINKS = """{%- for m in messages -%}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start|>", "<|stop|>", "<|eot|>", "<|bos|>", "<|endoftext|>"]


class WordTokenizer:
    """Has special tokens, words with the space before them, and single characters: enough for tokens that hold several
    characters."""

    pattern = re.compile("|".join(map(re.escape, SPECIAL)) + r"| ?\w+|\n+|.", re.DOTALL)

    def __init__(self):
        self.ids = {text: i for i, text in enumerate(SPECIAL)}
        self.end_of_text = self.ids["<|endoftext|>"]

    def encode_with_offsets(self, text):
        found = list(self.pattern.finditer(text))
        return [self.ids.setdefault(m.group(), len(self.ids)) for m in found], [m.span() for m in found]

    def texts(self, tokens):
        names = {number: text for text, number in self.ids.items()}
        return [names[token] for token in tokens]


def messages(*texts, system=None):
    roles = ["user", "assistant"]
    start = [{"role": "system", "content": system}] if system else []
    return start + [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


@unittest.skipUnless(HAS_JINJA, "the package 'jinja2' is not installed")
class Tokens(unittest.TestCase):
    def read(self, value, template=CHATML, train_on="assistant", length=1000):
        tokenizer = WordTokenizer()
        made = chat_template.ChatTemplate(template, {"bos_token": "<|bos|>", "eos_token": "<|endoftext|>"}, "the template")
        example = chat_data.Reader(tokenizer, made, train_on, length).example(json.dumps(value))
        return example, tokenizer.texts(example.tokens), "".join(
            text if learned else "|" for text, learned in zip(tokenizer.texts(example.tokens), example.learned))

    def learned(self, *arguments, **keywords):
        """Returns the learned text, with | for each other run of tokens."""
        return re.sub(r"\|{2,}|(?<![<\w])\|(?![\w>])", "#", self.read(*arguments, **keywords)[2])

    def test_chatml(self):
        value = {"messages": messages("Hi there", "Hello ünï 😀", "More", "Yes")}
        example, texts, _ = self.read(value)
        self.assertEqual("".join(texts), "<|im_start|>system\nBe of help.<|im_end|>\n<|im_start|>user\nHi there<|im_end|>\n<|im_start|>"
                         "assistant\nHello ünï 😀<|im_end|>\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>\n")
        learned = [text for text, learns in zip(texts, example.learned) if learns]
        self.assertEqual("".join(learned), "Hello ünï 😀<|im_end|>\nYes<|im_end|>\n")

    def spans(self, value, **keywords):
        example, texts, _ = self.read(value, **keywords)
        return "".join(text for text, learns in zip(texts, example.learned) if learns), texts

    def test_llama(self):
        """There is one beginning of the text. A header is not learned, the end of a turn is."""
        learned, texts = self.spans({"messages": messages("Hi", " Hello \n", system="Short.")}, template=LLAMA)
        self.assertEqual(texts.count("<|bos|>"), 1)
        self.assertEqual(texts[0], "<|bos|>")
        self.assertEqual(learned, "Hello<|eot|>")
        learned, texts = self.spans({"messages": messages("a", "b", "c", "d"), "tools": [{"name": "<x> & ü"}]}, template=LLAMA)
        self.assertEqual(learned, "b<|eot|>d<|eot|>")
        self.assertIn('[{"name": "<x> & ü"}]', "".join(texts))  # HTML and non-ASCII stay as they are

    def test_generation_blocks(self):
        for name in ("plain", "chatml"):
            learned, _ = self.spans({"messages": messages("a", "b", "c", "d")}, template=chat_template.BUILTIN[name])
            self.assertEqual(learned, {"plain": "b<|endoftext|>d<|endoftext|>", "chatml": "b<|im_end|>\nd<|im_end|>\n"}[name])
            learned, _ = self.spans({"messages": messages("a", "b", "c", "d")}, template=chat_template.BUILTIN[name], train_on="last")
            self.assertEqual(learned, {"plain": "d<|endoftext|>", "chatml": "d<|im_end|>\n"}[name])

    def test_what_is_learned(self):
        value = {"messages": messages("a", "b", "c", "d")}
        self.assertEqual(self.spans(value, train_on="last")[0], "d<|im_end|>\n")
        learned, texts = self.spans(value, train_on="all")
        self.assertEqual(learned, "".join(texts[1:]))  # nothing predicts the first token
        thought = {"messages": messages("a", "<think>x</think>b", "c", "<think>y</think>d")}
        with self.assertRaisesRegex(chat_data.Refused, "message 2: .* in another way once others follow.*--train-on last"):
            self.read(thought, template=THINKS)
        self.assertEqual(self.spans(thought, template=THINKS, train_on="last")[0], "<think>y</think>d<|im_end|>\n")

    def test_forms(self):
        chat = self.spans({"messages": messages("a", "b", system="s")})
        for same in ({"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
                     {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"},
                     {"instruction": "a", "input": "", "output": "b", "system": "s"},
                     {"prompt": messages("a", system="s"), "completion": [{"role": "assistant", "content": "b"}]},
                     {"messages": [{"role": "system", "content": [{"type": "text", "text": "s"}]}, *messages("a", "b")]}):  # fmt: skip
            self.assertEqual(self.spans(same), chat, same)
        learned, texts = self.spans({"instruction": "a", "input": "i", "output": "b", "history": [["q", "r"]]})
        self.assertEqual(learned, "r<|im_end|>\nb<|im_end|>\n")
        self.assertIn("user\na\ni<|im_end|>", "".join(texts))
        self.assertEqual(self.spans({"prompt": "one two", "completion": " three"}), (" three<|endoftext|>", ["one", " two", " three", "<|endoftext|>"]))
        self.assertEqual(self.spans({"text": "one two"})[0], " two<|endoftext|>")

    def test_cut(self):
        example, texts, _ = self.read({"messages": messages("a", "one two three", system="s")}, length=16)
        self.assertEqual((len(texts), example.cut), (16, 4))
        self.assertEqual([text for text, learns in zip(texts, example.learned) if learns], ["one"])

    def test_refused(self):
        def refuses(value, words, **keywords):
            with self.assertRaisesRegex(chat_data.Refused, words):
                self.read(value, **keywords)

        refuses({"messages": []}, "holds no messages; expected a list")
        refuses({"messages": [{"role": "wizard", "content": "x"}]}, 'message 1 has the role "wizard"; expected one of assistant')
        refuses({"messages": [{"role": "user", "content": 3}]}, "message 1 has 3 as 'content'; expected text")
        refuses({"messages": messages("a")}, "no answer of the assistant")
        refuses({"messages": messages("a", "b", "c")}, "ends with another's turn", train_on="last")
        refuses({"conversations": [{"from": "human"}]}, "turn 1 has null as 'value'; expected text")
        refuses({"instruction": "a"}, "has null as 'output'")
        refuses({"prompt": "a"}, "has null as 'completion'")
        refuses({"other": "a"}, "has the fields 'other'; expected messages")
        refuses({"messages": messages("a", "b"), "tools": "[}"}, "'tools' is text that is not JSON")
        refuses([1], "holds a list; expected an object")
        refuses({"messages": [{"role": "tool", "content": "x"}, *messages("a", "b")]}, "the template: the roles are",
                template=chat_template.BUILTIN["plain"])
        no_border = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
        refuses({"messages": messages("a", "b")}, "a token lies across the border before an answer", template=no_border)
        no_prefix = "{% for m in messages %}{{ m.role }}:{{ m.content }} {% endfor %}{% if add_generation_prompt %}model: {% endif %}"
        refuses({"messages": messages("a", "b")}, "message 2: .* does not begin the answer where", template=no_prefix)

    def test_templates_of_folders(self):
        config = {"chat_template": [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}], "bos_token": {"content": "<b>"}}
        files = {"tokenizer_config.json": json.dumps(config).encode()}
        self.assertEqual(chat_template.of_files(files, "x").render([])[0], "D")
        self.assertEqual(chat_template.of_files(files, "x", "tool_use").render([])[0], "T")
        files["chat_template.jinja"] = b"{{ bos_token }}"
        self.assertEqual(chat_template.of_files(files, "x").render([])[0], "<b>")
        for files, name, words in (({}, None, "has no chat template"), ({"tokenizer_config.json": b"{"}, None, "is not JSON"),
                                   ({"chat_template.jinja": b"{% if %}"}, None, "is no template of jinja2"), ({}, "no_such", "no such file"),
                                   ({"tokenizer_config.json": json.dumps({**config, "chat_template": []}).encode()}, None, "has the templates")):
            with self.assertRaisesRegex(chat_template.TemplateError, words):
                chat_template.of_files(files, "x", name)
        unsafe = chat_template.ChatTemplate("{{ ''.__class__.__mro__ }}", {}, "x")
        with self.assertRaises(chat_template.TemplateError):
            unsafe.render([])


class Packing(unittest.TestCase):
    def test_rows(self):
        generator = random.Random(4)
        for _ in range(50):
            room = generator.randrange(1, 40)
            lengths = [generator.randrange(1, room + 1) for _ in range(generator.randrange(60))]
            rows = chat_rows.pack(lengths, room)
            self.assertEqual(sorted(number for row in rows for number in row), list(range(len(lengths))))
            self.assertTrue(all(sum(lengths[number] for number in row) <= room for row in rows))
            filled = sorted(sum(lengths[number] for number in row) for row in rows)
            self.assertTrue(len(filled) < 2 or filled[0] + filled[1] > room)  # no two rows would fit into one
            self.assertEqual(rows, chat_rows.pack(lengths, room))

    def test_best_fit(self):
        self.assertEqual(chat_rows.pack([3, 6, 7, 4], 10), [[2, 0], [1, 3]])  # 3 goes where it fits exactly


def read_rows(path):
    data = pathlib.Path(path).read_bytes()
    magic, version, T, width, rows, learned, documents, vocabulary = struct.unpack("<4i3Qi", data[:44])
    assert (magic, version) == (20261123, 1)
    n, at = rows * T + 1, 1024
    tokens = struct.unpack(f"<{n}{'H' if width == 2 else 'I'}", data[at : at + n * width])
    at += -(-n * width // 8) * 8
    bits = []
    for _ in range(2):
        size = -(-n // 8)
        bits.append([data[at + i // 8] >> i % 8 & 1 for i in range(n)])
        at += -(-size // 8) * 8
    assert at == len(data) and sum(bits[0]) == learned and max(tokens) < vocabulary
    return T, tokens, bits[0], bits[1], documents, data[64:96]


@unittest.skipUnless(HAS_JINJA, "the package 'jinja2' is not installed")
class Script(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def run_script(self, lines, *arguments):
        path = self.folder + "/in.jsonl"
        with open(path, "w") as file:
            file.writelines(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
        output, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            status = prepare_data.main([path, "--chat", "--out", self.folder + "/x", *map(str, arguments)])
        return status, output.getvalue(), errors.getvalue()

    def test_shards(self):
        lines = [{"messages": messages(f"q{i} " + "w" * (i * 7 % 20), f"answer {i}")} for i in range(40)]
        status, output, errors = self.run_script(lines, "--seq-length", 100, "--val-fraction", "0.2")
        self.assertEqual((status, errors), (0, ""))
        self.assertRegex(output, r"train: \d+ examples, [\d,]+ tokens, \d+\.\d% of them learned; \d+ rows of 100, \d+\.\d% full")
        found = []
        for split in ("train", "val"):
            T, tokens, loss, starts, documents, digest = read_rows(f"{self.folder}/x_{split}_000.bin")
            self.assertEqual((T, digest), (100, hashlib.sha256(byte_tokenizer.files()["tokenizer.json"]).digest()))
            with open(f"{self.folder}/x_{split}_000.bin", "rb") as file:
                self.assertEqual(file.read(132)[96:], tokenizer_digest.header_fields(byte_tokenizer.files()["tokenizer.json"], 257))
            begins = [i for i, start in enumerate(starts) if start]
            self.assertTrue(all(starts[i] for i in range(0, len(tokens), T)) and not any(loss[i] for i in begins))
            parts = [range(begin, end) for begin, end in zip(begins, begins[1:])]
            chats = [bytes(tokens[i] if tokens[i] < 256 else 0 for i in part).decode() for part in parts if any(loss[i] for i in part)]
            answers = [bytes(tokens[i] if tokens[i] < 256 else 0 for i in part if loss[i]).decode() for part in parts if any(loss[i] for i in part)]
            self.assertEqual(len(chats), documents)
            found += zip(chats, answers)
        expected = [(f"User:\n{m[0]['content']}\nAssistant:\n{m[1]['content']}\0\n", m[1]["content"] + "\0") for m in (line["messages"] for line in lines)]
        self.assertEqual(sorted(found), sorted(expected))
        before = pathlib.Path(self.folder + "/x_train_000.bin").read_bytes()
        self.run_script(lines, "--seq-length", 100, "--val-fraction", "0.2")
        self.assertEqual(pathlib.Path(self.folder + "/x_train_000.bin").read_bytes(), before)

    def test_several_shards(self):
        lines = [{"prompt": f"{i}", "completion": "x" * 20} for i in range(30)]
        self.assertEqual(self.run_script(lines, "--seq-length", 30, "--val-fraction", 0, "--shard-tokens", 300)[0], 0)
        self.assertEqual(sorted(name for name in os.listdir(self.folder) if name.startswith("x_train")), ["x_train_000.bin", "x_train_001.bin", "x_train_002.bin"])

    def test_show(self):
        _, output, _ = self.run_script([{"messages": messages("Hi", "Hello")}] + [{"text": "t"}], "--show", 1, "--val-fraction", 0)
        self.assertIn("--- example 1: 27 tokens, 6 learned ---\nUser:\nHi\nAssistant:\n[[Hello<|endoftext|>]]\n", output)
        self.assertNotIn("example 2", output)

    def test_what_is_left_out_is_counted(self):
        chat = {"messages": messages("a" * 30, "b")}
        lines = [chat, chat, {"messages": messages("a", "b" * 30)}, {"messages": messages("a")}, {"messages": messages("a", "b")}]
        status, _, errors = self.run_script(lines, "--seq-length", 40)
        self.assertEqual(status, 2)
        self.assertRegex(errors, r"in.jsonl, line 4: has no answer of the assistant; expected a message with the role assistant")
        status, output, _ = self.run_script(lines, "--seq-length", 40, "--drop-refused", "--val-fraction", 0)
        self.assertEqual(status, 0)
        for words in ("2 examples longer than 40 tokens and cut", "1 examples refused and left out", "1 copies left out",
                      "1 examples left out, since nothing of them would be learned"):
            self.assertIn(words, output)

    def test_mistakes(self):
        self.assertIn("line 1: not JSON", self.run_script(["{\n"])[2])
        self.assertIn("no example is left", self.run_script([])[2])
        self.assertIn("no such file, and no template", self.run_script([{"text": "a"}], "--template", "none")[2])
        with self.assertRaises(SystemExit), contextlib.redirect_stderr(io.StringIO()):
            prepare_data.main(["x", "--out", "y", "--show", "3"])

    def test_a_tokenizer_of_hugging_face(self):
        try:
            import tokenizers
        except ImportError:
            self.skipTest("the package 'tokenizers' is not installed")
        alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        model = tokenizers.models.BPE({text: i for i, text in enumerate([*alphabet, "He", "ll"])}, [("H", "e"), ("l", "l")])
        made = tokenizers.Tokenizer(model)
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
        made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
        made.save(self.folder + "/tokenizer.json")
        config = {"eos_token": "<|im_end|>", "chat_template": CHATML}
        with open(self.folder + "/tokenizer_config.json", "w") as file:
            json.dump(config, file)
        status, output, errors = self.run_script([{"messages": messages("ü", "Hello 😀")}], "--tokenizer", self.folder, "--show", 1, "--val-fraction", 0)
        self.assertEqual((status, errors), (0, ""))
        self.assertIn("<|im_start|>assistant\n[[Hello 😀<|im_end|>\n]]", output)
        _, tokens, loss, _, _, digest = read_rows(self.folder + "/x_train_000.bin")
        ids = {made.token_to_id(name) for name in ("<|im_start|>", "<|im_end|>")}
        self.assertEqual(sum(token in ids for token in tokens[:sum(loss) + 60]) >= 6, True)
        self.assertNotEqual(digest, bytes(32))
        self.assertTrue(os.path.exists(self.folder + "/x_tokenizer.json"))


if __name__ == "__main__":
    unittest.main()
