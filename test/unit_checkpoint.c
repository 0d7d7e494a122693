// Checkpoints survive kills at every system call and at random moments, errors of every system call, a full disk, a
// read-only one, and flipped bits. What is found afterwards is always complete, and it is the newest that was complete.
#include "formats/checkpoint.h"        // under test
#include "formats/checkpoint_folder.h" // under test
#include "formats/checkpoint_part.h"   // under test
#include "formats/checkpoint_thread.h" // under test
#include "formats/checkpoint_write.c"  // under test
#include "test/testing.h"              // cmocka, test_random
#include <dirent.h>                    // opendir
#include <ftw.h>                       // nftw
#include <sched.h>                     // unshare
#include <signal.h>                    // kill
#include <sys/mman.h>                  // mmap
#include <sys/mount.h>                 // mount
#include <sys/ptrace.h>                // PTRACE_SYSCALL
#include <sys/resource.h>              // setrlimit
#include <sys/statvfs.h>               // statvfs
#include <sys/syscall.h>               // SYS_renameat2
#include <sys/user.h>                  // struct user_regs_struct
#include <sys/wait.h>                  // waitpid
#include <time.h>                      // nanosleep

#define XXH_INLINE_ALL // what the manifests hold, computed by xxHash itself
#include <xxhash.h>

#ifdef __has_feature // clang's
enum { UNDER_THREAD_SANITIZER = __has_feature(thread_sanitizer) };
#elif defined __SANITIZE_THREAD__
enum { UNDER_THREAD_SANITIZER = 1 };
#else
enum { UNDER_THREAD_SANITIZER = 0 };
#endif

// ---------------------------------------------------------------------------------------------------------------------
// Folders and checkpoints to test with

static char folder[256], root[PATH_MAX];
static char *child_text; // what a child says to its parent; CHILD_TEXT bytes of shared memory
enum { CHILD_TEXT = 4096 };

// Makes the tests' folder, in memory where there is room. A kill takes nothing from the page cache, so that memory
// makes no difference, and the many fsyncs don't wait for a disk that others use. TMPDIR names another place.
static int root_create(void **state) {
    struct statvfs status;
    const bool memory = access("/dev/shm", W_OK) == 0 && statvfs("/dev/shm", &status) == 0 &&
                        (uint64_t)status.f_bavail * status.f_bsize > (512u << 20);
    const char *const base = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/unit_checkpoint.XXXXXX", base ? base : memory ? "/dev/shm" : "/tmp");
    snprintf(root, sizeof root, "%s/checkpoints", mkdtemp(folder) ? folder : "");
    return strcmp(root, "/checkpoints") == 0 ? -1 : 0;
}
static int root_remove(void **state) {
    char command[300];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    return system(command);
}
static int entry_remove(const char *path, const struct stat *status, int kind, struct FTW *place) {
    return remove(path);
}
// Empties the root without a shell, whose start took longer than a save.
static void root_clear(void) {
    assert_true(nftw(root, entry_remove, 16, FTW_DEPTH | FTW_PHYS) == 0 || errno == ENOENT);
}

// Returns the path of `name` in the root, which is valid until the eighth call after this one.
static const char *in_root(const char *name) {
    static char paths[8][PATH_MAX + 256];
    static int next;
    char *const path = paths[next++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s", root, name);
    return path;
}
static bool exists(const char *path) {
    struct stat status;
    return lstat(path, &status) == 0;
}
static void file_write(const char *path, const void *bytes, size_t count) {
    FILE *const file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, count, file), count);
    assert_int_equal(fclose(file), 0);
}
static size_t file_read(const char *path, unsigned char *bytes, size_t room) {
    FILE *const file = fopen(path, "rb");
    assert_non_null(file);
    const size_t count = fread(bytes, 1, room, file);
    fclose(file);
    return count;
}
static int count_names(bool hidden) {
    int count = 0;
    DIR *const stream = opendir(root);
    for (const struct dirent *found = readdir(stream); found; found = readdir(stream))
        count +=
            strcmp(found->d_name, ".") != 0 && strcmp(found->d_name, "..") != 0 && (found->d_name[0] == '.') == hidden;
    closedir(stream);
    return count;
}
static int leftovers(void) { return count_names(true); }

// A checkpoint's contents, which follow from its step and a salt, so that two saves of one step differ.
struct contents {
    int64_t step, salt;
    unsigned char noise[300];
};
static struct contents contents_of(int64_t step, int64_t salt) {
    struct contents contents;
    uint64_t random = (uint64_t)(1000 * step + salt);
    contents.step = step;
    contents.salt = salt;
    for (size_t i = 0; i < sizeof contents.noise; i++)
        contents.noise[i] = (unsigned char)test_random(&random);
    return contents;
}
static const char *save_with(struct checkpoint_writer *writer, int64_t step, int64_t salt) {
    struct contents contents;
    memset(&contents, 0, sizeof contents); // the padding goes to disk too
    contents = contents_of(step, salt);
    const char *problem = checkpoint_begin(writer, root, step);
    if (!problem)
        problem = checkpoint_write_file(writer, "model.safetensors", &contents, sizeof contents);
    if (!problem)
        problem = checkpoint_write_file(writer, "empty", NULL, 0);
    return problem ? problem : checkpoint_commit(writer);
}
static void save(int64_t step, int64_t salt) {
    struct checkpoint_writer writer;
    const char *const problem = save_with(&writer, step, salt);
    if (problem)
        fail_msg("%s", problem);
}

// What a search said of the checkpoints that it passed over, a line each.
struct heard {
    char text[8192];
};
static void hear(void *context, const char *text) {
    struct heard *const heard = (struct heard *)context;
    const size_t length = strlen(heard->text);
    snprintf(heard->text + length, sizeof heard->text - length, "%s\n", text);
}

// Step and salt of the newest checkpoint, whose files must be what these two say; -1: there is none.
struct found {
    int64_t step, salt;
    char path[PATH_MAX];
};
static const char *find_newest(struct found *found, struct heard *heard, struct error_text *error) {
    struct manifest manifest;
    const struct checkpoint_listener listener = {hear, heard};
    if (heard)
        heard->text[0] = 0;
    found->step = found->salt = -1;
    const char *const problem = checkpoint_newest(found->path, &manifest, root, heard ? &listener : NULL, error);
    if (problem || !found->path[0])
        return problem;
    struct contents contents;
    char name[PATH_MAX + 32];
    memset(&contents, 0, sizeof contents);
    snprintf(name, sizeof name, "%s/model.safetensors", found->path);
    FILE *const file = fopen(name, "rb");
    const size_t items = file ? fread(&contents, sizeof contents, 1, file) : 0;
    if (file)
        fclose(file);
    const struct contents expected = contents_of(contents.step, contents.salt);
    const bool same = items == 1 && contents.step == manifest.step &&
                      memcmp(contents.noise, expected.noise, sizeof expected.noise) == 0 && manifest.num_files == 2;
    manifest_free(&manifest);
    found->step = contents.step;
    found->salt = contents.salt;
    return same ? NULL : error_format(error, "%.500s verifies but holds something else", found->path);
}
#define assert_newest(step, salt) assert_newest_at((step), (salt), __FILE__, __LINE__)
static void assert_newest_at(int64_t step, int64_t salt, const char *file, int line) {
    struct found found;
    struct heard heard;
    struct error_text error;
    const char *const problem = find_newest(&found, &heard, &error);
    if (problem || found.step != step || found.salt != salt) {
        print_error("%s:%d: newest is step %d, salt %d; expected %d, %d; %s\n%s", file, line, (int)found.step,
                    (int)found.salt, (int)step, (int)salt, problem ? problem : "", heard.text);
        _fail(file, line);
    }
}
// Checks a text. words: what it must hold, separated by '|'.
#define assert_words(text, words) assert_words_at((text), (words), __FILE__, __LINE__)
static void assert_words_at(const char *text, const char *words, const char *file, int line) {
    char wanted[1024], *rest = NULL;
    snprintf(wanted, sizeof wanted, "%s", words);
    bool complete = text != NULL;
    for (char *word = strtok_r(wanted, "|", &rest); word; word = strtok_r(NULL, "|", &rest))
        complete = complete && strstr(text, word);
    if (!complete) {
        print_error("%s:%d: expected a text with: %s\ngot: %s\n", file, line, words, text ? text : "(none)");
        _fail(file, line);
    }
}
static const char *verify(const char *path, struct error_text *error) {
    struct manifest manifest;
    const char *const problem = checkpoint_verify(&manifest, path, error);
    if (!problem)
        manifest_free(&manifest);
    return problem;
}

// ---------------------------------------------------------------------------------------------------------------------
// Names

static void names_read_back_as_what_they_are(void **state) {
    const int64_t steps[] = {0, 7, 99999999, 100000000, CHECKPOINT_LAST_STEP};
    const enum checkpoint_kind kinds[] = {CHECKPOINT_STEP, CHECKPOINT_REPLACED, CHECKPOINT_PARTIAL,
                                          CHECKPOINT_REMOVING};
    struct checkpoint_entry entry;
    for (int i = 0; i < 5; i++)
        for (int k = 0; k < 4; k++) {
            const enum checkpoint_kind kind = kinds[k];
            const struct checkpoint_entry made = checkpoint_entry_make(kind, steps[i], 4194304);
            assert_true(checkpoint_entry_parse(&entry, made.name));
            assert_int_equal(entry.kind, kind);
            assert_true(entry.step == steps[i]);
            assert_int_equal(entry.pid, kind == CHECKPOINT_STEP ? 0 : 4194304);
        }
    assert_string_equal(checkpoint_entry_make(CHECKPOINT_STEP, 1000, 0).name, "step_00001000");
    assert_string_equal(checkpoint_entry_make(CHECKPOINT_PARTIAL, 1000, 7).name, ".step_00001000.7.partial");
    const char *const others[] = {"",
                                  ".",
                                  "..",
                                  "step_",
                                  "step_1",
                                  "step_0000001",
                                  "step_000000001",
                                  "step_0000000x",
                                  "step_00000001.old",
                                  "step_00000001 ",
                                  "step_-0000001",
                                  "step_+0000001",
                                  "step_ 0000001",
                                  "Step_00000001",
                                  "step_9999999999999999999",
                                  "step_99999999999999999999999999999999999999",
                                  ".step_00000001",
                                  ".step_00000001.partial",
                                  ".step_00000001.0.partial",
                                  ".step_00000001.-1.partial",
                                  ".step_00000001.01.partial",
                                  ".step_00000001.7.partial~",
                                  ".step_00000001.7.other",
                                  ".step_1.7.partial",
                                  "step_00000001.7.partial",
                                  ".step_00000001.99999999999.removing",
                                  ".step_00000001. 7.removing",
                                  "best",
                                  "config.json"};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (checkpoint_entry_parse(&entry, others[i]))
            fail_msg("'%s' is taken for a checkpoint's name", others[i]);
}

// ---------------------------------------------------------------------------------------------------------------------
// The manifest

#define HASH "99aa06d3014798d86001c324468d497f"
static const char good_manifest[] =
    "{\"version\": 1, \"step\": 12, \"files\": [{\"name\": \"a.bin\", \"bytes\": 0, \"xxh3_128\": \"" HASH "\"}]}";

// Parses a copy that has exactly these bytes, so that a sanitizer sees a step beyond them.
static const char *parse(const char *text, size_t bytes, struct error_text *error) {
    struct manifest manifest;
    char *const copy = (char *)malloc(bytes ? bytes : 1);
    memcpy(copy, text, bytes);
    const char *const problem = manifest_parse(&manifest, copy, bytes, "manifest.json", error);
    free(copy);
    if (problem)
        assert_null(manifest.files);
    manifest_free(&manifest);
    return problem;
}

static void manifests_read_back(void **state) {
    struct manifest manifest, again;
    struct error_text error;
    memset(&manifest, 0, sizeof manifest);
    manifest.step = INT64_MAX;
    for (int i = 0; i < MANIFEST_FILES; i++) {
        char name[MANIFEST_FILE_NAME];
        memset(name, 'x', sizeof name);
        snprintf(name, sizeof name, "model-%05d", i);
        name[11] = i % 2 ? 'x' : 0; // the longest name that is allowed, and short ones
        name[MANIFEST_FILE_NAME - 1] = 0;
        struct manifest_file *const file = manifest_add(&manifest, name);
        assert_non_null(file);
        file->bytes = (uint64_t)INT64_MAX - (uint64_t)i;
        snprintf(file->xxh3_128, sizeof file->xxh3_128, "%032x", i);
    }
    size_t bytes = 0;
    char *const text = manifest_text(&manifest, &bytes);
    assert_non_null(text);
    assert_true(bytes <= MANIFEST_BYTES);
    const char *const problem = manifest_parse(&again, text, bytes, "manifest.json", &error);
    if (problem)
        fail_msg("%s", problem);
    assert_true(again.step == manifest.step && again.num_files == manifest.num_files);
    assert_memory_equal(again.files, manifest.files, (size_t)again.num_files * sizeof *again.files);
    assert_ptr_equal(manifest_find(&again, "model-00010"), &again.files[10]);
    assert_null(manifest_find(&again, "model-0001"));
    manifest_free(&again);
    manifest_free(&manifest);
    free(text);
}

// Checks manifests that are each bad in one thing, and what is said of it.
static void bad_manifests_are_refused_by_name(void **state) {
#define FILE_WITH(name, bytes, hash) "{\"name\": " name ", \"bytes\": " bytes ", \"xxh3_128\": " hash "}"
#define WITH_FILES(files) "{\"version\": 1, \"step\": 12, \"files\": " files "}"
#define WITH_FILE(name, bytes, hash) WITH_FILES("[" FILE_WITH(name, bytes, hash) "]")
#define GOOD_HASH "\"" HASH "\""
    static const char *const bad[][2] = {
        {"", "not JSON"},
        {"[]", "the manifest is not an object"},
        {"12", "not JSON"},
        {"{} x", "not JSON|end of file expected"},
        {"{}", "the manifest has no \"version\""},
        {"{\"version\": 1, \"files\": []}", "the manifest has no \"step\""},
        {"{\"version\": 1, \"step\": 1}", "the manifest has no \"files\""},
        {"{\"version\": 2, \"pieces\": []}", "has version 2; this engine reads version 1"},
        {"{\"version\": 0, \"step\": 1, \"files\": []}", "has version 0"},
        {"{\"version\": \"1\", \"step\": 1, \"files\": []}", "\"version\" of the manifest is not an integer"},
        {"{\"version\": 1.0, \"step\": 1, \"files\": []}", "\"version\" of the manifest is not an integer"},
        {"{\"version\": 1, \"step\": -1, \"files\": []}", "\"step\" of the manifest is not an integer of 0 or more"},
        {"{\"version\": 1, \"step\": 1e3, \"files\": []}", "\"step\" of the manifest is not an integer"},
        {"{\"version\": 1, \"step\": 9223372036854775808, \"files\": []}", "not JSON|too big"},
        {"{\"version\": 1, \"step\": 1, \"step\": 2, \"files\": []}", "not JSON|duplicate"},
        {"{\"version\": 1, \"step\": 1, \"extra\\u001b[2J\": 2, \"files\": []}", "unknown member \"extra?[2J\""},
        {WITH_FILES("{}"), "\"files\" is not a list of 1 to"},
        {WITH_FILES("[]"), "\"files\" is not a list of 1 to"},
        {WITH_FILES("[null]"), "file 0 is not an object"},
        {WITH_FILES("[{\"bytes\": 1, \"xxh3_128\": " GOOD_HASH "}]"), "file 0 has no \"name\""},
        {WITH_FILES("[{\"name\": \"a\", \"xxh3_128\": " GOOD_HASH "}]"), "file 0 has no \"bytes\""},
        {WITH_FILES("[{\"name\": \"a\", \"bytes\": 1}]"), "file 0 has no \"xxh3_128\""},
        {WITH_FILES("[{\"name\": \"a\", \"bytes\": 1, \"mode\": 1, \"xxh3_128\": \"\"}]"), "unknown member \"mode\""},
        {WITH_FILE("12", "1", GOOD_HASH), "\"name\" of file 0 is no string"},
        {WITH_FILE("\"\"", "1", GOOD_HASH), "\"name\" of file 0 is ; expected a plain file name"},
        {WITH_FILE("\"/etc/passwd\"", "1", GOOD_HASH), "\"name\" of file 0 is /etc/passwd; expected a plain file name"},
        {WITH_FILE("\"a/b\"", "1", GOOD_HASH), "expected a plain file name"},
        {WITH_FILE("\".\"", "1", GOOD_HASH), "expected a plain file name"},
        {WITH_FILE("\"..\"", "1", GOOD_HASH), "expected a plain file name"},
        {WITH_FILE("\".hidden\"", "1", GOOD_HASH), "expected a plain file name"},
        {WITH_FILE("\"a\\u0000b\"", "1", GOOD_HASH), "not JSON"},
        {WITH_FILE("\"a\\nb\"", "1", GOOD_HASH), "is a?b; expected a plain file name"},
        {WITH_FILE("\"h\xc3\xa9\"", "1", GOOD_HASH), "expected a plain file name"},
        {WITH_FILE("\"\xff\"", "1", GOOD_HASH), "not JSON"},
        {WITH_FILE("\"manifest.json\"", "1", GOOD_HASH), "expected a plain file name"},
        {WITH_FILE("\"a\"", "-1", GOOD_HASH), "\"bytes\" of file 0 is not an integer of 0 or more"},
        {WITH_FILE("\"a\"", "1.5", GOOD_HASH), "\"bytes\" of file 0 is not an integer"},
        {WITH_FILE("\"a\"", "99999999999999999999", GOOD_HASH), "not JSON|too big"},
        {WITH_FILE("\"a\"", "\"1\"", GOOD_HASH), "\"bytes\" of file 0 is not an integer"},
        {WITH_FILE("\"a\"", "1", "12"), "\"xxh3_128\" of file 0 is not a string of 32"},
        {WITH_FILE("\"a\"", "1", "\"" HASH "0\""), "\"xxh3_128\" of file 0"},
        {WITH_FILE("\"a\"", "1", "\"99aa06d3014798d86001c324468d497\""), "\"xxh3_128\" of file 0"},
        {WITH_FILE("\"a\"", "1", "\"99AA06D3014798D86001C324468D497F\""), "\"xxh3_128\" of file 0"},
        {WITH_FILE("\"a\"", "1", "\"99aa06d3014798d86001c324468d497g\""), "\"xxh3_128\" of file 0"},
        {WITH_FILES("[" FILE_WITH("\"a\"", "1", GOOD_HASH) ", " FILE_WITH("\"a\"", "1", GOOD_HASH) "]"),
         "lists a twice"},
        {WITH_FILES("[" FILE_WITH("\"a\"", "1", GOOD_HASH) ", 3]"), "file 1 is not an object"},
    };
    struct error_text error;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const char *const problem = parse(bad[i][0], strlen(bad[i][0]), &error);
        if (!problem)
            fail_msg("accepted: %s", bad[i][0]);
        assert_words(problem, "manifest.json: ");
        assert_words(problem, bad[i][1]);
    }
    char long_name[2 * MANIFEST_FILE_NAME + 512], longest[MANIFEST_FILE_NAME + 1];
    memset(longest, 'n', sizeof longest);
    for (int length = MANIFEST_FILE_NAME - 1; length <= MANIFEST_FILE_NAME; length++) {
        snprintf(long_name, sizeof long_name, WITH_FILE("\"%.*s\"", "1", GOOD_HASH), length, longest);
        const char *const problem = parse(long_name, strlen(long_name), &error);
        assert_true(length == MANIFEST_FILE_NAME ? problem && strstr(problem, "plain file name") : !problem);
    }
}

static void huge_manifests_are_refused(void **state) {
    struct error_text error;
    const size_t bytes = MANIFEST_BYTES + 1;
    char *const text = (char *)malloc(bytes);
    memset(text, ' ', bytes);
    memcpy(text, good_manifest, sizeof good_manifest - 1);
    assert_null(parse(text, bytes - 1, &error));
    assert_words(parse(text, bytes, &error), "is 4194305 bytes long; expected a manifest of 4194304 at most");
    memset(text, '[', bytes);
    assert_words(parse(text, bytes - 1, &error), "not JSON"); // nested more deeply than any stack holds
    size_t length = (size_t)sprintf(text, "{\"version\": 1, \"step\": 1, \"files\": [");
    for (int i = 0; i <= MANIFEST_FILES; i++)
        length += (size_t)sprintf(text + length, "%s1", i ? "," : "");
    length += (size_t)sprintf(text + length, "]}");
    assert_words(parse(text, length, &error), "\"files\" is not a list of 1 to 4096 files");
    free(text);
}

static void cut_and_changed_manifests_are_refused(void **state) {
    struct error_text error;
    const size_t bytes = sizeof good_manifest - 1;
    assert_null(parse(good_manifest, bytes, &error));
    for (size_t cut = 0; cut < bytes; cut++)
        assert_non_null(parse(good_manifest, cut, &error));
    char changed[sizeof good_manifest];
    uint64_t random = 5;
    for (int trial = 0; trial < 20000; trial++) { // whatever the bytes are, it returns, and reads nothing beyond them
        memcpy(changed, good_manifest, sizeof changed);
        for (int i = 0; i < 1 + trial % 3; i++)
            changed[test_random(&random) % bytes] = (char)test_random(&random);
        parse(changed, bytes, &error);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Saving and verifying

static void a_checkpoint_is_there_after_its_commit_and_not_before(void **state) {
    struct checkpoint_writer writer;
    struct found found;
    struct heard heard;
    struct error_text error;
    root_clear();
    assert_null(checkpoint_begin(&writer, root, 10));
    assert_null(checkpoint_write_file(&writer, "a", "x", 1));
    assert_null(find_newest(&found, &heard, &error));
    assert_int_equal(found.step, -1);
    assert_words(heard.text, ".step_00000010.|.partial: is being written or removed by process ");
    checkpoint_abandon(&writer);
    checkpoint_abandon(&writer); // a second time it does nothing
    assert_int_equal(leftovers(), 0);
    save(10, 1);
    assert_newest(10, 1);
    assert_int_equal(leftovers(), 0);
    save(20, 2);
    save(100000000, 3); // nine digits sort after eight
    assert_newest(100000000, 3);
    save(15, 4);
    assert_newest(100000000, 3);
}

// Checks that the manifest has what was written. XXH3 128 of no bytes is in its documentation: the manifest has what
// xxhsum -H128 prints.
static void the_manifest_says_what_was_written(void **state) {
    struct checkpoint_writer writer;
    struct manifest manifest;
    struct error_text error;
    enum { MAX = CHECKPOINT_WINDOW * 2 + CHECKPOINT_CHUNK + 12345 };
    unsigned char *const bytes = (unsigned char *)malloc(MAX);
    uint64_t random = 3;
    for (size_t i = 0; i + 8 <= MAX; i += 8) {
        const uint64_t value = test_random(&random);
        memcpy(bytes + i, &value, 8);
    }
    root_clear();
    assert_null(checkpoint_begin(&writer, root, 1));
    assert_null(checkpoint_write_file(&writer, "empty", NULL, 0));
    assert_null(checkpoint_write_file(&writer, "large", bytes, MAX));
    assert_null(checkpoint_write_file(&writer, "chunk", bytes, CHECKPOINT_CHUNK));
    assert_null(checkpoint_file_begin(&writer, "mixed")); // small and large pieces, on the chunks' borders and off them
    uint64_t done = 0;
    for (int i = 0; done < MAX; i++) {
        const uint64_t wish = i % 3 == 0 ? test_random(&random) % 100 : test_random(&random) % (5u << 20);
        const uint64_t part = wish < MAX - done ? wish : MAX - done;
        assert_null(checkpoint_file_write(&writer, bytes + done, part));
        done += part;
    }
    assert_null(checkpoint_file_end(&writer));
    assert_null(checkpoint_commit(&writer));
    assert_null(checkpoint_verify(&manifest, in_root("step_00000001"), &error));
    assert_int_equal(manifest.num_files, 4);
    assert_int_equal(manifest.step, 1);
    assert_string_equal(manifest_find(&manifest, "empty")->xxh3_128, HASH);
    XXH128_canonical_t canonical;
    char expected[HASH128_DIGITS + 1];
    XXH128_canonicalFromHash(&canonical, XXH3_128bits(bytes, MAX));
    for (int i = 0; i < 16; i++)
        snprintf(expected + 2 * i, 3, "%02x", canonical.digest[i]);
    assert_string_equal(manifest_find(&manifest, "large")->xxh3_128, expected);
    assert_string_equal(manifest_find(&manifest, "mixed")->xxh3_128, expected);
    assert_true(manifest_find(&manifest, "mixed")->bytes == MAX);
    unsigned char *const again = (unsigned char *)malloc(MAX + 1);
    assert_int_equal(file_read(in_root("step_00000001/mixed"), again, MAX + 1), MAX);
    assert_memory_equal(again, bytes, MAX);
    free(again);
    free(bytes);
    manifest_free(&manifest);
    root_clear();
}

static void what_is_not_listed_is_ignored_and_what_is_missing_is_named(void **state) {
    struct error_text error;
    char path[PATH_MAX + 256];
    root_clear();
    save(10, 1);
    const char *const checkpoint = in_root("step_00000010");
    snprintf(path, sizeof path, "%s/notes.txt", checkpoint);
    file_write(path, "x", 1);
    assert_null(verify(checkpoint, &error));
    snprintf(path, sizeof path, "%s/model.safetensors", checkpoint);
    assert_int_equal(truncate(path, 100), 0);
    assert_words(verify(checkpoint, &error), "step_00000010/model.safetensors: is 100 bytes long; its manifest says ");
    assert_int_equal(unlink(path), 0);
    assert_words(verify(checkpoint, &error), "model.safetensors: No such file or directory; its manifest lists it");
    assert_int_equal(mkdir(path, 0777), 0);
    assert_words(verify(checkpoint, &error), "model.safetensors: Is a directory");
    assert_int_equal(rmdir(path), 0);
    assert_int_equal(mkfifo(path, 0666), 0); // it must not wait for the other end
    assert_words(verify(checkpoint, &error), "model.safetensors: is not a regular file");
    snprintf(path, sizeof path, "%s/manifest.json", checkpoint);
    assert_int_equal(truncate(path, 60), 0);
    assert_words(verify(checkpoint, &error), "manifest.json: is not JSON");
    assert_int_equal(truncate(path, 1 << 30), 0); // too large to be read into memory
    assert_words(verify(checkpoint, &error), "manifest.json: is 4194305 bytes long");
    assert_int_equal(unlink(path), 0);
    assert_words(verify(checkpoint, &error), "manifest.json: No such file or directory; it is no complete checkpoint");
    assert_words(verify(in_root("step_00000011"), &error), "step_00000011: cannot be opened: No such file");
}

// The number of bits of a file whose flip leaves a checkpoint that verifies.
static int flip_bits(const char *checkpoint, const char *name) {
    unsigned char bytes[4096];
    char path[PATH_MAX + 256];
    struct error_text error;
    int harmless = 0;
    snprintf(path, sizeof path, "%s/%s", checkpoint, name);
    const size_t count = file_read(path, bytes, sizeof bytes);
    const int fd = open(path, O_WRONLY);
    assert_true(fd >= 0);
    for (size_t i = 0; i < count; i++) {
        for (int bit = 0; bit < 8; bit++) {
            const unsigned char flipped = (unsigned char)(bytes[i] ^ 1 << bit);
            assert_int_equal(pwrite(fd, &flipped, 1, (off_t)i), 1);
            const char *const problem = verify(checkpoint, &error);
            harmless += !problem;
            if (problem && strcmp(name, MANIFEST_NAME) != 0)
                assert_words(problem, "model.safetensors: is damaged: its XXH3 is ");
        }
        assert_int_equal(pwrite(fd, bytes + i, 1, (off_t)i), 1);
    }
    close(fd);
    assert_null(verify(checkpoint, &error));
    return harmless;
}
static void every_flipped_bit_is_found(void **state) {
    root_clear();
    save(10, 1);
    assert_int_equal(flip_bits(in_root("step_00000010"), "model.safetensors"), 0);
    // Only the manifest's step may become another one: 10 becomes 11, 12, 14, 18, 30, 50 or 90, or 1 and a space, by
    // one bit. A search finds these by the folder's name. All else is found.
    assert_int_equal(flip_bits(in_root("step_00000010"), MANIFEST_NAME), 8);
    struct error_text error;
    struct found found;
    struct heard heard;
    assert_int_equal(rename(in_root("step_00000010"), in_root("step_00000011")), 0);
    assert_words(find_newest(&found, &heard, &error), "checkpoints: none of its 1 checkpoints is complete");
    assert_words(heard.text, "step_00000011/manifest.json: is of step 10, not of the folder's");
}

static void faults_of_the_program_are_texts_too(void **state) {
    struct checkpoint_writer writer;
    root_clear();
    save(10, 1);
    const char *const bad_names[] = {"", ".", "..", "../x", "a/b", "/tmp/x", "manifest.json", ".x"};
    for (size_t i = 0; i < sizeof bad_names / sizeof *bad_names; i++) {
        assert_null(checkpoint_begin(&writer, root, 20));
        assert_words(checkpoint_file_begin(&writer, bad_names[i]), "cannot be made: Invalid argument");
        // Calls after a failure say the same, and do nothing.
        assert_ptr_equal(checkpoint_file_write(&writer, "x", 1), writer.error.text);
        assert_ptr_equal(checkpoint_file_end(&writer), writer.error.text);
        assert_ptr_equal(checkpoint_file_begin(&writer, "a"), writer.error.text);
        assert_ptr_equal(checkpoint_commit(&writer), writer.error.text);
    }
    assert_null(checkpoint_begin(&writer, root, 20));
    assert_words(checkpoint_commit(&writer), "without any");
    assert_null(checkpoint_begin(&writer, root, 20));
    assert_null(checkpoint_file_begin(&writer, "a"));
    assert_words(checkpoint_commit(&writer), "committed within a file");
    assert_null(checkpoint_begin(&writer, root, 20));
    assert_null(checkpoint_write_file(&writer, "a", "x", 1));
    assert_non_null(checkpoint_write_file(&writer, "a", "y", 1)); // a second time
    assert_null(checkpoint_begin(&writer, root, 20));
    assert_non_null(checkpoint_file_write(&writer, "x", 1));
    assert_null(checkpoint_begin(&writer, root, 20));
    assert_non_null(checkpoint_file_end(&writer));
    assert_non_null(checkpoint_begin(&writer, root, -1));
    assert_words(checkpoint_begin(&writer, "/proc/none/checkpoints", 1),
                 "/proc/none/checkpoints/step_00000001: the folder above it cannot be made or opened: "
                 "|step 1 is not saved, the checkpoints before it are untouched");
    file_write(in_root("file"), "x", 1);
    assert_words(checkpoint_begin(&writer, in_root("file"), 1), "Not a directory");
    assert_int_equal(unlink(in_root("file")), 0);
    assert_newest(10, 1);
    assert_int_equal(leftovers(), 0);
}

// ---------------------------------------------------------------------------------------------------------------------
// Finding

static void cut_model(const char *step) {
    char path[PATH_MAX + 256];
    snprintf(path, sizeof path, "%s/model.safetensors", in_root(step));
    assert_int_equal(truncate(path, 17), 0);
}
static void flip_model(const char *step) {
    char path[PATH_MAX + 256];
    snprintf(path, sizeof path, "%s/model.safetensors", in_root(step));
    const int fd = open(path, O_RDWR);
    unsigned char byte = 0;
    assert_int_equal(pread(fd, &byte, 1, 100), 1);
    byte ^= 4;
    assert_int_equal(pwrite(fd, &byte, 1, 100), 1);
    close(fd);
}

static void newer_ones_are_passed_over_with_a_reason(void **state) {
    struct found found;
    struct heard heard;
    struct error_text error;
    root_clear();
    assert_null(find_newest(&found, &heard, &error)); // there is no root: a run that has saved nothing
    assert_int_equal(found.step, -1);
    for (int i = 1; i <= 5; i++)
        save(10 * i, i);
    flip_model("step_00000050");
    cut_model("step_00000040");
    char path[PATH_MAX + 256];
    snprintf(path, sizeof path, "%s/manifest.json", in_root("step_00000030"));
    assert_int_equal(unlink(path), 0);
    assert_int_equal(mkdir(in_root(".step_00000060.4194304.partial"), 0777), 0);
    assert_int_equal(mkdir(in_root("step_00000070.bak"), 0777), 0);
    file_write(in_root("step_00000080"), "x", 1);
    assert_null(find_newest(&found, &heard, &error));
    assert_int_equal(found.step, 20);
    assert_words(heard.text, "step_00000080: cannot be opened: Not a directory\n|"
                             "partial: was left by a save that did not end; the next save removes it\n|"
                             "step_00000050/model.safetensors: is damaged|step_00000040/model.safetensors: is 17 bytes|"
                             "step_00000030/manifest.json: No such file");
    assert_null(strstr(heard.text, "step_00000070"));
    assert_null(strstr(heard.text, "step_00000020"));
    flip_model("step_00000020");
    cut_model("step_00000010");
    assert_words(find_newest(&found, &heard, &error), "none of its 6 checkpoints is complete");
    assert_string_equal(found.path, "");
}

static void users_name_a_checkpoint_its_root_or_the_run(void **state) {
    char path[PATH_MAX];
    struct manifest manifest;
    struct error_text error;
    struct heard heard = {{0}};
    const struct checkpoint_listener listener = {hear, &heard};
    root_clear();
    assert_words(checkpoint_resolve(path, &manifest, folder, &listener, &error), "holds no checkpoint");
    assert_words(checkpoint_resolve(path, &manifest, in_root("x"), &listener, &error),
                 "cannot be opened: No such file");
    save(10, 1);
    save(20, 2);
    save(30, 3);
    const char *const wholes[] = {folder, root};
    for (int i = 0; i < 2; i++) {
        assert_null(checkpoint_resolve(path, &manifest, wholes[i], &listener, &error));
        assert_string_equal(path, in_root("step_00000030"));
        manifest_free(&manifest);
    }
    assert_null(checkpoint_resolve(path, &manifest, in_root("step_00000010"), &listener, &error));
    assert_int_equal(manifest.step, 10);
    manifest_free(&manifest);
    assert_string_equal(path, in_root("step_00000010"));
    assert_string_equal(heard.text, "");
    flip_model("step_00000030");
    assert_null(checkpoint_resolve(path, &manifest, folder, &listener, &error));
    assert_int_equal(manifest.step, 20);
    manifest_free(&manifest);
    assert_words(heard.text, "step_00000030/model.safetensors: is damaged");
    // Where the named checkpoint is bad, no other is taken in its place.
    assert_words(checkpoint_resolve(path, &manifest, in_root("step_00000030"), &listener, &error), "is damaged");
    assert_string_equal(path, "");
    assert_words(checkpoint_resolve(path, &manifest, in_root("step_00000010/empty"), &listener, &error),
                 "is no folder");
    // Under another name it is still the same checkpoint.
    assert_int_equal(rename(in_root("step_00000010"), in_root("best")), 0);
    assert_null(checkpoint_resolve(path, &manifest, in_root("best"), &listener, &error));
    assert_int_equal(manifest.step, 10);
    manifest_free(&manifest);
}

// ---------------------------------------------------------------------------------------------------------------------
// Keeping few

static void prune(int keep, int64_t newest) {
    struct error_text error;
    const char *const problem = checkpoint_prune(root, keep, newest, &error);
    if (problem)
        fail_msg("%s", problem);
}

static void the_oldest_go_beyond_those_to_keep(void **state) {
    root_clear();
    for (int i = 1; i <= 6; i++)
        save(10 * i, i);
    prune(0, -1);
    assert_int_equal(count_names(false), 6);
    prune(4, 60);
    assert_int_equal(count_names(false), 4);
    assert_false(exists(in_root("step_00000020")));
    assert_true(exists(in_root("step_00000030")));
    prune(4, -1);
    assert_int_equal(count_names(false), 4);
    cut_model("step_00000050"); // so it does not count as one of the two
    prune(2, 60);
    assert_true(exists(in_root("step_00000040")));
    assert_false(exists(in_root("step_00000030")));
    prune(1, -1);
    assert_int_equal(count_names(false), 1);
    assert_newest(60, 6);
    assert_int_equal(leftovers(), 0);
}

static void the_newest_complete_one_always_stays(void **state) {
    root_clear();
    for (int i = 1; i <= 5; i++)
        save(10 * i, i);
    flip_model("step_00000050"); // its length is right, so that only its hash tells
    cut_model("step_00000040");
    prune(1, -1);
    assert_newest(30, 3);
    assert_true(exists(in_root("step_00000050"))); // of the newer ones none is lost
    assert_false(exists(in_root("step_00000020")));
    // A run that went back to step 30, and saves 35 while 50 is still there.
    save(35, 7);
    prune(1, 35);
    assert_newest(35, 7);
    assert_false(exists(in_root("step_00000030")));
    flip_model("step_00000035");
    prune(1, -1); // none is complete, so nothing is removed
    assert_int_equal(count_names(false), 3);
}

static void only_our_own_is_removed_and_links_are_not_followed(void **state) {
    char outside[300], path[600], link[600];
    struct error_text error;
    root_clear();
    save(30, 3);
    snprintf(outside, sizeof outside, "%s/outside", folder);
    assert_int_equal(mkdir(outside, 0777), 0);
    snprintf(path, sizeof path, "%s/precious", outside);
    file_write(path, "x", 1);
    assert_int_equal(symlink(outside, in_root("step_00000010")), 0);
    assert_int_equal(symlink(outside, in_root(".step_00000020.4194304.partial")), 0);
    assert_int_equal(mkdir(in_root(".step_00000021.4194304.removing"), 0777), 0);
    snprintf(link, sizeof link, "%s/deep", in_root(".step_00000021.4194304.removing"));
    assert_int_equal(mkdir(link, 0777), 0);
    snprintf(link, sizeof link, "%s/deep/link", in_root(".step_00000021.4194304.removing"));
    assert_int_equal(symlink("../../../outside", link), 0);
    // Folders of living processes, this one and its parent, that write nothing.
    char own[64], parents[64];
    snprintf(own, sizeof own, ".step_00000040.%d.partial", (int)getpid());
    snprintf(parents, sizeof parents, ".step_00000040.%d.partial", (int)getppid());
    assert_int_equal(mkdir(in_root(own), 0777), 0);
    assert_int_equal(mkdir(in_root(parents), 0777), 0);
    // Names like ours that are not ours.
    const char *const foreign[] = {".step_00000022.partial", "step_5", ".step_00000022.4194304.partial.bak", "best",
                                   "step_00000001.old"};
    for (size_t i = 0; i < 5; i++)
        assert_int_equal(mkdir(in_root(foreign[i]), 0777), 0);
    assert_null(checkpoint_prune(root, 1, 30, &error));
    assert_true(exists(path));
    for (size_t i = 0; i < 5; i++)
        assert_true(exists(in_root(foreign[i])));
    assert_false(exists(in_root(own)));
    assert_false(exists(in_root(parents)));
    assert_false(exists(in_root("step_00000010")));
    assert_false(exists(in_root(".step_00000020.4194304.partial")));
    assert_false(exists(in_root(".step_00000021.4194304.removing")));
    assert_newest(30, 3);
    root_clear();
}

static void a_checkpoint_that_was_set_aside_comes_back(void **state) {
    root_clear();
    save(20, 2);
    const char *const aside = in_root(".step_00000020.4194304.replaced");
    assert_int_equal(rename(in_root("step_00000020"), aside), 0);
    assert_newest(20, 2); // readers find it under that name, and change nothing
    assert_true(exists(aside));
    prune(1, -1);
    assert_true(exists(in_root("step_00000020")));
    assert_newest(20, 2);
    save(30, 3);
    assert_int_equal(rename(in_root("step_00000020"), in_root(".step_00000030.4194304.replaced")), 0);
    prune(1, 30); // its replacement is in place
    assert_newest(30, 3);
    assert_int_equal(leftovers(), 0);
}

// ---------------------------------------------------------------------------------------------------------------------
// Children that are killed, or whose system calls fail

#define NOT_PERMITTED 77
// Runs a function in a process of its own; returns its exit status, or -1 if it did not exit.
static int in_child(int (*run)(void *), void *argument) {
    int status = 0;
    child_text[0] = 0;
    fflush(stdout);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        alarm(120); // a child that hangs is a failure
        _exit(run(argument));
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}
static int child_says(const char *text) {
    snprintf(child_text, CHILD_TEXT, "%s", text);
    return 1;
}
#define check(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            return child_says("not: " #condition);                                                                     \
    } while (0)

// A save and a prune, as the trainer makes them.
struct job {
    int64_t step, salt;
};
static int run_job(void *argument) {
    const struct job *const job = (const struct job *)argument;
    struct checkpoint_writer writer;
    struct error_text error;
    const char *const problem = save_with(&writer, job->step, job->salt);
    if (problem)
        return child_says(problem);
    if (checkpoint_prune(root, 1, job->step, &error))
        return 2; // the save itself has succeeded
    return 0;
}

// Checks that the folder of a living writer is left, and that a killed writer's folder goes with the next save, though
// a process of the writer's number exists until its parent has asked for its status.
static void a_writer_holds_its_folder_until_it_dies(void **state) {
    int ends[2];
    char byte = 0;
    struct found found;
    struct heard heard;
    struct error_text error;
    static struct checkpoint_writer writer;
    siginfo_t unused;
    root_clear();
    save(10, 1);
    assert_int_equal(pipe(ends), 0);
    fflush(stdout);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        alarm(120);
        const bool begun = !checkpoint_begin(&writer, root, 20) && !checkpoint_write_file(&writer, "a", "x", 1);
        if (write(ends[1], begun ? "y" : "n", 1) == 1)
            pause();
        _exit(1);
    }
    assert_int_equal(read(ends[0], &byte, 1), 1);
    assert_int_equal(byte, 'y');
    save(15, 2);
    prune(1, 15);
    assert_int_equal(leftovers(), 1);
    assert_null(find_newest(&found, &heard, &error));
    assert_int_equal(found.step, 15);
    assert_words(heard.text, ".step_00000020.|.partial: is being written or removed by process ");
    assert_int_equal(kill(child, SIGKILL), 0);
    assert_int_equal(waitid(P_PID, (id_t)child, &unused, WEXITED | WNOWAIT), 0);
    assert_int_equal(kill(child, 0), 0); // a zombie
    assert_null(find_newest(&found, &heard, &error));
    assert_words(heard.text, ".step_00000020.|.partial: was left by a save that did not end");
    save(30, 3);
    assert_int_equal(leftovers(), 0);
    assert_int_equal(waitpid(child, NULL, 0), child);
    close(ends[0]);
    close(ends[1]);
    root_clear();
}

// What is done to a child at its system calls. Calls on files count, from 1.
struct trace {
    int kill_at;          // the child is killed before this call; 0: never
    int fail_at;          // this call fails; 0: none does
    int error;            // its errno
    bool no_exchange;     // renameat2 always fails, as on a file system that can't exchange
    bool short_writes;    // each write takes half of its bytes
    int calls;            // calls so far
    unsigned long failed; // the system call's number of the call that failed
    char order[64];       // f: an fsync, r: a rename
};

static bool is_file_call(unsigned long number) {
    const long calls[] = {SYS_openat,    SYS_mkdirat,  SYS_write,     SYS_fsync,      SYS_close,
                          SYS_renameat2, SYS_unlinkat, SYS_fstat,     SYS_getdents64, SYS_sync_file_range,
                          SYS_fadvise64, SYS_pwrite64, SYS_ftruncate, SYS_fcntl,
#ifdef SYS_renameat
                          SYS_renameat,
#endif
#ifdef SYS_mkdir
                          SYS_mkdir,     SYS_open,     SYS_rename,
#endif
                          SYS_newfstatat};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
        if (number == (unsigned long)calls[i])
            return true;
    return false;
}

#if defined(__x86_64__) && defined(PTRACE_GET_SYSCALL_INFO)
static bool poke(pid_t child, size_t offset, long value) { return ptrace(PTRACE_POKEUSER, child, offset, value) == 0; }

static bool is_rename(unsigned long number) { return number == SYS_rename || number == SYS_renameat; }

// Whether a call is to fail; runs as the child enters it. bytes: the call's third argument.
static bool trace_enter(struct trace *trace, pid_t child, unsigned long number, unsigned long bytes) {
    const bool counts = is_file_call(number);
    const size_t length = strlen(trace->order);
    if (length + 1 < sizeof trace->order && (number == SYS_fsync || number == SYS_renameat2 || is_rename(number)))
        trace->order[length] = number == SYS_fsync ? 'f' : 'r';
    trace->calls += counts;
    if (counts && trace->kill_at && trace->calls == trace->kill_at) {
        kill(child, SIGKILL);
        return false;
    }
    const bool exchange = trace->no_exchange && number == SYS_renameat2;
    const bool fails = exchange || (counts && trace->fail_at == trace->calls);
    if (counts && trace->fail_at == trace->calls)
        trace->failed = number;
    if (fails) // no call has the number -1
        assert_true(poke(child, offsetof(struct user_regs_struct, orig_rax), -1));
    if (trace->short_writes && (number == SYS_write || number == SYS_pwrite64) && bytes > 1)
        assert_true(poke(child, offsetof(struct user_regs_struct, rdx), (long)(bytes / 2)));
    return fails;
}

// Runs a function in a traced child; returns its wait status.
static int in_traced_child(int (*run)(void *), void *argument, struct trace *trace) {
    int status = 0;
    bool fails = false;
    unsigned long number = 0;
    trace->calls = 0;
    child_text[0] = 0;
    fflush(stdout);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) != 0)
            _exit(NOT_PERMITTED);
        alarm(120);
        raise(SIGSTOP);
        _exit(run(argument));
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    if (!WIFSTOPPED(status))
        return status;
    ptrace(PTRACE_SETOPTIONS, child, NULL, PTRACE_O_TRACESYSGOOD | PTRACE_O_EXITKILL);
    for (int deliver = 0;;) {
        ptrace(PTRACE_SYSCALL, child, NULL, (void *)(intptr_t)deliver);
        assert_int_equal(waitpid(child, &status, 0), child);
        if (!WIFSTOPPED(status))
            return status;
        deliver = WSTOPSIG(status) == (SIGTRAP | 0x80) || WSTOPSIG(status) == SIGSTOP ? 0 : WSTOPSIG(status);
        if (WSTOPSIG(status) != (SIGTRAP | 0x80))
            continue;
        struct __ptrace_syscall_info info;
        memset(&info, 0, sizeof info);
        if (ptrace(PTRACE_GET_SYSCALL_INFO, child, sizeof info, &info) <= 0)
            continue; // killed meanwhile
        if (info.op == PTRACE_SYSCALL_INFO_ENTRY) {
            number = info.entry.nr;
            fails = trace_enter(trace, child, number, info.entry.args[2]);
        } else if (fails) {
            const bool exchange = trace->no_exchange && number == SYS_renameat2;
            assert_true(poke(child, offsetof(struct user_regs_struct, rax), -(exchange ? EINVAL : trace->error)));
            fails = false;
        }
    }
}
#else // system calls are traced only on x86-64
static int in_traced_child(int (*run)(void *), void *argument, struct trace *trace) { return NOT_PERMITTED << 8; }
#endif

static void skip_if_not_permitted(int status, const char *what) {
    if (!WIFEXITED(status) || WEXITSTATUS(status) != NOT_PERMITTED)
        return;
    print_message("not tested: %s is not permitted here\n", what);
    skip();
}

// Checks that whatever has a checkpoint's name is a checkpoint, also while others are removed.
static void verify_all(void) {
    struct checkpoint_entries entries;
    struct error_text error;
    const int fd = open(root, O_RDONLY);
    assert_int_equal(checkpoint_list(&entries, fd), 0);
    close(fd);
    for (int i = 0; i < entries.count; i++)
        if (entries.all[i].kind == CHECKPOINT_STEP && verify(in_root(entries.all[i].name), &error))
            fail_msg("%s", error.text);
    free(entries.all);
}

// Checks a save that is killed before each of its calls in turn: there is always a complete checkpoint, the old one or
// the new one, and the next save succeeds and cleans up. old_step: there before; new_step: saved.
static void kill_at_every_call(int64_t old_step, int64_t new_step, bool no_exchange) {
    int old_found = 0, new_found = 0;
    for (int at = 1;; at++) {
        struct job job = {new_step, 2};
        struct trace trace = {at, 0, 0, no_exchange};
        struct found found;
        struct error_text error;
        root_clear();
        save(old_step, 1);
        const int status = in_traced_child(run_job, &job, &trace);
        skip_if_not_permitted(status, "tracing");
        const char *const problem = find_newest(&found, NULL, &error);
        if (problem || !((found.step == old_step && found.salt == 1) || (found.step == new_step && found.salt == 2)))
            fail_msg("killed at call %d: step %d, salt %d; %s", at, (int)found.step, (int)found.salt, problem);
        old_found += found.salt == 1;
        new_found += found.salt == 2;
        verify_all();
        if (new_found && found.salt == 1)
            fail_msg("killed at call %d: the old checkpoint is the newest again", at);
        prune(0, -1); // what a search finds must stay, or get its name again
        assert_newest(found.step, found.salt);
        assert_int_equal(leftovers(), 0);
        save(new_step, 3);
        assert_newest(new_step, 3);
        assert_int_equal(leftovers(), 0);
        if (!WIFSIGNALED(status)) {
            assert_int_equal(status, 0);
            break;
        }
    }
    assert_in_range(old_found, 10, 1000);
    assert_in_range(new_found, 3, 1000);
}
static void killed_at_every_system_call_of_a_save(void **state) { kill_at_every_call(10, 20, false); }
static void killed_at_every_system_call_of_the_same_step(void **state) { kill_at_every_call(20, 20, false); }
static void killed_at_every_system_call_without_exchange(void **state) { kill_at_every_call(20, 20, true); }

// Lets each call of a save fail in turn: the save reports it and the old checkpoint is there, or the save succeeds and
// the new one is.
static void fail_at_every_call(int64_t old_step, int64_t new_step, int error_number, bool no_exchange) {
    int failed = 0, at = 1;
    for (bool more = true; more; at++) {
        struct job job = {new_step, 2};
        struct trace trace = {0, at, error_number, no_exchange};
        struct found found;
        struct error_text error;
        root_clear();
        save(old_step, 1);
        const int status = in_traced_child(run_job, &job, &trace);
        skip_if_not_permitted(status, "tracing");
        more = trace.calls >= at;
        if (!WIFEXITED(status) || WEXITSTATUS(status) > 2)
            fail_msg("call %d failed: status %x", at, status);
        const bool saved = WEXITSTATUS(status) != 1 || strstr(child_text, "is saved and complete");
        const char *const problem = find_newest(&found, NULL, &error);
        if (problem || found.salt != (saved ? 2 : 1))
            fail_msg("call %d failed: step %d, salt %d; %s; %s", at, (int)found.step, (int)found.salt, problem,
                     child_text);
        if (trace.failed == SYS_fsync || trace.failed == SYS_write)
            assert_int_equal(WEXITSTATUS(status), 1); // every failure is reported
        if (WEXITSTATUS(status) == 1) {
            failed++;
            assert_words(child_text, strerror(error_number));
            assert_words(child_text, "the checkpoints before it are untouched");
            if (!saved)
                assert_int_equal(leftovers(), 0);
        }
        save(new_step, 3);
        prune(1, new_step);
        assert_newest(new_step, 3);
        assert_int_equal(leftovers(), 0);
        assert_int_equal(count_names(false), 1);
    }
    assert_in_range(failed, 15, at);
}
static void every_system_call_fails_once(void **state) {
    fail_at_every_call(10, 20, EIO, false);
    fail_at_every_call(20, 20, EDQUOT, false);
    fail_at_every_call(20, 20, EIO, true);
}

// Checks that a signal in the middle of a call is no error, and that a write may take only a part.
static void interrupted_calls_and_short_writes_go_on(void **state) {
    for (int at = 1;; at++) {
        struct job job = {20, 2};
        struct trace trace = {0, at, EINTR, false};
        root_clear();
        const int status = in_traced_child(run_job, &job, &trace);
        skip_if_not_permitted(status, "tracing");
        if (trace.calls < at)
            break;
        if (trace.failed != SYS_write && trace.failed != SYS_fsync && trace.failed != SYS_close)
            continue;
        if (status != 0)
            fail_msg("call %d interrupted: %s", at, child_text);
        assert_newest(20, 2);
    }
    struct job job = {30, 3};
    struct trace trace = {0, 0, 0, false, true};
    assert_int_equal(in_traced_child(run_job, &job, &trace), 0);
    assert_newest(30, 3);
}

// Checks the calls that guard against a power cut, in their order: a test can't cut the power, but it can count them.
static void everything_is_on_the_disk_before_its_name_and_the_name_after(void **state) {
    struct job job = {20, 2};
    struct trace trace = {0};
    root_clear();
    save(10, 1);
    skip_if_not_permitted(in_traced_child(run_job, &job, &trace), "tracing");
    // Two files, the manifest and the folder; the folder's name; the root; the name under which step 10 is removed.
    assert_string_equal(trace.order, "ffffrfr");
    struct trace again = {0};
    in_traced_child(run_job, &job, &again);
    assert_string_equal(again.order, "ffffrrfr"); // the first rename finds the name taken; the second one exchanges
    struct trace aside = {0};
    aside.no_exchange = true;
    in_traced_child(run_job, &job, &aside);
    assert_string_equal(aside.order, "ffffrrrrfr");
}

// ---------------------------------------------------------------------------------------------------------------------
// Several processes that write one checkpoint, each of them a part

enum { TEAM = 3, TEAM_PIECE = 7, TEAM_BEGIN = 5 };
static volatile pid_t *laid_out; // shared: process 0's pid, once the others may begin; -1: it has failed

// Writes a process's share of the contents, in pieces; the first bytes are already there.
static const char *team_part(pid_t writer, int number, int64_t step, int64_t salt, struct checkpoint_part *part) {
    struct contents contents;
    memset(&contents, 0, sizeof contents);
    contents = contents_of(step, salt);
    const char *problem = checkpoint_part_begin(part, root, step, writer, number);
    if (!problem)
        problem = checkpoint_part_open(part, "model.safetensors");
    for (size_t at = 0; at < sizeof contents && !problem; at += TEAM_PIECE)
        if ((int)(at / TEAM_PIECE) % TEAM == number) {
            const size_t first = at == 0 ? TEAM_BEGIN : at, end = at + TEAM_PIECE;
            problem = checkpoint_part_write(part, first, (const char *)&contents + first,
                                            (end < sizeof contents ? end : sizeof contents) - first);
        }
    if (!problem)
        problem = checkpoint_part_close(part);
    return problem ? problem : checkpoint_part_end(part);
}
static const char *team_lay_out(struct checkpoint_writer *writer, int64_t step, int64_t salt) {
    struct contents contents;
    memset(&contents, 0, sizeof contents);
    contents = contents_of(step, salt);
    const char *problem = checkpoint_begin(writer, root, step);
    if (!problem)
        problem = checkpoint_shared_file(writer, "model.safetensors", &contents, TEAM_BEGIN, sizeof contents);
    return problem ? problem : checkpoint_expect_parts(writer, TEAM - 1);
}
static const char *team_lead(struct checkpoint_writer *writer, int64_t step, int64_t salt) {
    static struct checkpoint_part part;
    const char *problem = team_lay_out(writer, step, salt);
    *laid_out = problem ? -1 : getpid();
    if (!problem)
        problem = checkpoint_write_file(writer, "empty", NULL, 0);
    if (!problem)
        problem = team_part(getpid(), 0, step, salt, &part);
    if (!problem)
        problem = checkpoint_wait_for_parts(writer);
    problem = problem ? problem : checkpoint_commit(writer);
    if (problem && !writer->failed)
        checkpoint_abandon(writer);
    return problem;
}
struct member {
    int number;
    int64_t step, salt;
    bool traced;
};
static int run_member(void *argument) {
    const struct member *const m = (const struct member *)argument;
    static struct checkpoint_writer writer;
    static struct checkpoint_part part;
    struct error_text error;
    if (m->number == 0) {
        const char *const problem = team_lead(&writer, m->step, m->salt);
        if (problem)
            return m->traced ? child_says(problem) : 1;
        return checkpoint_prune(root, 1, m->step, &error) ? 2 : 0;
    }
    while (*laid_out == 0)
        usleep(100);
    const char *const problem = *laid_out > 0 ? team_part(*laid_out, m->number, m->step, m->salt, &part) : NULL;
    return !problem ? 0 : m->traced ? child_says(problem) : 1;
}

// Saves by all processes, of which `traced` is under trace; returns its wait status. Unless it succeeds, the other ones
// are killed a little later, as the watch over a job does. *others: how many of them failed by themselves.
static int in_team(int traced, int64_t step, struct trace *trace, int *others) {
    pid_t pids[TEAM];
    struct member member = {traced, step, 2, true};
    *laid_out = 0;
    for (int number = 0; number < TEAM; number++) {
        pids[number] = number == traced ? 0 : fork();
        assert_true(pids[number] >= 0);
        if (number != traced && pids[number] == 0) {
            struct member other = {number, step, 2, false};
            alarm(120);
            _exit(run_member(&other));
        }
    }
    const int status = in_traced_child(run_member, &member, trace);
    const bool whole = WIFEXITED(status) && WEXITSTATUS(status) == 0;
    *others = 0;
    for (int number = 0; number < TEAM; number++) {
        int other = 0, waited = 0;
        if (number == traced)
            continue;
        while (waitpid(pids[number], &other, whole ? 0 : WNOHANG) == 0) {
            if (waited++ == 30) // of a millisecond each: time in which a forbidden rename would show
                kill(pids[number], SIGKILL);
            usleep(1000);
        }
        *others += WIFEXITED(other) && WEXITSTATUS(other) != 0;
    }
    return status;
}

static void team_is_whole(int at, int traced, bool saved, bool not_saved) {
    struct found found;
    struct error_text error;
    const char *const problem = find_newest(&found, NULL, &error);
    const bool old = found.step == 10 && found.salt == 1, new_one = found.step == 20 && found.salt == 2;
    if (problem || !((old && !saved) || (new_one && !not_saved)))
        fail_msg("process %d, call %d: step %d, salt %d; %s", traced, at, (int)found.step, (int)found.salt, problem);
    verify_all();
    save(30, 3); // also cleans up
    assert_newest(30, 3);
    assert_int_equal(leftovers(), 0);
}
static void a_kill_of_any_of_several_leaves_the_checkpoint_before(void **state) {
    for (int traced = 0; traced < TEAM; traced++)
        for (int at = 1;; at++) {
            struct trace trace = {at};
            int others;
            root_clear();
            save(10, 1);
            const int status = in_team(traced, 20, &trace, &others);
            skip_if_not_permitted(status, "tracing");
            const bool killed = WIFSIGNALED(status);
            team_is_whole(at, traced, !killed, false);
            if (!killed) {
                assert_int_equal(status, 0);
                assert_int_equal(others, 0);
                assert_in_range(at, traced == 0 ? 25 : 6, 1000);
                break;
            }
        }
}
static void a_failing_call_of_any_of_several_leaves_the_checkpoint_before(void **state) {
    for (int traced = 0; traced < TEAM; traced++) {
        int failed = 0;
        bool more = true;
        for (int at = 1; more; at++) {
            struct trace trace = {0, at, ENOSPC};
            int others;
            root_clear();
            save(10, 1);
            const int status = in_team(traced, 20, &trace, &others);
            skip_if_not_permitted(status, "tracing");
            more = trace.calls >= at;
            if (!WIFEXITED(status) || WEXITSTATUS(status) > 2)
                fail_msg("process %d, call %d failed: status %x", traced, at, status);
            const bool refused = WEXITSTATUS(status) == 1 && !strstr(child_text, "is saved and complete");
            if (refused)
                assert_words(child_text, "the checkpoints before it are untouched");
            if (trace.failed == SYS_fsync || trace.failed == SYS_pwrite64)
                assert_int_equal(WEXITSTATUS(status), 1); // every failure is reported
            failed += refused;
            team_is_whole(at, traced, !refused, refused);
        }
        assert_in_range(failed, traced == 0 ? 12 : 4, 1000);
    }
}
static void several_go_on_after_interruptions_and_short_writes(void **state) {
    for (int traced = 0; traced < TEAM; traced++) {
        struct trace trace = {0, 0, 0, false, true};
        int others;
        root_clear();
        skip_if_not_permitted(in_team(traced, 20, &trace, &others), "tracing");
        assert_newest(20, 2);
        for (int at = 1; at <= trace.calls; at++) {
            struct trace interrupted = {0, at, EINTR};
            root_clear();
            const int status = in_team(traced, 20, &interrupted, &others);
            if (interrupted.failed != SYS_write && interrupted.failed != SYS_fsync &&
                interrupted.failed != SYS_pwrite64 && interrupted.failed != SYS_ftruncate)
                continue;
            if (status != 0)
                fail_msg("process %d, call %d interrupted: %s", traced, at, child_text);
            assert_newest(20, 2);
        }
    }
}
// Checks the part of process 2. Where it is late the checkpoint waits, where it fails the checkpoint fails, and where
// it is never begun the checkpoint waits. Process 1 is told of failures.
static void parts_are_waited_for_and_failures_are_told(void **state) {
    static struct checkpoint_writer writer;
    static struct checkpoint_part part, late;
    root_clear();
    save(10, 1);
    assert_null(team_lay_out(&writer, 20, 2));
    assert_null(team_part(getpid(), 1, 20, 2, &part));
    assert_null(checkpoint_part_begin(&late, root, 20, getpid(), 2));
    assert_words(checkpoint_part_open(&late, "nothing"), "nothing: cannot be opened|No such file|step 20 is not saved");
    assert_words(checkpoint_part_end(&late), "nothing: cannot be opened"); // again with this text
    assert_words(checkpoint_wait_for_parts(&writer), "rank 2 could not write its part|the checkpoints before it");
    assert_false(late.given_up || late.unheard);
    assert_newest(10, 1);
    assert_int_equal(leftovers(), 0);
    // What process 0 has given up counts as no failure of the others.
    assert_null(team_lay_out(&writer, 20, 2));
    assert_null(checkpoint_part_begin(&late, root, 20, getpid(), 2));
    checkpoint_abandon(&writer);
    assert_non_null(checkpoint_part_open(&late, "model.safetensors"));
    assert_true(late.given_up && !late.unheard);
    // A file that another process has cut is no file of the checkpoint.
    assert_null(team_lay_out(&writer, 20, 2));
    assert_null(team_part(getpid(), 1, 20, 2, &part));
    assert_null(team_part(getpid(), 2, 20, 2, &part));
    assert_null(team_part(getpid(), 0, 20, 2, &part));
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/model.safetensors", in_root(writer.partial.name));
    assert_int_equal(truncate(path, 100), 0);
    assert_null(checkpoint_wait_for_parts(&writer));
    assert_words(checkpoint_commit(&writer), "model.safetensors: cannot be read back|step 20 is not saved");
    assert_newest(10, 1);
}

static int64_t clock_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

// A process that resumes from the newest checkpoint and saves again and again, and tells its parent of each complete
// save.
struct loop {
    int pipe;
    bool again; // it begins by saving the newest step again
};
static int run_loop(void *argument) {
    const struct loop *const loop = (const struct loop *)argument;
    struct checkpoint_writer writer;
    struct found found;
    struct error_text error;
    const char *problem = find_newest(&found, NULL, &error);
    if (problem)
        return child_says(problem);
    for (int64_t step = found.step + !(loop->again && found.step > 0);; step++) {
        problem = save_with(&writer, step, found.salt + 1);
        if (!problem && write(loop->pipe, &step, sizeof step) != sizeof step)
            problem = "no parent";
        if (!problem)
            problem = checkpoint_prune(root, 2, step, &error);
        if (problem)
            return child_says(problem);
    }
}
static void killed_at_random_moments(void **state) {
    uint64_t random = (uint64_t)clock_us();
    // the newest step known to be complete: first 0, then what a child or the search after it says
    int64_t complete = 0;
    const int kills = in_long_run() && !UNDER_THREAD_SANITIZER ? 200 : 50;
    root_clear();
    const int64_t begin_us = clock_us();
    for (int i = 0; i < 4; i++)
        save(0, i);
    uint64_t span_us = (uint64_t)(clock_us() - begin_us); // up to four saves, however slow they are
    for (int i = 0; i < kills; i++) {
        int ends[2], status = 0;
        struct found found;
        struct error_text error;
        assert_int_equal(pipe(ends), 0);
        struct loop loop = {ends[1], i % 3 == 0};
        child_text[0] = 0;
        fflush(stdout);
        const pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0)
            _exit(run_loop(&loop));
        close(ends[1]);
        const struct timespec time = {0, (long)(test_random(&random) % (span_us + 3000) % 1000000) * 1000};
        nanosleep(&time, NULL);
        kill(child, SIGKILL);
        assert_int_equal(waitpid(child, &status, 0), child);
        if (!WIFSIGNALED(status))
            fail_msg("kill %d: the child ended by itself: %s", i, child_text);
        for (int64_t step = 0; read(ends[0], &step, sizeof step) == sizeof step;)
            complete = step;
        close(ends[0]);
        const char *const problem = find_newest(&found, NULL, &error);
        // Nothing complete is lost. A kill before a save could be reported hides one save at most.
        if (problem || found.step < complete || found.step > complete + 1)
            fail_msg("kill %d: step %d, complete %d; %s", i, (int)found.step, (int)complete, problem);
        complete = found.step;
        if (complete <= i / 10) // the disk is slower than it was for the first saves
            span_us += span_us / 8;
    }
    assert_true(complete > kills / 10);
    print_message("%d kills, %d steps\n", kills, (int)complete);
    save(complete + 1, 0); // the next save removes what all of these left
    prune(2, complete + 1);
    assert_int_equal(leftovers(), 0);
    assert_int_equal(count_names(false), 2);
}

// ---------------------------------------------------------------------------------------------------------------------
// Disks that are full or read-only

static int run_file_size_limit(void *unused) {
    const struct rlimit limit = {100000, 100000};
    struct checkpoint_writer writer;
    static unsigned char bytes[3 << 20];
    signal(SIGXFSZ, SIG_IGN);
    check(setrlimit(RLIMIT_FSIZE, &limit) == 0);
    check(!checkpoint_begin(&writer, root, 20));
    check(!checkpoint_write_file(&writer, "fits", bytes, 100000));
    const char *const problem = checkpoint_write_file(&writer, "large", bytes, sizeof bytes);
    return problem ? child_says(problem) : 0;
}
static void a_write_that_fails_leaves_nothing_behind(void **state) {
    root_clear();
    save(10, 1);
    assert_int_equal(in_child(run_file_size_limit, NULL), 1);
    assert_words(child_text, "checkpoints/step_00000020/large: cannot be written at byte 100000: File too large; "
                             "step 20 is not saved, the checkpoints before it are untouched");
    assert_newest(10, 1);
    assert_int_equal(leftovers(), 0);
}

static bool write_text(const char *path, const char *text) {
    const int fd = open(path, O_WRONLY);
    const bool written = fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text);
    if (fd >= 0)
        close(fd);
    return written;
}
// Makes a file system of one MiB on the run's folder, which only this process sees, and which goes with it. Returns
// whether it could.
static bool mount_small_disk(void) {
    if (unshare(CLONE_NEWNS) != 0) {
        char uid[32], gid[32];
        snprintf(uid, sizeof uid, "0 %d 1", (int)getuid());
        snprintf(gid, sizeof gid, "0 %d 1", (int)getgid());
        if (unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0 || !write_text("/proc/self/setgroups", "deny") ||
            !write_text("/proc/self/uid_map", uid) || !write_text("/proc/self/gid_map", gid))
            return false;
    }
    return mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0 && mount("tmpfs", folder, "tmpfs", 0, "size=1m") == 0;
}
static uint64_t free_bytes(void) {
    struct statvfs status;
    return statvfs(folder, &status) == 0 ? status.f_bavail * status.f_bsize : 0;
}

static int run_full_disk(void *unused) {
    static unsigned char bytes[2 << 20];
    struct checkpoint_writer writer;
    struct found found;
    struct error_text error;
    if (!mount_small_disk())
        return NOT_PERMITTED;
    check(!save_with(&writer, 10, 1));
    const uint64_t before = free_bytes();
    for (int i = 0; i < 2; i++) { // first the data does not fit, then the manifest after it
        const uint64_t count = i == 0 ? sizeof bytes : before;
        const char *problem = checkpoint_begin(&writer, root, 20);
        if (!problem)
            problem = checkpoint_write_file(&writer, "model", bytes, count);
        if (!problem)
            problem = checkpoint_commit(&writer);
        check(problem && strstr(problem, i == 0 ? "step_00000020/model: " : "step_00000020/manifest.json: "));
        check(strstr(problem, "cannot be ") && strstr(problem, ": No space left on device; step 20 is not saved"));
        check(strstr(problem, "untouched; free space, or keep fewer by --keep-checkpoints"));
        check(free_bytes() == before); // nothing of it is left
        check(!find_newest(&found, NULL, &error) && found.step == 10 && found.salt == 1);
    }
    // A leftover fills the disk: the next save makes room itself.
    char path[PATH_MAX + 64];
    snprintf(path, sizeof path, "%s/.step_00000015.4194304.partial", root);
    check(mkdir(path, 0777) == 0);
    snprintf(path, sizeof path, "%s/.step_00000015.4194304.partial/model", root);
    const int fd = open(path, O_WRONLY | O_CREAT, 0666);
    while (write(fd, bytes, 4096) > 0)
        ;
    check(close(fd) == 0 && free_bytes() == 0);
    check(!save_with(&writer, 30, 3));
    check(!find_newest(&found, NULL, &error) && found.step == 30);
    return 0;
}
static void a_full_disk_leaves_the_checkpoints_before(void **state) {
    const int status = in_child(run_full_disk, NULL);
    skip_if_not_permitted(status << 8, "mounting in a namespace");
    assert_string_equal(child_text, "");
    assert_int_equal(status, 0);
}

static int run_read_only(void *unused) {
    struct checkpoint_writer writer;
    struct found found;
    struct error_text error;
    if (!mount_small_disk())
        return NOT_PERMITTED;
    check(!save_with(&writer, 10, 1));
    check(!save_with(&writer, 20, 2));
    check(mkdir(in_root(".step_00000030.4194304.partial"), 0777) == 0);
    check(mount(NULL, folder, NULL, MS_REMOUNT | MS_RDONLY, NULL) == 0);
    const char *problem = save_with(&writer, 30, 3);
    check(problem && strstr(problem, "step_00000030: the folder cannot be made: Read-only file system"));
    check(strstr(problem, "step 30 is not saved, the checkpoints before it are untouched"));
    problem = checkpoint_prune(root, 1, 20, &error);
    check(problem && strstr(problem, "step_00000010: cannot be removed: Read-only file system"));
    check(!find_newest(&found, NULL, &error) && found.step == 20 && found.salt == 2);
    // The disk becomes read-only in the middle of a save, as a kernel makes it after an error.
    check(mount(NULL, folder, NULL, MS_REMOUNT, NULL) == 0);
    check(!checkpoint_begin(&writer, root, 30));
    check(!checkpoint_write_file(&writer, "model", "x", 1));
    check(mount(NULL, folder, NULL, MS_REMOUNT | MS_RDONLY, NULL) == 0);
    problem = checkpoint_commit(&writer);
    check(problem && strstr(problem, "step_00000030/manifest.json: cannot be made: Read-only file system"));
    check(!find_newest(&found, NULL, &error) && found.step == 20);
    return 0;
}
static void a_read_only_disk_leaves_the_checkpoints_before(void **state) {
    const int status = in_child(run_read_only, NULL);
    skip_if_not_permitted(status << 8, "mounting in a namespace");
    assert_string_equal(child_text, "");
    assert_int_equal(status, 0);
}

// ---------------------------------------------------------------------------------------------------------------------
// The thread

struct thread_job {
    int pipe; // it waits until a byte comes
    int64_t step;
};
static const char *thread_save(void *argument, struct error_text *error) {
    struct thread_job *const job = (struct thread_job *)argument;
    struct checkpoint_writer writer;
    sigset_t blocked;
    char byte;
    pthread_sigmask(SIG_SETMASK, NULL, &blocked);
    if (!sigismember(&blocked, SIGTERM) || !sigismember(&blocked, SIGINT) || !sigismember(&blocked, SIGUSR1))
        return error_format(error, "signals reach the writer");
    if (read(job->pipe, &byte, 1) != 1)
        return error_format(error, "no byte");
    const char *const problem = save_with(&writer, job->step, 1);
    if (problem)
        return error_format(error, "%s", problem);
    job->step++; // the waiter sees it
    return job->step == 12 ? error_format(error, "step %d went wrong", 11) : NULL;
}
static void a_thread_saves_while_training_goes_on(void **state) {
    struct checkpoint_thread worker;
    int ends[2];
    sigset_t blocked;
    assert_int_equal(pipe(ends), 0);
    root_clear();
    checkpoint_thread_init(&worker);
    assert_false(checkpoint_thread_busy(&worker));
    assert_false(checkpoint_thread_done(&worker));
    assert_null(checkpoint_thread_wait(&worker));
    struct thread_job job = {ends[0], 10};
    for (int i = 0; i < 3; i++) {
        assert_true(checkpoint_thread_start(&worker, thread_save, &job));
        assert_true(checkpoint_thread_busy(&worker));
        assert_false(checkpoint_thread_done(&worker));
        assert_false(checkpoint_thread_start(&worker, thread_save, &job)); // only one save at a time
        assert_int_equal(write(ends[1], "x", 1), 1);
        while (i < 2 && checkpoint_thread_busy(&worker))
            usleep(1000);
        if (i < 2) {
            assert_true(checkpoint_thread_done(&worker));
            assert_false(checkpoint_thread_start(&worker, thread_save, &job)); // its result was not taken
        }
        const char *const problem = checkpoint_thread_wait(&worker);
        if (i == 1)
            assert_string_equal(problem, "step 11 went wrong");
        else
            assert_null(problem);
        assert_false(checkpoint_thread_busy(&worker));
        assert_false(checkpoint_thread_done(&worker));
        assert_int_equal(job.step, 11 + i);
        assert_newest(10 + i, 1);
    }
    pthread_sigmask(SIG_SETMASK, NULL, &blocked);
    assert_false(sigismember(&blocked, SIGTERM)); // in this thread they arrive as before
    assert_true(checkpoint_thread_start(&worker, thread_save, &job));
    assert_int_equal(write(ends[1], "x", 1), 1);
    checkpoint_thread_destroy(&worker); // it waits
    assert_newest(13, 1);
    close(ends[0]);
    close(ends[1]);
}

// ---------------------------------------------------------------------------------------------------------------------

static int open_descriptors(void) {
    int count = 0;
    DIR *const stream = opendir("/proc/self/fd");
    while (readdir(stream))
        count++;
    closedir(stream);
    return count;
}
static int descriptors_before;
static int group_setup(void **state) {
    child_text = (char *)mmap(NULL, CHILD_TEXT, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    laid_out = (pid_t *)mmap(NULL, sizeof *laid_out, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    descriptors_before = open_descriptors();
    return child_text == MAP_FAILED || laid_out == MAP_FAILED ? -1 : root_create(state);
}
// Checks, last of all, that no descriptor is left open in this process, by errors and searches neither.
static void no_descriptor_is_left_open(void **state) { assert_int_equal(open_descriptors(), descriptors_before); }

// Returns what the sanitizer is told before main: freed memory is kept back up to 4 MB. This test forks hundreds of
// processes, and each would copy the 256 MB of the default.
const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "quarantine_size_mb=4"; }

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_read_back_as_what_they_are),
        cmocka_unit_test(manifests_read_back),
        cmocka_unit_test(bad_manifests_are_refused_by_name),
        cmocka_unit_test(huge_manifests_are_refused),
        cmocka_unit_test(cut_and_changed_manifests_are_refused),
        cmocka_unit_test(a_checkpoint_is_there_after_its_commit_and_not_before),
        cmocka_unit_test(the_manifest_says_what_was_written),
        cmocka_unit_test(what_is_not_listed_is_ignored_and_what_is_missing_is_named),
        cmocka_unit_test(every_flipped_bit_is_found),
        cmocka_unit_test(faults_of_the_program_are_texts_too),
        cmocka_unit_test(newer_ones_are_passed_over_with_a_reason),
        cmocka_unit_test(users_name_a_checkpoint_its_root_or_the_run),
        cmocka_unit_test(the_oldest_go_beyond_those_to_keep),
        cmocka_unit_test(the_newest_complete_one_always_stays),
        cmocka_unit_test(only_our_own_is_removed_and_links_are_not_followed),
        cmocka_unit_test(a_checkpoint_that_was_set_aside_comes_back),
        cmocka_unit_test(a_writer_holds_its_folder_until_it_dies),
        cmocka_unit_test(killed_at_every_system_call_of_a_save),
        cmocka_unit_test(killed_at_every_system_call_of_the_same_step),
        cmocka_unit_test(killed_at_every_system_call_without_exchange),
        cmocka_unit_test(every_system_call_fails_once),
        cmocka_unit_test(interrupted_calls_and_short_writes_go_on),
        cmocka_unit_test(everything_is_on_the_disk_before_its_name_and_the_name_after),
        cmocka_unit_test(a_kill_of_any_of_several_leaves_the_checkpoint_before),
        cmocka_unit_test(a_failing_call_of_any_of_several_leaves_the_checkpoint_before),
        cmocka_unit_test(several_go_on_after_interruptions_and_short_writes),
        cmocka_unit_test(parts_are_waited_for_and_failures_are_told),
        cmocka_unit_test(killed_at_random_moments),
        cmocka_unit_test(a_write_that_fails_leaves_nothing_behind),
        cmocka_unit_test(a_full_disk_leaves_the_checkpoints_before),
        cmocka_unit_test(a_read_only_disk_leaves_the_checkpoints_before),
        cmocka_unit_test(a_thread_saves_while_training_goes_on),
        cmocka_unit_test(no_descriptor_is_left_open),
    };
    return cmocka_run_group_tests(tests, group_setup, root_remove);
}
