/*
 * gpu.h - a real GPU for the tests, which stands still like the simulated one until it is let go.
 *
 * VPMM_TEST_DRIVER=cuda chooses it. A held stream stands at a word of host memory (cuStreamWaitValue32), so that one
 * stream can be let go and another not; a host function would stop every stream's. The table counts its calls, and what
 * makes the host wait for the device lets everything go first, as the simulator does.
 *
 * One a process; every function but the table's entries is for one thread at a time.
 */
#ifndef VPMM_TESTS_GPU_H
#define VPMM_TESTS_GPU_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <vpmm/driver.h>

/* VPMM_TEST_DRIVER=cuda */
bool gpu_chosen(void);

/* The table; NULL, with vpmm_last_error()'s words, if there is no libcuda. */
const vpmm_driver *gpu_driver(void);

/* Takes and gives back the host memory that the other functions need. The context is current. False: refused. */
bool gpu_open(void);
bool gpu_close(void);

/* What is queued on the stream from now on waits, if it does not do so already. Any thread. */
bool gpu_hold(CUstream);

/* The stream is about to be destroyed: another one may get its handle. */
void gpu_forget(CUstream);

/* Host memory that the device can write without making the host wait; until gpu_run. NULL if there is no more. */
void *gpu_host_memory(size_t bytes);

/* Lets everything go and waits until the device is done. How many holds that ended; SIZE_MAX: the device failed. */
size_t gpu_run(void);

/* Lets the stream go, and with `wait` gives it some time. True if it had work to do, and has none any more. */
bool gpu_run_stream(CUstream, bool wait);

/* The stream has work that is not done. */
bool gpu_pending(CUstream);

/* Calls made so far of the named entry. */
uint64_t gpu_calls(const char *call);

#endif
