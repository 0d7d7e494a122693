// The checkpoint with the lowest validation loss: the link OUT/checkpoints/best says which one it is. It stays,
// whatever --keep-checkpoints says, until another one takes its place.
#pragma once
#include "runtime/machine/error_text.h" // struct error_text
#include <stdint.h>                     // int64_t
#include <sys/cdefs.h>                  // __BEGIN_DECLS

#define CHECKPOINT_BEST "best"

__BEGIN_DECLS
// Returns the step that the link of the root open as `root_fd` names, even if it is gone; -1: no link, or to no step.
int64_t checkpoint_best(int root_fd);
// Makes the checkpoint of `step`, which is there, the root's best one, then removes the former best one if its step is
// earlier and no multiple of `every`, the steps between regular saves (0: none). Returns NULL or the problem of either.
const char *checkpoint_set_best(const char *root, int64_t step, int every, struct error_text *error);
// Calls checkpoint_set_best for `step`, at which a run resumes with its lowest loss, in case a kill came before that
// call. Returns NULL at once where the root's best one is of `step` or later, or the root has no checkpoint of `step`.
const char *checkpoint_mend_best(const char *root, int64_t step, int every, struct error_text *error);
__END_DECLS
