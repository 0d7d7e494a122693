// The limits of memory in /proc and /sys. A missing file means no limit: older kernels and containers lack some.
#include "runtime/machine/memory_limits.h"
#include <stdbool.h>      // bool
#include <stdint.h>       // SIZE_MAX
#include <stdio.h>        // fopen, fread, snprintf, sscanf
#include <stdlib.h>       // strtoull
#include <string.h>       // strncmp, strchr, strrchr, strspn
#include <sys/resource.h> // getrlimit
#include <unistd.h>       // sysconf

// Reads the beginning of a kernel file, root/path, into the n bytes of `text`; false where that fails.
static bool read_kernel_file(const char *root, const char *path, char *text, size_t n) {
    char full[4096];
    if ((size_t)snprintf(full, sizeof full, "%s%s", root, path) >= sizeof full)
        return false;
    FILE *file = fopen(full, "r");
    if (!file)
        return false;
    const size_t count = fread(text, 1, n - 1, file);
    fclose(file);
    text[count] = 0;
    return count > 0;
}

// The number in the line of `text` that begins with `key`; SIZE_MAX where there is no such line or number ("max").
static size_t number_of_line(const char *text, const char *key) {
    const size_t n = strlen(key);
    for (const char *line = text; line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL)
        if (strncmp(line, key, n) == 0) {
            const char *digits = line + n + strspn(line + n, ": \t");
            return *digits >= '0' && *digits <= '9' ? (size_t)strtoull(digits, NULL, 10) : SIZE_MAX;
        }
    return SIZE_MAX;
}

// number_of_line of a number in KiB, in bytes.
static size_t kilobytes_of_line(const char *text, const char *key) {
    const size_t value = number_of_line(text, key);
    return value > SIZE_MAX / 1024 ? SIZE_MAX : value * 1024;
}

static size_t rest_of(size_t limit, size_t used) { return limit > used ? limit - used : 0; }
static size_t least(size_t a, size_t b) { return a < b ? a : b; }

// Bytes that one cgroup leaves: its limit less its usage without file cache, which the kernel drops on demand.
// SIZE_MAX: it has no limit.
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

// The least that this process's cgroup and those around it leave. A container may see its own group at the root of the
// mount while /proc names the path outside, so that every ancestor up to the root is read, whether it exists or not.
static size_t cgroups_left(const char *root) {
    char groups[8192];
    size_t left = SIZE_MAX;
    if (!read_kernel_file(root, "/proc/self/cgroup", groups, sizeof groups))
        return left;
    for (char *line = groups, *next; line && *line; line = next) { // "4:memory:/path" (v1) or "0::/path" (v2)
        next = strchr(line, '\n');
        if (next)
            *next++ = 0;
        const bool unified = strncmp(line, "0::", 3) == 0;
        char *controllers = strchr(line, ':'), *path = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!path || (!unified && strncmp(controllers, ":memory:", 8) != 0))
            continue;
        path++;
        for (bool at_root = false; !at_root;) {
            char folder[4096];
            char *slash = strrchr(path, '/');
            if (slash && !slash[1])
                *slash = 0;
            snprintf(folder, sizeof folder, "/sys/fs/cgroup%s%.3000s", unified ? "" : "/memory", path);
            const size_t here = unified ? cgroup_left(root, folder, "memory.max", "memory.current", "inactive_file")
                                        : cgroup_left(root, folder, "memory.limit_in_bytes", "memory.usage_in_bytes",
                                                      "total_inactive_file");
            left = least(left, here);
            slash = strrchr(path, '/');
            at_root = !slash;
            if (slash)
                *slash = 0;
        }
    }
    return left;
}

// memory_available_bytes, with /proc and /sys in the folder `root` ("" except in tests).
static size_t available_under(const char *root) {
    char text[16384];
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t left = cgroups_left(root);
    if (read_kernel_file(root, "/proc/meminfo", text, sizeof text)) {
        const size_t limit = kilobytes_of_line(text, "CommitLimit");
        const size_t committed = kilobytes_of_line(text, "Committed_AS");
        char mode[16];
        left = least(left, kilobytes_of_line(text, "MemAvailable"));
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

size_t memory_resident_peak_bytes(void) {
    char text[8192];
    if (!read_kernel_file("", "/proc/self/status", text, sizeof text))
        return 0;
    const size_t peak = kilobytes_of_line(text, "VmHWM");
    return peak == SIZE_MAX ? 0 : peak;
}
