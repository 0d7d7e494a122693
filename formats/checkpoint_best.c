#include "formats/checkpoint_best.h"
#include "formats/checkpoint_folder.h" // checkpoint_remove, checkpoint_fsync_folder
#include <errno.h>                     // errno
#include <fcntl.h>                     // open
#include <stdbool.h>                   // bool
#include <stdio.h>                     // renameat
#include <string.h>                    // strerror
#include <unistd.h>                    // readlinkat, symlinkat

int64_t checkpoint_best(int root_fd) {
    struct checkpoint_entry entry;
    char name[CHECKPOINT_NAME];
    const ssize_t length = readlinkat(root_fd, CHECKPOINT_BEST, name, sizeof name - 1);
    name[length > 0 ? length : 0] = '\0';
    return checkpoint_entry_parse(&entry, name) && entry.kind == CHECKPOINT_STEP ? entry.step : -1;
}

// Points the root's link to the checkpoint of a step, atomically, and flushes the root. Returns 0 or an errno.
static int link_best(int root_fd, int64_t step) {
    static const char made[] = "." CHECKPOINT_BEST ".new";
    const struct checkpoint_entry entry = checkpoint_entry_make(CHECKPOINT_STEP, step, 0);
    unlinkat(root_fd, made, 0); // what a killed process left
    if (symlinkat(entry.name, root_fd, made) != 0)
        return errno;
    if (renameat(root_fd, made, root_fd, CHECKPOINT_BEST) == 0)
        return checkpoint_fsync_folder(root_fd);
    const int problem = errno;
    unlinkat(root_fd, made, 0);
    return problem;
}

const char *checkpoint_replace_best(const char *root, int64_t step, int every, struct error_text *error) {
    const int root_fd = open(root, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (root_fd < 0)
        return error_format(error, "%.500s: cannot be opened: %s", root, strerror(errno));
    const int64_t former = checkpoint_best(root_fd);
    int problem = link_best(root_fd, step);
    if (problem) {
        close(root_fd);
        return error_format(error,
                            "%.500s/" CHECKPOINT_BEST ": the link to the best checkpoint, of step %lld, cannot be "
                            "made: %s",
                            root, (long long)step, strerror(problem));
    }
    if (former >= 0 && former < step && (every == 0 || former % every != 0)) {
        const struct checkpoint_entry entry = checkpoint_entry_make(CHECKPOINT_STEP, former, 0);
        checkpoint_lock(root_fd);
        problem = checkpoint_remove(root_fd, &entry);
    }
    close(root_fd);
    return problem && problem != ENOENT ? error_format(error,
                                                       "%.500s: the former best checkpoint, of step %lld, cannot "
                                                       "be removed: %s",
                                                       root, (long long)former, strerror(problem))
                                        : NULL;
}

const char *checkpoint_mend_best(const char *root, int64_t step, int every, struct error_text *error) {
    const struct checkpoint_entry entry = checkpoint_entry_make(CHECKPOINT_STEP, step, 0);
    const int root_fd = open(root, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (root_fd < 0)
        return NULL; // the run goes on in another folder than the checkpoint's
    const bool mends = faccessat(root_fd, entry.name, F_OK, 0) == 0 && checkpoint_best(root_fd) < step;
    close(root_fd);
    return mends ? checkpoint_replace_best(root, step, every, error) : NULL;
}
