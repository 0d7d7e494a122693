// Byte-fallback BPE: in each of its forms the ids and texts of the `tokenizers` package (test/golden/make_fallback.py),
// text that goes on after other tokens, and files that ask for what is not supported.
#include "formats/tokenizer.h"       // under test
#include "runtime/files/file_read.h" // read_whole
#include "test/testing.h"            // cmocka

#include <jansson.h> // json_loadb
#include <time.h>    // clock_gettime

static json_t *read_golden(const char *name) {
    char path[128];
    struct error_text error;
    json_error_t json_error;
    unsigned char *data;
    uint64_t length;
    snprintf(path, sizeof path, "test/golden/tokenizer_%s.json", name);
    const char *problem = read_whole(&data, &length, 1 << 30, path, "a golden file", &error);
    if (problem)
        fail_msg("%s", problem);
    json_t *root = json_loadb((char *)data, length, JSON_ALLOW_NUL, &json_error);
    assert_non_null(root);
    free(data);
    return root;
}
static const char *parse(struct tokenizer *tokenizer, const json_t *root, struct error_text *error) {
    char *text = json_dumps(root, JSON_COMPACT);
    assert_non_null(text);
    const char *problem = tokenizer_parse(tokenizer, (unsigned char *)text, strlen(text), "tiny", error);
    free(text);
    return problem;
}
// Returns the tokenizer of a form: what the golden file has of it in the place of the base's.
static struct tokenizer open_form(const json_t *base, const json_t *form) {
    struct tokenizer tokenizer;
    struct error_text error;
    json_t *root = json_deep_copy(base);
    json_object_update(root, json_object_get(form, "file"));
    json_object_set(json_object_get(root, "model"), "ignore_merges", json_object_get(form, "ignore_merges"));
    const char *problem = parse(&tokenizer, root, &error);
    if (problem)
        fail_msg("%s", problem);
    json_decref(root);
    return tokenizer;
}
static int64_t encode(const struct tokenizer *tokenizer, const void *text, size_t bytes, enum encode_as as,
                      int32_t **ids) {
    struct error_text error;
    int64_t count;
    const char *problem = tokenizer_encode(tokenizer, text, bytes, as, ids, &count, &error);
    if (problem)
        fail_msg("%s", problem);
    return count;
}
// Returns the printed text of ids, with characters that a terminal is not sent as \xNN; the caller frees it.
static char *print(const struct tokenizer *tokenizer, const int32_t *ids, int64_t count) {
    char *text = NULL;
    size_t bytes;
    struct vocabulary vocabulary;
    struct error_text error;
    assert_null(tokenizer_vocabulary(tokenizer, &vocabulary, &error));
    FILE *out = open_memstream(&text, &bytes);
    vocabulary_print(out, &vocabulary, ids, (int)count);
    fclose(out);
    vocabulary_close(&vocabulary);
    return text;
}

static void assert_comes_back(const struct tokenizer *tokenizer, const int32_t *ids, int64_t count, const char *text,
                              size_t bytes) {
    size_t place = 0;
    for (int64_t i = 0; i < count; i++) {
        int length;
        const unsigned char *token = tokenizer_decode(tokenizer, ids[i], &length);
        assert_non_null(token);
        const int strips = i == 0 && tokenizer_strips_space(tokenizer) && length > 0 && token[0] == ' ';
        assert_in_range(place + (size_t)(length - strips), 0, bytes);
        assert_memory_equal(text + place, token + strips, (size_t)(length - strips));
        place += (size_t)(length - strips);
    }
    assert_int_equal(place, bytes);
}

// Whether the ids are those of a JSON array.
static bool has_ids(const json_t *expected, const int32_t *ids, int64_t count) {
    bool same = count == (int64_t)json_array_size(expected);
    for (int64_t i = 0; i < count && same; i++)
        same = ids[i] == json_integer_value(json_array_get(expected, (size_t)i));
    return same;
}

static void each_form_equals_package(void **state) {
    json_t *base = read_golden("llama2"), *golden = read_golden("llama2_ids");
    const json_t *texts = json_object_get(golden, "texts");
    const char *name;
    json_t *form;
    int forms = 0, compared = 0;
    json_object_foreach (json_object_get(golden, "forms"), name, form) {
        struct tokenizer tokenizer = open_form(base, form);
        const json_t *decoded = json_object_get(form, "decoded");
        for (size_t i = 0; i < json_array_size(texts); i++) {
            const json_t *text = json_array_get(texts, i), *expected = json_array_get(json_object_get(form, "ids"), i);
            int32_t *ids;
            const int64_t count =
                encode(&tokenizer, json_string_value(text), json_string_length(text), ENCODE_TEXT, &ids);
            if (!has_ids(expected, ids, count)) {
                print_error("%s: '%s'\nexpected %s\ngot ", name, json_string_value(text),
                            json_dumps(expected, JSON_COMPACT));
                for (int64_t k = 0; k < count; k++)
                    print_error("%d,", (int)ids[k]);
                fail_msg(" ");
            }
            const json_t *back = json_array_get(decoded, i);
            if (back)
                assert_comes_back(&tokenizer, ids, count, json_string_value(back), json_string_length(back));
            compared += back != NULL;
            free(ids);
        }
        int32_t *rest;
        int length;
        assert_int_equal(encode(&tokenizer, "a", 1, ENCODE_AS_REST, &rest), 1); // without a space before it
        assert_memory_equal(tokenizer_decode(&tokenizer, rest[0], &length), "a", 1);
        free(rest);
        tokenizer_free(&tokenizer);
        forms++;
    }
    assert_int_equal(forms, 10);
    assert_int_equal(compared, 240);
    json_decref(base);
    json_decref(golden);
}

static struct tokenizer open_llama2(void) {
    struct tokenizer tokenizer;
    struct error_text error;
    const char *problem = tokenizer_read(&tokenizer, "test/golden/tokenizer_llama2.json", &error);
    if (problem)
        fail_msg("%s", problem);
    return tokenizer;
}

// Checks that a text's first token has a space before it, which printing leaves out, and that the rest of a text has
// none; after an added token there is one again.
static void spaces_before_text(void **state) {
    struct tokenizer tokenizer = open_llama2();
    int32_t *text, *rest, *whole;
    int length;
    assert_int_equal(tokenizer.end_of_text, 2);
    assert_true(tokenizer_strips_space(&tokenizer));
    assert_int_equal(encode(&tokenizer, "a", 1, ENCODE_TEXT, &text), 1);
    assert_memory_equal(tokenizer_decode(&tokenizer, text[0], &length), " a", 2);
    assert_int_equal(encode(&tokenizer, "a</s>a", 6, ENCODE_AS_REST, &rest), 3);
    assert_memory_equal(tokenizer_decode(&tokenizer, rest[0], &length), "a", 1);
    assert_int_equal(rest[1], 2);
    assert_int_equal(rest[2], text[0]);
    assert_int_equal(encode(&tokenizer, "a", 1, ENCODE_IN_TEMPLATE, &whole), 2);
    assert_int_equal(whole[0], 1);
    assert_int_equal(whole[1], text[0]);
    char *shown = print(&tokenizer, text, 1);
    assert_string_equal(shown, "a");
    free(shown);
    shown = print(&tokenizer, whole, 2);
    assert_string_equal(shown, "<s> a");
    free(shown);
    free(text);
    free(rest);
    free(whole);
    tokenizer_free(&tokenizer);
}

static void malformed_bytes_come_back(void **state) {
    static const unsigned char text[] = "\xff the\xe2\x96 \xf0\x9f\x8e\xc3 x\xed\xa0\x80";
    struct tokenizer tokenizer = open_llama2();
    int32_t *ids;
    const int64_t count = encode(&tokenizer, text, sizeof text - 1, ENCODE_AS_REST, &ids);
    assert_comes_back(&tokenizer, ids, count, (const char *)text, sizeof text - 1);
    free(ids);
    tokenizer_free(&tokenizer);
}

// Checks that text is not cut before a space where a merge goes on to it from a letter.
static void merges_across_spaces(void **state) {
    struct tokenizer tokenizer;
    struct error_text error;
    json_t *root = read_golden("llama2"), *model = json_object_get(root, "model");
    int32_t *ids;
    json_object_set_new(json_object_get(model, "vocab"), "a\u2581", json_integer(2000));
    json_array_insert_new(json_object_get(model, "merges"), 0, json_pack("[ss]", "a", "\u2581"));
    assert_null(parse(&tokenizer, root, &error));
    assert_int_equal(encode(&tokenizer, "a a", 3, ENCODE_TEXT, &ids), 3); // a space, "a ", "a"
    assert_int_equal(ids[1], 2000);
    free(ids);
    json_decref(root);
    tokenizer_free(&tokenizer);
}

// Checks megabytes that no space cuts, whose merges must not take quadratic time.
static void long_words_are_not_quadratic(void **state) {
    enum { BYTES = 1 << 20 };
    static const char *const units[] = {"the", " ", "\xe2\x96\x81", "\xf0\x9f\x8e\x89"};
    struct tokenizer tokenizer = open_llama2();
    char *text = (char *)malloc(BYTES);
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (size_t u = 0; u < sizeof units / sizeof *units; u++) {
        int32_t *ids;
        const size_t unit = strlen(units[u]), bytes = BYTES / unit * unit;
        for (size_t i = 0; i < bytes; i++)
            text[i] = units[u][i % unit];
        assert_true(encode(&tokenizer, text, bytes, ENCODE_TEXT, &ids) > 0);
        free(ids);
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
    assert_true(end.tv_sec - begin.tv_sec < 60); // a second without sanitizers
    free(text);
    tokenizer_free(&tokenizer);
}

// Checks that a file is refused with `words` where it has `by` in the place of `old`.
static void assert_refused(const char *file, const char *old, const char *by, const char *words) {
    struct tokenizer tokenizer;
    struct error_text error;
    const char *place = strstr(file, old);
    char *changed = NULL;
    if (!place)
        fail_msg("no %s to replace", old);
    assert_true(asprintf(&changed, "%.*s%s%s", (int)(place - file), file, by, place + strlen(old)) > 0);
    const char *problem = tokenizer_parse(&tokenizer, (unsigned char *)changed, strlen(changed), "tiny", &error);
    if (!problem)
        fail_msg("%s in place of %s was accepted", by, old);
    if (!strstr(problem, words))
        fail_msg("expected '%s', got: %s", words, problem);
    free(changed);
}
static void others_are_refused(void **state) {
    static const char metaspace[] = "\"pre_tokenizer\":{\"type\":\"Metaspace\",\"replacement\":\"\u2581\",";
    static const struct {
        const char *old, *by, *words;
    } cases[] = {
        {"\"<0x0B>\":", "\"<0x0b>\":", "no token is <0x0B>"},
        {"\"<0xC3>\":", "\"<xC3>\":", "no token is <0xC3>"},
        {"\"type\":\"Prepend\"", "\"type\":\"NFKC\"", "a part of normalizer is NFKC"},
        {"\"prepend\":\"\u2581\"", "\"prepend\":\"_\"", "Prepend.prepend is '_'"},
        {"\"String\":\" \"", "\"Regex\":\" \"", "tiny: Replace.pattern has 'Regex'"},
        {"\"String\":\"\u2581\"", "\"Regex\":\"\u2581\"", "the decoder's Replace.pattern has 'Regex'"},
        {"\"content\":\"\u2581\"}", "\"content\":\"_\"}", "Replace.content is '_'"},
        {"\"pre_tokenizer\":null", "\"pre_tokenizer\":{\"type\":\"ByteLevel\"}", "pre_tokenizer is ByteLevel"},
        {"\"pre_tokenizer\":null", "\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"String\":\"a\"}}",
         "Split.pattern.String is 'a'"},
        {"\"normalizers\":[", "\"normalizers\":0,\"n\":[", "normalizer.normalizers is not a list"},
        {"\"decoder\":{\"type\":\"Sequence\"", "\"decoder\":{\"type\":\"Metaspace\"", "decoder is Metaspace"},
        {"{\"type\":\"Fuse\"},", "", "a part of decoder is Strip"},
        {"{\"type\":\"ByteFallback\"}", "{\"type\":\"CTC\"}", "a part of decoder is CTC"},
        {"\"start\":1", "\"start\":2", "Strip.start"},
        {"\"byte_fallback\":true", "\"byte_fallback\":false", "model.fuse_unk is true"},
    };
    static const struct {
        const char *rest, *words;
    } spaces[] = {{"\"prepend_scheme\":\"last\"}", "prepend_scheme is 'last'"},
                  {"\"prepend_scheme\":\"first\",\"add_prefix_space\":false}", "'first' without add_prefix_space"},
                  {"\"split\":1}", "Metaspace.split is not"},
                  {"\"novelty\":1}", "Metaspace has 'novelty'"}};
    json_t *base = read_golden("llama2");
    char *file = json_dumps(base, JSON_COMPACT), by[256];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_refused(file, cases[i].old, cases[i].by, cases[i].words);
    for (size_t i = 0; i < sizeof spaces / sizeof *spaces; i++) {
        snprintf(by, sizeof by, "%s%s", metaspace, spaces[i].rest);
        assert_refused(file, "\"pre_tokenizer\":null", by, spaces[i].words);
    }
    free(file);
    json_decref(base);
}

// Checks the two ways in which files say that a Metaspace puts nothing before text.
static void no_mark_before_text(void **state) {
    static const char *const ways[] = {"{s:s,s:s,s:s}", "{s:s,s:s,s:s,s:b}"};
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        struct tokenizer tokenizer;
        struct error_text error;
        json_t *root = read_golden("llama2");
        int32_t *ids;
        int length;
        json_object_set_new(root, "normalizer", json_null());
        json_object_set_new(root, "pre_tokenizer",
                            json_pack(ways[i], "type", "Metaspace", "replacement", "\u2581", "prepend_scheme", "never",
                                      "add_prefix_space", 0));
        assert_null(parse(&tokenizer, root, &error));
        assert_int_equal(encode(&tokenizer, "a", 1, ENCODE_TEXT, &ids), 1);
        assert_memory_equal(tokenizer_decode(&tokenizer, ids[0], &length), "a", 1);
        free(ids);
        json_decref(root);
        tokenizer_free(&tokenizer);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_form_equals_package),     cmocka_unit_test(spaces_before_text),
        cmocka_unit_test(malformed_bytes_come_back),    cmocka_unit_test(merges_across_spaces),
        cmocka_unit_test(long_words_are_not_quadratic), cmocka_unit_test(others_are_refused),
        cmocka_unit_test(no_mark_before_text),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
