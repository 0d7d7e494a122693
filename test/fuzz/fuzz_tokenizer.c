// Any bytes as a tokenizer.json; one that is accepted encodes a short text and decodes it.
#include "runtime/tokenizer.h" // under test

#ifdef __cplusplus
extern "C"
#endif
    int
    LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const char text[] = "it's a  b\n\n123 e\xcc\x81\xcc\xa3 \xe5\xa4\xa9\xff<|endoftext|> \xf0\x9f\x8e\x89";
    struct tokenizer tokenizer;
    struct vocabulary vocabulary;
    struct error_text error;
    int32_t *ids;
    int64_t count;
    if (tokenizer_parse(&tokenizer, data, size, "fuzz", &error))
        return 0;
    if (!tokenizer_encode(&tokenizer, text, sizeof text - 1, true, &ids, &count, &error))
        for (int64_t i = 0; i < count; i++) {
            int length;
            if (!tokenizer_decode(&tokenizer, ids[i], &length) || length < 1)
                abort(); // an id that stands for nothing
        }
    free(ids);
    if (!tokenizer_vocabulary(&tokenizer, &vocabulary, &error))
        vocabulary_close(&vocabulary);
    tokenizer_parse_special(&tokenizer, data, size, "fuzz", &error);
    tokenizer_free(&tokenizer);
    return 0;
}
