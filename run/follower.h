// Runs scripts/follow.py beside the run: a process that reads log.jsonl and sends it to trackers. Its stdin is a pipe
// from this process, whose end tells it that the run has ended. No fault of the follower stops the run.
#pragma once
#include "config/config.h"       // struct config
#include "runtime/machine/say.h" // say_warning
#include <errno.h>               // ECHILD
#include <fcntl.h>               // O_CLOEXEC
#include <limits.h>              // PATH_MAX
#include <signal.h>              // sigset_t
#include <spawn.h>               // posix_spawnp: a process that uses a GPU should not be copied by fork
#include <stdbool.h>             // bool
#include <stdio.h>               // snprintf
#include <string.h>              // strerror, strrchr
#include <sys/wait.h>            // waitpid
#include <unistd.h>              // pipe2, readlink, access

extern char **environ;

struct follower {
    pid_t pid;   // 0: none was started
    int run_end; // the pipe's end that this process holds
};

// path = scripts/follow.py or share/train_gpt/follow.py, at most 3 folders above the program's. Returns whether found.
static bool follower_find(char path[PATH_MAX]) {
    enum { ABOVE = 4 };
    static const char *const places[] = {"scripts/follow.py", "share/train_gpt/follow.py"};
    char folder[PATH_MAX];
    const ssize_t length = readlink("/proc/self/exe", folder, sizeof folder - 1);
    folder[length > 0 ? length : 0] = '\0';
    for (int up = 0; up < ABOVE && strrchr(folder, '/'); up++) {
        *strrchr(folder, '/') = '\0';
        for (size_t i = 0; i < sizeof places / sizeof *places; i++)
            if ((size_t)snprintf(path, PATH_MAX, "%s/%s", folder, places[i]) < PATH_MAX && access(path, R_OK) == 0)
                return true;
    }
    return false;
}

// Starts python3 with argv `arguments` and stdin `in`, in a session that Ctrl-C doesn't reach. Returns 0, or an errno.
static int follower_spawn(pid_t *pid, const char *const arguments[], int in) {
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    int error = posix_spawn_file_actions_init(&actions);
    if (error)
        return error;
    error = posix_spawnattr_init(&attributes);
    if (!error) {
        error = posix_spawn_file_actions_adddup2(&actions, in, STDIN_FILENO);
        error = error ? error : posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID);
        error = error ? error : posix_spawnp(pid, "python3", &actions, &attributes, (char *const *)arguments, environ);
        posix_spawnattr_destroy(&attributes);
    }
    posix_spawn_file_actions_destroy(&actions);
    return error;
}

// Starts the follower on rank 0 if an option asks for trackers, or warns why it can't. follower_end ends *f. log.jsonl
// and config.json must be in --out. is_new: trackers begin new runs, else they go on with the runs in follow.json.
static void follower_start(struct follower *f, const struct config *c, bool is_new) {
    const struct tracker_options *t = &c->trackers;
    char path[PATH_MAX], port[16];
    int ends[2], count = 0;
    const char *arguments[20];
    memset(f, 0, sizeof *f);
    if (c->rank > 0 || (!*t->wandb_project && !*t->mlflow_tracking_uri && t->metrics_port == 0))
        return;
    if (!follower_find(path)) {
        say_warning("scripts/follow.py is in no folder above this program's; the run goes on without trackers");
        return;
    }
    snprintf(port, sizeof port, "%d", t->metrics_port);
    const char *const pairs[][2] = {{"--wandb-project", t->wandb_project},
                                    {"--wandb-name", t->wandb_name},
                                    {"--mlflow-tracking-uri", t->mlflow_tracking_uri},
                                    {"--mlflow-experiment", t->mlflow_experiment},
                                    {"--metrics-port", t->metrics_port > 0 ? port : ""}};
    arguments[count++] = "python3";
    arguments[count++] = path;
    arguments[count++] = c->data.out;
    arguments[count++] = "--with-run";
    if (is_new)
        arguments[count++] = "--new";
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        if (!*pairs[i][1])
            continue;
        arguments[count++] = pairs[i][0];
        arguments[count++] = pairs[i][1];
    }
    arguments[count] = NULL;
    int error = pipe2(ends, O_CLOEXEC) == 0 ? 0 : errno;
    if (!error) {
        error = follower_spawn(&f->pid, arguments, ends[0]);
        close(ends[0]);
        f->run_end = ends[1];
        if (error)
            close(ends[1]);
    }
    if (error) {
        f->pid = 0;
        say_warning("python3 %s: cannot be started: %s; the run goes on without trackers", path, strerror(error));
    }
}

// Tells the follower, if any, that the run has ended. Waits for its end; after a minute warns, and leaves it running.
static void follower_end(struct follower *f) {
    enum { WAIT_MS = 60000, EVERY_MS = 20 };
    if (f->pid == 0)
        return;
    close(f->run_end);
    for (int waited = 0; waited < WAIT_MS; waited += EVERY_MS) {
        const pid_t ended = waitpid(f->pid, NULL, WNOHANG);
        if (ended == f->pid || (ended < 0 && errno != EINTR))
            return;
        usleep(1000 * EVERY_MS);
    }
    say_warning("scripts/follow.py (process %ld) still sends to trackers", (long)f->pid);
}
