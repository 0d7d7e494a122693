// manifest.json of a checkpoint's folder: which files belong to it, how long each is, and its hash.
//   {"version": 1, "step": 1000, "files": [{"name": "model.safetensors", "bytes": 497774208, "xxh3_128": "0f3a..."}]}
// The hash is the 128-bit XXH3 as `xxhsum -H128` prints it, so that a checkpoint can be checked by hand.
#pragma once
#include "runtime/files/hash.h"         // HASH128_DIGITS
#include "runtime/machine/error_text.h" // struct error_text
#include <stdbool.h>                    // bool
#include <stddef.h>                     // size_t
#include <stdint.h>                     // int64_t, uint64_t
#include <sys/cdefs.h>                  // __BEGIN_DECLS

#define MANIFEST_NAME "manifest.json"
enum {
    MANIFEST_FILE_NAME = 128,     // bytes with the terminating 0
    MANIFEST_FILES = 4096,        // at most; a thousand ranks' shards of a model and an optimizer are fewer
    MANIFEST_BYTES = 4096 * 1024, // limit of the text: MANIFEST_FILES files stay below it, without added white space
};

struct manifest_file {
    char name[MANIFEST_FILE_NAME];
    uint64_t bytes;
    char xxh3_128[HASH128_DIGITS + 1];
};
struct manifest {
    int64_t step; // finished steps
    int num_files;
    struct manifest_file *files; // owned; manifest_free frees them
};

__BEGIN_DECLS
// Parses a text, which may be malformed. manifest_free frees *manifest. Unknown members are refused: an engine that
// adds one also raises the version. Returns NULL, or, with an empty *manifest, the problem, which begins with `name`.
const char *manifest_parse(struct manifest *manifest, const char *text, size_t bytes, const char *name,
                           struct error_text *error);
// Returns the manifest as JSON text of *bytes, which the caller frees; NULL when out of memory.
char *manifest_text(const struct manifest *manifest, size_t *bytes);
void manifest_free(struct manifest *manifest);

// Whether a checkpoint's file may have the name: 1 to MANIFEST_FILE_NAME - 1 letters, digits, '_', '-' and '.', no '.'
// in front, not MANIFEST_NAME. Such a name can't lead out of the folder or be hidden, and suits any file system.
bool manifest_name_is_allowed(const char *name);
// Returns the entry of that name, valid until manifest_add or manifest_free; NULL if there is none.
const struct manifest_file *manifest_find(const struct manifest *manifest, const char *name);
// Adds an entry, its other fields zero. Returns it, valid until the next manifest_add or manifest_free; NULL when out
// of memory. Checks neither MANIFEST_FILES nor the name: an existing name is added again, and a long one is cut.
struct manifest_file *manifest_add(struct manifest *manifest, const char *name);
__END_DECLS
