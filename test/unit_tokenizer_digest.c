// The digest of a tokenizer: the same of one tokenizer that is written in several ways, another where ids differ. And of
// the golden tokenizers what scripts/tokenizer_digest.py computes, which test/test_prepare_data.py compares, too.
#include "formats/tokenizer_digest.h" // under test
#include "test/testing.h"             // cmocka

#include <jansson.h> // json_load_file

static struct tokenizer_digest digest_of(const json_t *root) {
    struct tokenizer_digest digest;
    struct error_text error;
    char *text = json_dumps(root, JSON_INDENT(1));
    const char *problem = tokenizer_digest_parse(&digest, (unsigned char *)text, strlen(text), "tiny", &error);
    if (problem)
        fail_msg("%s", problem);
    free(text);
    return digest;
}
static json_t *read_golden(const char *name) {
    char path[128];
    snprintf(path, sizeof path, "test/golden/tokenizer_%s.json", name);
    json_t *root = json_load_file(path, 0, NULL);
    assert_non_null(root);
    return root;
}

static void assert_digest(const struct tokenizer_digest *digest, const char *expected) {
    char hex[65];
    for (int k = 0; k < 32; k++)
        sprintf(hex + 2 * k, "%02x", k < 16 ? digest->text[k] : digest->added[k - 16]);
    assert_string_equal(hex, expected);
}

static void known_digests(void **state) {
    static const char *const cases[][2] = {
        {"gpt2", "e33ea2b9cc33e07c0b45a7b8e180e7b2953b101b151de9e07e45a3981ed1a34b"},
        {"llama3", "b1cee6cf0668d060b037185db42b090cede22df4e9b5b7f81f369f0b5419bd0e"},
        {"qwen2", "05cd741c529086fc33d80cf2c9a3b0093298af780e0aa53f97fa515b9ee2ba5d"},
        {"llama2", "0b88cec82c86503b0e82945929c75ff5c7e6d5ee65483eb1d292f9a6bb8c43bf"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct tokenizer_digest digest;
        struct error_text error;
        char path[128];
        snprintf(path, sizeof path, "test/golden/tokenizer_%s.json", cases[i][0]);
        assert_null(tokenizer_digest_read(&digest, path, &error));
        assert_digest(&digest, cases[i][1]);
        assert_true(tokenizer_digest_known(&digest));
    }
}

// As scripts/tokenizer_digest.py has it: texts with zeros whole, null merges no sign of BPE.
static void zeros_and_null_merges(void **state) {
    static const char odd[] =
        "{\"model\":{\"vocab\":{\"\":0,\"a\":1},\"merges\":null},"
        "\"added_tokens\":[{\"id\":2,\"content\":\"\\u0000b\"},{\"id\":3,\"content\":\"\\u0000a\"}]}";
    struct tokenizer_digest digest;
    struct error_text error;
    assert_null(tokenizer_digest_parse(&digest, (const unsigned char *)odd, sizeof odd - 1, "odd", &error));
    assert_digest(&digest, "b890d420b6e878e22891c390989ec570dc5382ca566620a2ef5b0b4258ffb857");
}

// The changes of a file: a member of the object at a path, its value as JSON or NULL for none.
struct change {
    const char *name, *path[3], *value;
};
static json_t *changed(const char *name, const struct change *change) {
    json_t *root = read_golden(name), *object = root;
    for (int i = 0; i < 3 && change->path[i]; i++)
        object = *change->path[i] == '0' ? json_array_get(object, 0) : json_object_get(object, change->path[i]);
    assert_non_null(object);
    if (change->value)
        json_object_set_new(object, change->name, json_loads(change->value, JSON_DECODE_ANY, NULL));
    else
        json_object_del(object, change->name);
    return root;
}

static void other_ways_to_write_it(void **state) {
    static const struct change gpt2[] = {{"type", {"model"}, "\"BPE\""},
                                         {"unk_token", {"model"}, "\"<unk>\""},
                                         {"continuing_subword_prefix", {"model"}, "\"\""},
                                         {"dropout", {"model"}, "0.0"},
                                         {"use_regex", {"pre_tokenizer"}, NULL},
                                         {"trim_offsets", {"pre_tokenizer"}, "false"},
                                         {"post_processor", {0}, "{\"type\":\"TemplateProcessing\"}"},
                                         {"truncation", {0}, "{\"max_length\":5}"},
                                         {"normalizer", {0}, NULL},
                                         {"special", {"added_tokens", "0"}, "false"}};
    json_t *root = read_golden("gpt2");
    const struct tokenizer_digest own = digest_of(root);
    for (size_t i = 0; i < sizeof gpt2 / sizeof *gpt2; i++) {
        json_t *other = changed("gpt2", &gpt2[i]);
        const struct tokenizer_digest digest = digest_of(other);
        assert_memory_equal(&digest, &own, sizeof own);
        json_decref(other);
    }
    json_t *merges = json_object_get(json_object_get(root, "model"), "merges");
    for (size_t i = 0; i < json_array_size(merges); i++) { // "a b" as ["a", "b"]
        const char *merge = json_string_value(json_array_get(merges, i)), *space = strchr(merge, ' ');
        json_array_set_new(merges, i, json_pack("[s#s]", merge, (int)(space - merge), space + 1));
    }
    const struct tokenizer_digest pairs = digest_of(root);
    assert_memory_equal(&pairs, &own, sizeof own);
    json_decref(root);
}

static void a_metaspace_that_puts_nothing_before_text(void **state) {
    static const char *const ways[] = {"\"prepend_scheme\":\"never\"", "\"add_prefix_space\":false",
                                       "\"prepend_scheme\":\"never\",\"add_prefix_space\":false",
                                       "\"prepend_scheme\":\"always\",\"add_prefix_space\":false",
                                       "\"prepend_scheme\":\"always\""};
    struct tokenizer_digest digests[5];
    for (int i = 0; i < 5; i++) {
        char metaspace[128];
        snprintf(metaspace, sizeof metaspace, "{\"type\":\"Metaspace\",%s}", ways[i]);
        const struct change change = {"pre_tokenizer", {0}, metaspace};
        json_t *root = changed("llama2", &change);
        digests[i] = digest_of(root);
        json_decref(root);
        assert_int_equal(memcmp(&digests[i], &digests[0], sizeof digests[0]) == 0, i < 4);
    }
}

static void other_ids(void **state) {
    static const struct change text[] = {{"type", {"normalizer"}, "\"NFKC\""},    {"merges", {"model"}, "[]"},
                                         {"ignore_merges", {"model"}, "true"},    {"byte_fallback", {"model"}, "true"},
                                         {"novelty", {"model", "vocab"}, "5000"}, {"pre_tokenizer", {0}, "null"}};
    static const struct change added[] = {{"lstrip", {"added_tokens", "0"}, "true"},
                                          {"normalized", {"added_tokens", "0"}, "true"},
                                          {"id", {"added_tokens", "0"}, "1099"},
                                          {"content", {"added_tokens", "0"}, "\"<|eot|>\""}};
    json_t *root = read_golden("qwen2");
    const struct tokenizer_digest own = digest_of(root);
    json_decref(root);
    for (size_t i = 0; i < sizeof text / sizeof *text + sizeof added / sizeof *added; i++) {
        const bool of_text = i < sizeof text / sizeof *text;
        json_t *other = changed("qwen2", of_text ? &text[i] : &added[i - sizeof text / sizeof *text]);
        const struct tokenizer_digest digest = digest_of(other);
        assert_int_equal(memcmp(digest.text, own.text, sizeof own.text) != 0, of_text);
        assert_int_equal(memcmp(digest.added, own.added, sizeof own.added) != 0, !of_text);
        json_decref(other);
    }
}

static void malformed_files(void **state) {
    static const char *const bad[] = {"", "{", "[]", "{}", "{\"model\":[]}", "\"model\""};
    static const char *const odd[] = {"{\"model\":{}}",
                                      "{\"model\":{\"vocab\":[[\"a\",-1.5]],\"merges\":[7,[1],[\"a\"]]}}",
                                      "{\"model\":{\"vocab\":{\"a\":\"b\"}},\"added_tokens\":[7,{}]}",
                                      "{\"model\":{\"merges\":[\"ab\",\" \"]},\"added_tokens\":{}}"};
    struct tokenizer_digest digest;
    struct error_text error;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_non_null(tokenizer_digest_parse(&digest, (const unsigned char *)bad[i], strlen(bad[i]), "bad", &error));
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++)
        assert_null(tokenizer_digest_parse(&digest, (const unsigned char *)odd[i], strlen(odd[i]), "odd", &error));
}

static void a_header_has_it(void **state) {
    unsigned char header[1024] = {0};
    struct tokenizer_digest digest;
    uint32_t vocabulary;
    tokenizer_digest_of_header(&digest, &vocabulary, header);
    assert_false(tokenizer_digest_known(&digest));
    assert_int_equal(vocabulary, 0);
    for (int i = 0; i < 32; i++)
        header[96 + i] = (unsigned char)(i + 1);
    header[128] = 1;
    header[129] = 1;
    tokenizer_digest_of_header(&digest, &vocabulary, header);
    assert_true(tokenizer_digest_known(&digest));
    assert_int_equal(digest.text[0], 1);
    assert_int_equal(digest.added[0], 17);
    assert_int_equal(vocabulary, 257);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_digests),
        cmocka_unit_test(other_ways_to_write_it),
        cmocka_unit_test(other_ids),
        cmocka_unit_test(malformed_files),
        cmocka_unit_test(a_header_has_it),
        cmocka_unit_test(zeros_and_null_merges),
        cmocka_unit_test(a_metaspace_that_puts_nothing_before_text),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
