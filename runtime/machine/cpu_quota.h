// The CPU time that this process may use, where a container or a batch system grants fewer CPUs than it shows.
#pragma once
#include <sys/cdefs.h> // __BEGIN_DECLS

__BEGIN_DECLS
// The number of CPUs whose time the process's cgroups (v1 and v2) and their ancestors grant, rounded up; 0 if no limit
// is known. More threads than this are all stopped together when a period's time is used up.
int cpu_quota(void);
__END_DECLS
