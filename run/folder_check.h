// Checks the files of a folder against its manifest, where it has one, in a thread of its own while they are loaded.
#pragma once
#include "formats/checkpoint.h"    // checkpoint_verify_model
#include "runtime/machine/error.h" // fail
#include <pthread.h>               // pthread_create
#include <stdbool.h>               // bool
#include <sys/stat.h>              // stat

struct folder_check {
    const char *path; // not owned
    bool optimizer;   // check its files too
    bool running;
    pthread_t thread;
    const char *problem; // NULL, or in `error`
    struct error_text error;
};

static inline void *folder_check_run(void *argument) {
    struct folder_check *const check = (struct folder_check *)argument;
    check->problem = checkpoint_verify_model(check->path, check->optimizer, &check->error);
    return NULL;
}

// Begins to check a folder's files against its manifest; folder_check_end waits. *check and `path` must stay until
// then. Does nothing if path is NULL, empty or no folder. optimizer: also checks files of optimizer and trainer.
static inline void folder_check_begin(struct folder_check *check, const char *path, bool optimizer) {
    struct stat status;
    check->path = path;
    check->optimizer = optimizer;
    check->problem = NULL;
    check->running = path && *path && stat(path, &status) == 0 && S_ISDIR(status.st_mode);
    if (check->running && pthread_create(&check->thread, NULL, folder_check_run, check) != 0)
        fail("%s: no thread can be started that checks its files", path);
}

// Waits for the check, if one was begun. Returns what is wrong with the files, in *error. If nothing is, returns the
// caller's own `problem` (NULL: none), which comes second as damaged files may have caused it.
static inline const char *folder_check_end(struct folder_check *check, const char *problem, struct error_text *error) {
    if (!check->running)
        return problem;
    pthread_join(check->thread, NULL);
    check->running = false;
    return check->problem
               ? error_format(error, "%.900s; --check-weights=false takes the files as they are", check->problem)
               : problem;
}
