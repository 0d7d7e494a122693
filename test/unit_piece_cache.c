// The cache of pieces: it gives back what was put, and a text has the same ids with it as without it.
#include "formats/piece_cache.h" // under test
#include "formats/tokenizer.h"   // tokenizer_encode, tokenizer_encode_cached
#include "test/testing.h"        // cmocka

static void pieces_come_back(void **state) {
    struct piece_cache *cache = piece_cache_create();
    const unsigned char text[32] = " a piece of thirty-two bytes !!";
    const int32_t ids[9] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
    size_t count;
    assert_non_null(cache);
    for (size_t bytes = 1; bytes <= 32; bytes++) {
        const size_t put = bytes % 9 + 1;
        assert_null(piece_cache_find(cache, text, bytes, &count));
        piece_cache_put(cache, text, bytes, ids, put);
        const int32_t *found = piece_cache_find(cache, text, bytes, &count);
        assert_int_equal(found != NULL, bytes <= 30 && put <= 8);
        if (found) {
            assert_int_equal(count, put);
            assert_memory_equal(found, ids, put * sizeof *ids);
        }
    }
    piece_cache_put(cache, text, 0, ids, 1);
    assert_null(piece_cache_find(cache, text, 0, &count));
    piece_cache_free(cache);
    piece_cache_free(NULL);
}

static void ids_are_those_without_the_cache(void **state) {
    static const char *const files[] = {"test/golden/tokenizer_gpt2.json", "test/golden/tokenizer_llama3.json",
                                        "test/golden/tokenizer_qwen2.json", "test/golden/tokenizer_llama2.json"};
    char text[600];
    for (size_t f = 0; f < sizeof files / sizeof *files; f++) {
        struct tokenizer tokenizer;
        struct error_text error;
        struct piece_cache *cache = piece_cache_create();
        assert_null(tokenizer_read(&tokenizer, files[f], &error));
        uint32_t seed = 7;
        for (int n = 0; n < 400; n++) { // words of few letters: most pieces come again
            size_t bytes = 0;
            for (; bytes < sizeof text; bytes++) {
                seed = seed * 1664525 + 1013904223;
                text[bytes] = "eeaton  st\n1\xc3\xa9r."[seed >> 28];
            }
            int32_t *plain, *cached;
            int64_t plain_count, cached_count;
            assert_null(tokenizer_encode(&tokenizer, text, bytes, ENCODE_TEXT, &plain, &plain_count, &error));
            assert_null(
                tokenizer_encode_cached(&tokenizer, cache, text, bytes, ENCODE_TEXT, &cached, &cached_count, &error));
            assert_int_equal(plain_count, cached_count);
            assert_memory_equal(plain, cached, (size_t)plain_count * sizeof *plain);
            free(plain);
            free(cached);
        }
        piece_cache_free(cache);
        tokenizer_free(&tokenizer);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pieces_come_back),
        cmocka_unit_test(ids_are_those_without_the_cache),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
