// safetensors, and the index of sharded models. What the reference implementation wrote is read and written again byte
// for byte; each rule refuses a file that breaks it; no file makes a parser read beyond its bytes.
#include "formats/safetensors.h"           // under test
#include "runtime/files/file_read.h"       // read_whole, load_u64
#include "runtime/machine/float_convert.h" // float_from_f16_bits
#include "test/fails.h"                    // assert_error
#include "test/testing.h"                  // cmocka, test_random
#include <math.h>                          // isnan, isinf

// ---------------------------------------------------------------------------------------------------------------------
// Files in memory

struct bytes {
    unsigned char *data; // owned
    size_t count;
};
static struct bytes file_of(const char *header, uint64_t length, size_t data_bytes) {
    struct bytes file;
    file.count = 8 + strlen(header) + data_bytes;
    file.data = (unsigned char *)calloc(file.count, 1);
    memcpy(file.data, &length, 8);
    memcpy(file.data + 8, header, strlen(header));
    return file;
}
// Parses the first `available` bytes of a file of `file_bytes`, in memory of exactly this size, so that the sanitizer
// sees a read beyond them.
static const char *parse_part(const unsigned char *data, size_t available, size_t file_bytes,
                              struct error_text *error) {
    struct safetensors parsed;
    unsigned char *copy = (unsigned char *)malloc(available ? available : 1);
    memcpy(copy, data, available);
    const char *problem = safetensors_parse(&parsed, copy, available, file_bytes, "m", error);
    free(copy);
    safetensors_close(&parsed); // harmless after a failure, too
    return problem;
}
static const char *parse_length(const char *header, uint64_t length, size_t data_bytes, struct error_text *error) {
    const struct bytes file = file_of(header, length, data_bytes);
    const char *problem = parse_part(file.data, file.count, file.count, error);
    free(file.data);
    return problem;
}
static const char *parse(const char *header, size_t data_bytes, struct error_text *error) {
    return parse_length(header, strlen(header), data_bytes, error);
}
#define TENSOR(name, dtype, shape, begin, end)                                                                         \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":[" shape "],\"data_offsets\":[" begin "," end "]}"

static void read_golden(struct bytes *file) {
    struct error_text error;
    uint64_t count = 0;
    assert_null(read_whole(&file->data, &count, 4096, "test/golden/types.safetensors", "a test's file", &error));
    file->count = count;
}

// ---------------------------------------------------------------------------------------------------------------------
// Files of the reference implementation

static void assert_values(const struct safetensors *file, const char *name, const uint64_t *shape, int dims,
                          const float *expected, int n) {
    struct error_text error;
    const struct safetensors_tensor *tensor;
    unsigned char raw[64];
    float values[8];
    assert_null(safetensors_get(&tensor, file, name, shape, dims, "m", &error));
    assert_null(safetensors_read(file, tensor, 0, tensor->bytes, raw, &error));
    assert_true(safetensors_to_floats(values, raw, tensor->dtype, (uint64_t)n));
    for (int i = 0; i < n; i++)
        assert_int_equal(f32_to_bits(values[i]), f32_to_bits(expected[i]));
}
static void test_reads_the_reference(void **state) {
    static const char *const integers[] = {"BOOL",    "U8",          "I8",          "F8_E5M2", "F8_E4M3",
                                           "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I16",     "U16",
                                           "I32",     "U32",         "C64",         "I64",     "U64"};
    const uint64_t flat[] = {6}, square[] = {2, 3}, cube[] = {1, 3, 2}, empty[] = {0, 3};
    const float exact[] = {0, -0.0f, 1, -2.5f, 65504, 6e-8f}, half[] = {0, -0.0f, 1, -2.5f, 65504, 0x1p-24f};
    const float truncated[] = {0, -0.0f, 1, -2.5f, 65280, f32_from_bits(f32_to_bits(6e-8f) & 0xffff0000u)}, seven = 7;
    struct error_text error;
    struct safetensors file;
    assert_null(safetensors_open(&file, "test/golden/types.safetensors", &error));
    assert_int_equal(file.count, 21);
    assert_string_equal(safetensors_metadata(&file, "format"), "pt");
    assert_null(safetensors_metadata(&file, "other"));
    for (int i = 0; i < 15; i++) {
        char name[16];
        unsigned char raw[8];
        snprintf(name, sizeof name, "t%02d", i);
        const struct safetensors_tensor *tensor = safetensors_find(&file, name);
        assert_non_null(tensor);
        assert_string_equal(safetensors_dtype_name(tensor->dtype), integers[i]);
        assert_int_equal(tensor->bytes, safetensors_dtype_bytes(tensor->dtype));
        assert_null(safetensors_read(&file, tensor, 0, tensor->bytes, raw, &error));
        for (uint64_t j = 0; j < tensor->bytes; j++)
            assert_int_equal(raw[j], i + 1);
        assert_false(safetensors_to_floats(NULL, raw, tensor->dtype, 1));
    }
    assert_values(&file, "z.half", square, 2, half, 6);
    assert_values(&file, "bfloat", flat, 1, truncated, 6);
    assert_values(&file, "single", cube, 3, exact, 6);
    assert_values(&file, "double", flat, 1, exact, 6);
    assert_values(&file, "scalar", NULL, 0, &seven, 1);
    assert_values(&file, "empty", empty, 2, NULL, 0);
    assert_null(safetensors_find(&file, "z.hal"));

    const struct safetensors_tensor *tensor;
    assert_error(safetensors_get(&tensor, &file, "none", flat, 1, "m", &error), "m: has no tensor 'none'");
    assert_error(safetensors_get(&tensor, &file, "z.half", cube, 2, "m", &error),
                 "m: tensor 'z.half' has the shape (2, 3); expected (1, 3)");
    assert_error(safetensors_get(&tensor, &file, "z.half", square, 1, "m", &error), "shape (2, 3); expected (2)");
    assert_error(safetensors_get(&tensor, &file, "scalar", flat, 1, "m", &error), "has the shape (); expected (6)");
    float two[2];
    assert_null(safetensors_get(&tensor, &file, "single", cube, 3, "m", &error));
    assert_null(safetensors_read(&file, tensor, 8, 8, two, &error)); // only a part of it
    assert_true(two[0] == 1 && two[1] == -2.5f);
    assert_error(safetensors_read(&file, tensor, 16, 9, two, &error), "has 24 bytes, of which 9 from 16 on");
    assert_error(safetensors_read(&file, tensor, 16, UINT64_MAX - 8, two, &error), "were asked for");
    assert_error(safetensors_read(&file, tensor, UINT64_MAX, 2, two, &error), "were asked for");
    safetensors_close(&file);
    safetensors_close(&file); // harmless
}

// Checks that the tensors of the file, laid out from another order, give the file's own bytes, header and data.
static void test_writes_as_the_reference(void **state) {
    struct error_text error;
    struct bytes golden;
    struct safetensors file;
    struct safetensors_layout layout;
    struct safetensors_tensor tensors[21];
    const struct safetensors_pair metadata = {"format", "pt"};
    read_golden(&golden);
    assert_null(safetensors_parse(&file, golden.data, golden.count, golden.count, "m", &error));
    for (int i = 0; i < 21; i++) {
        tensors[i] = file.tensors[20 - i];
        tensors[i].begin = tensors[i].bytes = 99; // must be computed
        tensors[i].id = 20 - i;
    }
    assert_null(safetensors_lay_out(&layout, tensors, 21, &metadata, 1, "m", &error));
    assert_int_equal(layout.header_bytes, file.data_begin);
    assert_int_equal(layout.data_bytes, file.data_bytes);
    assert_memory_equal(layout.header, golden.data, layout.header_bytes);
    uint64_t next = 0;
    for (int i = 0; i < 21; i++) { // written in this order, each lies where it was
        assert_int_equal(tensors[i].begin, next);
        assert_int_equal(tensors[i].begin, file.tensors[tensors[i].id].begin);
        next += tensors[i].bytes;
    }
    free(layout.header);
    safetensors_close(&file);
    free(golden.data);
}

static void fill(struct safetensors_tensor *tensor, const char *name, enum safetensors_dtype dtype, uint64_t size) {
    memset(tensor, 0, sizeof *tensor);
    tensor->name = name;
    tensor->dtype = dtype;
    tensor->dims = 2;
    tensor->shape[0] = size;
    tensor->shape[1] = 2;
}
static void test_written_headers(void **state) {
    static const char names[12][16] = {"a",       "ab",       "abc",     "abcd",      "abcde", "abcdef",
                                       "abcdefg", "abcdefgh", "\"\\/\n", "h\xc3\xa9", "",      "__metadata"};
    struct error_text error;
    struct safetensors_layout layout;
    struct safetensors_tensor tensors[3];
    for (int i = 0; i < 12; i++) { // lengths of every remainder by 8, names that need escapes
        struct safetensors file;
        fill(&tensors[0], names[i], SAFETENSORS_BF16, 3);
        fill(&tensors[1], "other", SAFETENSORS_U64, 1);
        assert_null(safetensors_lay_out(&layout, tensors, 2, NULL, 0, "m", &error));
        assert_int_equal(layout.header_bytes % 8, 0);
        assert_int_equal(layout.data_bytes, 28);
        assert_null(safetensors_parse(&file, (unsigned char *)layout.header, layout.header_bytes,
                                      layout.header_bytes + layout.data_bytes, "m", &error));
        assert_int_equal(file.count, 2);
        assert_int_equal(safetensors_find(&file, names[i])->begin, 16);
        assert_null(safetensors_metadata(&file, "format"));
        safetensors_close(&file);
        free(layout.header);
    }
    assert_null(safetensors_lay_out(&layout, tensors, 0, NULL, 0, "m", &error));
    assert_int_equal(layout.header_bytes, 16);
    assert_memory_equal(layout.header, "\x08\0\0\0\0\0\0\0{}      ", 16);
    free(layout.header);

    fill(&tensors[0], "a", SAFETENSORS_BF16, 3);
    fill(&tensors[1], "b", SAFETENSORS_BF16, 3);
    fill(&tensors[2], "a", SAFETENSORS_F32, 3);
    assert_error(safetensors_lay_out(&layout, tensors, 3, NULL, 0, "m", &error), "would hold two of the name 'a'");
    fill(&tensors[0], "__metadata__", SAFETENSORS_BF16, 3);
    assert_error(safetensors_lay_out(&layout, tensors, 1, NULL, 0, "m", &error), "two of the name '__metadata__'");
    fill(&tensors[0], "a", SAFETENSORS_F32, (uint64_t)1 << 61);
    assert_error(safetensors_lay_out(&layout, tensors, 1, NULL, 0, "m", &error),
                 "shape (2305843009213693952, 2) overf");
    fill(&tensors[0], "a", SAFETENSORS_U8, (uint64_t)1 << 61);
    fill(&tensors[1], "b", SAFETENSORS_U8, (uint64_t)1 << 61);
    assert_error(safetensors_lay_out(&layout, tensors, 2, NULL, 0, "m", &error), "'b': shape");
    assert_null(layout.header);
}

// ---------------------------------------------------------------------------------------------------------------------
// Malformed files

static void test_each_rule_refuses(void **state) {
    const struct {
        const char *header;
        size_t data_bytes;
        const char *words;
    } bad[] = {
        {"", 0, "m: its header doesn't begin with '{'"},
        {" {}", 0, "m: its header doesn't begin with '{'"},
        {"[]", 0, "m: its header doesn't begin with '{'"},
        {"{", 0, "m: line 1, column 1: is not valid JSON"},
        {"{}x", 0, "end of file expected"},
        {"{\"a\xff\":1}", 0, "is not valid JSON: unable to decode byte 0xff"},
        {"{" TENSOR("a", "U8", "1", "0", "1") "," TENSOR("a", "U8", "1", "0", "1") "}", 1, "duplicate object key"},
        {"{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "duplicate object key"},
        {"{\"a\":1}", 0, "m: tensor 'a' is an integer; expected an object"},
        {"{\"a\":{\"shape\":[],\"data_offsets\":[0,1]}}", 1, "m: tensor 'a': dtype is absent; expected a string"},
        {"{\"a\":{\"dtype\":1,\"shape\":[],\"data_offsets\":[0,1]}}", 1, "dtype is an integer; expected a string"},
        {"{\"a\":{\"dtype\":\"U8\\u0000\",\"shape\":[],\"data_offsets\":[0,1]}}", 1, "dtype is a string with a NUL"},
        {"{" TENSOR("a", "u8", "1", "0", "1") "}", 1, "m: tensor 'a': dtype 'u8' is unknown"},
        {"{" TENSOR("a", "F4", "2", "0", "1") "}", 1, "m: tensor 'a': dtype F4 has less than a byte an element"},
        {"{" TENSOR("a", "F6_E2M3", "4", "0", "3") "}", 3, "dtype F6_E2M3 has less than a byte"},
        {"{" TENSOR("a", "F6_E3M2", "4", "0", "3") "}", 3, "dtype F6_E3M2 has less than a byte"},
        {"{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", 1, "m: tensor 'a': shape is absent; expected an array"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":1,\"data_offsets\":[0,1]}}", 1, "shape is an integer; expected an array"},
        {"{" TENSOR("a", "U8", "1.0", "0", "1") "}", 1, "a size in shape is a number with a fraction"},
        {"{" TENSOR("a", "U8", "-1", "0", "1") "}", 1, "a size in shape is -1; expected 0 to"},
        {"{" TENSOR("a", "U8", "1,null", "0", "1") "}", 1, "a size in shape is null; expected an integer"},
        {"{" TENSOR("a", "U8", "18446744073709551617", "0", "1") "}", 1, "too big integer"},
        {"{" TENSOR("a", "U8", "1,1,1,1,1,1,1,1,1", "0", "1") "}", 1, "shape has 9 dimensions; expected at most 8"},
        {"{" TENSOR("a", "U8", "4294967296,4294967296", "0", "0") "}", 0, "shape (4294967296, 4294967296) overflows"},
        {"{" TENSOR("a", "U8", "4294967296,4294967297,0", "0", "0") "}", 0, "4294967297, 0) overflows"},
        {"{" TENSOR("a", "F32", "4611686018427387905", "0", "4") "}", 4, "shape (4611686018427387905) overflows"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}", 1, "data_offsets is absent; expected an array"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0]}}", 1, "data_offsets has 1 numbers; expected 2"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1,1]}}", 1, "data_offsets has 3 numbers"},
        {"{" TENSOR("a", "U8", "1", "0.0", "1") "}", 1, "data_offsets[0] is a number with a fraction"},
        {"{" TENSOR("a", "U8", "1", "-1", "0") "}", 1, "data_offsets[0] is -1; expected 0 to"},
        {"{" TENSOR("a", "U8", "1", "2", "1") "}", 1, "data_offsets[1] is 1; expected 2 to"},
        {"{" TENSOR("a", "U8", "1", "0", "\"1\"") "}", 1, "data_offsets[1] is a string; expected an integer"},
        {"{" TENSOR("a", "F32", "2,3", "0", "23") "}", 23,
         "m: tensor 'a': has 23 bytes of data; expected 24 for F32 of shape (2, 3)"},
        {"{" TENSOR("a", "U8", "1", "0", "2") "}", 2, "has 2 bytes of data; expected 1 for U8 of shape (1)"},
        {"{" TENSOR("a", "F32", "", "0", "0") "}", 0, "has 0 bytes of data; expected 4 for F32 of shape ()"},
        {"{" TENSOR("a", "U8", "1", "1", "2") "}", 2,
         "m: tensor 'a' begins at byte 1 of the data; expected 0, the end of the tensor before it: there is a hole"},
        {"{" TENSOR("a", "U8", "1", "0", "1") "," TENSOR("b", "U8", "1", "2", "3") "}", 3,
         "tensor 'b' begins at byte 2 of the data; expected 1, the end of the tensor before it: there is a hole"},
        {"{" TENSOR("b", "U8", "2", "0", "2") "," TENSOR("a", "U8", "1", "1", "2") "}", 2,
         "tensor 'a' begins at byte 1 of the data; expected 2, the end of the tensor before it: there is an overlap"},
        {"{" TENSOR("a", "U8", "2", "0", "2") "," TENSOR("b", "U8", "2", "0", "2") "}", 2, "there is an overlap"},
        {"{" TENSOR("a", "U8", "2", "0", "2") "}", 1,
         "m: tensor 'a' ends at byte 2 of the data, which has only 1; the file was cut off"},
        {"{" TENSOR("a", "U8", "2", "0", "2") "}", 3, "m: has 3 bytes of data; expected 2, the end of the last tensor"},
        {"{}", 1, "m: has 1 bytes of data; expected 0"},
        {"{\"__metadata__\":[]}", 0, "m: __metadata__ is an array; expected an object"},
        {"{\"__metadata__\":null}", 0, "m: __metadata__ is null; expected an object"},
        {"{\"__metadata__\":{\"k\":1}}", 0, "m: __metadata__: k is an integer; expected a string"},
        {"{\"__metadata__\":{\"k\":\"a\\u0000\"}}", 0, "m: __metadata__: k is a string with a NUL byte"},
        {"{\"a\":[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[", 0, "is nested too deep"},
        {"{" TENSOR("\\u001b[2J", "u8", "1", "0", "1") "}", 1, "m: tensor '\\x1b[2J': dtype 'u8' is unknown"},
    };
    struct error_text error;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_error(parse(bad[i].header, bad[i].data_bytes, &error), bad[i].words);
    assert_error(parse_length("{}", 100000001, 0, &error), "m: promises a header of 100000001 bytes; expected at most");
    assert_error(parse_length("{}", 100000000, 0, &error), "bytes, but is 10 bytes long; it was cut off");
    assert_error(parse_length("{}", UINT64_MAX, 0, &error), "m: promises a header of 18446744073709551615 bytes; ");
    assert_error(parse_length("{}", 3, 0, &error), "m: promises a header of 3 bytes, but is 10 bytes long");
    assert_error(parse_part((const unsigned char *)"", 0, 0, &error),
                 "m: is 0 bytes long; expected a safetensors file");
}

static void test_odd_files_that_are_right(void **state) {
    static const char *const good[] = {
        "{}", "{} \n\t", "{\"__metadata__\":{}}",
        // 0 times anything, multiplied from the left as the reference does
        "{" TENSOR("a", "F32", "0,4611686018427387904,8", "0", "0") "}",
        "{" TENSOR("a", "U8", "0", "0", "0") "," TENSOR("b", "U8", "0", "0", "0") "}",
        "{" TENSOR("", "U8", "1,1,1,1,1,1,1,0", "0", "0") "}",
        "{\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0],\"more\":[{}]}}", // ignored, as by the reference
    };
    struct error_text error;
    for (size_t i = 0; i < sizeof good / sizeof *good; i++)
        assert_null(parse(good[i], 0, &error));
    // Empty tensors at the edges of another one, whichever comes first in the header.
    assert_null(parse("{" TENSOR("b", "U8", "0", "0", "0") "," TENSOR("a", "U8", "2", "0",
                                                                      "2") "," TENSOR("c", "U8", "0", "2", "2") "}",
                      2, &error));
    assert_null(parse("{" TENSOR("c", "U8", "0", "2", "2") "," TENSOR("a", "U8", "2", "0",
                                                                      "2") "," TENSOR("b", "U8", "0", "0", "0") "}",
                      2, &error));
}

static void test_truncation_at_every_byte(void **state) {
    struct error_text error;
    struct bytes golden;
    read_golden(&golden);
    assert_null(parse_part(golden.data, golden.count, golden.count, &error));
    const uint64_t header = 8 + load_u64(golden.data);
    for (size_t count = 0; count < golden.count; count++) {
        const char *words = count < 8        ? "expected a safetensors file, which has at least 8"
                            : count < header ? "bytes long; it was cut off"
                                             : "of the data, which has only";
        assert_error(parse_part(golden.data, count, count, &error), words);         // a file that was cut off
        const char *problem = parse_part(golden.data, count, golden.count, &error); // the beginning of a whole file
        if (count < 8)
            assert_error(problem, "bytes long");
        else if (count < header)
            assert_error(problem, "were read");
        else
            assert_null(problem);
    }
    free(golden.data);
}

// Checks damaged bytes: damage may go unnoticed in a name, but what is accepted covers the data and can be found.
static void test_damaged_bytes(void **state) {
    static const unsigned char values[] = {0, 1, '0', '9', '-', '"', '\\', '{', ']', ',', 0x7f, 0x80, 0xff};
    struct error_text error;
    struct bytes golden;
    int refused = 0;
    read_golden(&golden);
    unsigned char *copy = (unsigned char *)malloc(golden.count);
    for (size_t place = 0; place < golden.count; place++)
        for (size_t v = 0; v < sizeof values; v++) {
            struct safetensors file;
            memcpy(copy, golden.data, golden.count);
            copy[place] = values[v];
            if (safetensors_parse(&file, copy, golden.count, golden.count, "m", &error)) {
                refused++;
                continue;
            }
            uint64_t sum = 0;
            for (int i = 0; i < file.count; i++) {
                assert_ptr_equal(safetensors_find(&file, file.tensors[i].name), &file.tensors[i]);
                assert_true(file.tensors[i].begin + file.tensors[i].bytes <= file.data_bytes);
                sum += file.tensors[i].bytes;
            }
            assert_int_equal(sum, file.data_bytes);
            safetensors_close(&file);
        }
    assert_true(refused > (int)sizeof values * 900);
    free(copy);
    free(golden.data);
}

static void write_file(const char *path, const void *data, size_t bytes) {
    FILE *out = fopen(path, "wb");
    assert_non_null(out);
    assert_int_equal(fwrite(data, 1, bytes, out), bytes);
    fclose(out);
}
static void test_files_that_cannot_be_opened(void **state) {
    char path[TEST_PATH];
    struct error_text error;
    struct safetensors file;
    struct safetensors_index index;
    struct bytes golden;
    close(mkstemp(test_template(path, "unit_safetensors")));
    assert_error(safetensors_open(&file, "/nonexistent/m", &error), "/nonexistent/m: can't be opened");
    assert_error(safetensors_open(&file, "/tmp", &error), "/tmp: is a folder; expected a safetensors file");
    assert_error(safetensors_open(&file, path, &error), "is 0 bytes long; expected a safetensors file");
    assert_error(safetensors_index_open(&index, "/nonexistent/m", &error), "can't be opened");
    assert_error(safetensors_index_open(&index, path, &error), "is empty; expected JSON");
    assert_int_equal(truncate(path, 100000001), 0);
    assert_error(safetensors_index_open(&index, path, &error), "expected a safetensors index of at most 100000000");
    read_golden(&golden);
    write_file(path, golden.data, golden.count - 1);
    assert_error(safetensors_open(&file, path, &error), "the file was cut off");
    write_file(path, golden.data, 100);
    assert_error(safetensors_open(&file, path, &error), "is 100 bytes long; it was cut off");
    write_file(path, golden.data, golden.count);
    assert_null(safetensors_open(&file, path, &error));
    assert_int_equal(truncate(path, (off_t)golden.count - 1), 0); // cut while it is open
    unsigned char raw[64];
    const struct safetensors_tensor *last = safetensors_find(&file, "t00");
    assert_error(safetensors_read(&file, last, 0, last->bytes, raw, &error), "don't change it during the run");
    safetensors_close(&file);
    free(golden.data);
    unlink(path);
}

// ---------------------------------------------------------------------------------------------------------------------
// The index

static const char *parse_index_bytes(const char *text, size_t bytes, struct error_text *error) {
    struct safetensors_index index;
    unsigned char *copy = (unsigned char *)malloc(bytes ? bytes : 1);
    memcpy(copy, text, bytes);
    const char *problem = safetensors_index_parse(&index, copy, bytes, "i", error);
    free(copy);
    safetensors_index_close(&index);
    return problem;
}

static void test_index_round_trip(void **state) {
    static const char expected[] = "{\n"
                                   "  \"metadata\": {\n"
                                   "    \"total_size\": 9007199254740993\n" // a number that no double holds
                                   "  },\n"
                                   "  \"weight_map\": {\n"
                                   "    \"a\": \"model-00002-of-00002.safetensors\",\n"
                                   "    \"b.c\": \"model-00001-of-00002.safetensors\",\n"
                                   "    \"b.d\": \"model-00002-of-00002.safetensors\"\n"
                                   "  }\n"
                                   "}\n";
    static const char *const files[] = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"};
    struct safetensors_index_entry entries[] = {{"b.d", files[1]}, {"b.c", files[0]}, {"a", files[1]}};
    struct safetensors_index index;
    struct error_text error;
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    safetensors_index_write(out, entries, 3, 9007199254740993u);
    fclose(out);
    assert_string_equal(text, expected);
    for (size_t count = 0; count < bytes - 2; count++) // less its closing brace
        assert_non_null(parse_index_bytes(text, count, &error));
    assert_null(safetensors_index_parse(&index, (unsigned char *)text, bytes, "i", &error));
    assert_int_equal(index.count, 3);
    assert_int_equal(index.file_count, 2);
    assert_string_equal(index.files[0], files[0]);
    assert_string_equal(index.files[1], files[1]);
    assert_int_equal(index.total_bytes, 9007199254740993);
    assert_string_equal(safetensors_index_find(&index, "a"), files[1]);
    assert_string_equal(safetensors_index_find(&index, "b.c"), files[0]);
    assert_string_equal(safetensors_index_find(&index, "b.d"), files[1]);
    assert_null(safetensors_index_find(&index, "b"));
    safetensors_index_close(&index);
    safetensors_index_close(&index); // harmless
    free(text);
}

static void test_index_rules(void **state) {
    const struct {
        const char *text, *words;
    } bad[] = {
        {"", "i: is empty; expected JSON"},
        {"[]", "i: is an array; expected an object"},
        {"{}", "i: weight_map is absent; expected an object"},
        {"{\"weight_map\":[]}", "i: weight_map is an array; expected an object"},
        {"{\"weight_map\":{}}", "i: weight_map is empty; expected the file of each tensor"},
        {"{\"weight_map\":{\"a\":1}}", "i: weight_map: a is an integer; expected a string"},
        {"{\"weight_map\":{\"a\":\"f\",\"a\":\"f\"}}", "duplicate object key"},
        {"{\"weight_map\":{\"a\":\"\"}}", "i: weight_map: a is in ''; expected the name of a file beside the index"},
        {"{\"weight_map\":{\"a\":\"/etc/passwd\"}}", "a is in '/etc/passwd'; expected the name of a file beside"},
        {"{\"weight_map\":{\"a\":\"b/c\"}}", "a is in 'b/c'; expected"},
        {"{\"weight_map\":{\"a\":\"b\\\\c\"}}", "a is in 'b\\c'; expected"},
        {"{\"weight_map\":{\"a\":\"..\"}}", "a is in '..'; expected"},
        {"{\"weight_map\":{\"b\":\"f\",\"a\":\"x..y\"}}", "a is in 'x..y'; expected"},
        {"{\"weight_map\":{\"a\":\"b\\u0000c\"}}", "a is a string with a NUL byte"},
        {"{\"weight_map\":{\"a\":\"f\"},\"metadata\":1}", "i: metadata is an integer; expected an object"},
        {"{\"weight_map\":{\"a\":\"f\"},\"metadata\":{\"total_size\":\"1\"}}", "i: total_size is a string; expected"},
        {"{\"weight_map\":{\"a\":\"f\"},\"metadata\":{\"total_size\":-1}}", "i: total_size is -1; expected 0 to"},
        {"{\"weight_map\":{\"a\":\"f\"},\"metadata\":{\"total_size\":1e30}}", "i: total_size is 1e+30; expected 0 to"},
    };
    struct error_text error;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_error(parse_index_bytes(bad[i].text, strlen(bad[i].text), &error), bad[i].words);
    static const char *const good[] = {"{\"weight_map\":{\"a\":\"f\"}}",
                                       "{\"metadata\":{},\"weight_map\":{\"a\":\"f.x\"}}",
                                       "{\"metadata\":{\"total_size\":10.5},\"weight_map\":{\"a\":\"f\"}}",
                                       "{\"metadata\":null,\"weight_map\":{\"a\":\".f\"},\"more\":1}"};
    for (size_t i = 0; i < sizeof good / sizeof *good; i++)
        assert_null(parse_index_bytes(good[i], strlen(good[i]), &error));
    static const char unsorted[] = "{\"weight_map\":{\"c\":\"x\",\"a\":\"y\",\"d\":\"x\",\"b\":\"w\"}}";
    struct safetensors_index index;
    assert_null(safetensors_index_parse(&index, (const unsigned char *)unsorted, strlen(unsorted), "i", &error));
    for (const char *name = "abcd"; *name; name++) {
        const char tensor[] = {*name, '\0'};
        assert_string_equal(safetensors_index_find(&index, tensor), *name == 'a' ? "y" : *name == 'b' ? "w" : "x");
    }
    assert_int_equal(index.file_count, 3);
    safetensors_index_close(&index);
}

// ---------------------------------------------------------------------------------------------------------------------
// Conversions: every half and every bf16, against arithmetic in double

static void test_halves(void **state) {
    for (uint32_t bits = 0; bits < 0x10000; bits++) {
        const int sign = bits & 0x8000 ? -1 : 1, exponent = (int)(bits >> 10 & 31), fraction = (int)(bits & 1023);
        const float value = float_from_f16_bits((uint16_t)bits);
        assert_int_equal(f32_to_bits(value) >> 31, bits >> 15);
        if (exponent == 31 && fraction)
            assert_true(isnan(value) && (f32_to_bits(value) >> 13 & 1023) == (uint32_t)fraction);
        else if (exponent == 31)
            assert_true(isinf(value));
        else
            assert_true(value == sign * ldexp(exponent ? 1024 + fraction : fraction, (exponent ? exponent : 1) - 25));
    }
}
static void test_bf16(void **state) {
    uint64_t random = 3;
    for (uint32_t bits = 0; bits < 0x10000; bits++) { // there and back
        const uint16_t back = float_to_bf16_bits(float_from_bf16_bits((uint16_t)bits));
        const bool nan = (bits & 0x7fff) > 0x7f80;
        assert_int_equal(back, nan ? bits | 0x40 : bits);
    }
    for (int i = 0; i < 200000; i++) { // to the nearer neighbor, a tie to the even one
        const uint32_t low = i % 4 ? (uint32_t)test_random(&random) & 0xffff : 0x8000;
        const uint32_t high = (uint32_t)test_random(&random) % 0x7f80 | (i & 1 ? 0x8000 : 0);
        const uint32_t expected = low > 0x8000 || (low == 0x8000 && high & 1) ? high + 1 : high;
        assert_int_equal(float_to_bf16_bits(f32_from_bits(high << 16 | low)), expected);
    }
    assert_int_equal(float_to_bf16_bits(f32_from_bits(0x7f7fffff)), 0x7f80); // beyond the largest: infinity
    // a NaN whose bits are all in the lower half
    assert_int_equal(float_to_bf16_bits(f32_from_bits(0x7f800001)), 0x7fc0);
    assert_int_equal(float_to_bf16_bits(f32_from_bits(0xffffffff)), 0xffff); // it would carry into the sign
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reads_the_reference),
        cmocka_unit_test(test_writes_as_the_reference),
        cmocka_unit_test(test_written_headers),
        cmocka_unit_test(test_each_rule_refuses),
        cmocka_unit_test(test_odd_files_that_are_right),
        cmocka_unit_test(test_truncation_at_every_byte),
        cmocka_unit_test(test_damaged_bytes),
        cmocka_unit_test(test_files_that_cannot_be_opened),
        cmocka_unit_test(test_index_round_trip),
        cmocka_unit_test(test_index_rules),
        cmocka_unit_test(test_halves),
        cmocka_unit_test(test_bf16),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
