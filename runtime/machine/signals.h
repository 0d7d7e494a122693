// Signals as requests, which a run takes where it can act on them: between two steps or two batches.
//   SIGUSR1          save a checkpoint, and go on
//   SIGTERM, SIGINT  save a checkpoint, and stop; a second one while stopping ends the process at once
//   SIGHUP, SIGXCPU  save a checkpoint, and stop: the terminal was closed, or the CPU time of ulimit -t is spent
//   SIGXFSZ, SIGPIPE ignored, so that a write that fails returns an error, which has a message
#pragma once
#include <pthread.h>   // pthread_t
#include <stdbool.h>   // bool
#include <sys/cdefs.h> // __BEGIN_DECLS

__BEGIN_DECLS
// Makes SIGUSR1 ask for a save, SIGTERM for a stop, and SIGINT, SIGHUP and SIGXCPU too unless they are ignored, as by
// nohup. Ignores SIGPIPE and SIGXFSZ. The first thread calls this: the kernel sends signals to it.
void signals_install(void);
// Whether a save was asked for since the last call. Takes the request: SIGUSR1 during the save asks for another.
bool signals_take_save_request(void);
// Returns the number of the signal that first asked to stop (SIGTERM, ...); 0: none. The request stays.
int signals_stop_requested(void);
// Whether SIGINT, the interrupt key, was the first to ask for a stop. Takes the request: after that a SIGINT counts as
// a first one again, but is ignored within 0.5 s of the former.
bool signals_take_interrupt(void);
// Makes signals that ask to stop end a waiting read with EINTR from now on. signals_install comes before.
void signals_interrupt_reads(void);
// Starts a thread in which all signals are blocked, so that the training thread receives them. Returns 0 or an errno.
int signals_start_thread(pthread_t *thread, void *(*run)(void *), void *argument);
__END_DECLS
