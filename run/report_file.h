// Writes the file of a report under a temporary name, and renames it when complete, so that a full disk leaves the old
// file. A path that is no regular file (a pipe, a terminal) is written directly. A link stays; its target is replaced.
#pragma once
#include "runtime/machine/error.h" // fail
#include <errno.h>                 // errno
#include <stdbool.h>               // bool
#include <stdio.h>                 // FILE
#include <stdlib.h>                // malloc, free, realpath
#include <string.h>                // strlen, strerror
#include <sys/stat.h>              // lstat
#include <unistd.h>                // getpid, unlink

struct report_file {
    FILE *file;
    const char *option, *path;
    char *target;    // `path` without links; NULL: nothing is there yet
    char *temporary; // renamed to `target`, else to `path`, at the end; NULL: written directly
};

// Removes the temporary file, and ends the program with what errno says.
__attribute__((noreturn)) static void report_file_fail(const struct report_file *out) {
    const char *reason = strerror(errno);
    if (out->temporary)
        unlink(out->temporary);
    fail("%s %s: cannot write it: %s; name a file in a folder that exists, may be written and has room", out->option,
         out->path, reason);
}

// Opens `path` for writing, or ends the program. option: for messages. Both texts must stay until report_file_close.
static struct report_file report_file_open(const char *option, const char *path) {
    struct report_file out = {NULL, option, path, realpath(path, NULL), NULL};
    struct stat status;
    const char *const target = out.target ? out.target : path;
    if (lstat(target, &status) != 0 || S_ISREG(status.st_mode)) {
        const size_t n = strlen(target) + 32;
        out.temporary = (char *)malloc(n);
        if (!out.temporary)
            fail("out of memory for a file's name");
        snprintf(out.temporary, n, "%s.%ld.tmp", target, (long)getpid());
    }
    out.file = fopen(out.temporary ? out.temporary : path, "w");
    if (!out.file)
        report_file_fail(&out);
    return out;
}

// Closes the file and gives it its name. Ends the program where it could not be written.
static void report_file_close(struct report_file *out) {
    const bool written = fflush(out->file) == 0 && !ferror(out->file);
    const char *const target = out->target ? out->target : out->path;
    if (fclose(out->file) != 0 || !written || (out->temporary && rename(out->temporary, target) != 0))
        report_file_fail(out);
    free(out->temporary);
    free(out->target);
}
