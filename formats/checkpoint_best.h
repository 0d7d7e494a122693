// The checkpoint with the lowest validation loss: the link OUT/checkpoints/best says which one it is. It stays,
// whatever --keep-checkpoints says, until another one takes its place.
#pragma once
#include "runtime/machine/error_text.h" // struct error_text
#include <stdint.h>                     // int64_t
#include <sys/cdefs.h>                  // __BEGIN_DECLS

#define CHECKPOINT_BEST "best"

__BEGIN_DECLS
// Returns the step of the best checkpoint of the root that is open as `root_fd`; -1: none is known.
int64_t checkpoint_best(int root_fd);
// Makes the checkpoint of `step`, which is there, the root's best one. Removes the former best one, if it is older and
// its step is no multiple of `every` (0: there are none), which a run keeps anyway. Returns NULL or the problem.
const char *checkpoint_set_best(const char *root, int64_t step, int every, struct error_text *error);
// Does checkpoint_set_best for the step that was best when its run ended, where a kill came before it. Does nothing
// where the root has a later best one, or not that checkpoint.
const char *checkpoint_mend_best(const char *root, int64_t step, int every, struct error_text *error);
__END_DECLS
