// A whole safetensors file: what is accepted covers its data, is found by name, can be converted, and can be written
// again.
#include "formats/safetensors.h" // under test
#include "test/fuzz/fuzz.h"      // fuzz_require

static void convert(const struct safetensors *file, const struct safetensors_tensor *tensor,
                    const unsigned char *data) {
    const uint64_t n = tensor->bytes / safetensors_dtype_bytes(tensor->dtype);
    float *values = (float *)malloc(n * sizeof *values + 1);
    fuzz_require(values && file->data_begin + tensor->begin + tensor->bytes <= file->data_begin + file->data_bytes);
    safetensors_to_floats(values, data + file->data_begin + tensor->begin, tensor->dtype, n);
    free(values);
}

// Checks that the same tensors, written by the rules of the format, are accepted.
static void write_again(const struct safetensors *file) {
    struct error_text error;
    struct safetensors_layout layout;
    struct safetensors again;
    struct safetensors_tensor *tensors =
        (struct safetensors_tensor *)malloc(((size_t)file->count + 1) * sizeof *tensors);
    fuzz_require(tensors);
    memcpy(tensors, file->tensors, (size_t)file->count * sizeof *tensors);
    fuzz_require(!safetensors_lay_out(&layout, tensors, file->count, NULL, 0, "again", &error));
    fuzz_require(layout.data_bytes == file->data_bytes);
    fuzz_require(!safetensors_parse(&again, (unsigned char *)layout.header, layout.header_bytes,
                                    layout.header_bytes + layout.data_bytes, "again", &error));
    fuzz_require(again.count == file->count);
    for (int i = 0; i < file->count; i++) {
        const struct safetensors_tensor *x = &file->tensors[i], *y = &again.tensors[i];
        fuzz_require(strcmp(x->name, y->name) == 0 && x->dtype == y->dtype && x->bytes == y->bytes);
    }
    safetensors_close(&again);
    free(layout.header);
    free(tensors);
}

static const char *fuzz_parse(const unsigned char *data, size_t bytes, struct error_text *error) {
    struct safetensors file;
    const char *problem = safetensors_parse(&file, data, bytes, bytes, "model", error);
    if (!problem) {
        uint64_t sum = 0;
        for (int i = 0; i < file.count; i++) {
            fuzz_require(safetensors_find(&file, file.tensors[i].name) == &file.tensors[i]);
            convert(&file, &file.tensors[i], data);
            sum += file.tensors[i].bytes;
        }
        fuzz_require(sum == file.data_bytes && file.data_begin + file.data_bytes == bytes);
        safetensors_metadata(&file, "format");
        write_again(&file);
    }
    safetensors_close(&file);
    return problem;
}
