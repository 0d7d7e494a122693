#include "runtime/machine/numa.h"
#include <dirent.h>  // opendir
#include <limits.h>  // PATH_MAX
#include <sched.h>   // sched_getaffinity
#include <stdbool.h> // bool
#include <stdio.h>   // fopen
#include <string.h>  // memset

enum { NUMA_CPUS = 1 << 14 }; // more than Linux can be built for
struct cpus {
    cpu_set_t sets[NUMA_CPUS / CPU_SETSIZE];
};

// Whether the CPUs of a list as "0-3,8-11" and of `allowed` have one in common. What follows a malformed number of a
// list is not read.
static bool numa_list_meets(FILE *list, const struct cpus *allowed) {
    unsigned first, last;
    do {
        if (fscanf(list, "%u", &first) != 1)
            return false;
        if (fscanf(list, "-%u", &last) != 1)
            last = first;
        for (unsigned cpu = first; cpu <= last && cpu < NUMA_CPUS; cpu++)
            if (CPU_ISSET_S(cpu, sizeof *allowed, allowed->sets))
                return true;
    } while (fgetc(list) == ',');
    return false;
}

static int numa_count(const char *folder, const struct cpus *allowed) {
    int nodes = 0;
    DIR *const directory = opendir(folder);
    if (!directory)
        return 0;
    for (struct dirent *entry; (entry = readdir(directory));) {
        char path[PATH_MAX];
        int number, length = 0;
        if (sscanf(entry->d_name, "node%d%n", &number, &length) != 1 || entry->d_name[length] ||
            snprintf(path, sizeof path, "%s/%s/cpulist", folder, entry->d_name) >= (int)sizeof path)
            continue;
        FILE *const list = fopen(path, "re");
        if (!list)
            continue;
        nodes += numa_list_meets(list, allowed);
        fclose(list);
    }
    closedir(directory);
    return nodes;
}

int numa_nodes_used(const char *folder) {
    struct cpus allowed;
    memset(&allowed, 0, sizeof allowed);
    return sched_getaffinity(0, sizeof allowed, allowed.sets) == 0 ? numa_count(folder, &allowed) : 0;
}
