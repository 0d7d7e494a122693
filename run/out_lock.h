// The lock of --out: only one run at a time continues and writes what is there. Rank 0 takes it for all ranks, since
// hosts may have different folders of the same name. The file stays; the lock ends with the process.
#pragma once
#include "config/config.h"           // struct config
#include "run/run_folder.h"          // out_is_foreign
#include "run/start.h"               // start_check_new
#include "runtime/files/file_lock.h" // file_lock_take
#include "runtime/machine/say.h"     // say_warning
#include "runtime/text/log.h"        // log_make_folder

#define OUT_LOCK_NAME ".lock"

// Sets config->out_lock, -1 if --out is missing. Warns if locks fail. Returns an error if --out is another's, or NULL.
static const char *out_lock_take(struct config *config, struct error_text *error) {
    char path[PATH_MAX];
    struct error_text text;
    if ((size_t)snprintf(path, sizeof path, "%s/" OUT_LOCK_NAME, config->data.out) >= sizeof path)
        return error_format(error, "--out %.500s: the name is too long", config->data.out);
    if (out_is_foreign(config->data.out))
        return error_format(
            error,
            "--out %.500s: its config.json is not that of a run, but a model's or another program's, and "
            "would be overwritten; name another folder",
            config->data.out);
    switch (file_lock_take(&config->out_lock, path, &text)) {
    case FILE_LOCK_TAKEN:
    case FILE_LOCK_NO_FOLDER: break;
    case FILE_LOCK_HELD:
        return error_format(error,
                            "--out %.300s: %.300s is training there; wait until it ends, stop it, or name another "
                            "--out; if no such process is left, remove %.300s",
                            config->data.out, text.text, path);
    case FILE_LOCK_NO_FILE: return error_format(error, "%.900s; name another folder by --out", text.text);
    case FILE_LOCK_IMPOSSIBLE: say_warning("%s; start no second run with this --out", text.text); break;
    }
    return NULL;
}

// Takes the lock of --out on rank 0, unless it has it, or --out is missing (then out_lock_new does). Only warns where
// locks are impossible. Ends the job if another run has the lock, or the folder isn't a run's. Every rank calls this.
static void out_lock(struct config *config) {
    struct error_text error;
    const char *problem = config->rank == 0 && config->out_lock < 0 ? out_lock_take(config, &error) : NULL;
    bool refused = problem != NULL;
    if (!config->parallel && refused)
        fail("%s", problem);
    if (config->parallel)
        control_broadcast(config->parallel->control, &refused, sizeof refused, "lock of --out", false);
    if (!refused)
        return;
    if (problem)
        say_warning("%s", problem);
    parallel_close(config->parallel); // no rank takes the end of another for a failure
    exit(EXIT_USAGE);
}

// Creates --out and takes its lock, where --out was missing at the start. Ends the program if a new run finds
// checkpoints there, as another run was faster. Every rank calls this before anything is written there.
static void out_lock_new(struct config *config) {
    const bool first = config->rank == 0 && config->out_lock < 0;
    if (first)
        log_make_folder("out", config->data.out);
    out_lock(config);
    if (first && !*config->checkpoint)
        start_check_new(config);
}
