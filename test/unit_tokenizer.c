// Tokenizers: the ids of the `tokenizers` package (test/golden/make_tokenizer.py), text that comes back, and files that
// are malformed or ask for what is not supported.
#include "formats/tokenizer.c"      // under test
#include "formats/tokenizer_json.c" // under test: byte_of_character
#include "test/testing.h"           // cmocka, test_random

#include <time.h>   // clock_gettime
#include <unistd.h> // unlink, rmdir

static unsigned char *read_golden(const char *name, size_t *bytes) {
    char path[128];
    struct error_text error;
    snprintf(path, sizeof path, "test/golden/%s", name);
    unsigned char *data;
    uint64_t length;
    const char *problem = read_whole(&data, &length, 1 << 30, path, "a golden file", &error);
    if (problem)
        fail_msg("%s", problem);
    *bytes = (size_t)length;
    return data;
}
static struct tokenizer open_golden(const char *name) {
    struct tokenizer tokenizer;
    struct error_text error;
    char path[128];
    snprintf(path, sizeof path, "test/golden/tokenizer_%s.json", name);
    const char *problem = tokenizer_read(&tokenizer, path, &error);
    if (problem)
        fail_msg("%s", problem);
    return tokenizer;
}
static int64_t encode(const struct tokenizer *tokenizer, const void *text, size_t bytes, bool special, int32_t **ids) {
    struct error_text error;
    int64_t count;
    const char *problem =
        tokenizer_encode(tokenizer, text, bytes, special ? ENCODE_IN_TEMPLATE : ENCODE_TEXT, ids, &count, &error);
    if (problem)
        fail_msg("%s", problem);
    return count;
}
// Returns what the ids stand for, which the caller frees.
static unsigned char *decode(const struct tokenizer *tokenizer, const int32_t *ids, int64_t count, size_t *bytes) {
    unsigned char *text = NULL;
    FILE *out = open_memstream((char **)&text, bytes);
    for (int64_t i = 0; i < count; i++) {
        int length;
        const unsigned char *token = tokenizer_decode(tokenizer, ids[i], &length);
        assert_non_null(token);
        fwrite(token, 1, (size_t)length, out);
    }
    fclose(out);
    return text;
}
static void assert_comes_back(const struct tokenizer *tokenizer, const void *text, size_t bytes) {
    int32_t *ids;
    size_t decoded_bytes;
    const int64_t count = encode(tokenizer, text, bytes, false, &ids);
    unsigned char *decoded = decode(tokenizer, ids, count, &decoded_bytes);
    if (decoded_bytes != bytes || memcmp(decoded, text, bytes) != 0)
        fail_msg("'%.*s' came back as '%.*s'", (int)bytes, (const char *)text, (int)decoded_bytes, (char *)decoded);
    free(decoded);
    free(ids);
}

// ---- the package's ids ----

static void assert_ids(const struct tokenizer *tokenizer, const char *name, const json_t *text, const json_t *expected,
                       bool special) {
    int32_t *ids;
    const int64_t count = encode(tokenizer, json_string_value(text), json_string_length(text), special, &ids);
    bool same = count == (int64_t)json_array_size(expected);
    for (int64_t i = 0; i < count && same; i++)
        same = ids[i] == json_integer_value(json_array_get(expected, (size_t)i));
    if (!same) {
        char *wanted = json_dumps(expected, JSON_COMPACT),
             *quoted = json_dumps(text, JSON_ENCODE_ANY | JSON_ENSURE_ASCII);
        print_error("%s of %s\nexpected %s\ngot ", name, quoted, wanted);
        for (int64_t i = 0; i < count; i++)
            print_error("%d,", (int)ids[i]);
        fail_msg(" ");
    }
    free(ids);
}

// Checks all texts' ids. key: of the expected ids; least: the least number of texts.
static void assert_all_ids(const struct tokenizer *tokenizer, const char *key, bool special, size_t least) {
    size_t bytes;
    json_error_t error;
    unsigned char *data = read_golden("tokenizer_ids.json", &bytes);
    json_t *root = json_loadb((char *)data, bytes, JSON_ALLOW_NUL, &error);
    assert_non_null(root);
    const json_t *texts = json_object_get(root, "texts"), *expected = json_object_get(root, key);
    assert_true(json_array_size(expected) >= least);
    for (size_t i = 0; i < json_array_size(expected); i++)
        assert_ids(tokenizer, key, json_array_get(texts, i), json_array_get(expected, i), special);
    json_decref(root);
    free(data);
}

static void equals_package(const char *name) {
    char key[32];
    struct tokenizer tokenizer = open_golden(name);
    snprintf(key, sizeof key, "%s_special", name);
    assert_all_ids(&tokenizer, name, false, 400);
    assert_all_ids(&tokenizer, key, true, 40);
    tokenizer_free(&tokenizer);
}
static void gpt2_equals_package(void **state) { equals_package("gpt2"); }
static void llama3_equals_package(void **state) { equals_package("llama3"); }
static void qwen2_equals_package(void **state) { equals_package("qwen2"); }

// Returns a copy of `data` with one text in place of another one, which it must have; the caller frees it.
static unsigned char *replaced(const unsigned char *data, size_t *bytes, const char *old, const char *by) {
    const unsigned char *place = (const unsigned char *)memmem(data, *bytes, old, strlen(old));
    if (!place)
        fail_msg("no %s to replace", old);
    const size_t before = (size_t)(place - data), after = *bytes - before - strlen(old);
    unsigned char *copy = (unsigned char *)malloc(*bytes + strlen(by) + 1);
    memcpy(copy, data, before);
    memcpy(copy + before, by, strlen(by));
    memcpy(copy + before + strlen(by), place + strlen(old), after);
    *bytes = before + strlen(by) + after;
    return copy;
}

static void prefix_space_equals_package(void **state) {
    struct tokenizer tokenizer;
    struct error_text error;
    size_t bytes;
    unsigned char *data = read_golden("tokenizer_gpt2.json", &bytes);
    unsigned char *other = replaced(data, &bytes, "\"add_prefix_space\":false", "\"add_prefix_space\":true");
    assert_null(tokenizer_parse(&tokenizer, other, bytes, "gpt2", &error));
    assert_all_ids(&tokenizer, "gpt2_prefix", false, 60);
    tokenizer_free(&tokenizer);
    free(other);
    free(data);
}

// ---- text comes back ----

static void test_any_bytes_come_back(void **state) {
    static const char *const names[] = {"gpt2", "llama3"};
    static const unsigned char likely[] = " a\xe3\x81\x82\xf0\x9f\x8e\x89\xff\n";
    uint64_t random = 7;
    for (size_t n = 0; n < 2; n++) {
        struct tokenizer tokenizer = open_golden(names[n]);
        for (int round = 0; round < 300; round++) {
            unsigned char text[200];
            const size_t bytes = test_random(&random) % sizeof text;
            for (size_t i = 0; i < bytes; i++) {
                const uint64_t r = test_random(&random);
                text[i] = round % 3 == 0   ? (unsigned char)r
                          : round % 3 == 1 ? (unsigned char)(r | 0x80)
                                           : likely[r % 11];
            }
            assert_comes_back(&tokenizer, text, bytes);
        }
        tokenizer_free(&tokenizer);
    }
}

// Checks that malformed bytes become their byte tokens, and that the text around them is encoded as by itself.
static void test_malformed_bytes(void **state) {
    struct tokenizer tokenizer = open_golden("gpt2");
    int32_t *ids, *alone;
    assert_int_equal(encode(&tokenizer, "\xff\xc3 the\xe2\x82", 8, false, &ids), 5);
    assert_int_equal(encode(&tokenizer, " the", 4, false, &alone), 1);
    assert_int_equal(ids[0], tokenizer.tables->byte_token[0xff]);
    assert_int_equal(ids[1], tokenizer.tables->byte_token[0xc3]);
    assert_int_equal(ids[2], alone[0]);
    assert_int_equal(ids[3], tokenizer.tables->byte_token[0xe2]);
    assert_int_equal(ids[4], tokenizer.tables->byte_token[0x82]);
    free(ids);
    free(alone);
    tokenizer_free(&tokenizer);
}

static void test_bytes(void **state) {
    struct tokenizer tokenizer;
    struct error_text error;
    for (int size = 256; size <= 257; size++) {
        int32_t *ids;
        assert_null(tokenizer_of_bytes(&tokenizer, size, &error));
        const int64_t count = size == 257 ? 4 : 16; // the end of text is one token, or bytes like others
        assert_int_equal(encode(&tokenizer, "a\xff<|endoftext|>\0", 16, true, &ids), count);
        assert_int_equal(ids[1], 0xff);
        assert_int_equal(ids[2], size == 257 ? 256 : '<');
        assert_int_equal(ids[count - 1], 0);
        assert_int_equal(tokenizer.end_of_text, size == 257 ? 256 : -1);
        assert_comes_back(&tokenizer, "any\xc3 text", 9);
        free(ids);
        assert_int_equal(encode(&tokenizer, "", 0, true, &ids), 0);
        free(ids);
        tokenizer_free(&tokenizer);
    }
    assert_non_null(strstr(tokenizer_of_bytes(&tokenizer, 258, &error), "258 tokens"));
}

static void test_vocabulary(void **state) {
    static const char text[] = "The caf\xc3\xa9 is \xf0\x9f\x8e\x89 <|endoftext|> new\n";
    struct tokenizer tokenizer = open_golden("gpt2");
    struct vocabulary vocabulary;
    struct error_text error;
    int32_t *ids;
    char *printed = NULL;
    size_t length = 0;
    assert_null(tokenizer_vocabulary(&tokenizer, &vocabulary, &error));
    assert_int_equal(vocabulary.size, tokenizer.size);
    assert_true(vocabulary.end_of_text >= 0 && vocabulary.end_of_text == tokenizer.end_of_text);
    const int64_t count = encode(&tokenizer, text, sizeof text - 1, false, &ids);
    FILE *out = open_memstream(&printed, &length);
    vocabulary_print(out, &vocabulary, ids, (int)count);
    fclose(out);
    assert_string_equal(printed, text);
    free(printed);
    free(ids);
    vocabulary_close(&vocabulary);
    tokenizer_free(&tokenizer);
    assert_null(tokenizer_of_bytes(&tokenizer, 257, &error));
    assert_null(tokenizer_vocabulary(&tokenizer, &vocabulary, &error));
    struct vocabulary bytes = vocabulary_open(NULL, 257);
    assert_memory_equal(vocabulary.data, bytes.data, 24 + 4 * 258 + 256 + 13);
    vocabulary_close(&bytes);
    vocabulary_close(&vocabulary);
    tokenizer_free(&tokenizer);
}

// ---- long text ----

// Checks pieces of 256 KiB, which a quadratic algorithm would work on for an hour. Every letter merges, to several
// lengths.
static void test_long_runs_are_not_quadratic(void **state) {
    enum { BYTES = 1 << 18 };
    static const char *const units[] = {"a", " ", "the", "\n", "\xe5\xa4\xa9", "\xcc\x81\xcc\xa3", "\xff", "=", "1"};
    static const char *const names[] = {"gpt2", "llama3", "qwen2"};
    char *text = (char *)malloc(BYTES);
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (size_t n = 0; n < 3; n++) {
        struct tokenizer tokenizer = open_golden(names[n]);
        for (size_t u = 0; u < sizeof units / sizeof *units; u++) {
            int32_t *ids;
            const size_t unit = strlen(units[u]), bytes = BYTES / unit * unit;
            for (size_t i = 0; i < bytes; i++)
                text[i] = units[u][i % unit];
            assert_true(encode(&tokenizer, text, bytes, false, &ids) > 0);
            free(ids);
        }
        tokenizer_free(&tokenizer);
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
    assert_true(end.tv_sec - begin.tv_sec < 120); // half a second without sanitizers
    free(text);
}

// ---- files ----

// A byte-level tokenizer of ten tokens; U+0120 stands for ' '.
static const char tiny[] =
    "{\"version\":\"1.0\",\"truncation\":null,\"padding\":null,\"added_tokens\":[{\"id\":9,\"content\":\"<|endoftext|>"
    "\","
    "\"single_word\":false,\"lstrip\":false,\"rstrip\":false,\"normalized\":false,\"special\":true}],"
    "\"normalizer\":{\"type\":\"NFC\"},\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\","
    "\"pattern\":{\"Regex\":\" "
    "?\\\\p{L}+|\\\\s+\"},\"behavior\":\"Isolated\",\"invert\":false},{\"type\":\"ByteLevel\","
    "\"add_prefix_space\":false,\"trim_offsets\":true,\"use_regex\":false}]},\"post_processor\":{\"type\":"
    "\"TemplateProcessing\","
    "\"single\":[{\"SpecialToken\":{\"id\":\"<|endoftext|>\",\"type_id\":0}},{\"Sequence\":{\"id\":\"A\",\"type_id\":0}"
    "}],"
    "\"pair\":[],\"special_tokens\":{\"<|endoftext|>\":{\"id\":\"<|endoftext|>\",\"ids\":[9],\"tokens\":[\"<|endoftext|"
    ">\"]}}},"
    "\"decoder\":{\"type\":\"ByteLevel\"},\"model\":{\"type\":\"BPE\",\"dropout\":null,\"unk_token\":null,"
    "\"continuing_subword_prefix\":null,\"end_of_word_suffix\":\"\",\"fuse_unk\":false,\"byte_fallback\":false,"
    "\"ignore_merges\":false,\"vocab\":{\"a\":0,\"b\":1,\"\u0120\":2,\"ab\":3,\"\u0120a\":5},"
    "\"merges\":[\"\u0120 a\",[\"a\",\"b\"]]}}";

// Parses a copy that ends where the bytes end, so that the sanitizer sees a read beyond them.
static const char *parse_exactly(const void *data, size_t bytes, struct tokenizer *tokenizer,
                                 struct error_text *error) {
    unsigned char *copy = (unsigned char *)malloc(bytes ? bytes : 1);
    memcpy(copy, data, bytes);
    const char *problem = tokenizer_parse(tokenizer, copy, bytes, "tiny", error);
    free(copy);
    return problem;
}

static void test_tiny(void **state) {
    struct tokenizer tokenizer;
    struct error_text error;
    int32_t *ids;
    int64_t count;
    int length;
    const char *problem = parse_exactly(tiny, sizeof tiny - 1, &tokenizer, &error);
    if (problem)
        fail_msg("%s", problem);
    assert_int_equal(tokenizer.size, 10);
    assert_int_equal(tokenizer.end_of_text, 9);
    assert_int_equal(encode(&tokenizer, "ab ab", 5, true, &ids), 4); // end of text, ab, ' a', b
    assert_int_equal(ids[0], 9);
    assert_int_equal(ids[1], 3);
    assert_int_equal(ids[2], 5);
    assert_int_equal(ids[3], 1);
    free(ids);
    assert_null(tokenizer_decode(&tokenizer, 4, &length)); // no token has this id
    assert_null(tokenizer_decode(&tokenizer, -1, &length));
    assert_null(tokenizer_decode(&tokenizer, 10, &length));
    problem = tokenizer_encode(&tokenizer, "abc", 3, ENCODE_TEXT, &ids, &count, &error);
    assert_non_null(problem);
    assert_non_null(strstr(problem, "no token for the byte 0x63"));
    assert_null(ids);
    tokenizer_free(&tokenizer);
}

// Checks an added token of white space that strips the white space after it: each space of a run is the token, and the
// run's end is searched for once, not from each space.
static void test_spaces_that_strip_spaces(void **state) {
    enum { SPACES = 300000 };
    size_t json_bytes = sizeof tiny - 1;
    unsigned char *const json = replaced((const unsigned char *)tiny, &json_bytes, "\"added_tokens\":[",
                                         "\"added_tokens\":[{\"id\":8,\"content\":\" \",\"rstrip\":true},");
    char *const text = (char *)malloc(SPACES + 3);
    struct tokenizer tokenizer;
    struct error_text error;
    struct timespec begin, end;
    int32_t *ids;
    const char *problem = parse_exactly(json, json_bytes, &tokenizer, &error);
    if (problem)
        fail_msg("%s", problem);
    memset(text, ' ', SPACES + 3);
    text[0] = text[SPACES + 1] = 'a';
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &begin);
    assert_int_equal(encode(&tokenizer, text, SPACES + 3, false, &ids), SPACES + 3);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &end);
    assert_true(end.tv_sec - begin.tv_sec < 20); // 0.05 s; from each space to the run's end: minutes
    for (int i = 0; i < SPACES + 3; i++)
        assert_int_equal(ids[i], text[i] == 'a' ? 0 : 8);
    free(ids);
    free(json);
    free(text);
    tokenizer_free(&tokenizer);
}

static void test_truncated(void **state) {
    struct tokenizer tokenizer;
    struct error_text error;
    size_t bytes;
    for (size_t count = 0; count < sizeof tiny - 1; count++)
        assert_non_null(parse_exactly(tiny, count, &tokenizer, &error));
    assert_non_null(parse_exactly(tiny, sizeof tiny, &tokenizer, &error)); // with a zero after it, too
    unsigned char *data = read_golden("tokenizer_gpt2.json", &bytes);
    for (size_t count = 0; count + 1 < bytes; count += 397)
        assert_non_null(parse_exactly(data, count, &tokenizer, &error));
    free(data);
}

// Checks every byte changed to several others: refused or not, nothing is read outside, and what is accepted can
// encode.
static void test_damaged(void **state) {
    static const char values[] = {0, '0', '9', '"', '}', ']', ',', ':', 'a', ' ', '\\', (char)0x80, (char)0xff};
    struct tokenizer tokenizer;
    struct error_text error;
    char data[sizeof tiny];
    int accepted = 0;
    for (size_t place = 0; place < sizeof tiny - 1; place++)
        for (size_t v = 0; v < sizeof values; v++) {
            memcpy(data, tiny, sizeof tiny);
            data[place] = values[v];
            if (parse_exactly(data, sizeof tiny - 1, &tokenizer, &error))
                continue;
            int32_t *ids = NULL;
            int64_t count;
            accepted++;
            if (!tokenizer_encode(&tokenizer, "ab a\xff b<|endoftext|>", 20, ENCODE_IN_TEMPLATE, &ids, &count, &error))
                for (int64_t i = 0; i < count; i++)
                    assert_true(ids[i] >= 0 && ids[i] < tokenizer.size);
            free(ids);
            tokenizer_free(&tokenizer);
        }
    assert_true(accepted > 10);
}

// Checks that each byte is written as one character, which stands for no other byte.
static void test_alphabet(void **state) {
    int characters[256] = {0};
    for (uint32_t code = 0; code < 0x400; code++)
        if (byte_of_character(code) >= 0)
            characters[byte_of_character(code)]++;
    for (int byte = 0; byte < 256; byte++)
        assert_int_equal(characters[byte], 1);
    assert_int_equal(byte_of_character(0x120), ' ');
    assert_int_equal(byte_of_character(0x143), 0xad); // the soft hyphen, the last of the bytes that do not print
}

// Features that are not supported, and refused by name.
static const struct {
    const char *old, *by, *words;
} refusals[] = {
    {"\"type\":\"BPE\"", "\"type\":\"WordPiece\"", "model is WordPiece|expected BPE"},
    {"\"type\":\"BPE\"", "\"type\":\"Unigram\"", "model is Unigram"},
    {"\"type\":\"BPE\"", "\"type\":\"BPE\",\"novelty\":1", "model has 'novelty'"},
    {"\"version\":\"1.0\"", "\"version\":\"2.0\"", "version 2.0; expected 1.0"},
    {"\"version\"", "\"novelty\"", "the file has 'novelty'"},
    {"\"version\"", "\"model\"", "duplicate"},
    {"\"dropout\":null", "\"dropout\":0.1", "model.dropout"},
    {"\"fuse_unk\":false", "\"fuse_unk\":true", "model.fuse_unk is true"},
    {"\"fuse_unk\":false", "\"fuse_unk\":3", "model.fuse_unk is not true or false"},
    {"\"byte_fallback\":false", "\"byte_fallback\":true", "model.byte_fallback is true"},
    {"\"continuing_subword_prefix\":null", "\"continuing_subword_prefix\":\"##\"", "model.continuing_subword_prefix"},
    {"\"end_of_word_suffix\":\"\"", "\"end_of_word_suffix\":\"</w>\"", "model.end_of_word_suffix"},
    {"\"ignore_merges\":false", "\"ignore_merges\":\"no\"", "model.ignore_merges is not"},
    {"\"a\":0", "\"a\":-1", "the id of token 'a'"},
    {"\"a\":0", "\"a\":67108864", "the id of token 'a' is not a number from 0 to 67108863"},
    {"\"a\":0", "\"a\":99999999999999999999", "too big integer"},
    {"\"a\":0", "\"a\":0.5", "the id of token 'a'"},
    {"\"a\":0", "\"a\":60000000", "ids up to 60000000, but only 6 tokens"},
    {"\"a\":0", "\"a\":1", "two tokens have the id 1"},
    {"\"a\":0", "\"\":0", "token 0 is empty"},
    {"\"a\":0", "\"a\":0,\"a\":7", "duplicate"},
    {"\"a\":0,", "", "a token that the vocabulary does not have"},
    {"[\"a\",\"b\"]", "[\"b\",\"a\"]", "merge 1, of 'b' and 'a', has a token"},
    {"[\"a\",\"b\"]", "[\"a\",\"b\",\"\"]", "merge 1 is not two tokens"},
    {"[\"a\",\"b\"]", "\"ab\"", "merge 1 is not two tokens"},
    {"[\"a\",\"b\"]", "\"a b b\"", "merge 1 is not two tokens"},
    {"[\"a\",\"b\"]", "7", "merge 1 is not two tokens"},
    {"[\"a\",\"b\"]", "[\"a\",\"\xe5\xa4\xa9\"]", "merge 1, of 'a' and '\xe5\xa4\xa9', has a token"},
    {"\"id\":9,\"content\"", "\"id\":3,\"content\"", "two tokens have the id 3, one of them '<|endoftext|>'"},
    {"\"id\":9,\"content\":\"<|endoftext|>\"", "\"id\":9,\"content\":\"a\"", "the id 9, but the vocabulary gives it 0"},
    {"\"content\":\"<|endoftext|>\"", "\"content\":\"\"", "has 0 bytes"},
    {"\"content\":\"<|endoftext|>\"", "\"content\":7", "added token 0 has no content"},
    {"\"id\":9,\"content\"", "\"id\":\"9\",\"content\"", "the id of token '<|endoftext|>'"},
    {"\"single_word\":false", "\"single_word\":true", "added token '<|endoftext|>'.single_word is true"},
    {"\"lstrip\":false", "\"lstrip\":0", "added token '<|endoftext|>'.lstrip is not"},
    {"\"special\":true", "\"novelty\":true", "added token '<|endoftext|>' has 'novelty'"},
    {"\"content\":\"<|endoftext|>\",\"single_word\":false,\"lstrip\":false,\"rstrip\":false,\"normalized\":false",
     "\"content\":\"e\xcc\x81\",\"normalized\":true", "changes under NFC"},
    {"\"added_tokens\":[", "\"added_tokens\":[{\"id\":8,\"content\":\"<|endoftext|>\",\"normalized\":true},",
     "comes twice"},
    {"\"added_tokens\":[", "\"added_tokens\":[{\"id\":8,\"content\":\"<|endoftext|>\"},", "comes twice"},
    {"\"type\":\"NFC\"", "\"type\":\"NFKC\"", "normalizer is NFKC|expected null or NFC"},
    {"\"type\":\"Sequence\"", "\"type\":\"Metaspace\"", "pre_tokenizer is Metaspace"},
    {"\"pre_tokenizer\":{", "\"pre_tokenizer\":null,\"padding_\":{", "the file has 'padding_'"},
    {"\"type\":\"Split\"", "\"type\":\"Digits\"", "a part of pre_tokenizer is Digits"},
    {"\"type\":\"ByteLevel\",\"add", "\"type\":\"Whitespace\",\"add", "a part of pre_tokenizer is Whitespace"},
    {"\"behavior\":\"Isolated\"", "\"behavior\":\"Removed\"", "Split.behavior is 'Removed'"},
    {"\"invert\":false", "\"invert\":true", "Split.invert is true"},
    {"\"pattern\":{\"Regex\"", "\"pattern\":{\"String\"", "Split.pattern has 'String'"},
    {"\"add_prefix_space\":false", "\"add_prefix_space\":true", "ByteLevel.add_prefix_space after a Split"},
    {"\"type\":\"TemplateProcessing\"", "\"type\":\"BertProcessing\"", "post_processor is BertProcessing"},
    {"\"type\":\"TemplateProcessing\"", "\"type\":\"Sequence\"", "post_processor.processors is not a list"},
    {"\"pretokenizers\":[", "\"pretokenizers\":1,\"n\":[", "pre_tokenizer.pretokenizers is not a list"},
    {"\"ids\":[9]", "\"ids\":[8]", "the template's token '<|endoftext|>' has the id 8, which no token has"},
    {"\"ids\":[9]", "\"ids\":[10]", "has the id 10, which no token has"},
    {"\"ids\":[9]", "\"ids\":[]", "has no ids"},
    {"\"ids\":[9]", "\"ids\":[9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9]", "the template adds more than 16"},
    {"{\"Sequence\":{\"id\":\"A\"", "{\"Sequence\":{\"id\":\"B\"", "TemplateProcessing.single has a part"},
    {",{\"Sequence\":{\"id\":\"A\",\"type_id\":0}}", "", "has the text 0 times"},
    {"\"decoder\":{\"type\":\"ByteLevel\"}", "\"decoder\":{\"type\":\"WordPiece\"}", "decoder is WordPiece"},
    {"\"decoder\":{\"type\":\"ByteLevel\"}", "\"decoder\":null",
     "decoder is null, which is not supported; expected ByteLevel"},
    {"\"model\":{", "\"model\":null,\"m\":{", "the file has 'm'"},
};

static void assert_refused(const char *old, const char *by, const char *words) {
    struct tokenizer tokenizer;
    struct error_text error;
    size_t bytes = sizeof tiny - 1;
    char wanted[256], *rest = NULL;
    unsigned char *data = replaced((const unsigned char *)tiny, &bytes, old, by);
    const char *problem = parse_exactly(data, bytes, &tokenizer, &error);
    if (!problem)
        fail_msg("%s in place of %s was accepted", by, old);
    snprintf(wanted, sizeof wanted, "%s", words);
    for (char *word = strtok_r(wanted, "|", &rest); word; word = *words == '|' ? NULL : strtok_r(NULL, "|", &rest))
        if (!strstr(problem, word) && !strstr(problem, words))
            fail_msg("expected '%s', got: %s", words, problem);
    free(data);
}
static void test_refusals(void **state) {
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++)
        assert_refused(refusals[i].old, refusals[i].by, refusals[i].words);
}

// Checks patterns that Oniguruma and PCRE2 read differently.
static void test_patterns(void **state) {
    static const struct {
        const char *regex, *words;
    } cases[] = {{"", "has 0 bytes"},
                 {"^a", "an anchor"},
                 {"a$", "an anchor"},
                 {"\\\\w+", "an escape but"},
                 {"\\\\bx", "an escape but"},
                 {"\\\\h", "an escape but"},
                 {"[a[b]]", "a class within a class"},
                 {"[a&&b]", "a class within a class"},
                 {"[]a]", "an empty class"},
                 {"(?m:a)", "a group but"},
                 {"(*ACCEPT)", "a group but"},
                 {"(?R)", "a group but"},
                 {"(?i:[a])", "without regard to case"},
                 {"a{2}+", "braces but"},
                 {"a{,3}", "braces but"},
                 {"\\\\p{Han}", "not a general category"},
                 {"\\\\pL", "not a general category"},
                 {"\\\\x41", "\\x without {...}"},
                 {"\\\\x{110000}", "can be used"},
                 {"[\\\\s-z]", "a range that begins or ends"},
                 {"[!-\\\\d]", "a range that begins or ends"},
                 {"(a", "can be used"},
                 {"a\\\\", "an escape but"},
                 {"((((a{200}){200}){200}){200})", "can be used"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_refused(" ?\\\\p{L}+|\\\\s+", cases[i].regex, cases[i].words);
}

static int64_t matches(const char *regex, const char *text) {
    struct split_pattern *pattern;
    struct error_text error;
    size_t begin, end;
    const char *problem = split_pattern_compile(&pattern, regex, strlen(regex), "test", &error);
    if (problem)
        fail_msg("%s", problem);
    struct split_search *search = split_search_create(strlen(text));
    assert_non_null(search);
    const int found = split_pattern_find(pattern, search, (const unsigned char *)text, strlen(text), 0, &begin, &end);
    split_search_free(search);
    split_pattern_free(pattern);
    return found < 0 ? -1 : found ? (int64_t)(end - begin) : 0;
}
static void test_pattern_language(void **state) {
    assert_int_equal(matches("\\s", "\xe1\xa0\x8e"), 0); // U+180E, which only PCRE2 takes for white space
    assert_int_equal(matches("\\S", "\xe1\xa0\x8e"), 3);
    assert_int_equal(matches("[\\s]", "\xe1\xa0\x8e"), 0);
    assert_int_equal(matches("[\\S]", "\xe1\xa0\x8e"), 3);
    assert_int_equal(matches("[^\\s]", " \xe3\x80\x80"), 0);
    assert_int_equal(matches("[\\S]", " \xe3\x80\x80"), 0);
    assert_int_equal(matches("\\p{L}", "\xf0\x91\xbc\x84"), 4); // U+11F04, of Unicode 15
    assert_int_equal(matches("[\\p{Lo}]", "\xf0\x91\xbc\x84"), 4);
    assert_int_equal(matches("\\P{L}", "\xf0\x91\xbc\x84"), 0);
    assert_int_equal(matches("\\p{Lu}", "\xf0\x91\xbc\x84"), 0);
    assert_int_equal(matches("\\d+", "12\xd9\xa3"), 4);
    assert_int_equal(matches("\\D", "1"), 0);
    assert_int_equal(matches("\\u0041\\x{1f389}", "A\xf0\x9f\x8e\x89"), 5);
    assert_int_equal(matches("[a\\-]+", "--a"), 3);
    assert_int_equal(matches("[\\s-]+", "- -"), 3);
    assert_int_equal(matches(".+", "a\r\x0b\n"), 3);
    assert_int_equal(matches("a{2}|(?i:'S)", "'s"), 2);
    assert_int_equal(matches("(a)(b)", "ab"), 2);
}

// Checks that a pattern that takes 2^n steps ends with a message, and soon.
static void test_hostile_pattern(void **state) {
    struct tokenizer tokenizer;
    struct error_text error;
    size_t bytes = sizeof tiny - 1;
    char text[5001];
    int32_t *ids;
    int64_t count;
    memset(text, 'a', sizeof text);
    unsigned char *data = replaced((const unsigned char *)tiny, &bytes, " ?\\\\p{L}+|\\\\s+", "(?:a|aa)+[bc]");
    assert_null(parse_exactly(data, bytes, &tokenizer, &error));
    const char *problem = tokenizer_encode(&tokenizer, text, sizeof text, ENCODE_TEXT, &ids, &count, &error);
    assert_non_null(problem);
    assert_non_null(strstr(problem, "takes too long at byte 0 of 5001"));
    tokenizer_free(&tokenizer);
    free(data);
}

// ---- files beside each other ----

static void write_file(const char *folder, const char *name, const char *text) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}
static const char *read_from(const char *folder, int *end_of_text, struct error_text *error) {
    char shard[256], path[256];
    struct tokenizer tokenizer;
    snprintf(shard, sizeof shard, "%s/c_train_000.bin", folder);
    assert_true(tokenizer_find(shard, path, sizeof path));
    const char *problem = tokenizer_read(&tokenizer, path, error);
    if (problem)
        return problem;
    *end_of_text = tokenizer.end_of_text;
    tokenizer_free(&tokenizer);
    return NULL;
}

static void test_files(void **state) {
    static const char *const names[] = {"c_tokenizer.json", "c_special_tokens_map.json", "c_tokenizer_config.json"};
    char folder[TEST_PATH], path[256];
    struct error_text error;
    int end_of_text = -2;
    assert_non_null(mkdtemp(test_template(folder, "unit_tokenizer")));
    snprintf(path, sizeof path, "%s/c_train_000.bin", folder);
    assert_false(tokenizer_find(path, path, sizeof path));
    write_file(folder, names[0], tiny);
    assert_null(read_from(folder, &end_of_text, &error));
    assert_int_equal(end_of_text, 9);
    write_file(folder, names[1], "{\"eos_token\":{\"content\":\"ab\",\"lstrip\":false}}");
    assert_null(read_from(folder, &end_of_text, &error));
    assert_int_equal(end_of_text, 3);
    write_file(folder, names[2], "{\"bos_token\":null,\"eos_token\":\"b\"}"); // this one counts
    assert_null(read_from(folder, &end_of_text, &error));
    assert_int_equal(end_of_text, 1);
    static const char *const bad[][2] = {{"{\"eos_token\":\"c\"}", "names 'c' as eos_token"},
                                         {"{\"eos_token\":7}", "eos_token is not the text"},
                                         {"[]", "eos_token is not the text"},
                                         {"{", "c_tokenizer_config.json: line 1"}};
    for (size_t i = 0; i < 4; i++) {
        write_file(folder, names[2], bad[i][0]);
        const char *problem = read_from(folder, &end_of_text, &error);
        assert_non_null(problem);
        assert_non_null(strstr(problem, bad[i][1]));
    }
    for (size_t i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        unlink(path);
    }
    rmdir(folder);
    struct tokenizer tokenizer;
    assert_non_null(strstr(tokenizer_read(&tokenizer, "/nonexistent/tokenizer.json", &error), "can't be opened"));
    assert_non_null(strstr(tokenizer_read(&tokenizer, "/tmp", &error), "/tmp: "));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gpt2_equals_package),
        cmocka_unit_test(llama3_equals_package),
        cmocka_unit_test(qwen2_equals_package),
        cmocka_unit_test(prefix_space_equals_package),
        cmocka_unit_test(test_any_bytes_come_back),
        cmocka_unit_test(test_malformed_bytes),
        cmocka_unit_test(test_bytes),
        cmocka_unit_test(test_vocabulary),
        cmocka_unit_test(test_long_runs_are_not_quadratic),
        cmocka_unit_test(test_tiny),
        cmocka_unit_test(test_spaces_that_strip_spaces),
        cmocka_unit_test(test_truncated),
        cmocka_unit_test(test_damaged),
        cmocka_unit_test(test_alphabet),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_patterns),
        cmocka_unit_test(test_pattern_language),
        cmocka_unit_test(test_hostile_pattern),
        cmocka_unit_test(test_files),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
