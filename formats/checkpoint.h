// Checkpoints that are there: verifying one, finding the newest, keeping few. checkpoint_write.h writes them,
// checkpoint_folder.h says what the names in their folder mean. What is inside their files is their writers' business.
//
// Nothing here ends the process: each function returns NULL, or what is wrong, in words that lie in `error`. A
// manifest is the caller's to free where NULL is returned, and empty otherwise.
#pragma once
#include "formats/manifest.h"           // struct manifest
#include "runtime/machine/error_text.h" // struct error_text
#include <limits.h>                     // PATH_MAX
#include <stdint.h>                     // int64_t
#include <sys/cdefs.h>                  // __BEGIN_DECLS

// Who is told why something newer than what is found is passed over, and of leftovers.
struct checkpoint_listener {
    void (*say)(void *context, const char *text); // may be NULL
    void *context;
};

__BEGIN_DECLS
// Whether the folder is a complete checkpoint: each file that its manifest lists is there, as long as it should be, and
// has its hash. Files that the manifest doesn't list may lie beside them.
const char *checkpoint_verify(struct manifest *manifest, const char *folder, struct error_text *error);

// The newest checkpoint in a root that verifies: its folder and its manifest. An empty path and NULL: the root holds
// none, nor anything that looks like one. Where it holds some and none verifies, that is a problem: to begin anew
// beside them is the user's decision. `listener` may be NULL.
const char *checkpoint_newest(char path[PATH_MAX], struct manifest *manifest, const char *root,
                              const struct checkpoint_listener *listener, struct error_text *error);
// The checkpoint that a user names: itself, which then must verify; or a root, or a run's --out folder, of which it is
// the newest. That there is none is a problem here.
const char *checkpoint_resolve(char path[PATH_MAX], struct manifest *manifest, const char *given,
                               const struct checkpoint_listener *listener, struct error_text *error);

// Removes the oldest checkpoints beyond `keep` (0: none), and leftovers. `newest` is the step that was just saved and
// so is known to be complete; -1: the newest that verifies, which takes reading it. It always stays, and what is
// newer than it is not touched: a run that went back to an earlier step may still be wanted from its later one.
const char *checkpoint_prune(const char *root, int keep, int64_t newest, struct error_text *error);
__END_DECLS
