/*
 * memory.h - requests of the driver's that found no memory, tried again without what vpmm keeps free.
 */
#ifndef VPMM_PRELOAD_MEMORY_H
#define VPMM_PRELOAD_MEMORY_H

#include "served.h"

/*
 * Gives the devices what vpmm keeps free on them: which of them the request was for only the driver knows. True: it was
 * something. Outside of the lanes.
 */
bool memory_trim(void);

/* `call` once more if there was no memory, and vpmm could give some back. */
#define MEMORY_RETRIED(call)                                                                                           \
    ({                                                                                                                 \
        CUresult retried_ = (call);                                                                                    \
        if (retried_ == CUDA_ERROR_OUT_OF_MEMORY && memory_trim())                                                     \
            retried_ = (call);                                                                                         \
        retried_;                                                                                                      \
    })

#endif
