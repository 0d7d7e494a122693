#include "runtime/machine/numa.h"
#include <ctype.h>  // tolower
#include <dirent.h> // opendir
#include <limits.h> // PATH_MAX
#include <stdio.h>  // fopen
#include <string.h> // memset

// *common = the CPUs of `allowed` in a list as "0-3,8-11", up to a malformed number. Returns whether there are any.
static bool numa_list_meets(FILE *list, const struct cpus *allowed, struct cpus *common) {
    unsigned first, last;
    bool any = false;
    memset(common, 0, sizeof *common);
    do {
        if (fscanf(list, "%u", &first) != 1)
            break;
        if (fscanf(list, "-%u", &last) != 1)
            last = first;
        for (unsigned cpu = first; cpu <= last && cpu < NUMA_CPUS; cpu++)
            if (CPU_ISSET_S(cpu, sizeof *allowed, allowed->sets)) {
                CPU_SET_S(cpu, sizeof *common, common->sets);
                any = true;
            }
    } while (fgetc(list) == ',');
    return any;
}
// *common = the CPUs of `allowed` that the node has. Returns whether it has any. Without a list: false, *common unset.
static bool numa_node_meets(const char *folder, int node, const struct cpus *allowed, struct cpus *common) {
    char path[PATH_MAX];
    FILE *const list =
        snprintf(path, sizeof path, "%s/node%d/cpulist", folder, node) < (int)sizeof path ? fopen(path, "re") : NULL;
    if (!list)
        return false;
    const bool any = numa_list_meets(list, allowed, common);
    fclose(list);
    return any;
}

// The number of nodes in `folder` with a CPU of `allowed`; 0 where the folder can't be read.
static int numa_count(const char *folder, const struct cpus *allowed) {
    int nodes = 0;
    DIR *const directory = opendir(folder);
    if (!directory)
        return 0;
    for (struct dirent *entry; (entry = readdir(directory));) {
        int number, length = 0;
        struct cpus common;
        if (sscanf(entry->d_name, "node%d%n", &number, &length) == 1 && !entry->d_name[length])
            nodes += numa_node_meets(folder, number, allowed, &common);
    }
    closedir(directory);
    return nodes;
}

int numa_nodes_used(const char *folder) {
    struct cpus allowed;
    memset(&allowed, 0, sizeof allowed);
    return sched_getaffinity(0, sizeof allowed, allowed.sets) == 0 ? numa_count(folder, &allowed) : 0;
}

int numa_node_of_pci(const char *folder, const char *address) {
    char path[PATH_MAX];
    int node = -1;
    if (snprintf(path, sizeof path, "%s/%s/numa_node", folder, address) >= (int)sizeof path)
        return -1;
    for (char *c = path + strlen(folder); *c; c++)
        *c = (char)tolower((unsigned char)*c); // Linux writes addresses in lower case
    FILE *const file = fopen(path, "re");
    if (!file)
        return -1;
    if (fscanf(file, "%d", &node) != 1 || node < 0)
        node = -1;
    fclose(file);
    return node;
}

void numa_bind_thread(struct numa_binding *binding, const char *folder, int node) {
    struct cpus common;
    memset(binding, 0, sizeof *binding);
    binding->bound = node >= 0 && sched_getaffinity(0, sizeof binding->before, binding->before.sets) == 0 &&
                     numa_node_meets(folder, node, &binding->before, &common) &&
                     sched_setaffinity(0, sizeof common, common.sets) == 0;
}
void numa_restore_thread(const struct numa_binding *binding) {
    if (binding->bound)
        sched_setaffinity(0, sizeof binding->before, binding->before.sets);
}
