#include "runtime/machine/cgroups.h"
#include <stdio.h>  // fopen, fread, snprintf
#include <string.h> // strchr, strrchr, strncmp, strcspn

bool read_kernel_file(const char *root, const char *path, char *text, size_t n) {
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

// Whether a list of names with commas between them has the name.
static bool has_name(const char *list, const char *name) {
    const size_t length = strlen(name);
    for (const char *at = list; *at;) {
        const size_t n = strcspn(at, ",");
        if (n == length && strncmp(at, name, n) == 0)
            return true;
        at += n + (at[n] == ',');
    }
    return false;
}

void cgroups_each(const char *root, const char *controller,
                  void (*look)(const char *root, const char *folder, bool unified, void *context), void *context) {
    char groups[8192];
    if (!read_kernel_file(root, "/proc/self/cgroup", groups, sizeof groups))
        return;
    for (char *line = groups, *next; line && *line; line = next) { // "4:cpu,cpuacct:/path" (v1) or "0::/path" (v2)
        next = strchr(line, '\n');
        if (next)
            *next++ = 0;
        const bool unified = strncmp(line, "0::", 3) == 0;
        char *controllers = strchr(line, ':'), *path = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!path)
            continue;
        *path++ = 0;
        controllers++;
        if (!unified && !has_name(controllers, controller))
            continue;
        for (bool at_root = false; !at_root;) {
            char folder[4096];
            char *slash = strrchr(path, '/');
            if (slash && !slash[1])
                *slash = 0;
            snprintf(folder, sizeof folder, "/sys/fs/cgroup%s%.200s%.3000s", unified ? "" : "/", controllers, path);
            look(root, folder, unified, context);
            slash = strrchr(path, '/');
            at_root = !slash;
            if (slash)
                *slash = 0;
        }
    }
}
