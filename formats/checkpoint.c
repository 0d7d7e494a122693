#include "formats/checkpoint.h"
#include "formats/checkpoint_best.h"   // checkpoint_best
#include "formats/checkpoint_folder.h" // checkpoint_list, checkpoint_remove
#include "formats/checkpoint_hash.h"   // checkpoint_hash_file
#include <errno.h>                     // errno, EINTR
#include <fcntl.h>                     // openat
#include <inttypes.h>                  // PRId64
#include <stdio.h>                     // snprintf
#include <stdlib.h>                    // malloc, free
#include <string.h>                    // strerror
#include <sys/stat.h>                  // fstat
#include <unistd.h>                    // read, close

// ---- verifying ----

// Opens a regular file of a folder to read. *bytes = its length. Returns 0, or an errno: EINVAL for a pipe or a device.
static int checkpoint_open_regular(int *fd, uint64_t *bytes, int folder_fd, const char *name) {
    struct stat status;
    *bytes = 0;
    *fd = openat(folder_fd, name, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (*fd < 0)
        return errno;
    int error = fstat(*fd, &status) == 0 ? 0 : errno;
    if (!error && !S_ISREG(status.st_mode))
        error = S_ISDIR(status.st_mode) ? EISDIR : EINVAL;
    if (error)
        close(*fd);
    else
        *bytes = (uint64_t)status.st_size;
    return error;
}

// Returns what an errno of checkpoint_open_regular means, in words.
static const char *checkpoint_open_error(int error) {
    return error == EINVAL ? "is not a regular file" : strerror(error);
}

// Reads an open folder's manifest into the zeroed *manifest. A missing manifest is an error. folder: for messages.
static const char *checkpoint_read_manifest(struct manifest *manifest, int folder_fd, const char *folder,
                                            struct error_text *error) {
    char name[PATH_MAX + 32];
    int fd;
    uint64_t bytes;
    snprintf(name, sizeof name, "%s/" MANIFEST_NAME, folder);
    const int problem = checkpoint_open_regular(&fd, &bytes, folder_fd, MANIFEST_NAME);
    if (problem)
        return error_format(error, "%.500s: %s; it is no complete checkpoint", name, checkpoint_open_error(problem));
    // Of a file that is too long, one byte beyond the limit is read, so that the parser refuses it.
    const size_t room = bytes <= MANIFEST_BYTES ? (size_t)bytes : MANIFEST_BYTES + 1;
    char *const text = (char *)malloc(room + 1);
    const ssize_t got = text ? checkpoint_read(fd, (unsigned char *)text, room) : -1;
    const char *failed = NULL;
    if (got < 0)
        failed = error_format(error, "%.500s: cannot be read: %s", name, strerror(text ? errno : ENOMEM));
    else
        failed = manifest_parse(manifest, text, (size_t)got, name, error);
    free(text);
    close(fd);
    return failed;
}

// Checks the length and, with `hash`, the hash of a file in the open folder against the manifest. folder: for messages.
static const char *checkpoint_check_file(const struct manifest_file *file, int folder_fd, const char *folder, bool hash,
                                         struct error_text *error) {
    int fd;
    uint64_t bytes;
    char found[HASH128_DIGITS + 1];
    int problem = checkpoint_open_regular(&fd, &bytes, folder_fd, file->name);
    if (problem)
        return error_format(error, "%.400s/%s: %s; its manifest lists it", folder, file->name,
                            checkpoint_open_error(problem));
    const bool sized = bytes == file->bytes;
    if (sized && hash)
        problem = checkpoint_hash_file(found, &bytes, fd); // the length may have changed since
    close(fd);
    if (problem)
        return error_format(error, "%.400s/%s: cannot be read at byte %" PRIu64 ": %s", folder, file->name, bytes,
                            strerror(problem));
    if (bytes != file->bytes)
        return error_format(error, "%.400s/%s: is %" PRIu64 " bytes long; its manifest says %" PRIu64, folder,
                            file->name, bytes, file->bytes);
    if (hash && strcmp(found, file->xxh3_128) != 0)
        return error_format(error, "%.400s/%s: is damaged: its XXH3 is %s; its manifest says %s", folder, file->name,
                            found, file->xxh3_128);
    return NULL;
}

struct checkpoint_look {
    bool hash;           // check the files' hashes; false: only their lengths
    bool only_model;     // check no file of the optimizer or of the trainer's state
    bool needs_manifest; // false: a folder without a manifest passes
};

// Whether a checkpoint's file is of neither the optimizer nor the trainer's state.
static bool checkpoint_file_is_of_model(const char *name) {
    return strncmp(name, "optimizer", strlen("optimizer")) != 0 &&
           strncmp(name, "trainer_state", strlen("trainer_state")) != 0;
}

// Reads a folder's manifest into *manifest and checks the listed files, as `look` says. If `look` needs no manifest, a
// folder without one passes, with an empty *manifest. After an error *manifest is empty, too.
static const char *checkpoint_check(struct manifest *manifest, const char *folder, struct checkpoint_look look,
                                    struct error_text *error) {
    memset(manifest, 0, sizeof *manifest);
    const int folder_fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder_fd < 0)
        return error_format(error, "%.500s: cannot be opened: %s", folder, strerror(errno));
    const bool has_manifest = look.needs_manifest || faccessat(folder_fd, MANIFEST_NAME, F_OK, 0) == 0;
    const char *problem = has_manifest ? checkpoint_read_manifest(manifest, folder_fd, folder, error) : NULL;
    for (int i = 0; i < manifest->num_files && !problem; i++)
        if (!look.only_model || checkpoint_file_is_of_model(manifest->files[i].name))
            problem = checkpoint_check_file(&manifest->files[i], folder_fd, folder, look.hash, error);
    close(folder_fd);
    if (problem)
        manifest_free(manifest);
    return problem;
}

const char *checkpoint_verify(struct manifest *manifest, const char *folder, struct error_text *error) {
    const struct checkpoint_look all = {true, false, true};
    return checkpoint_check(manifest, folder, all, error);
}
const char *checkpoint_verify_model(const char *folder, bool optimizer, struct error_text *error) {
    const struct checkpoint_look look = {true, !optimizer, false};
    struct manifest manifest;
    const char *const problem = checkpoint_check(&manifest, folder, look, error);
    if (!problem)
        manifest_free(&manifest);
    return problem;
}

// ---- finding ----

static void checkpoint_say(const struct checkpoint_listener *listener, const char *text) {
    if (listener && listener->say)
        listener->say(listener->context, text);
}

// Tells `listener` why a .partial or .removing entry is passed over: a process still uses it, or a dead save left it.
static void checkpoint_say_leftover(const struct checkpoint_listener *listener, const char *root, int root_fd,
                                    const struct checkpoint_entry *entry) {
    struct error_text text;
    if (checkpoint_entry_is_in_use(root_fd, entry))
        error_format(&text, "%.500s/%s: is being written or removed by process %d; it is not looked at", root,
                     entry->name, (int)entry->pid);
    else
        error_format(&text, "%.500s/%s: was left by a save that did not end; the next save removes it", root,
                     entry->name);
    checkpoint_say(listener, text.text);
}

// Checks that `folder` is a whole checkpoint of the entry's step. With `hash` false only files' lengths are checked.
static const char *checkpoint_check_entry(struct manifest *manifest, const char *folder,
                                          const struct checkpoint_entry *entry, bool hash, struct error_text *error) {
    const struct checkpoint_look look = {hash, false, true};
    const char *const problem = checkpoint_check(manifest, folder, look, error);
    if (problem || manifest->step == entry->step)
        return problem;
    const int64_t step = manifest->step;
    manifest_free(manifest);
    return error_format(error, "%.500s/" MANIFEST_NAME ": is of step %" PRId64 ", not of the folder's", folder, step);
}

static const char *checkpoint_path(char path[PATH_MAX], const char *folder, const char *name,
                                   struct error_text *error) {
    if ((size_t)snprintf(path, PATH_MAX, "%s/%s", folder, name) < PATH_MAX)
        return NULL;
    return error_format(error, "%.500s...: the name is too long", folder);
}

// Finds the newest of `entries`, sorted, that verifies, set-aside ones too. Sets `path` and *manifest. Says to
// `listener` why it passes over one. NULL, `path` unchanged: there is no checkpoint. It is an error if all are damaged.
static const char *checkpoint_newest_of(char path[PATH_MAX], struct manifest *manifest, const char *root, int root_fd,
                                        const struct checkpoint_entries *entries,
                                        const struct checkpoint_listener *listener, struct error_text *error) {
    int candidates = 0;
    for (int i = 0; i < entries->count; i++) {
        const struct checkpoint_entry *const entry = &entries->all[i];
        if (entry->kind == CHECKPOINT_PARTIAL || entry->kind == CHECKPOINT_REMOVING) {
            checkpoint_say_leftover(listener, root, root_fd, entry);
            continue;
        }
        candidates++;
        const char *problem = checkpoint_path(path, root, entry->name, error);
        if (!problem)
            problem = checkpoint_check_entry(manifest, path, entry, true, error);
        if (!problem)
            return NULL;
        checkpoint_say(listener, problem);
        path[0] = 0;
    }
    if (!candidates)
        return NULL;
    return error_format(error, "%.500s: none of its %d checkpoints is complete", root, candidates);
}

const char *checkpoint_newest(char path[PATH_MAX], struct manifest *manifest, const char *root,
                              const struct checkpoint_listener *listener, struct error_text *error) {
    struct checkpoint_entries entries;
    memset(manifest, 0, sizeof *manifest);
    path[0] = 0;
    const int root_fd = open(root, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (root_fd < 0)
        return errno == ENOENT ? NULL : error_format(error, "%.500s: cannot be opened: %s", root, strerror(errno));
    const int listed = checkpoint_list(&entries, root_fd);
    const char *const problem = listed ? error_format(error, "%.500s: cannot be read: %s", root, strerror(listed))
                                       : checkpoint_newest_of(path, manifest, root, root_fd, &entries, listener, error);
    close(root_fd);
    free(entries.all);
    return problem;
}

const char *checkpoint_resolve(char path[PATH_MAX], struct manifest *manifest, const char *given,
                               const struct checkpoint_listener *listener, struct error_text *error) {
    char inside[PATH_MAX];
    struct stat status;
    memset(manifest, 0, sizeof *manifest);
    path[0] = 0;
    if (stat(given, &status) != 0)
        return error_format(error, "%.500s: cannot be opened: %s", given, strerror(errno));
    if (!S_ISDIR(status.st_mode))
        return error_format(error, "%.500s: is no folder; expected a checkpoint or a run's --out folder", given);
    const char *problem = checkpoint_path(inside, given, MANIFEST_NAME, error);
    if (problem)
        return problem;
    if (lstat(inside, &status) == 0) {
        snprintf(path, PATH_MAX, "%s", given);
        problem = checkpoint_verify(manifest, given, error);
    } else {
        problem = checkpoint_path(inside, given, "checkpoints", error);
        if (!problem)
            problem = checkpoint_newest(path, manifest, stat(inside, &status) == 0 ? inside : given, listener, error);
        if (!problem && !path[0])
            problem = error_format(error,
                                   "%.500s: holds no checkpoint: no " MANIFEST_NAME ", no step_NNNNNNNN, no "
                                   "checkpoints/step_NNNNNNNN",
                                   given);
    }
    if (problem)
        path[0] = 0;
    return problem;
}

// ---- keeping few ----

// Returns the newest step whose checkpoint verifies, hashes included; -1: none. Ignores .replaced checkpoints.
static int64_t checkpoint_newest_step(const char *root, const struct checkpoint_entries *entries) {
    struct error_text unused;
    struct manifest manifest;
    char path[PATH_MAX];
    for (int i = 0; i < entries->count; i++) {
        const struct checkpoint_entry *const entry = &entries->all[i];
        if (entry->kind != CHECKPOINT_STEP || checkpoint_path(path, root, entry->name, &unused) ||
            checkpoint_check_entry(&manifest, path, entry, true, &unused))
            continue;
        manifest_free(&manifest);
        return entry->step;
    }
    return -1;
}

// Removes checkpoints of steps up to `newest`; with -1, none. Spares the best one, the newest `keep` > 0 that are whole
// by their files' lengths, and damaged ones newer than these. Goes on after a failure; returns the last one, or NULL.
static const char *checkpoint_prune_entries(const char *root, int root_fd, const struct checkpoint_entries *entries,
                                            int keep, int64_t newest, struct error_text *error) {
    const char *failed = NULL;
    const int64_t best = checkpoint_best(root_fd);
    int kept = 0;
    for (int i = 0; i < entries->count; i++) {
        const struct checkpoint_entry *const entry = &entries->all[i];
        struct manifest manifest;
        struct error_text unused;
        char path[PATH_MAX];
        if (entry->kind != CHECKPOINT_STEP || entry->step > newest)
            continue;
        if (kept < keep) {
            // An incomplete checkpoint doesn't count: it would displace one that can be resumed from.
            const bool whole =
                entry->step == newest || (!checkpoint_path(path, root, entry->name, &unused) &&
                                          !checkpoint_check_entry(&manifest, path, entry, false, &unused));
            if (whole && entry->step != newest)
                manifest_free(&manifest);
            kept += whole;
            continue;
        }
        if (entry->step == best)
            continue;
        const int problem = checkpoint_remove(root_fd, entry);
        if (problem && problem != ENOENT)
            failed = error_format(error, "%.500s/%s: cannot be removed: %s; the newer checkpoints are untouched", root,
                                  entry->name, strerror(problem));
    }
    return failed;
}

const char *checkpoint_prune(const char *root, int keep, int64_t newest, struct error_text *error) {
    struct checkpoint_entries entries;
    const int root_fd = open(root, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (root_fd < 0)
        return error_format(error, "%.500s: cannot be opened: %s", root, strerror(errno));
    checkpoint_lock(root_fd);
    checkpoint_remove_leftovers(root_fd);
    const int listed = checkpoint_list(&entries, root_fd);
    const char *problem = NULL;
    if (listed)
        problem = error_format(error, "%.500s: cannot be read: %s", root, strerror(listed));
    else if (keep > 0)
        problem = checkpoint_prune_entries(root, root_fd, &entries, keep,
                                           newest >= 0 ? newest : checkpoint_newest_step(root, &entries), error);
    free(entries.all);
    close(root_fd);
    return problem;
}
