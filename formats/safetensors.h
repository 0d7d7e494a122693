// safetensors: tensors in a file, and the index of a model in several files. https://github.com/huggingface/safetensors
//    u64 N; N bytes of JSON: {"__metadata__": {"format": "pt"}, "NAME": {"dtype": "F32", "shape": [2, 3],
//    "data_offsets": [begin, end]}, ...}; then the data, in which the offsets count.
// Files are read by the reference implementation's rules. Refused besides are duplicate names, a header that begins
// with a space (which it accepts against its own description), names with a NUL byte, a null __metadata__, types of
// less than a byte, more than 8 dimensions, and what json_parse.h limits. Files are written byte for byte as it writes
// them. Functions that return const char * return NULL or, in `error`, the file's name and a problem.
#pragma once
#include "runtime/machine/error_text.h" // struct error_text
#include <jansson.h>                    // json_t
#include <stdbool.h>                    // bool
#include <stdint.h>                     // uint64_t
#include <stdio.h>                      // FILE
#include <sys/cdefs.h>                  // __BEGIN_DECLS

enum safetensors_dtype {
    SAFETENSORS_BOOL,
    SAFETENSORS_U8,
    SAFETENSORS_I8,
    SAFETENSORS_F8_E5M2,
    SAFETENSORS_F8_E4M3,
    SAFETENSORS_F8_E8M0,
    SAFETENSORS_F8_E4M3FNUZ,
    SAFETENSORS_F8_E5M2FNUZ,
    SAFETENSORS_I16,
    SAFETENSORS_U16,
    SAFETENSORS_F16,
    SAFETENSORS_BF16,
    SAFETENSORS_I32,
    SAFETENSORS_U32,
    SAFETENSORS_F32,
    SAFETENSORS_C64,
    SAFETENSORS_F64,
    SAFETENSORS_I64,
    SAFETENSORS_U64
};
enum { SAFETENSORS_MAX_DIMS = 8 };

struct safetensors_tensor {
    const char *name;
    enum safetensors_dtype dtype;
    int dims;
    uint64_t shape[SAFETENSORS_MAX_DIMS]; // [dims]
    uint64_t begin, bytes;                // offset in the data, and length
    int id;                               // for the caller, to identify a tensor after safetensors_lay_out sorted them
};

struct safetensors {
    struct safetensors_tensor *tensors; // [count], sorted by name; owned
    int count;
    uint64_t data_begin, data_bytes; // offset of the data in the file, and its length
    json_t *header;                  // holds the names and the metadata; owned
    char *path;                      // path and fd are set by safetensors_open, otherwise NULL and -1; owned
    int fd;
};

__BEGIN_DECLS
const char *safetensors_dtype_name(enum safetensors_dtype dtype); // "BF16"; a constant
uint64_t safetensors_dtype_bytes(enum safetensors_dtype dtype);   // bytes of an element

// Opens a file and parses its header. The caller closes it; after an error nothing is held, and closing it is harmless.
const char *safetensors_open(struct safetensors *file, const char *path, struct error_text *error);
void safetensors_close(struct safetensors *file);
// Parses a file's header in memory. data: the first `available` of the file's file_bytes, with the whole header. The
// caller closes *file; safetensors_read can't read from it. After an error nothing is held.
const char *safetensors_parse(struct safetensors *file, const unsigned char *data, uint64_t available,
                              uint64_t file_bytes, const char *name, struct error_text *error);
// Returns the tensor of that name, valid until the file is closed; NULL if there is none.
const struct safetensors_tensor *safetensors_find(const struct safetensors *file, const char *name);
// *result = the tensor of that name. A missing one, or another shape than `shape` (dims), is an error; any type passes.
const char *safetensors_get(const struct safetensors_tensor **result, const struct safetensors *file,
                            const char *tensor, const uint64_t *shape, int dims, const char *name,
                            struct error_text *error);
// Returns the value of a key of __metadata__, valid until the file is closed; NULL if there is none.
const char *safetensors_metadata(const struct safetensors *file, const char *key);
// out (bytes) = a tensor's bytes from `offset` on, of a file from safetensors_open. Several threads may call it.
const char *safetensors_read(const struct safetensors *file, const struct safetensors_tensor *tensor, uint64_t offset,
                             uint64_t bytes, void *out, struct error_text *error);
// out (n) = raw's elements, maybe unaligned, as floats; F64 is rounded. False, out unset: not F16, BF16, F32 or F64.
bool safetensors_to_floats(float *out, const unsigned char *raw, enum safetensors_dtype dtype, uint64_t n);

// ---- writing: the header is laid out first; the data then follows in the order of the sorted tensors ----
struct safetensors_pair {
    const char *key, *value;
};
struct safetensors_layout {
    char *header; // with its length in front and its padding; the caller frees it
    uint64_t header_bytes, data_bytes;
};
// Plans a file: sorts the tensors as in the file and sets begin and bytes. The caller has set the other fields, and
// frees layout->header, NULL after an error. metadata (pairs) keeps its order; Hugging Face wants "format": "pt".
const char *safetensors_lay_out(struct safetensors_layout *layout, struct safetensors_tensor *tensors, int count,
                                const struct safetensors_pair *metadata, int pairs, const char *name,
                                struct error_text *error);

// ---- model.safetensors.index.json: {"metadata": {"total_size": bytes}, "weight_map": {TENSOR: FILE, ...}} ----
struct safetensors_index_entry {
    const char *tensor, *file;
};
struct safetensors_index {
    struct safetensors_index_entry *entries; // [count], sorted by tensor; owned
    int count;
    const char **files; // [file_count], each once, sorted, each beside the index; owned
    int file_count;
    uint64_t total_bytes; // of all tensors; 0 where the index does not say
    json_t *root;         // holds the names; owned
};
// Opens an index. On success the caller closes it; on failure nothing is held, and closing is harmless.
const char *safetensors_index_open(struct safetensors_index *index, const char *path, struct error_text *error);
// Parses an index's bytes, which are not needed afterwards, as safetensors_index_open does. name: for messages.
const char *safetensors_index_parse(struct safetensors_index *index, const unsigned char *data, uint64_t bytes,
                                    const char *name, struct error_text *error);
void safetensors_index_close(struct safetensors_index *index);
// Returns the name of the file that holds a tensor, valid until the index is closed; NULL if there is none.
const char *safetensors_index_find(const struct safetensors_index *index, const char *tensor);
// Writes an index as transformers does: indented, tensors sorted. Sorts the entries. Errors stay in `out`.
void safetensors_index_write(FILE *out, struct safetensors_index_entry *entries, int count, uint64_t total_bytes);
__END_DECLS
