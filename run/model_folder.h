// Reads the safetensors files of a model's folder, which is laid out as Hugging Face's.
#pragma once
#include "formats/peft_config.h"      // PEFT_MODEL_NAME
#include "formats/safetensors.h"      // safetensors_open
#include "runtime/files/hash.h"       // struct hash128
#include "runtime/machine/error.h"    // fail
#include "runtime/machine/text_add.h" // text_copy
#include <limits.h>                   // PATH_MAX
#include <math.h>                     // isfinite
#include <stdio.h>                    // snprintf
#include <stdlib.h>                   // calloc, free
#include <string.h>                   // strcmp
#include <sys/stat.h>                 // stat

struct model_folder {
    const char *path;
    struct safetensors *files;
    char **names; // of the files, as messages show them
    int count;
};

// Closes the files and zeroes the folder, which may be zeroed already.
static inline void model_folder_close(struct model_folder *folder) {
    for (int i = 0; i < folder->count; i++) {
        safetensors_close(&folder->files[i]);
        free(folder->names[i]);
    }
    free(folder->files);
    free(folder->names);
    memset(folder, 0, sizeof *folder);
}

// Opens the folder's file `name` as the next one; there must be room for it. Returns NULL, or what is wrong.
static inline const char *model_folder_add(struct model_folder *folder, const char *name, struct error_text *error) {
    char path[PATH_MAX];
    if ((size_t)snprintf(path, sizeof path, "%s/%s", folder->path, name) >= sizeof path)
        return error_format(error, "%.500s: the name is too long", folder->path);
    RETURN_PROBLEM(safetensors_open(&folder->files[folder->count], path, error));
    folder->names[folder->count++] = text_copy(path);
    return NULL;
}

// Allocates the arrays of an empty *folder for `files` files. Returns NULL, or an error.
static inline const char *model_folder_allocate(struct model_folder *folder, int files, struct error_text *error) {
    folder->files = (struct safetensors *)calloc((size_t)files, sizeof *folder->files);
    folder->names = (char **)calloc((size_t)files, sizeof *folder->names);
    return folder->files && folder->names ? NULL : error_format(error, "%s: out of memory", folder->path);
}

// Opens model.safetensors or, without it, the files of its index, as from_pretrained does. model_folder_close is
// needed, after an error, too, and `path` must stay until then. Returns NULL, or what is wrong.
static inline const char *model_folder_open(struct model_folder *folder, const char *path, struct error_text *error) {
    char index_path[PATH_MAX], single_path[PATH_MAX];
    struct safetensors_index index;
    struct stat status;
    memset(folder, 0, sizeof *folder);
    folder->path = path;
    if ((size_t)snprintf(index_path, sizeof index_path, "%s/model.safetensors.index.json", path) >= sizeof index_path)
        return error_format(error, "%.500s: the name is too long", path);
    snprintf(single_path, sizeof single_path, "%.*s", (int)(strlen(index_path) - strlen(".index.json")), index_path);
    if (stat(single_path, &status) == 0 || stat(index_path, &status) != 0) {
        RETURN_PROBLEM(model_folder_allocate(folder, 1, error));
        return model_folder_add(folder, "model.safetensors", error);
    }
    RETURN_PROBLEM(safetensors_index_open(&index, index_path, error));
    const char *problem = model_folder_allocate(folder, index.file_count, error);
    for (int i = 0; i < index.file_count && !problem; i++)
        problem = model_folder_add(folder, index.files[i], error);
    safetensors_index_close(&index);
    return problem;
}

// Refuses values (n), of a file's tensor from element `first` on, that aren't finite. Returns NULL, or what is wrong.
static inline const char *tensor_check_finite(const float *values, int64_t n, int64_t first, const char *tensor,
                                              const char *file, struct error_text *error) {
    float all = 0;
#pragma omp simd reduction(+ : all)
    for (int64_t i = 0; i < n; i++)
        all += values[i] * 0.0f; // NaN where the value is NaN or infinite
    for (int64_t i = 0; i < n && all != 0; i++)
        if (!isfinite(values[i]))
            return error_format(error, "%.600s: element %lld of tensor '%.200s' is %g; --check-weights=false takes it",
                                file, (long long)(first + i), tensor, (double)values[i]);
    return NULL;
}

// Returns the tensor `name`, or NULL; *file = its file's index. "transformer.NAME" also finds a tensor NAME.
static inline const struct safetensors_tensor *model_folder_find(const struct model_folder *folder, const char *name,
                                                                 int *file) {
    static const char prefix[] = "transformer.";
    for (*file = 0; *file < folder->count; ++*file) {
        const struct safetensors_tensor *tensor = safetensors_find(&folder->files[*file], name);
        if (!tensor && strncmp(name, prefix, sizeof prefix - 1) == 0)
            tensor = safetensors_find(&folder->files[*file], name + sizeof prefix - 1);
        if (tensor)
            return tensor;
    }
    return NULL;
}

// Opens peft's adapters, for model_folder_close, after an error, too. `path` must stay. Returns NULL, or what is wrong.
static inline const char *adapter_folder_open(struct model_folder *folder, const char *path, struct error_text *error) {
    memset(folder, 0, sizeof *folder);
    folder->path = path;
    RETURN_PROBLEM(model_folder_allocate(folder, 1, error));
    return model_folder_add(folder, PEFT_MODEL_NAME, error);
}

// digest = a hash of the tensors' names, types, shapes and first bytes, which differs between models of one shape.
// Another division into files changes it. Returns NULL, or what is wrong; digest then means nothing.
static inline const char *model_folder_digest(char digest[HASH128_DIGITS + 1], const char *path,
                                              struct error_text *error) {
    enum { FIRST_BYTES = 4096 };
    unsigned char first[FIRST_BYTES];
    struct model_folder folder;
    struct hash128 *hash = hash128_new();
    const char *problem = model_folder_open(&folder, path, error);
    if (!hash)
        fail("out of memory");
    for (int f = 0; f < folder.count; f++)
        for (int i = 0; i < folder.files[f].count && !problem; i++) {
            const struct safetensors_tensor *t = &folder.files[f].tensors[i];
            const char *dtype = safetensors_dtype_name(t->dtype);
            const uint64_t bytes = t->bytes < FIRST_BYTES ? t->bytes : (uint64_t)FIRST_BYTES;
            hash128_update(hash, t->name, strlen(t->name) + 1);
            hash128_update(hash, dtype, strlen(dtype) + 1);
            hash128_update(hash, t->shape, (uint64_t)t->dims * sizeof *t->shape);
            problem = safetensors_read(&folder.files[f], t, 0, bytes, first, error);
            if (!problem)
                hash128_update(hash, first, bytes);
        }
    hash128_text(digest, hash);
    hash128_free(hash);
    model_folder_close(&folder);
    return problem;
}
