// An .idx file of Megatron-LM, after 8 bytes with the length of the .bin beside it.
#include "formats/token_file.h" // under test
#include "test/fuzz/fuzz.h"     // fuzz_require

static const char *fuzz_parse(const unsigned char *data, size_t bytes, struct error_text *error) {
    struct token_file file;
    memset(&file, 0, sizeof file);
    if (bytes < 8)
        return "no length of the .bin";
    const uint64_t bin_bytes = load_u64(data);
    const char *problem = megatron_index_parse(&file, data + 8, bytes - 8, bin_bytes, "index", error);
    if (problem)
        return problem;
    fuzz_require(file.tokens > 0 && file.tokens * token_type_bytes(file.type) == bin_bytes);
    problem = megatron_documents_parse(&file, data + 8, "index", error);
    fuzz_require(!problem || !file.documents);
    for (uint64_t i = 0; !problem && i < file.num_documents; i++) // they rise from 0, and lie within the .bin
        fuzz_require(file.documents[i] < file.tokens &&
                     (i == 0 ? file.documents[i] == 0 : file.documents[i] > file.documents[i - 1]));
    token_file_close(&file);
    return problem;
}
