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
// The number of nodes with a CPU that this thread may use, by `folder`, NUMA_NODES or laid out as it; 0: unknown.
int numa_nodes_used(const char *folder);
// Returns the node of a PCI device, address "0000:3B:00.0", by `folder`, PCI_DEVICES or laid out as it; -1: unknown.
int numa_node_of_pci(const char *folder, const char *address);
// Binds the calling thread to the CPUs that it may use of a node, until it calls numa_restore_thread(binding). Nothing
// is bound for node -1, and where no such CPU is known; *binding is set then too. folder: NUMA_NODES or laid out as it.
void numa_bind_thread(struct numa_binding *binding, const char *folder, int node);
void numa_restore_thread(const struct numa_binding *binding);
__END_DECLS
