// Existing checkpoints: verifying one, finding the newest, removing old ones. checkpoint_write.h writes them,
// checkpoint_folder.h says what the names in their folder mean. The content of their files is not looked at here. No
// function here ends the process: each returns NULL, or what is wrong, in `error`. Where NULL is returned the caller
// frees *manifest; otherwise it is empty.
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
// *manifest = the manifest of a folder, which must be a complete checkpoint: each file that is listed exists, with the
// length and the hash listed. Other files may be in the folder. Where NULL is returned, the caller frees *manifest.
const char *checkpoint_verify(struct manifest *manifest, const char *folder, struct error_text *error);
// Checks length and hash of the files that the manifest of a model's folder lists. A folder without a manifest passes:
// this program did not write it. `optimizer`: the files of the optimizer and of the trainer's state too.
const char *checkpoint_verify_model(const char *folder, bool optimizer, struct error_text *error);

// Finds the newest checkpoint in a root that verifies: its `path`, and *manifest, which the caller frees. NULL with an
// empty path: the root is missing, or holds nothing that looks like a checkpoint. Checkpoints of which none verifies
// are an error: whether to begin anew beside them is for the user to decide. `listener` may be NULL.
const char *checkpoint_newest(char path[PATH_MAX], struct manifest *manifest, const char *root,
                              const struct checkpoint_listener *listener, struct error_text *error);
// Finds the checkpoint that the user's path `given` means: a checkpoint's folder, which must verify, or else the newest
// one in a root or a run's --out folder; none is an error. Sets `path` and *manifest as checkpoint_newest does.
const char *checkpoint_resolve(char path[PATH_MAX], struct manifest *manifest, const char *given,
                               const struct checkpoint_listener *listener, struct error_text *error);

// Removes leftovers, under a lock, and the oldest checkpoints beyond the `keep` newest complete ones (0: keeps all).
// newest: the step just saved, known to be complete; -1: the newest that verifies, found by reading. Step `newest`, the
// best (checkpoint_best.h) and later ones stay: a run that went back may want them. NULL or the last problem.
const char *checkpoint_prune(const char *root, int keep, int64_t newest, struct error_text *error);
__END_DECLS
