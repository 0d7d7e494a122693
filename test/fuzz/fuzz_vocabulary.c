// The table of tokens' text: each accepted token is decoded, and nothing that is printed has a control character.
#include "formats/vocabulary.h" // under test
#include "test/fuzz/fuzz.h"     // fuzz_require

static void print_all(const struct vocabulary *vocabulary) {
    char *printed = NULL;
    size_t length = 0;
    FILE *out = open_memstream(&printed, &length);
    fuzz_require(out);
    for (int32_t token = -1; token <= vocabulary->size; token++)
        vocabulary_print(out, vocabulary, &token, 1);
    fclose(out);
    for (size_t i = 0; i < length; i++)
        fuzz_require((unsigned char)printed[i] >= 0x20 || printed[i] == '\n' || printed[i] == '\t');
    free(printed);
}

static const char *fuzz_parse(const unsigned char *data, size_t bytes, struct error_text *error) {
    struct vocabulary vocabulary;
    const char *problem = vocabulary_parse(&vocabulary, data, bytes, "vocabulary", error);
    if (problem)
        return problem;
    fuzz_require(vocabulary.size > 0 && vocabulary.end_of_text >= -1 && vocabulary.end_of_text < vocabulary.size);
    for (int32_t token = 0; token < vocabulary.size; token++) {
        int length;
        const unsigned char *text = vocabulary_decode(&vocabulary, token, &length);
        fuzz_require(text >= data && length >= 0 && text + length <= data + bytes);
    }
    print_all(&vocabulary);
    return NULL;
}
