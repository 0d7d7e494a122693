// Reads a golden file: what PyTorch computes on a small random model. test/golden/README.md describes the file and its
// names.
//
// A malformed file fails the running test with a message; nothing beyond its bytes is read.
#pragma once
#include "test/testing.h" // cmocka, test_alloc

#include <stdbool.h> // bool
#include <string.h>  // memcpy, memcmp, strlen

enum { GOLDEN_MAX_DIMS = 4 };
enum golden_dtype { GOLDEN_FP32, GOLDEN_INT32 };

struct golden_tensor {
    char name[64];
    enum golden_dtype dtype;
    int ndim;
    int64_t dims[GOLDEN_MAX_DIMS];
    int64_t count;       // product of dims
    const float *floats; // NULL for int32
    const int32_t *ints; // NULL for fp32
};

struct golden {
    const char *path;
    unsigned char *bytes; // the whole file
    size_t size, position;
    char *config; // key=value lines, ends with a zero byte
    uint32_t num_tensors;
    struct golden_tensor *tensors;
};

#define golden_check(g, condition, what)                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            print_error("%s: malformed golden file: %s\n", (g)->path, what);                                           \
            _fail(__FILE__, __LINE__);                                                                                 \
        }                                                                                                              \
    } while (0)

// Returns the next `bytes` bytes of the file; fails the test where the file ends before.
static inline const unsigned char *golden_take(struct golden *g, uint64_t bytes) {
    golden_check(g, bytes <= g->size - g->position, "ends too early");
    const unsigned char *taken = g->bytes + g->position;
    g->position += bytes;
    return taken;
}
static inline uint32_t golden_take_u32(struct golden *g) {
    uint32_t value;
    memcpy(&value, golden_take(g, sizeof value), sizeof value);
    return value;
}

static inline void golden_read_tensor(struct golden *g, struct golden_tensor *tensor) {
    const uint32_t length = golden_take_u32(g);
    golden_check(g, length < sizeof tensor->name, "name too long");
    memcpy(tensor->name, golden_take(g, length), length);
    tensor->name[length] = 0;
    const unsigned char dtype = *golden_take(g, 1);
    golden_check(g, dtype <= GOLDEN_INT32, "unknown dtype");
    tensor->dtype = (enum golden_dtype)dtype;
    const uint32_t ndim = golden_take_u32(g);
    golden_check(g, ndim >= 1 && ndim <= GOLDEN_MAX_DIMS, "number of dimensions");
    tensor->ndim = (int)ndim;
    memcpy(tensor->dims, golden_take(g, ndim * sizeof tensor->dims[0]), ndim * sizeof tensor->dims[0]);
    tensor->count = 1;
    for (uint32_t i = 0; i < ndim; i++) {
        golden_check(g, tensor->dims[i] > 0 && tensor->dims[i] <= (int64_t)g->size / tensor->count, "dimension");
        tensor->count *= tensor->dims[i];
    }
    golden_take(g, (8 - g->position % 8) % 8);
    const unsigned char *data = golden_take(g, (uint64_t)tensor->count * 4); // each type has four bytes
    tensor->floats = dtype == GOLDEN_FP32 ? (const float *)(const void *)data : NULL;
    tensor->ints = dtype == GOLDEN_INT32 ? (const int32_t *)(const void *)data : NULL;
}

static inline void golden_load(struct golden *g) {
    FILE *file = fopen(g->path, "rb");
    if (!file) {
        print_error("%s: cannot be opened; tests run in the root of the repository\n", g->path);
        _fail(__FILE__, __LINE__);
    }
    fseek(file, 0, SEEK_END);
    g->size = (size_t)ftell(file);
    rewind(file);
    g->bytes = (unsigned char *)test_alloc(g->size);
    golden_check(g, fread(g->bytes, 1, g->size, file) == g->size, "cannot be read");
    fclose(file);
}

static inline struct golden *golden_open(const char *path) {
    struct golden *g = (struct golden *)calloc(1, sizeof *g);
    assert_non_null(g);
    g->path = path;
    golden_load(g);
    golden_check(g, memcmp(golden_take(g, 8), "GPTGOLD1", 8) == 0, "magic is not GPTGOLD1");
    const uint32_t config_bytes = golden_take_u32(g);
    const unsigned char *config = golden_take(g, config_bytes);
    g->config = (char *)calloc((size_t)config_bytes + 1, 1);
    assert_non_null(g->config);
    memcpy(g->config, config, config_bytes);
    g->num_tensors = golden_take_u32(g);
    golden_check(g, g->num_tensors <= g->size / 16, "number of tensors");
    g->tensors = (struct golden_tensor *)calloc(g->num_tensors + 1u, sizeof *g->tensors);
    assert_non_null(g->tensors);
    for (uint32_t i = 0; i < g->num_tensors; i++)
        golden_read_tensor(g, &g->tensors[i]);
    golden_check(g, g->position == g->size, "bytes after the last tensor");
    return g;
}
static inline void golden_close(struct golden *g) {
    free(g->tensors);
    free(g->config);
    free(g->bytes);
    free(g);
}

static inline const struct golden_tensor *golden_find(const struct golden *g, const char *name) {
    for (uint32_t i = 0; i < g->num_tensors; i++)
        if (strcmp(g->tensors[i].name, name) == 0)
            return &g->tensors[i];
    return NULL;
}
// Returns the tensor of that name, which must be there. golden_find returns NULL where there is none.
static inline const struct golden_tensor *golden_tensor(const struct golden *g, const char *name) {
    const struct golden_tensor *tensor = golden_find(g, name);
    if (!tensor) {
        print_error("%s: no tensor %s\n", g->path, name);
        _fail(__FILE__, __LINE__);
    }
    return tensor;
}
static inline const float *golden_floats(const struct golden *g, const char *name) {
    const struct golden_tensor *tensor = golden_tensor(g, name);
    golden_check(g, tensor->floats, name);
    return tensor->floats;
}
// Returns an fp32 tensor's values (count) in double, which the caller frees.
static inline double *golden_doubles(const struct golden *g, const char *name) {
    const float *floats = golden_floats(g, name);
    const int64_t count = golden_tensor(g, name)->count;
    double *result = test_doubles(count);
    for (int64_t i = 0; i < count; i++)
        result[i] = floats[i];
    return result;
}
static inline const int32_t *golden_ints(const struct golden *g, const char *name) {
    const struct golden_tensor *tensor = golden_tensor(g, name);
    golden_check(g, tensor->ints, name);
    return tensor->ints;
}

// Returns the text after `key=`, which the end of its line ends; NULL where the key is absent.
static inline const char *golden_value(const struct golden *g, const char *key) {
    const size_t length = strlen(key);
    for (const char *line = g->config; *line;) {
        if (strncmp(line, key, length) == 0 && line[length] == '=')
            return line + length + 1;
        const char *end = strchr(line, '\n');
        line = end ? end + 1 : line + strlen(line);
    }
    return NULL;
}
static inline bool golden_is(const struct golden *g, const char *key, const char *expected) {
    const char *value = golden_value(g, key);
    const size_t length = strlen(expected);
    return value && strncmp(value, expected, length) == 0 && (value[length] == '\n' || value[length] == 0);
}
static inline double golden_double(const struct golden *g, const char *key) {
    const char *value = golden_value(g, key);
    golden_check(g, value, key);
    char *end;
    const double number = strtod(value, &end);
    golden_check(g, end != value && (*end == '\n' || *end == 0), key);
    return number;
}
static inline int golden_int(const struct golden *g, const char *key) {
    const double number = golden_double(g, key);
    golden_check(g, number == (int)number, key);
    return (int)number;
}
