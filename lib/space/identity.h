/*
 * identity.h - what a stream's handle names, as the calling thread sees it now.
 *
 * CUDA gives a destroyed stream's handle to the next one, and the handles of default streams mean another stream in
 * each context, or thread. So a handle is turned into
 *   key      under which the stream's record stands in the registry (stream.h): the handle; of streams 0 and
 *            CU_STREAM_LEGACY the current context; of CU_STREAM_PER_THREAD the current context and the thread
 *   id       cuStreamGetId's, which differs when the handle has come back as another stream's. Default streams have
 *            none, nor has any under a driver without that call
 *   thread   of CU_STREAM_PER_THREAD: the calling one. Its end is known by a pthread key; in a process that had none
 *            left when such a stream was first met, none is known: HOST_MEMORY
 *
 * A struct identity is the caller's own. A struct thread is its thread's, and of each record that has a reference to
 * it: who gives the last reference up frees it. Its end is written once, by the thread itself.
 */
#ifndef VPMM_LIB_IDENTITY_H
#define VPMM_LIB_IDENTITY_H

#include "base/queue.h"
#include "driver/device.h"

struct thread; /* a thread of the program, as long as anyone asks whether it still runs */

struct identity {
    struct object_key key;
    CUcontext context; /* of a default stream; of any other NULL: see identity_find_context */
    unsigned long long id;
    bool has_id;
    struct thread *thread;
};

static inline bool handle_is_legacy(CUstream handle)
{
    return !handle || handle == CU_STREAM_LEGACY;
}

/*
 * In a call that was given the stream. NOT_SUPPORTED: the stream captures, and nothing was asked that would destroy
 * the capture. DRIVER, HOST_MEMORY. `by_name`: the stream may capture, no driver call is made with it, and there is no
 * id.
 */
vpmm_status identify(struct device *, CUstream, bool by_name, struct identity *);

/* The same for a pool that keeps no streams. INVALID_VALUE too: a stream of another device. */
vpmm_status identity_check(struct device *, CUstream);

/* What both ask first: NOT_SUPPORTED, DRIVER. Of a default stream its context, else NULL. */
vpmm_status identity_refuse_capture(struct device *, CUstream, CUcontext);

/* The context that an identified stream is of. INVALID_VALUE: one of another device. DRIVER. */
vpmm_status identity_find_context(struct device *, CUstream, const struct identity *, CUcontext *);

/* Both of NULL do nothing. */
void thread_ref(struct thread *);
void thread_unref(struct thread *);

/* What the thread did before its end has happened before what the caller does next. */
bool thread_has_exited(const struct thread *);

#endif
