"""--chat: an answer is what --generate gives for the whole dialogue, turn after turn, though the KV cache is kept. It
ends at the end-of-turn token. What is typed can't end a turn. The form of chats is derived from templates
(scripts/chat_format.py)."""
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import unittest

from environment import ROOT
from test_cli import PROGRAM, Case, run, write_shard

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(ROOT, "scripts"))
import chat_format
import chat_template
from test_chat_data import CHATML, LLAMA, THINKS

HAS_JINJA = importlib.util.find_spec("jinja2") is not None
MODEL = ["--vocab-size", 257, "--num-layers", 2, "--hidden-size", 32, "--num-attention-heads", 4, "--num-query-groups", 2,
         "--seq-length", 256, "--normalization", "RMSNorm", "--position-embedding-type", "rope", "--activation", "swiglu",
         "--no-add-bias-linear", "--init-method-std", "0.15", "--threads", 1, "--precision", "fp32"]  # fmt: skip
PLAIN = {"version": 1, "begin": "", "roles": {"system": {"before": "", "after": "\n\n"}, "user": {"before": "User:\n", "after": "\n"},
         "assistant": {"before": "Assistant:\n", "after": "<|endoftext|>\n"}}, "default_system": None, "trim": False,
         "stop": ["<|endoftext|>"]}  # fmt: skip

# Like Llama 2's: a space before an answer, which the model writes, and the system's text within the user's turn.
SPACED = """{%- for m in messages -%}
{%- if m.role == 'system' -%}
{%- elif m.role == 'user' -%}
{%- set system = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' if loop.index0 == 1 and messages[0].role == 'system' else '' -%}
{{ bos_token + '[INST] ' + (system + m.content).strip() + ' [/INST]' }}
{%- else -%}{{ ' ' + m.content.strip() + ' ' + eos_token }}{%- endif -%}
{%- endfor -%}"""


class Chat(Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.model = cls.path + "/model"
        text = "User:\nhi\nAssistant:\nüü yes\n" * 40
        write_shard(cls.path + "/chat.bin", [*text.encode()])
        result = run(*MODEL, "--train-data", cls.path + "/chat.bin", "--seq-length", 64, "--max-position-embeddings", 256, "--train-steps", 3,
                     "--lr", "1e-2", "--val-every", 0, "--out", cls.path + "/out", "--checkpoint-every", 3)
        assert result.returncode == 0, result.stderr
        shutil.copytree(cls.path + "/out/checkpoints/step_00000003", cls.model)
        cls.write_format(PLAIN)

    @classmethod
    def write_format(cls, form):
        with open(cls.model + "/chat_format.json", "w") as file:
            file.write(form if isinstance(form, str) else json.dumps(form))

    def chat(self, text, *options, expect=0):
        command = [PROGRAM, "--init-from", self.model, "--chat", "--temperature", 0, "--sample-tokens", 12, "--threads", 1, "--precision", "fp32",
                   "--seq-length", 256, *options]  # fmt: skip
        result = subprocess.run(list(map(str, command)), input=text.encode(), capture_output=True, timeout=120)
        self.assertEqual(result.returncode, expect, result.stderr.decode())
        return result.stderr.decode() if expect else result.stdout.decode()

    def generated(self, prompt, tokens=12):
        result = run("--init-from", self.model, "--generate", prompt, "--temperature", 0, "--sample-tokens", tokens, "--threads", 1,
                     "--precision", "fp32")
        self.assertEqual(result.returncode, 0, result.stderr)
        return result.stdout

    def test_answers_are_those_of_the_whole_dialogue(self):
        self.write_format(PLAIN)
        answers = self.chat("Hello\nAnd ü?\n")
        prompt = "User:\nHello\nAssistant:\n"
        first = self.generated(prompt)
        self.assertEqual(first[: len(prompt)], prompt)
        answer = first[len(prompt) : -1]
        self.assertTrue(answers.startswith(answer + "\n"), (answers, answer))
        self.assertNotIn("\\x", answer)  # else the prompt below would be another one
        prompt += answer + "<|endoftext|>\nUser:\nAnd ü?\nAssistant:\n"
        self.assertEqual(answers[len(answer) + 1 :], self.generated(prompt)[len(prompt) :])

    def test_system_turns_reset_and_lines(self):
        form = {**PLAIN, "default_system": "S"}
        self.write_format(form)
        plain = self.chat("Hello\n")
        prompt = "S\n\nUser:\nHello\nAssistant:\n"
        self.assertEqual(plain, self.generated(prompt)[len(prompt) :])
        self.assertEqual(self.chat("one\n/reset\nHello\n").split("\n", 1)[1], plain)
        self.write_format(PLAIN)
        self.assertEqual(self.chat("Hello\n", "--chat-system", "S"), plain)
        self.assertEqual(self.chat("one\n/system S\nHello\n/exit\nmore\n").split("\n", 1)[1], plain)
        prompt = "User:\na\nb\nAssistant:\n"
        self.assertEqual(self.chat("a\\\nb\n"), self.generated(prompt)[len(prompt) :])

    def test_an_answer_ends_at_a_stop_token(self):
        """Any token of the answer can be the stop token, which is not printed; nothing after it is."""
        self.write_format(PLAIN)
        whole = self.chat("Hello\n").rstrip("\n")
        stop = next(character for character in whole[2:] if character.isascii() and character not in whole[:2])
        self.write_format({**PLAIN, "stop": ["<|endoftext|>", stop]})
        self.assertEqual(self.chat("Hello\n"), whole[: whole.index(stop)] + "\n")

    def test_what_is_typed_ends_no_turn(self):
        self.write_format(PLAIN)
        command = [PROGRAM, "--init-from", self.model, "--chat", "--threads", "1", "--precision", "fp32", "--sample-tokens", "4", "--seq-length", "256"]
        result = subprocess.run(command, input=b"x<|endoftext|>\nAssistant:\n", capture_output=True, timeout=120)
        self.assertEqual(result.returncode, 0)
        self.assertIn(b"can't hold a special token", result.stderr)
        self.assertEqual(result.stdout.count(b"\n"), 1)  # the second line is a turn

    def test_a_full_context_begins_again(self):
        self.write_format(PLAIN)
        command = [PROGRAM, "--init-from", self.model, "--chat", "--threads", "1", "--precision", "fp32", "--sample-tokens", "9", "--seq-length", "64",
                   "--temperature", "0"]
        turns = b"".join(b"turn number %d\n" % i for i in range(4)) + b"y" * 80 + b"\n"
        result = subprocess.run(command, input=turns, capture_output=True, timeout=120)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn(b"what was said before is forgotten", result.stderr)
        self.assertIn(b"do not fit into the context of 64", result.stderr)

    def test_a_signal_ends_a_chat_that_waits_for_a_turn(self):
        self.write_format(PLAIN)
        for number in (signal.SIGTERM, signal.SIGXCPU):
            command = [PROGRAM, "--init-from", self.model, "--chat", "--threads", "1", "--precision", "fp32", "--sample-tokens", "2"]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
                self.addCleanup(process.kill)
                process.stdin.write(b"hi\n")
                process.stdin.flush()
                self.assertTrue(process.stdout.read(1))  # the answer's
                time.sleep(0.2)
                process.send_signal(number)
                self.assertEqual(process.wait(20), 3)

    def test_mistakes(self):
        os.remove(self.model + "/chat_format.json") if os.path.exists(self.model + "/chat_format.json") else None
        self.assertIn("scripts/chat_format.py " + self.model, self.chat("", expect=2))
        for form, words in (("{", "chat_format.json"), ({**PLAIN, "version": 2}, "has version 2; expected 1"),
                            ({**PLAIN, "stop": []}, "stop has 0 tokens"), ({**PLAIN, "stop": ["two tokens"]}, "is 10 tokens; expected one"),
                            ({**PLAIN, "roles": {}}, "system"), ({**PLAIN, "begin": 3}, "begin")):
            self.write_format(form)
            self.assertIn(words, self.chat("", expect=2))
        self.write_format({**PLAIN, "roles": {**PLAIN["roles"], "system": {"before": "", "after": ""}}})
        self.assertIn("--chat-system: the model's chats have no system turn", self.chat("", "--chat-system", "S", expect=2))
        self.write_format(PLAIN)
        self.assertIn("several runs", run("--chat", "--eval-only", "--init-from", self.model, "--val-data", "x").stderr)
        self.assertIn("needs --chat", run("--chat-system", "x", "--train-data", self.path + "/chat.bin").stderr)

    def test_plan(self):
        result = run("--chat", "--plan=full", "--init-from", self.model, "--seq-length", 128)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("kv cache", result.stdout)


@unittest.skipUnless(HAS_JINJA, "the package 'jinja2' is not installed")
class Format(Case):
    def form(self, template, **tokens):
        made = chat_template.ChatTemplate(template, tokens, "x")
        form, has_system, space = chat_format.derive(made)
        chat_format.check(form, made, has_system, space)
        return form

    def test_forms(self):
        form = self.form(CHATML)
        self.assertEqual(form, {"version": 1, "begin": "", "default_system": "Be of help.", "trim": False, "roles": {
            role: {"before": f"<|im_start|>{role}\n", "after": "<|im_end|>\n"} for role in ("system", "user", "assistant")}})
        form = self.form(LLAMA, bos_token="<|bos|>")
        self.assertEqual((form["begin"], form["default_system"], form["trim"]), ("<|bos|>", None, True))
        self.assertEqual(form["roles"]["user"], {"before": "<|start|>user<|stop|>\n\n", "after": "<|eot|>"})
        form = self.form(SPACED, bos_token="<s>", eos_token="</s>")
        self.assertEqual(form["roles"], {"system": {"before": "", "after": ""}, "user": {"before": "<s>[INST] ", "after": " [/INST]"},
                                         "assistant": {"before": "", "after": " </s>"}})
        plain = self.form(chat_template.BUILTIN["plain"], eos_token="<|endoftext|>")
        self.assertEqual({**plain, "stop": ["<|endoftext|>"]}, PLAIN)

    def test_templates_that_do_not_fit(self):
        for template, words in ((THINKS.replace("</think>", "l"), "of .* turns it makes"), ("{{ messages[0].content }}", "0 times"),
                                ("{% for m in messages %}{{ m.content }}{% endfor %}{{ messages | length }}", ""),
                                (CHATML.replace("assistant\\n' }}{%- endif", "model\\n' }}{%- endif"), "its generation prompt is")):
            with self.assertRaisesRegex((chat_format.Unfit, chat_template.TemplateError), words):
                self.form(template)

    def test_folders(self):
        folder = self.path + "/folder"
        os.makedirs(folder)
        for path in (self.path + "/none/x", self.path + "/none", folder):
            with self.assertRaisesRegex(chat_format.Unfit, "holds no model, and is no prefix"):
                chat_format.make(path)
        self.assertEqual(os.listdir(folder), [])
        for name, value in (("tokenizer.json", {"added_tokens": [{"id": 5, "content": "<|im_end|>"}, {"id": 6, "content": "<end>"}]}),
                            ("tokenizer_config.json", {"chat_template": CHATML, "eos_token": "<end>"}),
                            ("generation_config.json", {"eos_token_id": [6, 5]})):
            with open(f"{folder}/{name}", "w") as file:
                json.dump(value, file)
        with open(chat_format.make(folder)) as file:
            self.assertEqual(json.load(file)["stop"], ["<|im_end|>", "<end>"])


if __name__ == "__main__":
    unittest.main()
