// llm.c's .bin checkpoints of a GPT-2: a header of 256 int32, then the tensors. run/load.cuh reads the tensors.
#pragma once
#include <stdbool.h>   // bool
#include <stdint.h>    // uint64_t
#include <sys/cdefs.h> // __BEGIN_DECLS

#include "formats/huggingface.h"        // struct huggingface_config
#include "runtime/machine/error_text.h" // struct error_text

enum { LLMC_MODEL_HEADER = 1024 }; // bytes

struct llmc_header {
    int positions, vocab_size, layers, heads, channels, padded_vocab_size;
    bool bf16; // the tensors are bf16, else fp32
};

__BEGIN_DECLS
// Reads an llm.c file's header into *h. data: the file's first `available` bytes. file_bytes: the file's length, which
// must be what the header asks for. Returns NULL or what is wrong, with `name`.
const char *llmc_parse(struct llmc_header *h, const unsigned char *data, uint64_t available, uint64_t file_bytes,
                       const char *name, struct error_text *error);
// *h = the options of the model that `header` describes, unchecked, with defaults. huggingface_free frees them.
void llmc_settings(struct huggingface_config *h, const struct llmc_header *header);
__END_DECLS
