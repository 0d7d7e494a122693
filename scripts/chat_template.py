"""Renders chat templates of Hugging Face folders as transformers renders them, by only jinja2.

A folder's template is chat_template.jinja beside the tokenizer; without this file it is `chat_template` of
tokenizer_config.json: a text, or a list of named templates, of which `default` counts unless another is named. A
template sees messages, tools, documents, add_generation_prompt, the special tokens of tokenizer_config.json as
bos_token, eos_token and so on, raise_exception and strftime_now. `{% generation %}` blocks enclose what an assistant
wrote: render() finds them.
"""

import datetime
import json
import os

# This project's templates for tokenizers without one, by name. `plain` needs no special token but the end of a text.
BUILTIN = {
    "plain": (
        "{%- for message in messages -%}"
        "{%- if message.role == 'system' -%}{{ message.content + '\\n\\n' }}"
        "{%- elif message.role == 'user' -%}{{ 'User:\\n' + message.content + '\\n' }}"
        "{%- elif message.role == 'assistant' -%}{{ 'Assistant:\\n' }}"
        "{% generation %}{{ message.content + eos_token }}{% endgeneration %}{{ '\\n' }}"
        "{%- else -%}{{ raise_exception('the roles are system, user and assistant') }}{%- endif -%}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ 'Assistant:\\n' }}{%- endif -%}"
    ),
    "chatml": (
        "{%- for message in messages -%}"
        "{{ '<|im_start|>' + message.role + '\\n' }}"
        "{%- if message.role == 'assistant' -%}"
        "{% generation %}{{ message.content + '<|im_end|>\\n' }}{% endgeneration %}"
        "{%- else -%}{{ message.content + '<|im_end|>\\n' }}{%- endif -%}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
    ),
}
SPECIAL_TOKENS = ["bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token"]
OPENS, CLOSES = "\ue0f0\ue0f1", "\ue0f2\ue0f3"  # of private use; {% generation %} blocks put them around their text


class TemplateError(Exception):
    """Why there is no template, or why it can't be rendered; for the user."""


def environment():
    try:
        import jinja2
        import jinja2.ext
        import jinja2.sandbox
    except ImportError:
        raise TemplateError("chat templates need the Python package 'jinja2': apt install python3-jinja2, or pip install jinja2") from None

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

        def mark(self, caller):
            return OPENS + caller() + CLOSES

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = tojson  # jinja2's own writes < and > as escapes
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return made


class ChatTemplate:
    """text: the template; tokens: the special tokens by name; where: its origin, for messages."""

    def __init__(self, text, tokens, where):
        self.where, self.tokens = where, tokens
        try:
            self.template = environment().from_string(text)
        except TemplateError:
            raise
        except Exception as error:  # a template may make jinja2 raise anything
            raise TemplateError(f"{where}: is no template of jinja2: {error}") from None

    def render_marked(self, messages, tools=None, add_generation_prompt=False):
        """Returns the text, with OPENS and CLOSES around the text of {% generation %} blocks."""
        try:
            return self.template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=add_generation_prompt, **self.tokens
            )
        except Exception as error:  # a template may raise anything
            raise TemplateError(f"{self.where}: {str(error) or type(error).__name__}") from None

    def render(self, messages, tools=None, add_generation_prompt=False):
        """Returns the text, and the spans [begin, end) of its characters that are of {% generation %} blocks."""
        text, spans = "", []
        for number, part in enumerate(self.render_marked(messages, tools, add_generation_prompt).split(OPENS)):
            inside, _, after = part.rpartition(CLOSES) if number else ("", "", part)
            if number:
                spans.append((len(text), len(text) + len(inside)))
            text += inside + after
        return text, spans


def special_tokens(config):
    """Returns the special tokens of a tokenizer_config.json by name; the file has texts, or objects with `content`."""
    tokens = {}
    for name in SPECIAL_TOKENS:
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def of_files(contents, where, name=None):
    """Returns the template of a tokenizer's files, {name: bytes}. where: their place, for messages. name: a file, a
    key of BUILTIN, or one of the tokenizer's templates; None: the tokenizer's default."""
    try:
        config = json.loads(contents.get("tokenizer_config.json", b"{}"))
    except (ValueError, RecursionError) as error:
        raise TemplateError(f"{where}: tokenizer_config.json is not JSON: {error}") from None
    tokens = special_tokens(config)
    if name in BUILTIN:
        return ChatTemplate(BUILTIN[name], {"eos_token": "<|endoftext|>", **tokens}, f"template '{name}'")
    if name and os.path.isfile(name):
        with open(name, encoding="utf-8") as file:
            return ChatTemplate(file.read(), tokens, name)
    if "chat_template.jinja" in contents and not name:
        return ChatTemplate(contents["chat_template.jinja"].decode("utf-8"), tokens, f"{where}: chat_template.jinja")
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get(name or "default")
        if found is None:
            raise TemplateError(f"{where}: has the templates {', '.join(map(str, named))}; name one of them by --template")
    elif name:
        raise TemplateError(f"--template {name}: no such file, and no template of {', '.join(BUILTIN)}")
    if not isinstance(found, str):
        raise TemplateError(
            f"{where}: has no chat template, neither chat_template.jinja nor chat_template in tokenizer_config.json; "
            f"name a file, or one of {', '.join(BUILTIN)}, by --template"
        )
    return ChatTemplate(found, tokens, f"{where}: tokenizer_config.json")
