// The NUMA nodes of this machine that a process computes on: a node's memory is slow from the cores of another.
#pragma once
#include <sys/cdefs.h> // __BEGIN_DECLS

#define NUMA_NODES "/sys/devices/system/node" // where Linux describes them

__BEGIN_DECLS
// The number of nodes that have a CPU which this process may run on, by `folder`, which is NUMA_NODES or laid out as it;
// 0 where the folder does not tell.
int numa_nodes_used(const char *folder);
__END_DECLS
