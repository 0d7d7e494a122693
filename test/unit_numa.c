// The NUMA nodes that a process spans, a device's node, and threads that are bound to a node, by folders like Linux's.
#include "runtime/machine/numa.c" // under test
#include "test/testing.h"         // cmocka
#include <stdlib.h>               // mkdtemp
#include <sys/stat.h>             // mkdir
#include <unistd.h>               // rmdir

enum { NODES = 4 };

static void remove_node(const char *folder, int node) {
    char path[TEST_PATH + 32];
    snprintf(path, sizeof path, "%s/node%d/cpulist", folder, node);
    remove(path);
    snprintf(path, sizeof path, "%s/node%d", folder, node);
    rmdir(path);
}
// The number of nodes, of a machine whose nodes have these lists of CPUs, for a process that may run on CPUs first to
// last.
static int count(int first, int last, const char *const lists[NODES]) {
    char folder[TEST_PATH], path[TEST_PATH + 32];
    struct cpus allowed;
    memset(&allowed, 0, sizeof allowed);
    for (int cpu = first; cpu <= last; cpu++)
        CPU_SET_S((size_t)cpu, sizeof allowed, allowed.sets);
    assert_non_null(mkdtemp(test_template(folder, "unit_numa")));
    for (int node = 0; node < NODES && lists[node]; node++) {
        snprintf(path, sizeof path, "%s/node%d", folder, node);
        assert_int_equal(mkdir(path, 0755), 0);
        snprintf(path, sizeof path, "%s/node%d/cpulist", folder, node);
        FILE *const list = fopen(path, "w");
        assert_non_null(list);
        fputs(lists[node], list);
        fclose(list);
    }
    snprintf(path, sizeof path, "%s/online", folder); // Linux has it beside the nodes
    FILE *const online = fopen(path, "w");
    assert_non_null(online);
    fclose(online);
    const int nodes = numa_count(folder, &allowed);
    remove(path);
    for (int node = 0; node < NODES; node++)
        remove_node(folder, node);
    assert_int_equal(rmdir(folder), 0);
    return nodes;
}

static void a_machine_of_one_node(void **state) {
    assert_int_equal(count(0, 7, (const char *const[NODES]){"0-7\n"}), 1);
    assert_int_equal(count(3, 3, (const char *const[NODES]){"0-7\n"}), 1);
}

static void nodes_with_an_allowed_cpu_are_counted(void **state) {
    const char *const sockets[NODES] = {"0-3,8-11\n", "4-7,12-15\n"}; // two hardware threads a core
    assert_int_equal(count(0, 15, sockets), 2);
    assert_int_equal(count(8, 11, sockets), 1);
    assert_int_equal(count(11, 12, sockets), 2);
    assert_int_equal(count(15, 15, sockets), 1);
    assert_int_equal(count(16, 16, sockets), 0);
    assert_int_equal(count(1999, 2000, (const char *const[NODES]){"0-1023", "1024-1999", "2000", "2001-99999"}), 2);
}

static void a_node_of_memory_alone_is_none(void **state) {
    assert_int_equal(count(0, 7, (const char *const[NODES]){"0-3\n", "4-7\n", "\n", ""}), 2);
}

static void what_is_malformed_counts_no_more(void **state) {
    assert_int_equal(count(0, 7, (const char *const[NODES]){"none", "9-", "-3", "9,x"}), 0);
}

static void a_folder_that_is_not_there_tells_nothing(void **state) { assert_int_equal(numa_nodes_used("/nowhere"), 0); }

// Checks this machine: a process runs somewhere, so that at least one node counts where Linux describes nodes.
static void this_machine_has_a_node(void **state) {
    DIR *const directory = opendir(NUMA_NODES "/node0");
    if (!directory)
        skip();
    closedir(directory);
    assert_true(numa_nodes_used(NUMA_NODES) >= 1);
}

// Makes root/folder, and writes root/folder/name.
static void write_in(const char *root, const char *folder, const char *name, const char *text) {
    char path[TEST_PATH + 64];
    snprintf(path, sizeof path, "%s/%s", root, folder);
    mkdir(path, 0755);
    snprintf(path, sizeof path, "%s/%s/%s", root, folder, name);
    FILE *const file = fopen(path, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}
static void remove_in(const char *root, const char *folder, const char *name) {
    char path[TEST_PATH + 64];
    snprintf(path, sizeof path, "%s/%s/%s", root, folder, name);
    remove(path);
    snprintf(path, sizeof path, "%s/%s", root, folder);
    rmdir(path);
}
static void a_device_has_the_node_that_linux_names(void **state) {
    static const struct {
        const char *text;
        int node;
    } cases[] = {{"1\n", 1}, {"0\n", 0}, {"-1\n", -1}, {"", -1}, {"x", -1}};
    char root[TEST_PATH];
    assert_non_null(mkdtemp(test_template(root, "unit_numa_PCI"))); // whose capitals must stay
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_in(root, "0000:3b:00.0", "numa_node", cases[i].text);
        assert_int_equal(numa_node_of_pci(root, "0000:3B:00.0"), cases[i].node);
    }
    remove_in(root, "0000:3b:00.0", "numa_node");
    assert_int_equal(numa_node_of_pci(root, "0000:3B:00.0"), -1);
    assert_int_equal(rmdir(root), 0);
}

// Checks the first CPU that this thread may run on, in a node of its own, and nodes where the thread may not run.
static void a_thread_is_bound_to_a_node_and_back(void **state) {
    char root[TEST_PATH], list[32];
    struct cpus before, now;
    struct numa_binding binding;
    memset(&before, 0, sizeof before);
    memset(&now, 0, sizeof now);
    assert_int_equal(sched_getaffinity(0, sizeof before, before.sets), 0);
    int cpu = 0;
    while (!CPU_ISSET_S((size_t)cpu, sizeof before, before.sets))
        cpu++;
    snprintf(list, sizeof list, "%d\n", cpu);
    assert_non_null(mkdtemp(test_template(root, "unit_numa")));
    write_in(root, "node2", "cpulist", list);
    write_in(root, "node3", "cpulist", "16000-16100\n");
    numa_bind_thread(&binding, root, 2);
    assert_int_equal(sched_getaffinity(0, sizeof now, now.sets), 0);
    assert_true(CPU_COUNT_S(sizeof now, now.sets) == 1 && CPU_ISSET_S((size_t)cpu, sizeof now, now.sets));
    numa_restore_thread(&binding);
    // -1: any node; 0, 1: no such node; 3: a node where the thread may not run
    for (int node = -1; node < 4; node += node == 1 ? 2 : 1) {
        assert_int_equal(sched_getaffinity(0, sizeof now, now.sets), 0);
        assert_true(CPU_EQUAL_S(sizeof now, now.sets, before.sets));
        numa_bind_thread(&binding, root, node);
    }
    numa_restore_thread(&binding);
    assert_int_equal(sched_getaffinity(0, sizeof now, now.sets), 0);
    assert_true(CPU_EQUAL_S(sizeof now, now.sets, before.sets));
    remove_in(root, "node2", "cpulist");
    remove_in(root, "node3", "cpulist");
    assert_int_equal(rmdir(root), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_machine_of_one_node),
        cmocka_unit_test(nodes_with_an_allowed_cpu_are_counted),
        cmocka_unit_test(a_node_of_memory_alone_is_none),
        cmocka_unit_test(what_is_malformed_counts_no_more),
        cmocka_unit_test(a_folder_that_is_not_there_tells_nothing),
        cmocka_unit_test(this_machine_has_a_node),
        cmocka_unit_test(a_device_has_the_node_that_linux_names),
        cmocka_unit_test(a_thread_is_bound_to_a_node_and_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
