// The checkpoint with the lowest validation loss: the link OUT/checkpoints/best says which one it is. It stays,
// whatever --keep-checkpoints says, until another one takes its place.
#pragma once
#include "runtime/machine/error_text.h" // struct error_text
#include <stdint.h>                     // int64_t
#include <sys/cdefs.h>                  // __BEGIN_DECLS

#define CHECKPOINT_BEST "best"

__BEGIN_DECLS
// Returns the step that the link `best` in the open root names, even if its checkpoint is gone; -1: it names no step.
int64_t checkpoint_best(int root_fd);
// Makes an existing checkpoint, of `step`, the root's best one. Then removes the former best one if its step is earlier
// and not a multiple of `every`, the steps between regular saves (0: there are none). Returns NULL or a problem.
const char *checkpoint_replace_best(const char *root, int64_t step, int every, struct error_text *error);
// Calls checkpoint_replace_best when a run resumes at `step`, where its loss is lowest, in case a kill prevented it.
// Does nothing where the root's best checkpoint is of `step` or later, or `step` has no checkpoint there.
const char *checkpoint_mend_best(const char *root, int64_t step, int every, struct error_text *error);
__END_DECLS
