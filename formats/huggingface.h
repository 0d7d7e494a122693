// config.json of a Hugging Face folder: which architecture a model is, and its options written and read.
// run/tensor_names.cuh does the same for the tensors.
//
// A model that no architecture of Hugging Face can express (LayerNorm with rotary positions, say) is ARCHITECTURE_OURS
// and written under our own names, which only this program reads. Where an architecture can't express an option but has
// an exact equivalent, that is written: GPT-2 has as many KV heads as heads, so fewer are repeated; it has biases
// everywhere, so absent ones are zeros. huggingface_note says so.
//
// Names: transformers' models/{gpt2,llama,qwen2}/configuration_*.py. Functions that return a text return NULL when all
// is well, else what is wrong, in `error` (runtime/machine/error_text.h).
#pragma once
#include <stdbool.h>   // bool
#include <stdint.h>    // uint64_t
#include <stdio.h>     // FILE
#include <sys/cdefs.h> // __BEGIN_DECLS

#include "runtime/machine/error_text.h" // struct error_text

struct config;     // config.h
struct option_row; // runtime/text/options.h

// One row per architecture: its model_type and its class in config.json.
#define ARCHITECTURE_ROWS(ROW)                                                                                         \
    ROW(OURS, "train_gpt", "TrainGPT")                                                                                 \
    ROW(GPT2, "gpt2", "GPT2LMHeadModel")                                                                               \
    ROW(LLAMA, "llama", "LlamaForCausalLM")                                                                            \
    ROW(QWEN2, "qwen2", "Qwen2ForCausalLM")
#define ENUM_ROW(id, model_type, class_name) ARCHITECTURE_##id,
enum architecture { ARCHITECTURE_ROWS(ENUM_ROW) };
#undef ENUM_ROW

// The options in a config.json, or in the header of an llm.c checkpoint.
struct huggingface_config {
    enum architecture architecture;
    int num_settings;
    char settings[24][64]; // "num-layers=12"
};
enum { HUGGINGFACE_LARGEST = 1 << 26 }; // the limit of every size in a file; no option takes more

__BEGIN_DECLS
// The architecture that a model of these options is saved as: ARCHITECTURE_OURS where no other can express it. Where
// this gives another for a model with a parameter that it has no tensor for, run/tensor_names.cuh ends the run at its
// start.
enum architecture architecture_of(const struct config *c);
const char *architecture_class(enum architecture a);
// A note for the start-up report about the form of the checkpoints; "": none.
const char *huggingface_note(const struct config *c);

// Writes a checkpoint's config.json. end_of_text: the token; -1: none. bf16: the type of model.safetensors, else fp32.
void huggingface_write_config(FILE *out, const struct config *c, int end_of_text, bool bf16);
// Reads a config.json, of which nothing is trusted; what the engine does not support is an error. `name`: the file, for
// messages.
const char *huggingface_parse_config(struct huggingface_config *h, const unsigned char *data, uint64_t bytes,
                                     const char *name, struct error_text *error);

// Adds a setting, OPTION=VALUE.
void huggingface_set(struct huggingface_config *h, const char *format, ...) __attribute__((format(printf, 2, 3)));
// Adds the settings that all GPT-2s have in common.
void huggingface_set_gpt2(struct huggingface_config *h);
// Checks that each setting is a value that its option takes; huggingface_parse_config does so itself.
const char *huggingface_check_settings(const struct huggingface_config *h, const char *name, struct error_text *error);

// rows = the options that the config.json of an ARCHITECTURE_OURS holds, in the order of the file.
// `rows` has room for CONFIG_ROWS. Returns their number.
int huggingface_own_options(const struct option_row **rows);
__END_DECLS
