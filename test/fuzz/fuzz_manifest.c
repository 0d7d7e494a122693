// The manifest's parser on any bytes: it answers, and what it accepts keeps its promises and reads back the same.
#include "runtime/manifest.h" // under test
#include <stddef.h>           // size_t

static void require(bool condition) {
    if (!condition)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct manifest manifest, again;
    struct error_text error;
    const char *const problem = manifest_parse(&manifest, (const char *)data, size, "manifest.json", &error);
    if (problem) {
        require(problem == error.text && strncmp(problem, "manifest.json: ", 15) == 0);
        require(!manifest.files && manifest.num_files == 0);
        return 0;
    }
    require(manifest.step >= 0 && manifest.num_files >= 1 && manifest.num_files <= MANIFEST_FILES);
    for (int i = 0; i < manifest.num_files; i++) {
        const struct manifest_file *const file = &manifest.files[i];
        require(manifest_name_is_allowed(file->name) && manifest_find(&manifest, file->name) == file);
        require(file->bytes <= INT64_MAX && strlen(file->xxh3_128) == MANIFEST_HASH);
    }
    size_t bytes = 0;
    char *const text = manifest_text(&manifest, &bytes);
    require(text != NULL);
    require(!manifest_parse(&again, text, bytes, "again", &error));
    require(again.step == manifest.step && again.num_files == manifest.num_files);
    require(memcmp(again.files, manifest.files, (size_t)again.num_files * sizeof *again.files) == 0);
    manifest_free(&again);
    manifest_free(&manifest);
    free(text);
    return 0;
}
