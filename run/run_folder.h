// Recognizes a run's folder, --out, and finds what --init-from and --resume take from one.
#pragma once
#include "config/config.h"            // struct config
#include "formats/checkpoint.h"       // checkpoint_resolve
#include "runtime/files/file_read.h"  // is_pipe
#include "runtime/machine/error.h"    // fail
#include "runtime/machine/say.h"      // say
#include "runtime/machine/text_add.h" // text_copy
#include "runtime/net/parallel.h"     // control_broadcast
#include <limits.h>                   // PATH_MAX
#include <stdio.h>                    // snprintf
#include <stdlib.h>                   // realpath
#include <string.h>                   // strcmp
#include <sys/stat.h>                 // stat

// Whether a folder has a folder `checkpoints` in it, as a run's --out has; a model's own folder has none.
static bool has_checkpoints(const char *folder) {
    char path[PATH_MAX];
    struct stat status;
    return (size_t)snprintf(path, sizeof path, "%s/checkpoints", folder) < sizeof path && stat(path, &status) == 0 &&
           S_ISDIR(status.st_mode);
}
// Whether a folder has a config.json that no run of this program wrote, such as a model's; a run would replace it.
static bool out_is_foreign(const char *folder) {
    char path[PATH_MAX], text[4096];
    if ((size_t)snprintf(path, sizeof path, "%s/config.json", folder) >= sizeof path || is_pipe(path))
        return false;
    FILE *const file = fopen(path, "r");
    const size_t bytes = file ? fread(text, 1, sizeof text - 1, file) : 0;
    text[bytes] = '\0';
    if (file)
        fclose(file);
    return bytes > 0 && !strstr(text, "\"preset\"");
}

// Whether `checkpoint`, an absolute path without links, is one of the run whose --out is `folder`, and is still there.
static bool is_checkpoint_of_run(const char *checkpoint, const char *folder) {
    char path[PATH_MAX];
    const size_t length =
        has_checkpoints(folder) && !out_is_foreign(folder) && realpath(folder, path) ? strlen(path) : 0;
    struct stat status;
    return length > 0 && strncmp(checkpoint, path, length) == 0 &&
           strncmp(checkpoint + length, "/checkpoints/", strlen("/checkpoints/")) == 0 &&
           stat(checkpoint, &status) == 0;
}

static void say_passed_over(void *context, const char *text) { say(stdout, "passed over: %s\n", text); }

// Replaces *folder, if it is a run's, by the path of the newest checkpoint there that verifies, a new text; ends the
// program if there is none. Leaves "" and other folders. option: its name without dashes. Every rank calls this.
static void take_newest_of_run(const struct config *config, const char **folder, const char *option) {
    const struct checkpoint_listener listener = {say_passed_over, NULL};
    struct manifest manifest;
    struct error_text error;
    char path[PATH_MAX];
    if (!**folder || !has_checkpoints(*folder) || out_is_foreign(*folder))
        return;
    memset(path, 0, sizeof path);
    if (config->rank == 0) {
        const char *problem = checkpoint_resolve(path, &manifest, *folder, &listener, &error);
        if (problem)
            fail("--%s %s: %s", option, *folder, problem);
        manifest_free(&manifest);
    }
    if (config->parallel)
        control_broadcast(config->parallel->control, path, sizeof path, "the newest checkpoint of a run", true);
    *folder = text_copy(path);
}

// Sets --out, unless given, to the run's folder if --resume names that, its `checkpoints`, or a checkpoint in these.
static void out_of_resume(struct config *config) {
    const char *const resume = config->checkpoints.resume;
    char path[PATH_MAX];
    if (config_given(config, data.out) || strcmp(resume, "none") == 0 || strcmp(resume, "auto") == 0)
        return;
    if (has_checkpoints(resume)) {
        config->data.out = resume;
        return;
    }
    if (!realpath(resume, path))
        return; // start_resume says what is wrong with it
    char *slash = strrchr(path, '/');
    if (slash && slash > path && strcmp(slash, "/checkpoints") != 0) {
        *slash = '\0';
        slash = strrchr(path, '/');
    }
    if (!slash || slash == path || strcmp(slash, "/checkpoints") != 0)
        return;
    *slash = '\0';
    config->data.out = text_copy(path);
}
