// The manifest's parser on any bytes: it returns, and what it accepts keeps its promises and reads back the same.
#include "formats/manifest.h" // under test
#include "test/fuzz/fuzz.h"   // fuzz_require

static const char *fuzz_parse(const unsigned char *data, size_t bytes, struct error_text *error) {
    struct manifest manifest, again;
    const char *const problem = manifest_parse(&manifest, (const char *)data, bytes, "manifest.json", error);
    if (problem) {
        fuzz_require(problem == error->text && strncmp(problem, "manifest.json: ", 15) == 0);
        fuzz_require(!manifest.files && manifest.num_files == 0);
        return problem;
    }
    fuzz_require(manifest.step >= 0 && manifest.num_files >= 1 && manifest.num_files <= MANIFEST_FILES);
    for (int i = 0; i < manifest.num_files; i++) {
        const struct manifest_file *const file = &manifest.files[i];
        fuzz_require(manifest_name_is_allowed(file->name) && manifest_find(&manifest, file->name) == file);
        fuzz_require(file->bytes <= INT64_MAX && strlen(file->xxh3_128) == HASH128_DIGITS);
    }
    size_t length = 0;
    char *const text = manifest_text(&manifest, &length);
    fuzz_require(text != NULL);
    fuzz_require(!manifest_parse(&again, text, length, "again", error));
    fuzz_require(again.step == manifest.step && again.num_files == manifest.num_files);
    fuzz_require(memcmp(again.files, manifest.files, (size_t)again.num_files * sizeof *again.files) == 0);
    manifest_free(&again);
    manifest_free(&manifest);
    free(text);
    return NULL;
}
