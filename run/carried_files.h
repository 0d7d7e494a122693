// The files beside a model's parameters that its checkpoints, and a model merged with adapters, get copies of.
#pragma once

static const char *const carried_files[] = {
    "tokenizer.json",          "tokenizer_config.json",  "vocab.json",      "merges.txt",
    "special_tokens_map.json", "added_tokens.json",      "tokenizer.model", "chat_template.jinja",
    "chat_format.json",        "generation_config.json", "vocabulary.bin",
};
enum { CARRIED_FILES = sizeof carried_files / sizeof carried_files[0] };
