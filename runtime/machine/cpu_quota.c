#include "runtime/machine/cpu_quota.h"
#include "runtime/machine/cgroups.h" // cgroups_each, read_kernel_file
#include <stdio.h>                   // snprintf, sscanf

// Lowers *context (int, 0: no limit yet) to the CPUs whose time the group grants, rounded up. Without a limit it stays.
static void lower_to_quota(const char *root, const char *folder, bool unified, void *context) {
    int *const fewest = (int *)context;
    char path[4200], text[128];
    long long quota = 0, period = 0;
    if (unified) { // "200000 100000": microseconds of CPU time in each period of so many; "max 100000"
        snprintf(path, sizeof path, "%s/cpu.max", folder);
        if (!read_kernel_file(root, path, text, sizeof text) || sscanf(text, "%lld %lld", &quota, &period) != 2)
            return;
    } else {
        snprintf(path, sizeof path, "%s/cpu.cfs_quota_us", folder);
        if (!read_kernel_file(root, path, text, sizeof text) || sscanf(text, "%lld", &quota) != 1)
            return;
        snprintf(path, sizeof path, "%s/cpu.cfs_period_us", folder);
        if (!read_kernel_file(root, path, text, sizeof text) || sscanf(text, "%lld", &period) != 1)
            return;
    }
    if (quota <= 0 || period <= 0) // -1: no limit
        return;
    const long long cpus = (quota + period - 1) / period;
    if (cpus < 1 << 20 && (*fewest == 0 || cpus < *fewest))
        *fewest = (int)cpus;
}

// The number of CPUs that cgroups grant, as cpu_quota, by /proc and /sys in the folder `root`, "" except in tests.
static int cpu_quota_under(const char *root) {
    int fewest = 0;
    cgroups_each(root, "cpu", lower_to_quota, &fewest);
    return fewest;
}

int cpu_quota(void) { return cpu_quota_under(""); }
