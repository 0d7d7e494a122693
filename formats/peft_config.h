// adapter_config.json of a folder of LoRA adapters as peft has it (peft's src/peft/tuners/lora/config.py). A setting
// that changes the result and that this program does not have is refused by its name, as is an unknown setting, unless
// it is off (null, false or empty). Functions with an `error` return NULL or, in `error`, what is wrong.
#pragma once
#include <stdbool.h>   // bool
#include <stddef.h>    // size_t
#include <stdint.h>    // uint64_t
#include <stdio.h>     // FILE
#include <sys/cdefs.h> // __BEGIN_DECLS

#include "runtime/machine/error_text.h" // struct error_text

#define PEFT_CONFIG_NAME "adapter_config.json"
#define PEFT_MODEL_NAME "adapter_model.safetensors"
#define PEFT_ALL_LINEAR "all-linear" // as target_modules: every linear layer but the output layer

struct peft_config {
    int rank;
    float alpha, dropout;
    bool rslora;         // adapters are scaled by alpha / sqrt(rank), else by alpha / rank
    bool fan_in_fan_out; // the base's weights are (in, out), as GPT-2's are; the adapters' shapes do not change
    char *targets;       // PEFT_ALL_LINEAR, or names of modules with commas between them; owned
    char *base;          // name or path of the base model; "": the file does not say; owned
};

__BEGIN_DECLS
// Parses an adapter_config.json's bytes. name: for messages. After success, and only then, call peft_config_free.
const char *peft_config_parse(struct peft_config *c, const unsigned char *data, uint64_t bytes, const char *name,
                              struct error_text *error);
// Reads the adapter_config.json of a folder, as peft_config_parse does.
const char *peft_config_read(struct peft_config *c, const char *folder, struct error_text *error);
void peft_config_free(struct peft_config *c);
// Whether `name` (length bytes), from target_modules, means a module: it is all of `module`, or its end behind a dot.
bool peft_name_matches(const char *name, size_t length, const char *module);
// Writes an adapter_config.json that peft reads as these settings, of which no text is NULL. Errors stay in `out`.
void peft_config_write(FILE *out, const struct peft_config *c);
__END_DECLS
