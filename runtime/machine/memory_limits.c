// The limits of memory in /proc and /sys. A missing file means no limit: older kernels and containers lack some.
#include "runtime/machine/memory_limits.h"
#include "runtime/machine/cgroups.h" // cgroups_each, read_kernel_file
#include <stdbool.h>                 // bool
#include <stdint.h>                  // SIZE_MAX
#include <stdio.h>                   // fopen, fread, snprintf, sscanf
#include <stdlib.h>                  // strtoull
#include <string.h>                  // strncmp, strchr, strrchr, strspn
#include <sys/resource.h>            // getrlimit
#include <unistd.h>                  // sysconf

// Returns the number after `key` in the first line of `text` that begins with `key`; SIZE_MAX if there is none.
static size_t number_of_line(const char *text, const char *key) {
    const size_t n = strlen(key);
    for (const char *line = text; line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL)
        if (strncmp(line, key, n) == 0) {
            const char *digits = line + n + strspn(line + n, ": \t");
            return *digits >= '0' && *digits <= '9' ? (size_t)strtoull(digits, NULL, 10) : SIZE_MAX;
        }
    return SIZE_MAX;
}

// Returns, in bytes, the KiB in the first line of `text` that begins with `key`; SIZE_MAX if there is none.
static size_t bytes_of_kib_line(const char *text, const char *key) {
    const size_t value = number_of_line(text, key);
    return value > SIZE_MAX / 1024 ? SIZE_MAX : value * 1024;
}

static size_t rest_of(size_t limit, size_t used) { return limit > used ? limit - used : 0; }
static size_t least(size_t a, size_t b) { return a < b ? a : b; }

// Returns the bytes that a cgroup leaves: limit - (usage - memory.stat's cache_field). SIZE_MAX if there is no limit.
static size_t cgroup_left(const char *root, const char *folder, const char *limit_file, const char *usage_file,
                          const char *cache_field) {
    char path[4096], text[16384];
    snprintf(path, sizeof path, "%s/%s", folder, limit_file);
    if (!read_kernel_file(root, path, text, sizeof text))
        return SIZE_MAX;
    const size_t limit = number_of_line(text, "");
    if (limit >= SIZE_MAX / 2 - 65536) // no limit in v1: the largest multiple of a page
        return SIZE_MAX;
    snprintf(path, sizeof path, "%s/%s", folder, usage_file);
    size_t used = read_kernel_file(root, path, text, sizeof text) ? number_of_line(text, "") : 0;
    snprintf(path, sizeof path, "%s/memory.stat", folder);
    if (read_kernel_file(root, path, text, sizeof text)) {
        const size_t cache = number_of_line(text, cache_field);
        used = cache == SIZE_MAX ? used : rest_of(used, cache);
    }
    return rest_of(limit, used);
}

// Lowers *context (size_t), in bytes, to what the group leaves, if that is less.
static void lower_to_bytes_left(const char *root, const char *folder, bool unified, void *context) {
    size_t *const left = (size_t *)context;
    *left = least(*left, unified ? cgroup_left(root, folder, "memory.max", "memory.current", "inactive_file")
                                 : cgroup_left(root, folder, "memory.limit_in_bytes", "memory.usage_in_bytes",
                                               "total_inactive_file"));
}
// Returns the fewest bytes that this process's cgroup and its ancestors leave; SIZE_MAX: none has a limit.
static size_t cgroups_left(const char *root) {
    size_t left = SIZE_MAX;
    cgroups_each(root, "memory", lower_to_bytes_left, &left);
    return left;
}

// Returns memory_available_bytes() by the /proc and /sys under `root` ("" except in tests) and this process's rlimits.
static size_t available_under(const char *root) {
    char text[16384];
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t left = cgroups_left(root);
    if (read_kernel_file(root, "/proc/meminfo", text, sizeof text)) {
        const size_t limit = bytes_of_kib_line(text, "CommitLimit");
        const size_t committed = bytes_of_kib_line(text, "Committed_AS");
        char mode[16];
        left = least(left, bytes_of_kib_line(text, "MemAvailable"));
        const bool never_overcommits =
            read_kernel_file(root, "/proc/sys/vm/overcommit_memory", mode, sizeof mode) && mode[0] == '2';
        if (never_overcommits && limit != SIZE_MAX && committed != SIZE_MAX)
            left = least(left, rest_of(limit, committed));
    }
    size_t address_pages = 0, data_pages = 0;
    if (read_kernel_file(root, "/proc/self/statm", text, sizeof text))
        sscanf(text, "%zu %*u %*u %*u %*u %zu", &address_pages, &data_pages);
    struct rlimit limit;
    if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
        left = least(left, rest_of((size_t)limit.rlim_cur, address_pages * page));
    if (getrlimit(RLIMIT_DATA, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
        left = least(left, rest_of((size_t)limit.rlim_cur, data_pages * page));
    return left;
}

size_t memory_available_bytes(void) { return available_under(""); }

size_t memory_resident_bytes(void) {
    char text[256];
    size_t pages = 0;
    if (read_kernel_file("", "/proc/self/statm", text, sizeof text))
        sscanf(text, "%*u %zu", &pages);
    return pages * (size_t)sysconf(_SC_PAGESIZE);
}

// Returns the largest resident set size that this process has had; 0 if unknown.
size_t memory_resident_peak_bytes(void) {
    char text[8192];
    if (!read_kernel_file("", "/proc/self/status", text, sizeof text))
        return 0;
    const size_t peak = bytes_of_kib_line(text, "VmHWM");
    return peak == SIZE_MAX ? 0 : peak;
}
