// The header of llm.c's checkpoints: its meaning as options, and what is refused.
#include "formats/huggingface.h" // huggingface_setting
#include "formats/llmc.h"        // under test
#include "test/fails.h"          // assert_error
#include "test/testing.h"        // cmocka

static const int32_t LLMC[8] = {20240326, 3, 40, 101, 2, 2, 32, 128};
static const uint64_t LLMC_BYTES = LLMC_MODEL_HEADER + 4 * ((128 + 40 + 2) * 32 + 2 * (12 * 32 * 32 + 13 * 32));

static const char *parse_llmc(struct llmc_header *h, int word, int32_t value, size_t available, uint64_t file_bytes,
                              struct error_text *error) {
    unsigned char *header = (unsigned char *)calloc(1, available ? available : 1);
    int32_t words[8];
    memcpy(words, LLMC, sizeof words);
    if (word >= 0)
        words[word] = value;
    memcpy(header, words, available < sizeof words ? available : sizeof words);
    const char *problem = llmc_parse(h, header, available, file_bytes, "m.bin", error);
    free(header);
    return problem;
}
static void test_llmc_header(void **state) {
    struct llmc_header h;
    struct error_text error;
    struct huggingface_config settings;
    assert_null(parse_llmc(&h, -1, 0, LLMC_MODEL_HEADER, LLMC_BYTES, &error));
    llmc_settings(&settings, &h);
    assert_null(huggingface_check_settings(&settings, "m.bin", &error));
    assert_string_equal(huggingface_setting(&settings, "vocab-size"), "101");
    assert_string_equal(huggingface_setting(&settings, "max-position-embeddings"), "40");
    assert_string_equal(huggingface_setting(&settings, "ffn-hidden-size"), "128");
    assert_string_equal(huggingface_setting(&settings, "num-query-groups"), "2");
    huggingface_free(&settings);
    assert_null(
        parse_llmc(&h, 1, 5, LLMC_MODEL_HEADER, LLMC_MODEL_HEADER + (LLMC_BYTES - LLMC_MODEL_HEADER) / 2, &error));
    assert_true(h.bf16);

    for (size_t available = 0; available < LLMC_MODEL_HEADER; available++)
        assert_error(parse_llmc(&h, -1, 0, available, available, &error), "expected an llm.c checkpoint, whose header");
    assert_error(parse_llmc(&h, 0, 20240520, LLMC_MODEL_HEADER, LLMC_BYTES, &error), "begins with 20240520");
    assert_error(parse_llmc(&h, 1, 4, LLMC_MODEL_HEADER, LLMC_BYTES, &error), "version 4; expected");
    for (int word = 2; word < 8; word++) {
        assert_error(parse_llmc(&h, word, 0, LLMC_MODEL_HEADER, LLMC_BYTES, &error), "is 0; expected 1 to");
        assert_error(parse_llmc(&h, word, -5, LLMC_MODEL_HEADER, LLMC_BYTES, &error), "is -5; expected 1 to");
        assert_error(parse_llmc(&h, word, INT32_MAX, LLMC_MODEL_HEADER, LLMC_BYTES, &error),
                     "is 2147483647; expected 1 to");
    }
    assert_error(parse_llmc(&h, 7, 100, LLMC_MODEL_HEADER, LLMC_BYTES, &error), "a vocabulary of 101 padded to 100");
    assert_error(parse_llmc(&h, 5, 3, LLMC_MODEL_HEADER, LLMC_BYTES, &error), "3 heads and width 32");
    assert_error(parse_llmc(&h, 5, 8, LLMC_MODEL_HEADER, LLMC_BYTES, &error), "a multiple of 8");
    assert_error(parse_llmc(&h, -1, 0, LLMC_MODEL_HEADER, LLMC_BYTES - 1, &error), "it was cut off");
    assert_error(parse_llmc(&h, -1, 0, LLMC_MODEL_HEADER, LLMC_BYTES + 1, &error),
                 "expected 124416 by its header; it is damaged");
    assert_error(parse_llmc(&h, 6, 1 << 25, LLMC_MODEL_HEADER, UINT64_MAX, &error), "by its header");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_llmc_header),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
