#include "formats/llmc.h"

#include <string.h> // memcpy, memset

// The number of elements of all tensors: (Vp + T) C, then 12 C^2 + 13 C in each layer, then 2 C, with Vp the padded
// vocabulary, T the positions, C the channels. A double, since an untrusted header may exceed 64 bits.
static double llmc_elements(const struct llmc_header *h) {
    const double C = h->channels;
    return ((double)h->padded_vocab_size + h->positions + 2) * C + h->layers * (12 * C * C + 13 * C);
}

const char *llmc_parse(struct llmc_header *h, const unsigned char *data, uint64_t available, uint64_t file_bytes,
                       const char *name, struct error_text *error) {
    int32_t words[8];
    memset(h, 0, sizeof *h);
    if (available < LLMC_MODEL_HEADER)
        return error_format(error, "%s: is %llu bytes long; expected an llm.c checkpoint, whose header has %d", name,
                            (unsigned long long)file_bytes, LLMC_MODEL_HEADER);
    memcpy(words, data, sizeof words);
    if (words[0] != 20240326 || (words[1] != 3 && words[1] != 5))
        return error_format(error,
                            "%s: begins with %d and version %d; expected an llm.c checkpoint, 20240326 and version 3 "
                            "(fp32) or 5 (bf16)",
                            name, (int)words[0], (int)words[1]);
    for (int i = 2; i < 8; i++)
        if (words[i] < 1 || words[i] >= HUGGINGFACE_LARGEST)
            return error_format(error, "%s: header word %d is %d; expected 1 to %d", name, i, (int)words[i],
                                HUGGINGFACE_LARGEST - 1);
    h->positions = words[2], h->vocab_size = words[3], h->layers = words[4];
    h->heads = words[5], h->channels = words[6], h->padded_vocab_size = words[7];
    h->bf16 = words[1] == 5;
    if (h->padded_vocab_size < h->vocab_size || h->channels % h->heads != 0 || h->channels / h->heads % 8 != 0)
        return error_format(error,
                            "%s: has a vocabulary of %d padded to %d, %d heads and width %d; expected as many or more, "
                            "and heads of a size that is a multiple of 8",
                            name, h->vocab_size, h->padded_vocab_size, h->heads, h->channels);
    const double expected = LLMC_MODEL_HEADER + llmc_elements(h) * (h->bf16 ? 2 : 4);
    if (expected >= 0x1p53 || (double)file_bytes != expected)
        return error_format(error, "%s: is %llu bytes long; expected %.0f by its header; %s", name,
                            (unsigned long long)file_bytes, expected,
                            (double)file_bytes < expected ? "it was cut off: copy it again" : "it is damaged");
    return NULL;
}

void llmc_settings(struct huggingface_config *h, const struct llmc_header *header) {
    memset(h, 0, sizeof *h);
    h->architecture = ARCHITECTURE_GPT2;
    huggingface_add_setting(h, "vocab-size=%d", header->vocab_size);
    huggingface_add_setting(h, "num-layers=%d", header->layers);
    huggingface_add_setting(h, "hidden-size=%d", header->channels);
    huggingface_add_setting(h, "num-attention-heads=%d", header->heads);
    huggingface_add_setting(h, "num-query-groups=%d", header->heads);
    huggingface_add_setting(h, "kv-channels=%d", header->channels / header->heads);
    huggingface_add_setting(h, "max-position-embeddings=%d", header->positions);
    huggingface_add_setting(h, "ffn-hidden-size=%d", 4 * header->channels);
    huggingface_add_setting(h, "norm-epsilon=1e-5");
    huggingface_add_setting(h, "untie-embeddings-and-output-weights=false");
    huggingface_complete_gpt2(h);
}
