// A report's file: a plan, the scores of tasks. It is written under a temporary name and renamed when it is complete, so
// that a full disk leaves the old file, and two runs that write one leave that of either, whole. Where the path is no
// regular file (a pipe, a terminal, a link), it is written directly.
#pragma once
#include "runtime/machine/error.h" // fail
#include <errno.h>                 // errno
#include <stdbool.h>               // bool
#include <stdio.h>                 // FILE
#include <stdlib.h>                // malloc, free
#include <string.h>                // strlen, strerror
#include <sys/stat.h>              // lstat
#include <unistd.h>                // getpid, unlink

struct report_file {
    FILE *file;
    const char *option, *path;
    char *temporary; // renamed to `path` at the end; NULL: written directly
};

__attribute__((noreturn)) static void report_file_fail(const struct report_file *out) {
    const char *reason = strerror(errno);
    if (out->temporary)
        unlink(out->temporary);
    fail("%s %s: cannot write it: %s; name a file in a folder that exists, may be written and has room", out->option,
         out->path, reason);
}

// Opens the file that the option names; fails, naming it, where that can't be written.
static struct report_file report_file_open(const char *option, const char *path) {
    struct report_file out = {NULL, option, path, NULL};
    struct stat status;
    if (lstat(path, &status) != 0 || S_ISREG(status.st_mode)) {
        const size_t n = strlen(path) + 32;
        out.temporary = (char *)malloc(n);
        if (!out.temporary)
            fail("out of memory for a file's name");
        snprintf(out.temporary, n, "%s.%ld.tmp", path, (long)getpid());
    }
    out.file = fopen(out.temporary ? out.temporary : path, "w");
    if (!out.file)
        report_file_fail(&out);
    return out;
}

// Ends the file, which then has its name; fails where it could not be written.
static void report_file_close(struct report_file *out) {
    const bool written = fflush(out->file) == 0 && !ferror(out->file);
    if (fclose(out->file) != 0 || !written || (out->temporary && rename(out->temporary, out->path) != 0))
        report_file_fail(out);
    free(out->temporary);
}
