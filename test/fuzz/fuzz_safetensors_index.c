// model.safetensors.index.json: what is accepted names only files in the same folder, is found, and can be written
// again.
#include "formats/safetensors.h" // under test
#include "test/fuzz/fuzz.h"      // fuzz_require

static void write_again(const struct safetensors_index *index) {
    struct error_text error;
    struct safetensors_index again;
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    fuzz_require(out);
    safetensors_index_write(out, index->entries, index->count, index->total_bytes);
    fclose(out);
    fuzz_require(!safetensors_index_parse(&again, (unsigned char *)text, bytes, "again", &error));
    fuzz_require(again.count == index->count && again.file_count == index->file_count);
    fuzz_require(again.total_bytes == index->total_bytes);
    for (int i = 0; i < index->count; i++)
        fuzz_require(strcmp(again.entries[i].tensor, index->entries[i].tensor) == 0 &&
                     strcmp(again.entries[i].file, index->entries[i].file) == 0);
    safetensors_index_close(&again);
    free(text);
}

static const char *fuzz_parse(const unsigned char *data, size_t bytes, struct error_text *error) {
    struct safetensors_index index;
    const char *problem = safetensors_index_parse(&index, data, bytes, "index", error);
    if (!problem) {
        for (int i = 0; i < index.file_count; i++)
            fuzz_require(index.files[i][0] && !strchr(index.files[i], '/') && !strstr(index.files[i], ".."));
        for (int i = 0; i < index.count; i++)
            fuzz_require(safetensors_index_find(&index, index.entries[i].tensor) == index.entries[i].file);
        write_again(&index);
    }
    safetensors_index_close(&index);
    return problem;
}
