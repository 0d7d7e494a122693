// The checkpoint of the lowest validation loss: OUT/checkpoints/best links to it, and --keep-checkpoints spares it.
#pragma once
#include "runtime/machine/error_text.h" // struct error_text
#include <stdint.h>                     // int64_t
#include <sys/cdefs.h>                  // __BEGIN_DECLS

#define CHECKPOINT_BEST "best"

__BEGIN_DECLS
// Returns the step that the link `best` in the open root names, even if its checkpoint is gone; -1: it names no step.
int64_t checkpoint_best(int root_fd);
// Points the root's link `best` to the existing checkpoint of `step`. Then removes the former best one, if its step is
// earlier and no multiple of `every`, the steps between regular saves (0: there are none). Returns NULL or a problem.
const char *checkpoint_replace_best(const char *root, int64_t step, int every, struct error_text *error);
// Makes up for a checkpoint_replace_best that a kill prevented. A run that resumes at `step`, where its loss is lowest,
// calls it. Does nothing if the root's best checkpoint is of `step` or later, or if `step` has no checkpoint there.
const char *checkpoint_mend_best(const char *root, int64_t step, int every, struct error_text *error);
__END_DECLS
