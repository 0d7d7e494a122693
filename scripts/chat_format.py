#!/usr/bin/env python3
"""Derives chat_format.json, the form of a model's chats that train_gpt --chat reads, from the model's chat template.

  scripts/chat_format.py MODEL

MODEL is a Hugging Face folder, or the prefix of files that prepare_data.py wrote. The texts around turns are found by
rendering dialogues whose contents are marks. Then other dialogues are put together from these texts, and must be what
the template renders. A template that does more than put texts around turns is refused.
"""

import argparse
import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import byte_tokenizer  # noqa: E402: lies beside this file
import chat_template  # noqa: E402
from mistakes import Mistake, run_script  # noqa: E402

MARKS = {name: f"\ue100{name}\ue101" for name in ("system", "one", "two", "three", "four")}
FILES = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "config.json"]


class Unfit(Exception):
    """Why a template has no such form."""


def turns(*contents, system=None):
    first = [{"role": "system", "content": system}] if system is not None else []
    return first + [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(contents)]


def cut(text, *marks):
    """Returns the parts of a text around marks, each of which must be in it once."""
    parts = []
    for mark in marks:
        if text.count(mark) != 1:
            raise Unfit(f"shows a turn's content {text.count(mark)} times; expected once, as it is")
        before, text = text.split(mark)
        parts.append(before)
    return [*parts, text]


def without_end(text, end, what):
    if not text.endswith(end):
        raise Unfit(f"{what}: {text!r} does not end with {end!r}")
    return text[: len(text) - len(end)]


def derive(template):
    """Returns the form, without `stop`, whether the template takes a system turn, and a space that it puts before an
    answer, as Llama 2's does, which the model then writes itself."""
    def render(messages, ask=False):
        return template.render(messages, add_generation_prompt=ask)[0]

    one, two, three, four = (MARKS[name] for name in ("one", "two", "three", "four"))
    start, user_after = cut(render(turns(one)), one)
    _, asks = cut(render(turns(one), ask=True), one)
    if not asks.startswith(user_after):
        raise Unfit(f"its generation prompt {asks!r} does not begin with what ends a user's turn, {user_after!r}")
    assistant_before = asks[len(user_after) :]
    _, between, assistant_after = cut(render(turns(one, two)), one, two)
    space = " " if between == user_after + assistant_before + " " else ""
    if between != user_after + assistant_before + space:
        raise Unfit(f"an answer begins with {between!r}, but its generation prompt is {asks!r}")
    _, _, next_turn, _, _ = cut(render(turns(one, two, three, four)), one, two, three, four)
    if not next_turn.startswith(assistant_after):
        raise Unfit(f"a turn ends with {assistant_after!r}, but with {next_turn!r} before another one")
    user_before = next_turn[len(assistant_after) :]
    rest = without_end(start, user_before, "the beginning of a chat")
    try:
        head, system_and_user, _ = cut(render(turns(one, system=MARKS["system"])), MARKS["system"], one)
    except (Unfit, chat_template.TemplateError):
        head = None
    begin, system, default = rest, {"before": "", "after": ""}, None
    if head is not None and head.startswith(start) and not system_and_user.endswith(user_before):
        head = None  # Llama 2's system text lies within the user's turn, which no form has
    if head is not None:
        after = without_end(system_and_user, user_before, "the system turn")
        if head.startswith(rest):  # where no system turn is given, none is rendered
            system = {"before": head[len(rest) :], "after": after}
        elif rest.startswith(head) and rest.endswith(after) and len(rest) >= len(head) + len(after):
            bos = template.tokens.get("bos_token", "")
            begin = bos if bos and head.startswith(bos) else ""
            system = {"before": head[len(begin) :], "after": after}
            default = rest[len(head) : len(rest) - len(after)]
        else:
            raise Unfit(f"begins with {head!r} where a system turn is given and with {rest!r} where none is")
    trim = cut(render(turns(f" {one} \n")), one)[0] == start
    form = {"version": 1, "begin": begin,
            "roles": {"system": system, "user": {"before": user_before, "after": user_after},
                      "assistant": {"before": assistant_before, "after": assistant_after}},
            "default_system": default, "trim": trim}  # fmt: skip
    return form, head is not None, space


def compose(form, messages, ask=False, space=""):
    """Returns a chat's text by the form; ask: with the generation prompt after it; space: before an answer."""
    system = [m for m in messages if m["role"] == "system"]
    if not system and form["default_system"] is not None:
        messages = [{"role": "system", "content": form["default_system"]}, *messages]
    text = form["begin"]
    for message in messages:
        role = form["roles"][message["role"]]
        text += role["before"] + (space if message["role"] == "assistant" else "") + (message["content"].strip() if form["trim"] else message["content"]) + role["after"]
    return text + (form["roles"]["assistant"]["before"] if ask else "")


def check(form, template, has_system, space):
    """Raises Unfit where the form makes another text of a dialogue than the template."""
    texts = ["Hello", " a line\nand another ", "ünï 😀", "", "{{ 1 }} <b> & \\n", "five"]
    for system in [None] + (["Be brief.", " with spaces \n"] if has_system else []):
        for count in range(1, len(texts) + 1):
            messages, ask = turns(*texts[:count], system=system), count % 2 == 1
            expected = template.render(messages, add_generation_prompt=ask)[0]
            made = compose(form, messages, ask, space)
            if made != expected:
                at = next((i for i, (a, b) in enumerate(zip(made, expected)) if a != b), min(len(made), len(expected)))
                raise Unfit(f"of {count} turns it makes {expected[max(0, at - 20) : at + 30]!r}, texts around turns {made[max(0, at - 20) : at + 30]!r}")


def stop_tokens(form, files):
    """Returns the texts of the tokens that end an answer: what ends the assistant's turn, and the model's ends of
    text."""
    def parsed(name):
        try:
            return json.loads(files.get(name, b"{}"))
        except (ValueError, RecursionError) as error:
            raise Unfit(f"{name} is not JSON: {error}") from None

    added = {token["id"]: token["content"] for token in parsed("tokenizer.json").get("added_tokens", [])}
    added = added or {256: "<|endoftext|>"}  # a model whose tokens are bytes
    stops = [text for text in sorted(added.values(), key=len, reverse=True) if form["roles"]["assistant"]["after"].startswith(text)][:1]
    for name in ("generation_config.json", "config.json"):
        ids = parsed(name).get("eos_token_id")
        stops += [added[number] for number in (ids if isinstance(ids, list) else [ids]) if number in added]
    eos = chat_template.special_tokens(parsed("tokenizer_config.json")).get("eos_token")
    stops += [eos] if eos in added.values() else []
    if not stops:
        raise Unfit("ends an answer with no special token, and the model has no end of text: an answer would have no end")
    return list(dict.fromkeys(stops))


def read_files(model):
    prefix = os.path.join(model, "") if os.path.isdir(model) else f"{model}_"
    files = {}
    for name in FILES:
        if os.path.isfile(prefix + name):
            with open(prefix + name, "rb") as file:
                files[name] = file.read()
    return prefix, files


def make(model, name=None):
    """Writes the form of a model's chats; returns the file's path. name: a template's file, or a key of BUILTIN;
    None: the model's own template."""
    prefix, files = read_files(model)
    if not files and not os.path.isfile(prefix + "vocabulary.bin"):
        raise Unfit("holds no model, and is no prefix of what prepare_data.py wrote; name a folder with tokenizer.json or vocabulary.bin")
    of_bytes = files.get("tokenizer.json") in (None, byte_tokenizer.files()["tokenizer.json"])
    template = chat_template.of_files(files, model, name or ("plain" if of_bytes else None))
    form, has_system, space = derive(template)
    check(form, template, has_system, space)
    form["stop"] = stop_tokens(form, files)
    path = prefix + "chat_format.json"
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(form, file, indent=1, ensure_ascii=False)
        file.write("\n")
    os.replace(temporary, path)
    return path


def run(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--template", metavar="FILE|NAME", help=f"a template's file, or {' or '.join(chat_template.BUILTIN)} (default: the model's)")
    options = parser.parse_args(arguments)
    try:
        print(make(options.model, options.template))
    except (Unfit, chat_template.TemplateError) as error:
        raise Mistake(f"{options.model}: {error}") from None


def main(arguments=None):
    return run_script("chat_format.py", run, arguments)


if __name__ == "__main__":
    sys.exit(main())
