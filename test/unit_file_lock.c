// Locks of files: one holder at a time, whom others can name, until it ends in whatever way. On file systems and
// kernels without the usual kind of lock, by the kind that they have.
#include <errno.h>    // EINVAL
#include <fcntl.h>    // fcntl
#include <sys/file.h> // flock

// What the code under test calls: the system's functions, or the answers of a kernel or file system without such locks.
static struct {
    int ofd_problem, flock_problem; // an errno; 0: they work
} missing;
static int replaced_fcntl(int fd, int command, struct flock *lock) {
    if (missing.ofd_problem == 0)
        return fcntl(fd, command, lock);
    errno = missing.ofd_problem;
    return -1;
}
static int replaced_flock(int fd, int operation);
#define fcntl replaced_fcntl
#define flock(fd, operation) replaced_flock(fd, operation)
#include "runtime/files/file_lock.c" // under test
#undef fcntl
#undef flock
static int replaced_flock(int fd, int operation) {
    if (missing.flock_problem == 0)
        return flock(fd, operation);
    errno = missing.flock_problem;
    return -1;
}

#include "test/testing.h" // cmocka
#include <limits.h>       // PATH_MAX
#include <stdlib.h>       // mkdtemp
#include <sys/wait.h>     // waitpid

static char folder[64], path[128];

static int setup(void **state) {
    snprintf(folder, sizeof folder, "/tmp/unit_file_lock.XXXXXX");
    snprintf(path, sizeof path, "%s/.lock", mkdtemp(folder));
    return 0;
}
static int teardown(void **state) {
    unlink(path);
    return rmdir(folder);
}
static int setup_one(void **state) {
    unlink(path);
    memset(&missing, 0, sizeof missing);
    return 0;
}

// Takes the lock, which must give `expected`; returns the open file.
static int take(enum file_lock expected, struct error_text *text) {
    int fd;
    text->text[0] = '\0';
    const enum file_lock found = file_lock_take(&fd, path, text);
    assert_int_equal(found, expected);
    assert_int_equal(fd >= 0, expected == FILE_LOCK_TAKEN || expected == FILE_LOCK_IMPOSSIBLE);
    return fd;
}
// Checks that text has the words.
static void assert_words(const struct error_text *text, const char *words) {
    if (!strstr(text->text, words))
        fail_msg("'%s' is without '%s'", text->text, words);
}

static void the_second_is_told_who_has_it(void **state) {
    struct error_text text;
    char host[256] = "", expected[320];
    const int first = take(FILE_LOCK_TAKEN, &text);
    take(FILE_LOCK_HELD, &text); // also against the same process
    gethostname(host, sizeof host - 1);
    snprintf(expected, sizeof expected, "process %ld on host %s", (long)getpid(), host);
    assert_string_equal(text.text, expected);
    char content[FILE_LOCK_TEXT], later[FILE_LOCK_TEXT];
    assert_true(file_lock_read(content, path));
    assert_int_equal(ftruncate(first, 0), 0);
    assert_false(file_lock_read(later, path));
    take(FILE_LOCK_HELD, &text);
    assert_string_equal(text.text, "another process");
    close(first);
    close(take(FILE_LOCK_TAKEN, &text)); // the file stays, without a lock
    assert_true(file_lock_read(later, path));
    assert_string_not_equal(content, later);
}

// Checks that a child with the open file frees no lock as it ends, and that a program that the child becomes does not
// have the file.
static void a_child_neither_frees_nor_passes_it_on(void **state) {
    struct error_text text;
    const int first = take(FILE_LOCK_TAKEN, &text);
    assert_int_equal(fcntl(first, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        close(first);
        _exit(0);
    }
    assert_int_equal(waitpid(child, NULL, 0), child);
    close(open(path, O_RDONLY)); // this would free a process's lock
    take(FILE_LOCK_HELD, &text);
    close(first);
}

static void a_kill_frees_it(void **state) {
    struct error_text text;
    int ends[2], fd;
    char byte;
    siginfo_t unused;
    assert_int_equal(pipe(ends), 0);
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        alarm(60);
        if (file_lock_take(&fd, path, &text) == FILE_LOCK_TAKEN && write(ends[1], "y", 1) == 1)
            pause();
        _exit(1);
    }
    assert_int_equal(read(ends[0], &byte, 1), 1);
    take(FILE_LOCK_HELD, &text);
    assert_int_equal(kill(child, SIGKILL), 0);
    assert_int_equal(waitid(P_PID, (id_t)child, &unused, WEXITED | WNOWAIT), 0); // a zombie keeps nothing
    close(take(FILE_LOCK_TAKEN, &text));
    assert_int_equal(waitpid(child, NULL, 0), child);
    close(ends[0]);
    close(ends[1]);
}

static void flock_where_there_is_no_other(void **state) {
    struct error_text text;
    for (int i = 0; i < 3; i++) {
        missing.ofd_problem = i == 0 ? EINVAL : i == 1 ? ENOLCK : EOPNOTSUPP;
        const int first = take(FILE_LOCK_TAKEN, &text);
        take(FILE_LOCK_HELD, &text);
        assert_words(&text, "process ");
        close(first);
    }
    missing.flock_problem = ENOSYS;
    close(take(FILE_LOCK_IMPOSSIBLE, &text));
    assert_words(&text, "cannot be locked: Function not implemented");
}

static void other_files_are_left_alone(void **state) {
    struct error_text text;
    char other[160];
    snprintf(other, sizeof other, "%s/other", folder);
    const int file = open(other, O_WRONLY | O_CREAT, 0666);
    assert_int_equal(write(file, "content", 7), 7);
    close(file);
    assert_int_equal(symlink(other, path), 0);
    take(FILE_LOCK_NO_FILE, &text);
    assert_words(&text, "cannot be written: ");
    struct stat status;
    assert_int_equal(stat(other, &status), 0);
    assert_int_equal(status.st_size, 7);
    unlink(path);
    unlink(other);
    assert_int_equal(mkfifo(path, 0666), 0);
    take(FILE_LOCK_NO_FILE, &text);
    assert_words(&text, "is not a regular file");
    unlink(path);
    int fd;
    snprintf(other, sizeof other, "%s/none/.lock", folder);
    assert_int_equal(file_lock_take(&fd, other, &text), FILE_LOCK_NO_FOLDER);
    assert_int_equal(fd, -1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(the_second_is_told_who_has_it, setup_one),
        cmocka_unit_test_setup(a_child_neither_frees_nor_passes_it_on, setup_one),
        cmocka_unit_test_setup(a_kill_frees_it, setup_one),
        cmocka_unit_test_setup(flock_where_there_is_no_other, setup_one),
        cmocka_unit_test_setup(other_files_are_left_alone, setup_one),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
