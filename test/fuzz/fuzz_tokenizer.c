// A tokenizer.json: an accepted one encodes a short text and decodes it. Any has a digest, or is refused.
#include "formats/tokenizer.h"        // under test
#include "formats/tokenizer_digest.h" // under test
#include "test/fuzz/fuzz.h"           // fuzz_require

static void use(const struct tokenizer *tokenizer) {
    static const char text[] = "it's a  b\n\n123 e\xcc\x81\xcc\xa3 \xe5\xa4\xa9\xff<|endoftext|> \xf0\x9f\x8e\x89";
    struct vocabulary vocabulary;
    struct error_text error;
    int32_t *ids;
    int64_t count;
    if (!tokenizer_encode(tokenizer, text, sizeof text - 1, ENCODE_IN_TEMPLATE, &ids, &count, &error)) {
        for (int64_t i = 0; i < count; i++) {
            int length;
            fuzz_require(tokenizer_decode(tokenizer, ids[i], &length) && length >= 1);
        }
        free(ids);
    }
    if (!tokenizer_vocabulary(tokenizer, &vocabulary, &error))
        vocabulary_close(&vocabulary);
}

static const char *fuzz_parse(const unsigned char *data, size_t bytes, struct error_text *error) {
    struct tokenizer tokenizer;
    struct tokenizer_digest digest;
    struct error_text unused;
    const bool has_digest = !tokenizer_digest_parse(&digest, data, bytes, "tokenizer.json", &unused);
    const char *problem = tokenizer_parse(&tokenizer, data, bytes, "tokenizer.json", error);
    if (problem)
        return problem;
    fuzz_require(has_digest && tokenizer_digest_known(&digest));
    use(&tokenizer);
    tokenizer_parse_special(&tokenizer, data, bytes, "special", &unused);
    tokenizer_free(&tokenizer);
    return NULL;
}
