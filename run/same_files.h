// Finds shards that are read twice: by a pattern that takes validation files, too, or by two names. It may be meant.
#pragma once
#include "dataloader.h"          // dataloader_path
#include "runtime/machine/say.h" // say
#include <stdio.h>               // FILE
#include <stdlib.h>              // calloc, free
#include <sys/stat.h>            // stat

struct file_identity {
    dev_t device;
    ino_t inode;
};

// Returns the identities of a loader's files, which the caller frees, or NULL without memory. inode 0: a file is gone.
static struct file_identity *file_identities(const struct dataloader *loader) {
    const int count = dataloader_num_files(loader);
    struct file_identity *all = (struct file_identity *)calloc((size_t)count + 1, sizeof *all);
    for (int i = 0; all && i < count; i++) {
        struct stat status;
        if (stat(dataloader_path(loader, i), &status) != 0)
            continue;
        all[i].device = status.st_dev;
        all[i].inode = status.st_ino;
    }
    return all;
}
// Whether a and b are one file, which exists.
static bool is_same_file(struct file_identity a, struct file_identity b) {
    return a.inode != 0 && a.device == b.device && a.inode == b.inode;
}

// Prints a note on `out` if training data have a file twice, or a file of the validation data. val may be NULL.
static void report_same_files(const struct dataloader *train, const struct dataloader *val, FILE *out) {
    const int files = dataloader_num_files(train), val_files = val ? dataloader_num_files(val) : 0;
    struct file_identity *trained = file_identities(train), *validated = val ? file_identities(val) : NULL;
    int shared = 0, first = 0, twice = 0, former = 0, later = 0;
    for (int i = 0; trained && i < files; i++) {
        bool found = false;
        for (int j = 0; validated && j < val_files && !found; j++)
            found = is_same_file(trained[i], validated[j]);
        if (found && shared++ == 0)
            first = i;
        for (int j = 0; j < i; j++)
            if (is_same_file(trained[i], trained[j]) && twice++ == 0) {
                former = j;
                later = i;
            }
    }
    if (shared > 0)
        say(out, "note: %s is in --train-data and in --val-data, %d of %d files: validation sees what is trained on\n",
            dataloader_path(train, first), shared, files);
    if (twice > 0)
        say(out, "note: %s and %s of --train-data are one file, whose tokens count twice\n",
            dataloader_path(train, former), dataloader_path(train, later));
    free(trained);
    free(validated);
}
