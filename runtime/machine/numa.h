// The NUMA nodes of this machine: a node's memory is slow from the cores, and the devices, of another.
#pragma once
#include <sched.h>     // cpu_set_t
#include <stdbool.h>   // bool
#include <sys/cdefs.h> // __BEGIN_DECLS

#define NUMA_NODES "/sys/devices/system/node" // where Linux describes them
#define PCI_DEVICES "/sys/bus/pci/devices"    // and the devices of the PCI bus

enum { NUMA_CPUS = 1 << 14 }; // more than Linux can be built for
struct cpus {
    cpu_set_t sets[NUMA_CPUS / CPU_SETSIZE];
};
// Holds what a thread was bound to before numa_bind_thread.
struct numa_binding {
    struct cpus before;
    bool bound;
};

__BEGIN_DECLS
// The number of nodes with a CPU that this thread may use; 0 if unknown. folder: NUMA_NODES, or one laid out like it.
int numa_nodes_used(const char *folder);
// Returns the node of the PCI device `address`, as "0000:3B:00.0"; -1 if unknown. folder: PCI_DEVICES, or one like it.
int numa_node_of_pci(const char *folder, const char *address);
// Binds the calling thread to the CPUs of a node that it may use, until it calls numa_restore_thread(binding). Binds
// nothing for node -1, or if no such CPU is known, but sets *binding even then. folder: NUMA_NODES, or one like it.
void numa_bind_thread(struct numa_binding *binding, const char *folder, int node);
void numa_restore_thread(const struct numa_binding *binding);
__END_DECLS
