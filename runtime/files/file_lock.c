#include "runtime/files/file_lock.h"
#include <errno.h>    // errno
#include <fcntl.h>    // open, fcntl
#include <stdio.h>    // snprintf, sscanf
#include <string.h>   // memset, strerror
#include <sys/file.h> // flock
#include <sys/stat.h> // fstat
#include <time.h>     // clock_gettime
#include <unistd.h>   // pread, gethostname

// Returns a lock of one byte for fcntl; type: F_WRLCK or F_RDLCK.
static struct flock lock_of_byte(short type, off_t byte) {
    struct flock lock;
    memset(&lock, 0, sizeof lock); // l_pid must be 0
    lock.l_type = type;
    lock.l_whence = SEEK_SET;
    lock.l_start = byte;
    lock.l_len = 1;
    return lock;
}

int file_lock_byte(int fd, short type, off_t byte) {
    struct flock lock = lock_of_byte(type, byte);
    return fcntl(fd, F_OFD_SETLK, &lock) == 0 ? 0 : errno == EACCES ? EAGAIN : errno;
}

bool file_byte_is_locked(int fd, off_t byte) {
    struct flock lock = lock_of_byte(F_WRLCK, byte); // asks what would be in its way
    return fcntl(fd, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

// Locks an open file until it is closed, without waiting: its first byte by fcntl or, where that fails, all of it by
// flock, which older kernels and some other file systems have. Returns 0 or an errno; EAGAIN: another has the lock.
static int file_lock_open(int fd) {
    const int problem = file_lock_byte(fd, F_WRLCK, 0);
    if (problem == 0 || problem == EAGAIN)
        return problem;
    return flock(fd, LOCK_EX | LOCK_NB) == 0 ? 0 : errno;
}

// Replaces the file's text by this host, process and time. A failure, as on a full disk, is ignored: the lock holds.
static void file_lock_sign(int fd) {
    char host[256] = "", text[FILE_LOCK_TEXT];
    struct timespec now;
    if (gethostname(host, sizeof host - 1) != 0 || !*host)
        snprintf(host, sizeof host, "?");
    clock_gettime(CLOCK_REALTIME, &now);
    const int n =
        snprintf(text, sizeof text, "%s %ld %lld.%09ld\n", host, (long)getpid(), (long long)now.tv_sec, now.tv_nsec);
    if (pwrite(fd, text, (size_t)n, 0) != n || ftruncate(fd, n) != 0)
        return;
}

// text = the content of an open file, cut to fit; "" where it can't be read.
static void file_lock_content(char text[FILE_LOCK_TEXT], int fd) {
    const ssize_t n = pread(fd, text, FILE_LOCK_TEXT - 1, 0);
    text[n > 0 ? n : 0] = '\0';
}
bool file_lock_read(char text[FILE_LOCK_TEXT], const char *path) {
    const int fd = open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    text[0] = '\0';
    if (fd < 0)
        return false;
    file_lock_content(text, fd);
    close(fd);
    return *text != '\0';
}

// text = "process 12 on host NAME", from the lock file's content; "another process" where the content names none.
static void file_lock_name_holder(struct error_text *text, int fd) {
    char content[FILE_LOCK_TEXT], host[256];
    long process;
    file_lock_content(content, fd);
    if (sscanf(content, "%255s %ld", host, &process) == 2)
        error_format(text, "process %ld on host %s", process, host);
    else
        error_format(text, "another process");
}

enum file_lock file_lock_take(int *fd, const char *path, struct error_text *text) {
    struct stat status;
    *fd = -1;
    // Without O_NOFOLLOW and O_NONBLOCK this would overwrite what a link points to, or wait for a pipe's other end.
    const int file = open(path, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666);
    if (file < 0) {
        const bool no_folder = errno == ENOENT || errno == ENOTDIR;
        error_format(text, "%s: cannot be written: %s", path, strerror(errno));
        return no_folder ? FILE_LOCK_NO_FOLDER : FILE_LOCK_NO_FILE;
    }
    if (fstat(file, &status) != 0 || !S_ISREG(status.st_mode)) {
        close(file);
        error_format(text, "%s: is not a regular file; remove it", path);
        return FILE_LOCK_NO_FILE;
    }
    const int problem = file_lock_open(file);
    if (problem == EAGAIN) {
        file_lock_name_holder(text, file);
        close(file);
        return FILE_LOCK_HELD;
    }
    *fd = file;
    file_lock_sign(file);
    if (problem == 0)
        return FILE_LOCK_TAKEN;
    error_format(text, "%s: cannot be locked: %s", path, strerror(problem));
    return FILE_LOCK_IMPOSSIBLE;
}
