// What this process may still allocate: the machine's memory, its cgroups and its own limits, under a root of the
// test's own, or with the limit set. And the CPU time that its cgroups grant it.
#include "runtime/machine/cpu_quota.c"     // under test
#include "runtime/machine/memory_limits.c" // under test
#include "test/fails.h"                    // run_in_child
#include "test/testing.h"                  // cmocka
#include <sys/stat.h>                      // mkdir

static void write_under(const char *root, const char *path, const char *text) {
    char full[512];
    snprintf(full, sizeof full, "%s%s", root, path);
    for (char *slash = strchr(full + strlen(root) + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        mkdir(full, 0700);
        *slash = '/';
    }
    FILE *file = fopen(full, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}
static void remove_root(const char *root) {
    char command[512];
    snprintf(command, sizeof command, "rm -r '%s'", root);
    assert_int_equal(system(command), 0);
}

static void the_machine_and_its_cgroups_bound_memory(void **state) {
    char root[TEST_PATH];
    assert_non_null(mkdtemp(test_template(root, "unit_memory_limits")));
    write_under(root, "/proc/meminfo",
                "MemTotal: 9000 kB\nMemAvailable:    5000 kB\nCommitLimit: 4000 kB\nCommitted_AS: 1000 kB\n");
    assert_true(available_under(root) == 5000 * 1024);
    write_under(root, "/proc/sys/vm/overcommit_memory", "2\n");
    assert_true(available_under(root) == 3000 * 1024);
    write_under(root, "/proc/sys/vm/overcommit_memory", "0\n");
    // cgroup v2: no limit on the group, but one around it, of which some is used; a part of this is file cache
    write_under(root, "/proc/self/cgroup", "0::/outer/inner\n");
    write_under(root, "/sys/fs/cgroup/outer/inner/memory.max", "max\n");
    write_under(root, "/sys/fs/cgroup/outer/memory.max", "2000000\n");
    assert_true(available_under(root) == 2000000);
    write_under(root, "/sys/fs/cgroup/outer/memory.current", "1500000\n");
    assert_true(available_under(root) == 500000);
    write_under(root, "/sys/fs/cgroup/outer/memory.stat", "anon 1\nfile 2\ninactive_file 300000\nactive_file 4\n");
    assert_true(available_under(root) == 800000);
    write_under(root, "/sys/fs/cgroup/outer/memory.current", "9900000\n");
    assert_true(available_under(root) == 0);
    // cgroup v1, in a container whose own group is mounted at the root
    write_under(root, "/proc/self/cgroup", "12:cpu:/elsewhere\n4:memory:/docker/0123\n1:name=systemd:/x\n");
    assert_true(available_under(root) == 5000 * 1024);
    write_under(root, "/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    assert_true(available_under(root) == 5000 * 1024);
    write_under(root, "/sys/fs/cgroup/memory/memory.limit_in_bytes", "4000000\n");
    write_under(root, "/sys/fs/cgroup/memory/memory.usage_in_bytes", "1000000\n");
    write_under(root, "/sys/fs/cgroup/memory/memory.stat", "inactive_file 1\ntotal_inactive_file 7\n");
    assert_true(available_under(root) == 3000007);
    remove_root(root);
    assert_true(memory_available_bytes() > 0);
}

static void cgroups_bound_the_cpus(void **state) {
    char root[TEST_PATH];
    assert_non_null(mkdtemp(test_template(root, "unit_memory_limits")));
    assert_int_equal(cpu_quota_under(root), 0); // nothing is known
    write_under(root, "/proc/self/cgroup", "0::/outer/inner\n");
    write_under(root, "/sys/fs/cgroup/outer/inner/cpu.max", "max 100000\n");
    assert_int_equal(cpu_quota_under(root), 0);
    write_under(root, "/sys/fs/cgroup/outer/cpu.max", "350000 100000\n");
    assert_int_equal(cpu_quota_under(root), 4);
    write_under(root, "/sys/fs/cgroup/outer/inner/cpu.max", "20000 100000\n");
    assert_int_equal(cpu_quota_under(root), 1);
    write_under(root, "/proc/self/cgroup", "12:cpu,cpuacct:/job\n4:memory:/docker/0123\n");
    write_under(root, "/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "-1\n");
    write_under(root, "/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000\n");
    assert_int_equal(cpu_quota_under(root), 0);
    write_under(root, "/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "200000\n");
    assert_int_equal(cpu_quota_under(root), 2);
    remove_root(root);
    assert_true(cpu_quota() >= 0);
}

static void limited(void *resource) {
    struct rlimit limit;
    char text[256];
    size_t pages = 0;
    assert_true(read_kernel_file("", "/proc/self/statm", text, sizeof text));
    sscanf(text, "%zu", &pages); // all addresses, which are more than the data
    limit.rlim_cur = limit.rlim_max = pages * (size_t)sysconf(_SC_PAGESIZE) + (50 << 20);
    if (setrlimit(*(const int *)resource, &limit) != 0)
        _exit(3);
    const size_t left = memory_available_bytes();
    const bool exact = *(const int *)resource == RLIMIT_AS;
    if (left < (exact ? 49u << 20 : 50u << 20) || (exact && left > 50 << 20) || left > limit.rlim_cur)
        _exit(4);
}
// Checks that limits hold, in a child. An emulator of another CPU, such as qemu-user, takes limits without applying
// them.
static void limits_hold(void *argument) {
    struct rlimit limit = {1 << 30, 1 << 30};
    setrlimit(RLIMIT_AS, &limit);
    limit.rlim_cur = 0;
    getrlimit(RLIMIT_AS, &limit);
    _exit(limit.rlim_cur == 1 << 30 ? 0 : 1);
}
static void the_limits_of_the_process_bound_memory(void **state) {
    const int resources[2] = {RLIMIT_AS, RLIMIT_DATA};
    char said[512];
    if (run_in_child(limits_hold, NULL, said, sizeof said) != 0)
        skip(); // nothing here limits a process
    for (int i = 0; i < 2; i++) {
        char message[512];
        int resource = resources[i];
        assert_int_equal(run_in_child(limited, &resource, message, sizeof message), 0);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_machine_and_its_cgroups_bound_memory),
        cmocka_unit_test(cgroups_bound_the_cpus),
        cmocka_unit_test(the_limits_of_the_process_bound_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
