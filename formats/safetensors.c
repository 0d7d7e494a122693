#include "formats/safetensors.h"
#include "runtime/files/file_read.h"       // open_regular, read_exactly, read_whole
#include "runtime/machine/float_convert.h" // float_from_f16_bits
#include "runtime/machine/text_add.h"      // text_add
#include "runtime/text/json.h"             // json_quote, json_writer
#include "runtime/text/json_parse.h"       // json_parse_object, json_get_*
#include <inttypes.h>                      // PRIu64
#include <stdlib.h>                        // malloc, free, qsort, bsearch
#include <string.h>                        // strcmp, memcpy
#include <unistd.h>                        // close

enum { SAFETENSORS_MAX_HEADER_BYTES = 100000000 };

// The types in the reference implementation's order. A file has the last row's tensors first, so that each is aligned.
static const struct safetensors_dtype_row {
    enum safetensors_dtype dtype;
    const char *name;
    int bytes;
} safetensors_dtypes[] = {
    {SAFETENSORS_BOOL, "BOOL", 1},
    {SAFETENSORS_U8, "U8", 1},
    {SAFETENSORS_I8, "I8", 1},
    {SAFETENSORS_F8_E5M2, "F8_E5M2", 1},
    {SAFETENSORS_F8_E4M3, "F8_E4M3", 1},
    {SAFETENSORS_F8_E8M0, "F8_E8M0", 1},
    {SAFETENSORS_F8_E4M3FNUZ, "F8_E4M3FNUZ", 1},
    {SAFETENSORS_F8_E5M2FNUZ, "F8_E5M2FNUZ", 1},
    {SAFETENSORS_I16, "I16", 2},
    {SAFETENSORS_U16, "U16", 2},
    {SAFETENSORS_F16, "F16", 2},
    {SAFETENSORS_BF16, "BF16", 2},
    {SAFETENSORS_I32, "I32", 4},
    {SAFETENSORS_U32, "U32", 4},
    {SAFETENSORS_F32, "F32", 4},
    {SAFETENSORS_C64, "C64", 8},
    {SAFETENSORS_F64, "F64", 8},
    {SAFETENSORS_I64, "I64", 8},
    {SAFETENSORS_U64, "U64", 8},
};
enum { SAFETENSORS_DTYPES = sizeof safetensors_dtypes / sizeof *safetensors_dtypes };

static const struct safetensors_dtype_row *safetensors_dtype_row(enum safetensors_dtype dtype) {
    for (int i = 0; i < SAFETENSORS_DTYPES; i++)
        if (safetensors_dtypes[i].dtype == dtype)
            return &safetensors_dtypes[i];
    abort(); // a type without a row
}
const char *safetensors_dtype_name(enum safetensors_dtype dtype) { return safetensors_dtype_row(dtype)->name; }
uint64_t safetensors_dtype_bytes(enum safetensors_dtype dtype) { return (uint64_t)safetensors_dtype_row(dtype)->bytes; }

// *bytes = a tensor's bytes, by its type and shape. False, *bytes undefined, if a product is 2^64 or more.
static bool safetensors_count_bytes(const struct safetensors_tensor *tensor, uint64_t *bytes) {
    uint64_t elements = 1; // multiplied in order, so that [2^63, 4, 0] is too large, as it is to the reference
    for (int i = 0; i < tensor->dims; i++)
        if (__builtin_mul_overflow(elements, tensor->shape[i], &elements))
            return false;
    return !__builtin_mul_overflow(elements, safetensors_dtype_bytes(tensor->dtype), bytes);
}

// A shape as messages show it: (2, 3).
struct safetensors_shape_text {
    char text[SAFETENSORS_MAX_DIMS * 22 + 3];
};
static struct safetensors_shape_text safetensors_show_shape(const uint64_t *shape, int dims) {
    struct safetensors_shape_text shown = {"("};
    for (int i = 0; i < dims; i++)
        text_add(shown.text, sizeof shown.text, "%s%" PRIu64, i ? ", " : "", shape[i]);
    text_add(shown.text, sizeof shown.text, ")");
    return shown;
}

// ---- reading ----

static int safetensors_by_name(const void *a, const void *b) {
    return strcmp(((const struct safetensors_tensor *)a)->name, ((const struct safetensors_tensor *)b)->name);
}
static int safetensors_by_offset(const void *a, const void *b) {
    const struct safetensors_tensor *x = (const struct safetensors_tensor *)a,
                                    *y = (const struct safetensors_tensor *)b;
    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes); // an empty tensor before the one that begins at the same byte
}

// *dtype = the type that a tensor's description names. `place`: file and tensor, for messages.
static const char *safetensors_parse_dtype(enum safetensors_dtype *dtype, const json_t *description, const char *place,
                                           struct error_text *error) {
    const char *text;
    const char *problem = json_get_string(description, "dtype", &text, place, error);
    if (problem)
        return problem;
    for (int i = 0; i < SAFETENSORS_DTYPES; i++)
        if (strcmp(text, safetensors_dtypes[i].name) == 0) {
            *dtype = safetensors_dtypes[i].dtype;
            return NULL;
        }
    if (strcmp(text, "F4") == 0 || strcmp(text, "F6_E2M3") == 0 || strcmp(text, "F6_E3M2") == 0)
        return error_format(error, "%s: dtype %s has less than a byte an element, which is not supported", place, text);
    return error_format(error, "%s: dtype '%s' is unknown; expected one of safetensors', as F32 or BF16", place,
                        json_show(text).text);
}

static const char *safetensors_parse_shape(struct safetensors_tensor *tensor, const json_t *description,
                                           const char *place, struct error_text *error) {
    json_t *shape;
    const char *problem = json_get_array(description, "shape", &shape, place, error);
    if (problem)
        return problem;
    if (json_array_size(shape) > SAFETENSORS_MAX_DIMS)
        return error_format(error, "%s: shape has %zu dimensions; expected at most %d", place, json_array_size(shape),
                            SAFETENSORS_MAX_DIMS);
    tensor->dims = (int)json_array_size(shape);
    for (int i = 0; i < tensor->dims; i++) {
        int64_t size = 0;
        problem =
            json_check_int(json_array_get(shape, (size_t)i), "a size in shape", 0, INT64_MAX, &size, place, error);
        if (problem)
            return problem;
        tensor->shape[i] = (uint64_t)size;
    }
    return NULL;
}

// Fills a tensor, whose name `key` stays the caller's. Checks its bytes by type and shape, not by the data's length.
static const char *safetensors_parse_tensor(struct safetensors_tensor *tensor, const char *key,
                                            const json_t *description, const char *name, struct error_text *error) {
    char place[sizeof error->text / 2];
    snprintf(place, sizeof place, "%s: tensor '%s'", name, json_show(key).text);
    if (!json_is_object(description))
        return error_format(error, "%s is %s; expected an object", place, json_type_name(description));
    tensor->name = key;
    const char *problem = safetensors_parse_dtype(&tensor->dtype, description, place, error);
    if (!problem)
        problem = safetensors_parse_shape(tensor, description, place, error);
    json_t *offsets = NULL;
    if (!problem)
        problem = json_get_array(description, "data_offsets", &offsets, place, error);
    if (problem)
        return problem;
    int64_t begin = 0, end = 0;
    if (json_array_size(offsets) != 2)
        return error_format(error, "%s: data_offsets has %zu numbers; expected 2: begin and end", place,
                            json_array_size(offsets));
    problem = json_check_int(json_array_get(offsets, 0), "data_offsets[0]", 0, INT64_MAX, &begin, place, error);
    if (!problem)
        problem = json_check_int(json_array_get(offsets, 1), "data_offsets[1]", begin, INT64_MAX, &end, place, error);
    if (problem)
        return problem;
    tensor->begin = (uint64_t)begin;
    tensor->bytes = (uint64_t)(end - begin);

    uint64_t expected;
    const struct safetensors_shape_text shape = safetensors_show_shape(tensor->shape, tensor->dims);
    if (!safetensors_count_bytes(tensor, &expected))
        return error_format(error, "%s: shape %s overflows", place, shape.text);
    if (tensor->bytes != expected)
        return error_format(error, "%s: has %" PRIu64 " bytes of data; expected %" PRIu64 " for %s of shape %s", place,
                            tensor->bytes, expected, safetensors_dtype_name(tensor->dtype), shape.text);
    return NULL;
}

// Checks that __metadata__ is an object of texts; nothing is stored.
static const char *safetensors_parse_metadata(const json_t *metadata, const char *name, struct error_text *error) {
    char place[sizeof error->text / 2];
    const char *key, *text;
    json_t *value;
    if (!json_is_object(metadata))
        return error_format(error, "%s: __metadata__ is %s; expected an object", name, json_type_name(metadata));
    snprintf(place, sizeof place, "%s: __metadata__", name);
    json_object_foreach ((json_t *)metadata, key, value) {
        const char *problem = json_check_string(value, key, &text, place, error);
        if (problem)
            return problem;
    }
    return NULL;
}

// Checks that every byte of the data is one tensor's: no holes, overlaps or rest. Leaves the tensors sorted by offset.
static const char *safetensors_check_offsets(struct safetensors *file, const char *name, struct error_text *error) {
    uint64_t next = 0;
    qsort(file->tensors, (size_t)file->count, sizeof *file->tensors, safetensors_by_offset);
    for (int i = 0; i < file->count; i++) {
        const struct safetensors_tensor *tensor = &file->tensors[i];
        if (tensor->begin != next)
            return error_format(error,
                                "%s: tensor '%s' begins at byte %" PRIu64 " of the data; expected %" PRIu64
                                ", the end of the tensor before it: there is %s; the file is damaged",
                                name, json_show(tensor->name).text, tensor->begin, next,
                                tensor->begin > next ? "a hole" : "an overlap");
        next += tensor->bytes; // each is below 2^63
        if (next > file->data_bytes)
            return error_format(error,
                                "%s: tensor '%s' ends at byte %" PRIu64 " of the data, which has only %" PRIu64
                                "; the file was cut off or is still being written: copy it again",
                                name, json_show(tensor->name).text, next, file->data_bytes);
    }
    if (next != file->data_bytes)
        return error_format(error,
                            "%s: has %" PRIu64 " bytes of data; expected %" PRIu64 ", the end of the last tensor", name,
                            file->data_bytes, next);
    return NULL;
}

// Fills file->tensors, sorted by name, and file->count from the header. After an error the caller closes *file.
static const char *safetensors_parse_header(struct safetensors *file, const char *name, struct error_text *error) {
    const char *key, *problem;
    json_t *value;
    const size_t members = json_object_size(file->header); // at most JSON_MAX_VALUES
    file->tensors = (struct safetensors_tensor *)calloc(members + 1, sizeof *file->tensors);
    if (!file->tensors)
        return error_format(error, "%s: out of memory for %zu tensors", name, members);
    json_object_foreach (file->header, key, value) {
        if (strcmp(key, "__metadata__") == 0)
            problem = safetensors_parse_metadata(value, name, error);
        else
            problem = safetensors_parse_tensor(&file->tensors[file->count++], key, value, name, error);
        if (problem)
            return problem;
    }
    problem = safetensors_check_offsets(file, name, error);
    qsort(file->tensors, (size_t)file->count, sizeof *file->tensors, safetensors_by_name);
    return problem;
}

// *length = the JSON's length, from the file's `first` 8 bytes. Refuses one beyond file_bytes, and a file of under 8.
static const char *safetensors_header_length(uint64_t *length, const unsigned char *first, uint64_t file_bytes,
                                             const char *name, struct error_text *error) {
    if (file_bytes < 8)
        return error_format(error, "%s: is %" PRIu64 " bytes long; expected a safetensors file, which has at least 8",
                            name, file_bytes);
    *length = load_u64(first);
    if (*length > SAFETENSORS_MAX_HEADER_BYTES)
        return error_format(error,
                            "%s: promises a header of %" PRIu64 " bytes; expected at most %d: it is not a safetensors "
                            "file",
                            name, *length, SAFETENSORS_MAX_HEADER_BYTES);
    if (*length > file_bytes - 8)
        return error_format(error,
                            "%s: promises a header of %" PRIu64 " bytes, but is %" PRIu64
                            " bytes long; it was cut off or is still being written: copy it again",
                            name, *length, file_bytes);
    return NULL;
}

void safetensors_close(struct safetensors *file) {
    json_decref(file->header);
    free(file->tensors);
    free(file->path);
    if (file->fd >= 0)
        close(file->fd);
    memset(file, 0, sizeof *file);
    file->fd = -1;
}

const char *safetensors_parse(struct safetensors *file, const unsigned char *data, uint64_t available,
                              uint64_t file_bytes, const char *name, struct error_text *error) {
    uint64_t length = 0;
    memset(file, 0, sizeof *file);
    file->fd = -1;
    const char *problem = safetensors_header_length(&length, data, available < 8 ? available : file_bytes, name, error);
    if (problem)
        return problem;
    if (available - 8 < length)
        return error_format(error, "%s: has a header of %" PRIu64 " bytes, of which %" PRIu64 " were read", name,
                            length, available - 8);
    if (length == 0 || data[8] != '{')
        return error_format(error, "%s: its header doesn't begin with '{'; it is not a safetensors file", name);
    problem = json_parse_object(&file->header, data + 8, length, name, error);
    file->data_begin = 8 + length;
    file->data_bytes = file_bytes - file->data_begin;
    if (!problem)
        problem = safetensors_parse_header(file, name, error);
    if (problem)
        safetensors_close(file);
    return problem;
}

// Reads the header of the open `fd`, the caller's, into *file, without path and fd. After an error nothing is held.
static const char *safetensors_read_header(struct safetensors *file, int fd, uint64_t file_bytes, const char *path,
                                           struct error_text *error) {
    unsigned char first[8] = {0};
    uint64_t length = 0;
    const char *problem = read_exactly(fd, first, file_bytes < 8 ? file_bytes : 8, 0, path, error);
    if (!problem)
        problem = safetensors_header_length(&length, first, file_bytes, path, error);
    if (problem)
        return problem;
    unsigned char *header = (unsigned char *)malloc((size_t)length + 8);
    if (!header)
        return error_format(error, "%s: out of memory for a header of %" PRIu64 " bytes", path, length);
    problem = read_exactly(fd, header, length + 8, 0, path, error);
    if (!problem)
        problem = safetensors_parse(file, header, length + 8, file_bytes, path, error);
    free(header);
    return problem;
}

const char *safetensors_open(struct safetensors *file, const char *path, struct error_text *error) {
    int fd;
    uint64_t file_bytes = 0;
    memset(file, 0, sizeof *file);
    file->fd = -1;
    const char *problem = open_regular(&fd, &file_bytes, path, "a safetensors file", error);
    if (problem)
        return problem;
    problem = safetensors_read_header(file, fd, file_bytes, path, error);
    if (problem) {
        close(fd);
        return problem;
    }
    file->fd = fd;
    file->path = strdup(path);
    if (!file->path) {
        safetensors_close(file);
        return error_format(error, "%s: out of memory", path);
    }
    return NULL;
}

const struct safetensors_tensor *safetensors_find(const struct safetensors *file, const char *name) {
    struct safetensors_tensor key;
    key.name = name;
    return file->count ? (const struct safetensors_tensor *)bsearch(&key, file->tensors, (size_t)file->count,
                                                                    sizeof key, safetensors_by_name)
                       : NULL;
}
const char *safetensors_metadata(const struct safetensors *file, const char *key) {
    return json_string_value(json_object_get(json_object_get(file->header, "__metadata__"), key));
}

const char *safetensors_get(const struct safetensors_tensor **result, const struct safetensors *file,
                            const char *tensor, const uint64_t *shape, int dims, const char *name,
                            struct error_text *error) {
    const struct safetensors_tensor *found = *result = safetensors_find(file, tensor);
    if (!found)
        return error_format(error, "%s: has no tensor '%s'", name, json_show(tensor).text);
    if (found->dims != dims || (dims && memcmp(found->shape, shape, (size_t)dims * sizeof *shape) != 0))
        return error_format(error, "%s: tensor '%s' has the shape %s; expected %s", name, json_show(tensor).text,
                            safetensors_show_shape(found->shape, found->dims).text,
                            safetensors_show_shape(shape, dims).text);
    return NULL;
}

const char *safetensors_read(const struct safetensors *file, const struct safetensors_tensor *tensor, uint64_t offset,
                             uint64_t bytes, void *out, struct error_text *error) {
    if (offset > tensor->bytes || bytes > tensor->bytes - offset)
        return error_format(
            error, "%s: tensor '%s' has %" PRIu64 " bytes, of which %" PRIu64 " from %" PRIu64 " on were asked for",
            file->path, json_show(tensor->name).text, tensor->bytes, bytes, offset);
    return read_exactly(file->fd, (unsigned char *)out, bytes, file->data_begin + tensor->begin + offset, file->path,
                        error);
}

bool safetensors_to_floats(float *out, const unsigned char *raw, enum safetensors_dtype dtype, uint64_t n) {
    uint16_t half;
    double wide;
    switch (dtype) {
    case SAFETENSORS_F16:
        for (uint64_t i = 0; i < n; i++) {
            memcpy(&half, raw + 2 * i, 2);
            out[i] = float_from_f16_bits(half);
        }
        return true;
    case SAFETENSORS_BF16:
        for (uint64_t i = 0; i < n; i++) {
            memcpy(&half, raw + 2 * i, 2);
            out[i] = float_from_bf16_bits(half);
        }
        return true;
    case SAFETENSORS_F32:
        if (n)
            memcpy(out, raw, (size_t)n * 4);
        return true;
    case SAFETENSORS_F64:
        for (uint64_t i = 0; i < n; i++) {
            memcpy(&wide, raw + 8 * i, 8);
            out[i] = (float)wide;
        }
        return true;
    case SAFETENSORS_BOOL:
    case SAFETENSORS_U8:
    case SAFETENSORS_I8:
    case SAFETENSORS_F8_E5M2:
    case SAFETENSORS_F8_E4M3:
    case SAFETENSORS_F8_E8M0:
    case SAFETENSORS_F8_E4M3FNUZ:
    case SAFETENSORS_F8_E5M2FNUZ:
    case SAFETENSORS_I16:
    case SAFETENSORS_U16:
    case SAFETENSORS_I32:
    case SAFETENSORS_U32:
    case SAFETENSORS_C64:
    case SAFETENSORS_I64:
    case SAFETENSORS_U64: return false;
    }
    return false;
}

// ---- writing ----

// Orders tensors for qsort as a file holds them: by type, safetensors_dtypes' last row first, then by name.
static int safetensors_by_place(const void *a, const void *b) {
    const struct safetensors_tensor *x = (const struct safetensors_tensor *)a,
                                    *y = (const struct safetensors_tensor *)b;
    const struct safetensors_dtype_row *x_row = safetensors_dtype_row(x->dtype),
                                       *y_row = safetensors_dtype_row(y->dtype);
    return x_row != y_row ? (x_row > y_row ? -1 : 1) : strcmp(x->name, y->name);
}

// Sorts tensors as in the file; sets begin, bytes and *data_bytes. Refuses __metadata__, a name twice, and 2^63 bytes.
static const char *safetensors_place(struct safetensors_tensor *tensors, int count, uint64_t *data_bytes,
                                     const char *name, struct error_text *error) {
    qsort(tensors, (size_t)count, sizeof *tensors, safetensors_by_name);
    for (int i = 0; i < count; i++)
        if (strcmp(tensors[i].name, "__metadata__") == 0 || (i && strcmp(tensors[i].name, tensors[i - 1].name) == 0))
            return error_format(error, "%s: would hold two of the name '%s'", name, json_show(tensors[i].name).text);
    qsort(tensors, (size_t)count, sizeof *tensors, safetensors_by_place);
    *data_bytes = 0;
    for (int i = 0; i < count; i++) {
        tensors[i].begin = *data_bytes;
        if (!safetensors_count_bytes(&tensors[i], &tensors[i].bytes) ||
            __builtin_add_overflow(*data_bytes, tensors[i].bytes, data_bytes) || *data_bytes > INT64_MAX)
            return error_format(error, "%s: tensor '%s': shape %s overflows", name, json_show(tensors[i].name).text,
                                safetensors_show_shape(tensors[i].shape, tensors[i].dims).text);
    }
    return NULL;
}

// Writes the header's JSON. The tensors come from safetensors_place. Errors stay in `out`.
static void safetensors_write_json(FILE *out, const struct safetensors_tensor *tensors, int count,
                                   const struct safetensors_pair *metadata, int pairs) {
    fputs(pairs ? "{\"__metadata__\":{" : "{", out);
    for (int i = 0; i < pairs; i++) {
        fputs(i ? "," : "", out);
        json_quote(out, metadata[i].key);
        fputc(':', out);
        json_quote(out, metadata[i].value);
    }
    fputs(pairs ? "}" : "", out);
    for (int i = 0; i < count; i++) {
        const struct safetensors_tensor *tensor = &tensors[i];
        fputs(i || pairs ? "," : "", out);
        json_quote(out, tensor->name);
        fprintf(out, ":{\"dtype\":\"%s\",\"shape\":[", safetensors_dtype_name(tensor->dtype));
        for (int d = 0; d < tensor->dims; d++)
            fprintf(out, "%s%" PRIu64, d ? "," : "", tensor->shape[d]);
        fprintf(out, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", tensor->begin, tensor->begin + tensor->bytes);
    }
    fputc('}', out);
}

const char *safetensors_lay_out(struct safetensors_layout *layout, struct safetensors_tensor *tensors, int count,
                                const struct safetensors_pair *metadata, int pairs, const char *name,
                                struct error_text *error) {
    memset(layout, 0, sizeof *layout);
    const char *problem = safetensors_place(tensors, count, &layout->data_bytes, name, error);
    if (problem)
        return problem;
    size_t bytes = 0;
    FILE *out = open_memstream(&layout->header, &bytes);
    if (out) {
        fwrite("\0\0\0\0\0\0\0\0", 1, 8, out); // the length, once it is known
        safetensors_write_json(out, tensors, count, metadata, pairs);
        for (long end = ftell(out); end % 8; end++)
            fputc(' ', out); // so that the data begins at a multiple of 8
    }
    if (!out || fclose(out) != 0)
        problem = error_format(error, "%s: out of memory for its header", name);
    else if (bytes - 8 > SAFETENSORS_MAX_HEADER_BYTES)
        problem = error_format(error, "%s: would have a header of %zu bytes; safetensors allows %d", name, bytes - 8,
                               SAFETENSORS_MAX_HEADER_BYTES);
    if (problem) {
        free(layout->header);
        layout->header = NULL;
        return problem;
    }
    const uint64_t length = bytes - 8;
    memcpy(layout->header, &length, 8);
    layout->header_bytes = bytes;
    return NULL;
}

// ---- model.safetensors.index.json ----

static int safetensors_by_tensor(const void *a, const void *b) {
    return strcmp(((const struct safetensors_index_entry *)a)->tensor,
                  ((const struct safetensors_index_entry *)b)->tensor);
}
static int safetensors_by_text(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

// Whether the name is a mere file name, which can't lead out of the index's folder.
static bool safetensors_is_file_name(const char *name) { return *name && !strpbrk(name, "/\\") && !strstr(name, ".."); }

void safetensors_index_close(struct safetensors_index *index) {
    json_decref(index->root);
    free(index->entries);
    free(index->files);
    memset(index, 0, sizeof *index);
}

// Fills entries and files from weight_map, which owns their names. After an error the caller closes the index.
static const char *safetensors_index_parse_map(struct safetensors_index *index, json_t *map, const char *name,
                                               struct error_text *error) {
    char place[sizeof error->text / 2];
    const char *key;
    json_t *value;
    const size_t count = json_object_size(map); // at most JSON_MAX_VALUES
    snprintf(place, sizeof place, "%.400s: weight_map", name);
    if (count == 0)
        return error_format(error, "%s is empty; expected the file of each tensor", place);
    index->entries = (struct safetensors_index_entry *)calloc(count, sizeof *index->entries);
    index->files = (const char **)calloc(count, sizeof *index->files);
    if (!index->entries || !index->files)
        return error_format(error, "%s: out of memory for %zu tensors", name, count);
    json_object_foreach (map, key, value) {
        struct safetensors_index_entry *entry = &index->entries[index->count];
        entry->tensor = key;
        const char *problem = json_check_string(value, key, &entry->file, place, error);
        if (problem)
            return problem;
        if (!safetensors_is_file_name(entry->file))
            return error_format(error,
                                "%s: %s is in '%s'; expected the name of a file beside the index, without '/', "
                                "'\\' or '..'",
                                place, json_show(key).text, json_show(entry->file).text);
        index->files[index->count++] = entry->file;
    }
    qsort(index->entries, count, sizeof *index->entries, safetensors_by_tensor);
    qsort(index->files, count, sizeof *index->files, safetensors_by_text);
    for (int i = 0; i < index->count; i++)
        if (i == 0 || strcmp(index->files[i], index->files[index->file_count - 1]) != 0)
            index->files[index->file_count++] = index->files[i];
    return NULL;
}

const char *safetensors_index_parse(struct safetensors_index *index, const unsigned char *data, uint64_t bytes,
                                    const char *name, struct error_text *error) {
    json_t *metadata = NULL, *map = NULL;
    double total_size = 0; // a double, since some files write it with a fraction
    memset(index, 0, sizeof *index);
    const char *problem = json_parse_object(&index->root, data, bytes, name, error);
    if (!problem)
        problem = json_opt_object(index->root, "metadata", &metadata, name, error);
    if (!problem && metadata)
        problem = json_opt_number(metadata, "total_size", 0, 0x1p62, 0, &total_size, name, error);
    if (!problem)
        problem = json_get_object(index->root, "weight_map", &map, name, error);
    if (!problem)
        problem = safetensors_index_parse_map(index, map, name, error);
    if (problem) {
        safetensors_index_close(index);
        return problem;
    }
    const json_t *exact = json_object_get(metadata, "total_size");
    index->total_bytes = json_is_integer(exact) ? (uint64_t)json_integer_value(exact) : (uint64_t)total_size;
    return NULL;
}

const char *safetensors_index_open(struct safetensors_index *index, const char *path, struct error_text *error) {
    unsigned char *data;
    uint64_t bytes;
    memset(index, 0, sizeof *index);
    const char *problem = read_whole(&data, &bytes, SAFETENSORS_MAX_HEADER_BYTES, path, "a safetensors index", error);
    if (!problem)
        problem = safetensors_index_parse(index, data, bytes, path, error);
    free(data);
    return problem;
}

const char *safetensors_index_find(const struct safetensors_index *index, const char *tensor) {
    struct safetensors_index_entry key;
    key.tensor = tensor;
    const struct safetensors_index_entry *found =
        index->count ? (const struct safetensors_index_entry *)bsearch(&key, index->entries, (size_t)index->count,
                                                                       sizeof key, safetensors_by_tensor)
                     : NULL;
    return found ? found->file : NULL;
}

void safetensors_index_write(FILE *out, struct safetensors_index_entry *entries, int count, uint64_t total_bytes) {
    struct json json = json_writer(out, true);
    qsort(entries, (size_t)count, sizeof *entries, safetensors_by_tensor);
    json_object_begin(&json, NULL);
    json_object_begin(&json, "metadata");
    json_uint(&json, "total_size", total_bytes);
    json_object_end(&json);
    json_object_begin(&json, "weight_map");
    for (int i = 0; i < count; i++)
        json_str(&json, entries[i].tensor, entries[i].file);
    json_object_end(&json);
    json_object_end(&json);
}
