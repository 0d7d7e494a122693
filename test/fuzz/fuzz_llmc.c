// The header of an llm.c checkpoint, after 8 bytes with the length of the file: what is accepted has the length of its
// tensors, and sets options to values that they take.
#include "formats/llmc.h"   // under test
#include "test/fuzz/fuzz.h" // fuzz_require

static const char *fuzz_parse(const unsigned char *data, size_t bytes, struct error_text *error) {
    struct llmc_header header;
    struct huggingface_config settings;
    unsigned char *copy = (unsigned char *)malloc(bytes + 1);
    fuzz_require(copy);
    const uint64_t file_bytes = bytes < 8 ? 0 : load_u64(data);
    const size_t available = bytes < 8 ? 0 : bytes - 8 < LLMC_MODEL_HEADER ? bytes - 8 : LLMC_MODEL_HEADER;
    memcpy(copy, data + (bytes < 8 ? bytes : 8), available);
    const char *problem = llmc_parse(&header, copy, available, file_bytes, "llmc", error);
    free(copy);
    if (problem)
        return problem;
    const uint64_t width = header.bf16 ? 2 : 4, C = (uint64_t)header.channels, L = (uint64_t)header.layers;
    const uint64_t outside = ((uint64_t)header.padded_vocab_size + (uint64_t)header.positions + 2) * C;
    fuzz_require(file_bytes == LLMC_MODEL_HEADER + width * (outside + L * (12 * C * C + 13 * C)));
    fuzz_require(header.vocab_size >= 1 && header.padded_vocab_size >= header.vocab_size &&
                 header.channels % header.heads == 0);
    llmc_settings(&settings, &header);
    huggingface_check_settings(&settings, "llmc", error);
    huggingface_free(&settings);
    return NULL;
}
