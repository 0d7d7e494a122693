"""Turns chats and other examples in JSONL into tokens to finetune on, each marked as learned or not.

A line is one of
  {"messages": [{"role": "user", "content": "..."}, ...], "tools": [...]}
  {"prompt": [messages], "completion": [messages], "tools": [...]}
  {"prompt": "...", "completion": "..."}                                          texts, without a template
  {"conversations": [{"from": "human", "value": "..."}, ...], "system": "..."}    ShareGPT
  {"instruction": "...", "input": "...", "output": "...", "system": "...", "history": [["...", "..."], ...]}   Alpaca
  {"text": "..."}                                                                 all tokens are learned
"""

import json

import chat_template

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant", "bot": "assistant",
         "system": "system", "developer": "developer", "function_call": "assistant", "observation": "tool", "tool": "tool"}  # fmt: skip
TRAIN_ON = ["assistant", "last", "all"]


class Refused(Exception):
    """What is wrong with an example, and what was expected."""


class Example:
    """An example: its tokens, whether each token is learned, and how many tokens did not fit (`cut`)."""

    __slots__ = ("tokens", "learned", "cut")

    def __init__(self, tokens, learned):
        self.tokens, self.learned, self.cut = tokens, learned, 0
        if learned:
            learned[0] = False  # nothing predicts an example's first token


# --- Lines ------------------------------------------------------------------------------------------------------------


def text_of(value, name, key, empty=False):
    text = value.get(key, "" if empty else None)
    if text is None and empty:
        return ""
    if not isinstance(text, str):
        raise Refused(f"{name} has {json.dumps(text)[:40]} as '{key}'; expected text")
    return text


def check_messages(messages, name="'messages'"):
    """Returns the messages with roles that templates know and contents that are texts. name: the field, for messages
    to the user."""
    if not isinstance(messages, list) or not messages:
        raise Refused(f"{name} holds no messages; expected a list of objects with 'role' and 'content'")
    checked = []
    for number, message in enumerate(messages, 1):
        where = f"message {number}"
        if not isinstance(message, dict):
            raise Refused(f"{where} is {json.dumps(message)[:40]}; expected an object with 'role' and 'content'")
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise Refused(f"{where} has the role {json.dumps(role)}; expected one of {', '.join(sorted(set(ROLES)))}")
        content = message.get("content")
        if isinstance(content, list):  # parts, of which only text is known here
            parts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
            if any(not isinstance(part, str) for part in parts):
                raise Refused(f"{where} has parts that are no text; expected text")
            content = "".join(parts)
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise Refused(f"{where} has {json.dumps(content)[:40]} as 'content'; expected text")
        checked.append({**message, "role": ROLES[role], "content": content or ""})
    return checked


def sharegpt_messages(value):
    turns = value["conversations"]
    if not isinstance(turns, list):
        raise Refused("'conversations' is no list; expected objects with 'from' and 'value'")
    messages = [{"role": "system", "content": text_of(value, "the line", "system")}] if value.get("system") else []
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, dict):
            raise Refused(f"turn {number} is {json.dumps(turn)[:40]}; expected an object with 'from' and 'value'")
        if "from" not in turn and "role" in turn:
            messages.append(turn)
            continue
        messages.append({"role": turn.get("from"), "content": text_of(turn, f"turn {number}", "value")})
    return check_messages(messages, "'conversations'")


def alpaca_messages(value):
    messages = []
    if text_of(value, "the line", "system", empty=True):
        messages.append({"role": "system", "content": value["system"]})
    history = value.get("history") or []
    if not isinstance(history, list):
        raise Refused("'history' is no list; expected pairs of a question and an answer")
    for number, turn in enumerate(history, 1):
        if not isinstance(turn, list) or len(turn) != 2 or not all(isinstance(text, str) for text in turn):
            raise Refused(f"entry {number} of 'history' is {json.dumps(turn)[:40]}; expected a pair of texts")
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    more = text_of(value, "the line", "input", empty=True)
    question = text_of(value, "the line", "instruction") + (f"\n{more}" if more else "")
    messages += [{"role": "user", "content": question}, {"role": "assistant", "content": text_of(value, "the line", "output")}]
    return check_messages(messages)


def parse_line(line):
    """Parses a line into ("chat", messages, tools or None), ("pair", prompt, completion) or ("text", text)."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Refused(f"not JSON: {error}; expected one object a line") from None
    if not isinstance(value, dict):
        raise Refused(f"holds a {type(value).__name__}; expected an object")
    tools = value.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            raise Refused("'tools' is text that is not JSON; expected a list of tools") from None
    if tools is not None and not isinstance(tools, list):
        raise Refused("'tools' is no list; expected a list of tools")
    if "messages" in value:
        return "chat", check_messages(value["messages"]), tools
    if "conversations" in value:
        return "chat", sharegpt_messages(value), tools
    if "prompt" in value and isinstance(value["prompt"], list):
        return "chat", check_messages(value["prompt"], "'prompt'") + check_messages(value.get("completion"), "'completion'"), tools
    if "prompt" in value:
        return "pair", text_of(value, "the line", "prompt"), text_of(value, "the line", "completion")
    if "instruction" in value:
        return "chat", alpaca_messages(value), tools
    if "text" in value:
        return "text", text_of(value, "the line", "text")
    names = ", ".join(map(repr, value)) or "none"
    raise Refused(f"has the fields {names}; expected messages, conversations, instruction, prompt and completion, or text")


# --- Tokens -----------------------------------------------------------------------------------------------------------


def answer_spans(template, messages, tools, turns):
    """Returns the rendered text and a span [begin, end) for each assistant's turn: from the generation prompt to the
    turn's end. turns: numbers of messages."""
    text, _ = template.render(messages, tools)
    spans = []
    for turn in turns:
        before, _ = template.render(messages[:turn], tools, add_generation_prompt=True)
        after, _ = template.render(messages[: turn + 1], tools)
        if not after.startswith(before):
            raise Refused(
                f"message {turn + 1}: {template.where} does not begin the answer where its generation prompt ends; expected "
                f"{before[-30:]!r} before it; use a template with generation blocks"
            )
        if not text.startswith(after):
            raise Refused(
                f"message {turn + 1}: {template.where} shows this turn in another way once others follow, so that it can't be "
                "learned with them; expected the same text; use --train-on last"
            )
        spans.append((len(before), len(after)))
    return text, spans


def learned_spans(template, messages, tools, train_on):
    """Returns the rendered text, and the spans [begin, end) of its characters that are learned. train_on: one of
    TRAIN_ON."""
    if train_on == "all":
        text, _ = template.render(messages, tools)
        return text, [(0, len(text))]
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise Refused("has no answer of the assistant; expected a message with the role assistant")
    text, spans = template.render(messages, tools)
    if spans and train_on == "last":
        return text, spans[-1:]
    if spans:
        return text, spans
    if train_on == "last":
        if turns[-1] != len(messages) - 1:
            raise Refused("ends with another's turn; expected the assistant's, which --train-on last learns")
        turns = turns[-1:]
    return answer_spans(template, messages, tools, turns)


def mark_tokens(offsets, spans, where):
    """Returns for each token whether it lies in a span. Refuses a token across a span's border: in use, where the
    text ends at the border, the tokens are others."""
    learned, at = [], 0
    for begin, end in offsets:
        while at < len(spans) and spans[at][1] <= begin:
            at += 1
        inside = at < len(spans) and begin >= spans[at][0] and end <= spans[at][1] and end > begin
        if at < len(spans) and begin < spans[at][0] < end:
            raise Refused(f"a token lies across the border before an answer, by {where}; expected the answer to begin a token")
        if at < len(spans) and begin < spans[at][1] < end and begin >= spans[at][0]:
            raise Refused(f"a token lies across the border behind an answer, by {where}; expected the answer to end a token")
        learned.append(inside)
    return learned


class Reader:
    """Makes examples of lines. tokenizer: has encode_with_offsets(text) and end_of_text. template: a ChatTemplate;
    None: chats are refused. length: tokens that an example may have."""

    def __init__(self, tokenizer, template, train_on, length):
        self.tokenizer, self.template, self.train_on, self.length = tokenizer, template, train_on, length

    def example(self, line):
        kind, *parts = parse_line(line)
        example = {"chat": self.chat, "pair": self.pair, "text": self.text}[kind](*parts)
        example.cut = max(0, len(example.tokens) - self.length)
        del example.tokens[self.length :], example.learned[self.length :]
        return example

    def chat(self, messages, tools):
        if self.template is None:
            raise Refused("is a chat, and the tokenizer has no chat template; expected --template")
        try:
            text, spans = learned_spans(self.template, messages, tools, self.train_on)
        except chat_template.TemplateError as error:
            raise Refused(str(error)) from None
        tokens, offsets = self.tokenizer.encode_with_offsets(text)
        return Example(tokens, mark_tokens(offsets, spans, self.template.where))

    def pair(self, prompt, completion):
        before, _ = self.tokenizer.encode_with_offsets(prompt)
        after, _ = self.tokenizer.encode_with_offsets(completion)
        after.append(self.tokenizer.end_of_text)
        return Example(before + after, [self.train_on == "all"] * len(before) + [True] * len(after))

    def text(self, text):
        tokens, _ = self.tokenizer.encode_with_offsets(text)
        tokens.append(self.tokenizer.end_of_text)
        return Example(tokens, [True] * len(tokens))
