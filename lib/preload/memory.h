/*
 * memory.h - requests of the driver's that found no memory, tried again without what vpmm keeps free.
 */
#ifndef VPMM_PRELOAD_MEMORY_H
#define VPMM_PRELOAD_MEMORY_H

#include "served.h"

/* The current context's device; MEMORY_ANY_DEVICE: there is none. Of what is no device's memory: MEMORY_OF_THE_HOST. */
enum { MEMORY_ANY_DEVICE = -1, MEMORY_OF_THE_HOST = -2 };
int memory_device(void);

/*
 * Gives a device what vpmm keeps free there, for which its work may be waited for: so no other device is asked, but
 * where the request's is not known (of a pool that several can reach). True: it was tried, and the request may find
 * memory now, if not for this trim then for another thread's, or a pass, which has left nothing to this one. Outside of
 * the lanes.
 */
bool memory_trim(int device);

/* `call` once more, of a request for memory of the device, if there was none and vpmm may have given some back. */
#define MEMORY_RETRIED_ON(device, call)                                                                                \
    ({                                                                                                                 \
        CUresult retried_ = (call);                                                                                    \
        if (retried_ == CUDA_ERROR_OUT_OF_MEMORY && memory_trim(device))                                               \
            retried_ = (call);                                                                                         \
        retried_;                                                                                                      \
    })
#define MEMORY_RETRIED(call) MEMORY_RETRIED_ON(memory_device(), call)

#endif
