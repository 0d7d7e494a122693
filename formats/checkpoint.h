// Verifies existing checkpoints, finds the newest and removes old ones. checkpoint_write.h writes checkpoints, and
// checkpoint_folder.h says what the names in their folder mean. No function here ends the process: each returns NULL
// or, in `error`, what is wrong. Where NULL is returned, the caller frees *manifest; otherwise it is empty.
#pragma once
#include "formats/manifest.h"           // struct manifest
#include "runtime/machine/error_text.h" // struct error_text
#include <limits.h>                     // PATH_MAX
#include <stdbool.h>                    // bool
#include <stdint.h>                     // int64_t
#include <sys/cdefs.h>                  // __BEGIN_DECLS

// The caller's callback: it is told why newer checkpoints were passed over, and which leftovers were seen.
struct checkpoint_listener {
    void (*say)(void *context, const char *text); // may be NULL
    void *context;
};

__BEGIN_DECLS
// Checks that a folder is a complete checkpoint, and reads its manifest. Each file that the manifest lists must be
// there, with the listed length and hash. Other files may be there. Where NULL is returned, the caller frees *manifest.
const char *checkpoint_verify(struct manifest *manifest, const char *folder, struct error_text *error);
// Checks the files that the manifest of a model's folder lists, by length and hash. A folder without a manifest passes:
// this program did not write it. Without `optimizer`, skips the files of the optimizer and of the trainer's state.
const char *checkpoint_verify_model(const char *folder, bool optimizer, struct error_text *error);

// Finds the newest checkpoint in a root that verifies. Sets `path`, and *manifest, which the caller frees. Returns NULL
// with an empty path where the root is missing or holds no checkpoints. Where it has some but none verifies, that is an
// error: the user must decide whether to begin anew beside them. `listener` may be NULL.
const char *checkpoint_newest(char path[PATH_MAX], struct manifest *manifest, const char *root,
                              const struct checkpoint_listener *listener, struct error_text *error);
// Finds the checkpoint that the user's path `given` means: `given` if it has a manifest, else the newest in
// given/checkpoints or, if this folder is missing, in `given`. Finding none is an error. Sets `path` and *manifest.
const char *checkpoint_resolve(char path[PATH_MAX], struct manifest *manifest, const char *given,
                               const struct checkpoint_listener *listener, struct error_text *error);

// Removes what unfinished saves left, and old checkpoints. What stays: the newest `keep` complete ones (0: all), the
// best one (checkpoint_best.h), step `newest`, and later steps, which a run that went back may want. newest: the step
// just saved, known to be complete; -1: the newest that verifies, found by reading. Returns NULL or the last problem.
const char *checkpoint_prune(const char *root, int keep, int64_t newest, struct error_text *error);
__END_DECLS
