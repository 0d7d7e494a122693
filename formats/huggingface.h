// Reads and writes config.json of a Hugging Face folder: which architecture a model is, and its options.
// run/tensor_names.cuh does the same for the tensors. Names: transformers' models/*/configuration_*.py. Functions with
// an `error` return NULL when all is well, else what is wrong, in `error`.
//
// An architecture fits a model if the model's options, written in the architecture's config.json, are read back as the
// same options. A model that none fits (LayerNorm with rotary positions and no biases, say) is ARCHITECTURE_OURS: it is
// written under our own names, which only this program reads. An option with an exact equivalent is written as that,
// and huggingface_note says so: GPT-2 has as many KV heads as heads, so fewer are repeated; it has biases everywhere,
// so absent ones are zeros. Several may fit: a Mistral without a window is a Llama, too.
#pragma once
#include <stdbool.h>   // bool
#include <stdint.h>    // uint64_t
#include <stdio.h>     // FILE
#include <sys/cdefs.h> // __BEGIN_DECLS

#include "runtime/machine/error_text.h" // struct error_text

struct config;     // config/config.h
struct option_row; // runtime/text/options.h

// One row per architecture: its model_type and class in config.json. architecture_traits has what else differs.
#define ARCHITECTURE_ROWS(ROW)                                                                                         \
    ROW(OURS, "train_gpt", "TrainGPT")                                                                                 \
    ROW(GPT2, "gpt2", "GPT2LMHeadModel")                                                                               \
    ROW(LLAMA, "llama", "LlamaForCausalLM")                                                                            \
    ROW(QWEN2, "qwen2", "Qwen2ForCausalLM")                                                                            \
    ROW(QWEN3, "qwen3", "Qwen3ForCausalLM")                                                                            \
    ROW(MISTRAL, "mistral", "MistralForCausalLM")                                                                      \
    ROW(MINISTRAL, "ministral", "MinistralForCausalLM")                                                                \
    ROW(CWM, "cwm", "CwmForCausalLM")                                                                                  \
    ROW(SMOLLM3, "smollm3", "SmolLM3ForCausalLM")                                                                      \
    ROW(GRANITE, "granite", "GraniteForCausalLM")                                                                      \
    ROW(OLMO2, "olmo2", "Olmo2ForCausalLM")                                                                            \
    ROW(OLMO3, "olmo3", "Olmo3ForCausalLM")                                                                            \
    ROW(GEMMA, "gemma", "GemmaForCausalLM")                                                                            \
    ROW(GEMMA2, "gemma2", "Gemma2ForCausalLM")                                                                         \
    ROW(GEMMA3, "gemma3_text", "Gemma3ForCausalLM")                                                                    \
    ROW(PHI3, "phi3", "Phi3ForCausalLM")                                                                               \
    ROW(GPT_NEOX, "gpt_neox", "GPTNeoXForCausalLM")
#define ENUM_ROW(id, model_type, class_name) ARCHITECTURE_##id,
enum architecture { ARCHITECTURE_ROWS(ENUM_ROW) };
#undef ENUM_ROW

// The options in a config.json, or in the header of an llm.c checkpoint. Zeroed before its first use.
struct huggingface_config {
    enum architecture architecture;
    int num_settings;
    char **settings; // [num_settings] "num-layers=12", each owned
};
enum { HUGGINGFACE_LARGEST = 1 << 26 }; // the limit of every size in a file; no option takes more

__BEGIN_DECLS
// Returns the architecture as which a model of these resolved options is saved: --checkpoint-architecture if it fits
// (train_gpt always does), else the first of ARCHITECTURE_ROWS to fit, else ARCHITECTURE_OURS. If the architecture has
// no tensor for one of the model's parameters, run/tensor_names.cuh ends the run at its start.
enum architecture architecture_of(const struct config *c);
// Whether config.json of architecture `a` can express these shape options or equivalents. `a` is not ARCHITECTURE_OURS.
bool architecture_fits(enum architecture a, const struct config *c);
const char *architecture_class(enum architecture a);
const char *architecture_model_type(enum architecture a);
// *a = the architecture of a model_type. Returns false, and *a stays, where the model_type is unknown.
bool architecture_find(enum architecture *a, const char *type);
// Returns what the start-up report says about the form of the checkpoints, a constant; "" for nothing.
const char *huggingface_note(const struct config *c);

// Writes config.json as architecture_of(c). end_of_text -1: none. bf16: bf16 tensors, else fp32. Errors stay in `out`.
void huggingface_write_config(FILE *out, const struct config *c, int end_of_text, bool bf16);
// Reads a config.json, which may be malformed. What the engine doesn't support is an error. Shape options that the file
// doesn't mention get their defaults. huggingface_free frees h; after an error h holds nothing.
const char *huggingface_parse_config(struct huggingface_config *h, const unsigned char *data, uint64_t bytes,
                                     const char *name, struct error_text *error);
void huggingface_free(struct huggingface_config *h);

// Adds a setting "OPTION=VALUE", with dashes in the name, of an option not set so far. Out of memory ends the program.
void huggingface_add_setting(struct huggingface_config *h, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
// Returns an option's value, valid until h is freed. option: its name with dashes. NULL if the option is not set.
const char *huggingface_setting(const struct huggingface_config *h, const char *option);
// Adds what all GPT-2s have in common, then defaults for options not set. The file's own settings are added before.
void huggingface_complete_gpt2(struct huggingface_config *h);
// Checks that each setting's option takes its value. huggingface_parse_config has done so already. name: for messages.
const char *huggingface_check_settings(const struct huggingface_config *h, const char *name, struct error_text *error);

// rows (CONFIG_ROWS) = the options in config.json of ARCHITECTURE_OURS, in the file's order. Returns their number.
int huggingface_own_options(const struct option_row **rows);
__END_DECLS
